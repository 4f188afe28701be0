//! The addresses beyond the host that sandboxes may reach.
//!
//! A sandbox's packets leave the host with the host's own address. So a service that trusts that
//! address trusts every sandbox: on a cloud that is the metadata service, which gives out the
//! machine's credentials. Its address is link-local, and link-local addresses mean nothing to a
//! sandbox behind a router anyway. They are refused, together with the addresses that clouds use
//! for the same purpose elsewhere (`LINK_LOCAL`), unless an administrator allows one.
//!
//! The [`Policy`] decides whether sandboxes reach private networks that the host is in.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::{Error, Result};

/// Link-local addresses, and other addresses of services that a cloud has for its machines.
const LINK_LOCAL: [&str; 9] = [
    // RFC 3927, section 2.1; metadata of AWS, Azure, Google, OpenStack and others.
    "169.254.0.0/16",
    // RFC 4291, section 2.5.6.
    "fe80::/10",
    // AWS: metadata, time, credentials of pods.
    "fd00:ec2::/32",
    // Google: metadata.
    "fd20:ce::254/128",
    // Azure: the host's agent, which also gives out certificates.
    "168.63.129.16/32",
    // Alibaba: metadata.
    "100.100.100.200/32",
    // Oracle: metadata.
    "192.0.0.192/32",
    // 169.254.0.0/16 through a gateway of RFC 6052 and of RFC 3056.
    "64:ff9b::a9fe:0/112",
    "2002:a9fe::/32",
];

/// Networks that are not the internet: of organisations, providers and laboratories.
const PRIVATE: [&str; 14] = [
    // RFC 1918.
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    // RFC 6598: of providers, of clouds and of overlay networks.
    "100.64.0.0/10",
    // RFC 6890: of protocols. RFC 2544: of laboratories. RFC 1112: not in use.
    "192.0.0.0/24",
    "198.18.0.0/15",
    "240.0.0.0/4",
    // RFC 4193, RFC 3879.
    "fc00::/7",
    "fec0::/10",
    // Private IPv4 networks through a gateway of RFC 6052 or RFC 8215.
    "64:ff9b::a00:0/104",
    "64:ff9b::ac10:0/108",
    "64:ff9b::c0a8:0/112",
    "64:ff9b::6440:0/106",
    "64:ff9b:1::/48",
];

/// The addresses that sandboxes are refused. The first list that contains an address decides:
/// allowed addresses, denied addresses, link-local ones, private ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    allowed: Nets,
    refused: Nets,
}

/// Networks of both families.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Nets {
    four: Vec<Ipv4Net>,
    six: Vec<Ipv6Net>,
}

impl Nets {
    fn of(all: impl IntoIterator<Item = IpNet>) -> Self {
        let mut nets = Self::default();
        for net in all {
            match net.trunc() {
                IpNet::V4(net) => nets.four.push(net),
                IpNet::V6(net) => nets.six.push(net),
            }
        }
        // A set of the packet filter must not contain a network twice.
        Self { four: Ipv4Net::aggregate(&nets.four), six: Ipv6Net::aggregate(&nets.six) }
    }

    /// Returns a rule with the verdict for packets to these networks, for each family that has any.
    fn rules(&self, verdict: &str) -> String {
        let four = set("ip", &self.four, verdict);
        four + &set("ip6", &self.six, verdict)
    }
}

fn set(family: &str, nets: &[impl ToString], verdict: &str) -> String {
    if nets.is_empty() {
        return String::new();
    }
    let nets: Vec<String> = nets.iter().map(ToString::to_string).collect();
    format!("{family} daddr {{ {} }} {verdict}\n", nets.join(", "))
}

/// The verdict of refused packets: an error at once, so that the sandbox need not wait for a
/// timeout.
const REFUSE: &str = "reject with icmpx type admin-prohibited";

impl Policy {
    /// Parses the node's settings. `reach` is "all" or "internet"; the others are addresses and
    /// networks.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the invalid word.
    pub fn parse(reach: &str, allow: &[String], deny: &[String]) -> Result<Self> {
        let private = match reach {
            "all" => &[][..],
            "internet" => &PRIVATE[..],
            other => {
                return Err(Error::Invalid(format!(
                    "network_reach = \"{other}\": \"all\" or \"internet\""
                )));
            }
        };
        let refused = LINK_LOCAL.iter().chain(private).filter_map(|text| text.parse().ok());
        let denied = nets("network_deny", deny)?;
        Ok(Self {
            allowed: Nets::of(nets("network_allow", allow)?),
            refused: Nets::of(denied.into_iter().chain(refused)),
        })
    }

    /// Returns the rules for packets that leave the host.
    pub(crate) fn beyond(&self) -> String {
        self.allowed.rules("return") + &self.refused.rules(REFUSE)
    }

    /// Returns the rules for packets to the host itself: some clouds' services run on the machine,
    /// at a link-local address. IPv6's own link-local network is left out, since IPv6 does not work
    /// without the host's address in it.
    pub(crate) fn host(&self) -> String {
        let own = |text: &&&str| !text.starts_with("fe80:");
        let link_local = LINK_LOCAL.iter().filter(own).filter_map(|text| text.parse().ok());
        self.allowed.rules("return") + &Nets::of(link_local).rules(REFUSE)
    }
}

fn nets(setting: &str, texts: &[String]) -> Result<Vec<IpNet>> {
    let one = |text: &String| {
        let address = || text.parse::<IpAddr>().map(IpNet::from).ok();
        text.parse().ok().or_else(address).ok_or_else(|| {
            Error::Invalid(format!("{setting}: \"{text}\" is no address and no network"))
        })
    };
    texts.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(reach: &str, allow: &[&str], deny: &[&str]) -> Result<Policy> {
        let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        Policy::parse(reach, &texts(allow), &texts(deny))
    }

    #[test]
    fn every_network_of_the_lists_is_one() {
        for text in LINK_LOCAL.iter().chain(&PRIVATE) {
            let net: IpNet = text.parse().unwrap();
            assert_eq!(net.trunc(), net, "{text}");
        }
    }

    #[test]
    fn link_local_is_refused_and_private_is_a_setting() {
        let refuses = |policy: &Policy, text: &str| {
            let address: IpAddr = text.parse().unwrap();
            let Nets { four, six } = &policy.refused;
            match address {
                IpAddr::V4(address) => four.iter().any(|net| net.contains(&address)),
                IpAddr::V6(address) => six.iter().any(|net| net.contains(&address)),
            }
        };
        let all = policy("all", &[], &["203.0.113.0/24"]).unwrap();
        let internet = policy("internet", &[], &[]).unwrap();
        for address in ["169.254.169.254", "fe80::1", "fd00:ec2::254", "168.63.129.16"] {
            assert!(refuses(&all, address) && refuses(&internet, address), "{address}");
        }
        for address in ["10.1.2.3", "192.168.0.1", "100.64.0.1", "fd12::1", "64:ff9b::a01:203"] {
            assert!(!refuses(&all, address) && refuses(&internet, address), "{address}");
        }
        for address in ["1.1.1.1", "2001:db8::1", "64:ff9b::101:101"] {
            assert!(!refuses(&all, address) && !refuses(&internet, address), "{address}");
        }
        assert!(refuses(&all, "203.0.113.7") && !refuses(&internet, "203.0.113.7"));
    }

    #[test]
    fn what_is_allowed_comes_first_and_nothing_is_in_a_set_twice() {
        let policy = policy("internet", &["169.254.169.254"], &["10.1.0.0/16", "10.0.0.0/8"]);
        let text = policy.unwrap().beyond();
        let allowed = text.find("ip daddr { 169.254.169.254/32 } return").unwrap();
        assert!(allowed < text.find("169.254.0.0/16").unwrap(), "{text}");
        assert_eq!(text.matches("10.").count(), 1, "{text}");
    }

    #[test]
    fn the_host_keeps_its_own_link_local_address() {
        let text = policy("internet", &[], &[]).unwrap().host();
        assert!(text.contains("169.254.0.0/16") && !text.contains("fe80"), "{text}");
        assert!(!text.contains("10.0.0.0/8"), "{text}");
    }

    #[test]
    fn what_is_no_network_is_named() {
        for (reach, allow, deny, says) in [
            ("some", &[][..], &[][..], "network_reach"),
            ("all", &["x"], &[], "network_allow: \"x\""),
            ("all", &[], &["10.0.0.0/33"], "network_deny"),
        ] {
            let error = policy(reach, allow, deny).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
