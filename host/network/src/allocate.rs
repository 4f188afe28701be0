//! Allocation of addresses.
//!
//! A sandbox gets the lowest free IPv4 address, and the IPv6 address with the same host number. Its
//! MAC address follows from the IPv4 address, so that an address which is given out again finds no
//! stale neighbour entries.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::ledger::{Lease, Network, nth4, nth6};
use crate::{Error, Mac, Result};

/// The addresses that a sandbox asks for; those that are `None` are chosen.
#[derive(Clone, Debug, Default)]
pub struct AddressRequest {
    /// An IPv4 address.
    pub ipv4: Option<Ipv4Addr>,
    /// An IPv6 address.
    pub ipv6: Option<Ipv6Addr>,
    /// A MAC address.
    pub mac: Option<Mac>,
}

impl AddressRequest {
    /// Parses the arguments of a command line: at most one address of each family, and a MAC
    /// address, or an empty text for one that is to be chosen.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn parse(addresses: &[String], mac: &str) -> Result<Self> {
        let mut request = Self::default();
        for text in addresses {
            let bad = |why: &str| Error::Invalid(format!("\"{text}\" {why}"));
            match text.parse().map_err(|_| bad("is no IP address"))? {
                IpAddr::V4(address) if request.ipv4.is_none() => request.ipv4 = Some(address),
                IpAddr::V6(address) if request.ipv6.is_none() => request.ipv6 = Some(address),
                IpAddr::V4(_) => return Err(bad("is a second IPv4 address; a sandbox has one")),
                IpAddr::V6(_) => return Err(bad("is a second IPv6 address; a sandbox has one")),
            }
        }
        if !mac.is_empty() {
            request.mac = Some(mac.parse()?);
        }
        Ok(request)
    }
}

/// Chooses addresses for a sandbox `name`, without changing the network.
///
/// # Errors
/// [`Error::Invalid`], [`Error::Taken`], [`Error::Full`].
pub fn choose(network: &Network, name: &str, request: &AddressRequest) -> Result<Lease> {
    let ipv4 = match request.ipv4 {
        Some(address) => wanted4(network, address)?,
        None => free4(network).ok_or_else(|| Error::Full {
            network: network.name.clone(),
            subnet: network.subnet.to_string(),
        })?,
    };
    let ipv6 = match request.ipv6 {
        Some(address) => wanted6(network, address)?,
        None => free6(network, ipv4),
    };
    let mac = match request.mac {
        Some(mac) => wanted_mac(network, mac)?,
        None => free_mac(network, ipv4),
    };
    Ok(Lease {
        name: name.to_owned(),
        mac,
        ipv4,
        ipv6,
        published: Vec::new(),
        attached: false,
        sequence: 0,
    })
}

/// Checks an IPv4 address that a sandbox asks for, and returns it.
///
/// # Errors
/// [`Error::Invalid`], [`Error::Taken`].
fn wanted4(network: &Network, address: Ipv4Addr) -> Result<Ipv4Addr> {
    let subnet = network.subnet;
    let refuse = |why: &str| unusable(network, address.into(), why);
    if !subnet.contains(&address) {
        return refuse(&format!("it is outside of {subnet}"));
    }
    if address == subnet.network() {
        return refuse("it is the network's own");
    }
    if address == subnet.broadcast() {
        return refuse("it is the broadcast address");
    }
    if address == network.gateway {
        return refuse("it is the gateway's");
    }
    match network.leases.values().find(|lease| lease.ipv4 == address) {
        Some(lease) => taken(address, lease),
        None => Ok(address),
    }
}

/// Checks an IPv6 address that a sandbox asks for, and returns it.
///
/// # Errors
/// [`Error::Invalid`], [`Error::Taken`].
fn wanted6(network: &Network, address: Ipv6Addr) -> Result<Ipv6Addr> {
    let prefix = network.prefix;
    let refuse = |why: &str| unusable(network, address.into(), why);
    if !prefix.contains(&address) {
        return refuse(&format!("it is outside of {prefix}"));
    }
    // The subnet-router anycast address of RFC 4291, section 2.6.1.
    if address == prefix.network() {
        return refuse("it is the routers' anycast address");
    }
    if address == network.gateway6() {
        return refuse("it is the gateway's");
    }
    match network.leases.values().find(|lease| lease.ipv6 == address) {
        Some(lease) => taken(address, lease),
        None => Ok(address),
    }
}

/// Refuses an address that no sandbox in the network can have.
fn unusable<T>(network: &Network, address: IpAddr, why: &str) -> Result<T> {
    let name = &network.name;
    Err(Error::Invalid(format!(
        "{address} cannot be a sandbox's address in the network \"{name}\": {why}"
    )))
}

/// Checks a MAC address that a sandbox asks for, and returns it.
///
/// # Errors
/// [`Error::Invalid`], [`Error::Taken`].
fn wanted_mac(network: &Network, mac: Mac) -> Result<Mac> {
    if mac == network.gateway_mac() {
        return Err(Error::Invalid(format!("{mac} is the gateway's MAC address")));
    }
    match network.leases.values().find(|lease| lease.mac == mac) {
        Some(lease) => taken(mac, lease),
        None => match network.ports.iter().find(|(_, port)| port.mac == Some(mac)) {
            Some((name, _)) => {
                let owner = format!("memory port {name}");
                Err(Error::Taken { address: mac.to_string(), owner })
            }
            None => Ok(mac),
        },
    }
}

/// Refuses an address that a lease has.
fn taken<T>(address: impl ToString, lease: &Lease) -> Result<T> {
    let owner = format!("sandbox {}", lease.name);
    Err(Error::Taken { address: address.to_string(), owner })
}

/// Returns the lowest free IPv4 address. Returns `None` if the subnet has none.
fn free4(network: &Network) -> Option<Ipv4Addr> {
    let leased = network.leases.values().map(|lease| lease.ipv4);
    let mut taken: Vec<Ipv4Addr> = leased.chain([network.gateway]).collect();
    taken.sort_unstable();
    let mut taken = taken.into_iter().peekable();
    let last = network.subnet.hostmask().to_bits();
    (1..last).map(|index| nth4(network.subnet, index)).find(|address| {
        while taken.next_if(|one| one < address).is_some() {}
        taken.peek() != Some(address)
    })
}

/// Returns a free IPv6 address: that with the host number of `ipv4`, or one beyond the numbers of
/// the IPv4 subnet if that is taken.
fn free6(network: &Network, ipv4: Ipv4Addr) -> Ipv6Addr {
    let mut leased = network.leases.values().map(|lease| lease.ipv6);
    let index = ipv4.to_bits() & network.subnet.hostmask().to_bits();
    let same = nth6(network.prefix, index);
    if same != network.gateway6() && !leased.any(|address| address == same) {
        return same;
    }
    let taken: BTreeSet<Ipv6Addr> = network.leases.values().map(|lease| lease.ipv6).collect();
    let beyond = network.subnet.hostmask().to_bits().saturating_add(1)..;
    let mut candidates = beyond.map(|index| nth6(network.prefix, index));
    let free = |address: &Ipv6Addr| !taken.contains(address) && *address != network.gateway6();
    // A prefix has at least 2^32 addresses, a ledger never so many.
    candidates.find(free).unwrap_or_else(|| nth6(network.prefix, u32::MAX))
}

/// Returns a free MAC address: that which is derived from `ipv4`, unless it is taken.
fn free_mac(network: &Network, ipv4: Ipv4Addr) -> Mac {
    let ports = network.ports.values().filter_map(|port| port.mac);
    let used = network.leases.values().map(|lease| lease.mac).chain(ports);
    let derived = Mac::derived(ipv4);
    if derived != network.gateway_mac() && !used.clone().any(|mac| mac == derived) {
        return derived;
    }
    let taken: BTreeSet<Mac> = used.collect();
    // If another sandbox has asked for this very address, use the one of an IPv4 address outside of
    // the network.
    let mut outside = (1..).map(|index| Mac::derived(Ipv4Addr::from_bits(index)));
    let free = |mac: &Mac| !taken.contains(mac) && *mac != network.gateway_mac();
    outside.find(free).unwrap_or(derived)
}

/// Parses a subnet.
///
/// # Errors
/// [`Error::Invalid`]: no subnet, bits beyond the prefix, too small, no unicast addresses.
pub fn subnet(text: &str) -> Result<Ipv4Net> {
    let bad = |why: &str| Error::Invalid(format!("\"{text}\" is no subnet for a network: {why}"));
    let subnet: Ipv4Net =
        text.parse().map_err(|_| bad("an address and a prefix, as 10.1.0.0/24"))?;
    if subnet.addr() != subnet.network() {
        return Err(bad(&format!("{} has bits beyond the prefix set", subnet.addr())));
    }
    if !(8..=30).contains(&subnet.prefix_len()) {
        return Err(bad("a prefix of 8 to 30 bits leaves room for a gateway and sandboxes"));
    }
    let first = subnet.network();
    if first.is_loopback()
        || first.is_multicast()
        || first.octets()[0] == 0
        || first.octets()[0] >= 240
    {
        return Err(bad("its addresses are not for hosts"));
    }
    Ok(subnet)
}

/// Parses an IPv6 prefix.
///
/// # Errors
/// The errors of [`subnet`].
pub fn prefix(text: &str) -> Result<Ipv6Net> {
    let bad = |why: &str| Error::Invalid(format!("\"{text}\" is no prefix for a network: {why}"));
    let prefix: Ipv6Net =
        text.parse().map_err(|_| bad("an address and a prefix, as fd00:1::/64"))?;
    if prefix.addr() != prefix.network() {
        return Err(bad(&format!("{} has bits beyond the prefix set", prefix.addr())));
    }
    if !(16..=96).contains(&prefix.prefix_len()) {
        return Err(bad("a prefix of 16 to 96 bits leaves room for a gateway and sandboxes"));
    }
    let first = prefix.network();
    if first.is_multicast() || first.is_unicast_link_local() || first.segments()[0] == 0 {
        return Err(bad("its addresses are not for hosts"));
    }
    Ok(prefix)
}

/// Parses a gateway's address, for a network of that subnet.
///
/// # Errors
/// [`Error::Invalid`].
pub fn gateway(text: &str, subnet: Ipv4Net) -> Result<Ipv4Addr> {
    let bad = |why: &str| Error::Invalid(format!("\"{text}\" is no gateway: {why}"));
    let address: Ipv4Addr = text.parse().map_err(|_| bad("no IPv4 address"))?;
    let of_no_host = address == subnet.network() || address == subnet.broadcast();
    if !subnet.contains(&address) || of_no_host {
        return Err(bad(&format!("no address of a host in {subnet}")));
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(subnet: &str) -> Network {
        let prefix = "fd00:1::/64".parse().unwrap();
        Network::new("blue".into(), "slip0".into(), super::subnet(subnet).unwrap(), prefix)
    }

    fn join(network: &mut Network, name: &str, wish: &AddressRequest) -> Result<Lease> {
        let lease = choose(network, name, wish)?;
        network.leases.insert(name.to_owned(), lease.clone());
        Ok(lease)
    }

    fn ask(addresses: &[&str], mac: &str) -> AddressRequest {
        let addresses: Vec<String> = addresses.iter().map(|one| (*one).to_owned()).collect();
        AddressRequest::parse(&addresses, mac).unwrap()
    }

    #[test]
    fn the_lowest_that_is_free_and_never_one_twice() {
        let mut network = network("10.0.0.0/29");
        let addresses: Vec<String> = (0..5)
            .map(|n| join(&mut network, &n.to_string(), &AddressRequest::default()).unwrap())
            .map(|lease| format!("{} {} {}", lease.ipv4, lease.ipv6, lease.mac))
            .collect();
        assert_eq!(addresses[0], "10.0.0.2 fd00:1::2 5a:11:0a:00:00:02");
        assert_eq!(addresses[4], "10.0.0.6 fd00:1::6 5a:11:0a:00:00:06");
        let full = join(&mut network, "5", &AddressRequest::default()).unwrap_err();
        assert!(matches!(full, Error::Full { .. }) && full.to_string().contains("10.0.0.0/29"));
        network.leases.remove("3");
        let lease = join(&mut network, "6", &AddressRequest::default()).unwrap();
        assert_eq!(lease.ipv4, Ipv4Addr::new(10, 0, 0, 5));
    }

    #[test]
    fn wishes_are_granted_or_refused_with_the_reason() {
        let mut network = network("10.0.0.0/24");
        let mac = "5a:11:0a:00:00:09";
        let lease = join(&mut network, "web", &ask(&["10.0.0.7", "fd00:1::2"], mac)).unwrap();
        assert_eq!((lease.ipv4.octets()[3], lease.mac.to_string().as_str()), (7, mac));
        for (addresses, mac, why) in [
            (&["10.0.0.7"][..], "", "taken by sandbox web"),
            (&["fd00:1::2"], "", "taken by sandbox web"),
            (&[], mac, "taken by sandbox web"),
            (&["10.0.1.7"], "", "outside of 10.0.0.0/24"),
            (&["fd00:2::7"], "", "outside of fd00:1::/64"),
            (&["10.0.0.0"], "", "network's own"),
            (&["10.0.0.255"], "", "broadcast"),
            (&["10.0.0.1"], "", "gateway"),
            (&["fd00:1::1"], "", "gateway"),
            (&["fd00:1::"], "", "anycast"),
            (&[], "5a:11:0a:00:00:01", "gateway"),
        ] {
            let error = choose(&network, "db", &ask(addresses, mac)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        // Addresses that others asked for are skipped.
        let next = join(&mut network, "db", &AddressRequest::default()).unwrap();
        assert_eq!(next.ipv4, Ipv4Addr::new(10, 0, 0, 2));
        assert_eq!(next.ipv6, "fd00:1::100".parse::<Ipv6Addr>().unwrap());
        let ninth = join(&mut network, "x", &ask(&["10.0.0.9"], "")).unwrap();
        assert_ne!(ninth.mac.to_string(), mac);
    }

    #[test]
    fn words_that_are_no_wishes() {
        let parse = |addresses: &[&str], mac: &str| {
            let addresses: Vec<String> = addresses.iter().map(|one| (*one).to_owned()).collect();
            AddressRequest::parse(&addresses, mac).unwrap_err().to_string()
        };
        assert!(parse(&["10.0.0"], "").contains("no IP address"));
        assert!(parse(&["10.0.0.1", "10.0.0.2"], "").contains("second IPv4"));
        assert!(parse(&["::1", "::2"], "").contains("second IPv6"));
        assert!(parse(&[], "x").contains("no MAC address"));
    }

    #[test]
    fn subnets_and_prefixes_and_gateways() {
        for bad in [
            "",
            "10.0.0.0",
            "10.0.0.1/24",
            "10.0.0.0/31",
            "10.0.0.0/32",
            "0.0.0.0/0",
            "0.0.0.0/8",
            "127.0.0.0/8",
            "224.0.0.0/24",
            "240.0.0.0/8",
            "10.0.0.0/33",
            "fd00::/64",
            "x/24",
        ] {
            assert!(subnet(bad).unwrap_err().to_string().contains("no subnet"), "{bad}");
        }
        for bad in ["", "fd00::1/64", "fe80::/64", "ff02::/64", "::/64", "fd00::/97", "10.0.0.0/24"]
        {
            assert!(prefix(bad).unwrap_err().to_string().contains("no prefix"), "{bad}");
        }
        let small = subnet("10.0.0.4/30").unwrap();
        assert!(gateway("10.0.0.6", small).is_ok());
        for bad in ["10.0.0.4", "10.0.0.7", "10.0.0.1", "::1", "x"] {
            assert!(gateway(bad, small).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_gateway_elsewhere_is_not_given_out() {
        let mut network = network("10.0.0.0/29");
        network.gateway = gateway("10.0.0.2", network.subnet).unwrap();
        let lease = choose(&network, "web", &AddressRequest::default()).unwrap();
        assert_eq!(lease.ipv4, Ipv4Addr::new(10, 0, 0, 1));
        // The gateway has number 1 in IPv6.
        assert_ne!(lease.ipv6, network.gateway6());
    }
}
