//! The packet filter's rules for networks, in nft's language.
//!
//! All rules are in one table of our own. Its whole content follows from the ledger and is replaced
//! in one transaction: no outdated rule stays, and tables of others are not touched. An `accept`
//! here is no promise: another table may still drop a packet.
//!
//! A new rule is a function here that makes text of the networks, in a chain of `ruleset`. What it
//! needs to know is in the ledger (the head of `ledger`), so that the next daemon writes it again.
//! `nft` refuses the whole table for one wrong line. Tests: below, each with the text;
//! `tests/networks_as_root.rs` and `tests/e2e/45-network.sh` send packets. `docs/networks.md`,
//! "Within a network, and the host" and "Beyond the host", says what passes.

use std::fmt::Write;
use std::net::IpAddr;

use crate::OnlyForSandboxes;
use crate::host::DEVICE;
use crate::ledger::Network;
use crate::publish::Published;
use crate::reach::Policy;

/// Exceptions from the redirects for packets of the host itself. A proxy serves the loopback
/// addresses: a packet from there must not leave by another interface.
const LOOPBACK: &str = "ip daddr 127.0.0.0/8 return\nip6 daddr ::1 return\n";

/// Returns the table of `networks`, as an input of `nft -f -` that replaces the former one. Without
/// networks there is no table, unless the host still forwards for none of them (`only`).
pub fn ruleset(
    table: &str,
    networks: &[&Network],
    policy: &Policy,
    only: OnlyForSandboxes,
) -> String {
    // The first line makes the deletion valid if the table does not exist.
    let mut text = format!("add table inet {table}\ndelete table inet {table}\n");
    if networks.is_empty() && only == OnlyForSandboxes::default() {
        return text;
    }
    let _ = writeln!(text, "table inet {table} {{");
    for (name, head, rules) in [
        ("source", "type filter hook prerouting priority raw", source(networks)),
        ("input", "type filter hook input priority filter", to_host(networks) + &input(networks)),
        (
            "forward",
            "type filter hook forward priority filter",
            only_for_sandboxes(only) + &beyond(networks) + &forward(networks),
        ),
        ("prerouting", "type nat hook prerouting priority dstnat", redirects(networks)),
        (
            "output",
            "type nat hook output priority -100",
            format!("{LOOPBACK}{}", redirects(networks)),
        ),
        ("postrouting", "type nat hook postrouting priority srcnat", postrouting(networks)),
    ] {
        let _ = writeln!(text, "chain {name} {{\n{head}; policy accept;\n{rules}}}");
    }
    // After the chains that jump to them, which nft allows: it reads the table as a whole.
    let _ = writeln!(text, "chain beyond {{\n{}}}", policy.beyond());
    let _ = writeln!(text, "chain host {{\n{}}}", policy.host());
    let _ = writeln!(text, "chain published {{\n{}}}\n}}", published(networks));
    text
}

/// Returns the rules that keep the host from routing between its other interfaces. They drop the
/// packets of the families `only` that neither come from a network of sandboxes nor go to one; the
/// networks of other daemons count, too.
fn only_for_sandboxes(only: OnlyForSandboxes) -> String {
    let mut text = String::new();
    for (family, only) in [("ipv4", only.ipv4), ("ipv6", only.ipv6)] {
        if only {
            let others = format!("iifname != \"{DEVICE}*\" oifname != \"{DEVICE}*\"");
            let _ = writeln!(text, "meta nfproto {family} {others} drop");
        }
    }
    text
}

/// Returns the rules that check the destination of packets which leave the host.
fn beyond(networks: &[&Network]) -> String {
    let mut text = String::new();
    for Network { device, .. } in networks {
        let _ = writeln!(text, "iifname \"{device}\" oifname != \"{DEVICE}*\" jump beyond");
    }
    text
}

/// Returns the rules that check packets from sandboxes to the host itself.
fn to_host(networks: &[&Network]) -> String {
    let mut text = String::new();
    for Network { device, .. } in networks {
        let _ = writeln!(text, "iifname \"{device}\" jump host");
    }
    text
}

/// Returns the redirects of packets to the host's addresses. The gateways' addresses, where names
/// are answered, are left to the proxy too, so that a published port does not hide the name server.
fn redirects(networks: &[&Network]) -> String {
    let mut text = String::new();
    for network in networks {
        let _ = writeln!(text, "ip daddr {} return", network.gateway);
        let _ = writeln!(text, "ip6 daddr {} return", network.gateway6());
    }
    text.push_str("fib daddr type local jump published\n");
    text
}

/// Returns the rules that drop packets of a network with a source address from elsewhere. The
/// switch makes sure that the address is the sender's own.
fn source(networks: &[&Network]) -> String {
    let mut text = String::new();
    for Network { device, subnet, prefix, .. } in networks {
        let _ = writeln!(text, "iifname \"{device}\" ip saddr != {subnet} drop");
        let _ =
            writeln!(text, "iifname \"{device}\" ip6 saddr != {{ {prefix}, fe80::/10, :: }} drop");
        // Packets with a network's addresses may come from nowhere else.
        let _ = writeln!(text, "iifname != {{ \"{device}\", \"lo\" }} ip saddr {subnet} drop");
        let _ = writeln!(text, "iifname != {{ \"{device}\", \"lo\" }} ip6 saddr {prefix} drop");
    }
    text
}

/// Returns the rules that reserve a network's gateway for its sandboxes and the host.
fn input(networks: &[&Network]) -> String {
    let mut text = String::new();
    for network in networks {
        let Network { device, gateway, .. } = network;
        let others = format!("iifname != {{ \"{device}\", \"lo\" }}");
        let _ = writeln!(text, "{others} ip daddr {gateway} drop");
        let _ = writeln!(text, "{others} ip6 daddr {} drop", network.gateway6());
        if network.internal {
            let _ = writeln!(text, "iifname \"{device}\" ip daddr != {gateway} drop");
            let _ = writeln!(
                text,
                "iifname \"{device}\" ip6 daddr != {{ {}, fe80::/10, ff00::/8 }} drop",
                network.gateway6()
            );
        }
    }
    text + &closed_doors(networks)
}

/// Returns the rules that keep sandboxes from other networks' published ports, which are open on
/// all of the host's addresses, also on gateways and link-local ones. Names are answered all the
/// same.
fn closed_doors(networks: &[&Network]) -> String {
    let mut text = String::new();
    for network in networks {
        let Network { device, gateway, .. } = network;
        let names = "meta l4proto { tcp, udp } th dport 53 accept";
        let _ = writeln!(text, "iifname \"{device}\" ip daddr {gateway} {names}");
        let _ = writeln!(text, "iifname \"{device}\" ip6 daddr {} {names}", network.gateway6());
    }
    // Internal networks have no published ports. If leases name some, these are closed as well.
    for network in networks {
        let others = networks.iter().filter(|other| other.device != network.device);
        let others: Vec<String> = others.map(|other| format!("\"{}\"", other.device)).collect();
        if others.is_empty() {
            continue;
        }
        let from = format!("iifname {{ {} }}", others.join(", "));
        for one in network.leases.values().flat_map(|lease| &lease.published) {
            let to = match one.address {
                Some(IpAddr::V4(address)) => format!("ip daddr {address} "),
                Some(IpAddr::V6(address)) => format!("ip6 daddr {address} "),
                None => String::new(),
            };
            let (protocol, port) = (one.protocol.as_str(), one.host);
            let _ = writeln!(text, "{from} {to}{protocol} dport {port} drop");
        }
    }
    text
}

/// Returns the rules for packets that the host forwards. A sandbox reaches no sandbox of another
/// network. Into a network come only packets of connections that began in it, and connections
/// through its published ports. Nothing leaves an internal network, or comes into it.
fn forward(networks: &[&Network]) -> String {
    let mut text = String::new();
    let devices: Vec<String> = networks.iter().map(|one| format!("\"{}\"", one.device)).collect();
    let all = devices.join(", ");
    // All refusals come before the first permission: a published port of one network is no way into
    // it for another.
    for Network { device, internal, .. } in networks {
        if *internal {
            let _ = writeln!(text, "iifname \"{device}\" drop\noifname \"{device}\" drop");
            continue;
        }
        // Connections through a published port back into the same network.
        let _ = writeln!(text, "iifname \"{device}\" oifname \"{device}\" ct status dnat accept");
        let _ = writeln!(text, "iifname \"{device}\" oifname {{ {all} }} drop");
    }
    for Network { device, .. } in networks.iter().filter(|one| !one.internal) {
        let _ = writeln!(text, "oifname \"{device}\" ct state established,related accept");
        let _ = writeln!(text, "oifname \"{device}\" ct status dnat accept");
        let _ = writeln!(text, "oifname \"{device}\" drop");
    }
    text
}

/// Returns the rules that give packets a source address of the host when they leave their network,
/// and when they come back into it through a published port. Internal networks have no way out.
fn postrouting(networks: &[&Network]) -> String {
    let mut text = String::new();
    for Network { device, subnet, prefix, .. } in networks.iter().filter(|one| !one.internal) {
        let _ = writeln!(text, "ip saddr {subnet} oifname != \"{device}\" masquerade");
        let _ = writeln!(text, "ip6 saddr {prefix} oifname != \"{device}\" masquerade");
        // Without this, the answer would bypass the host, and match no connection.
        let _ =
            writeln!(text, "iifname \"{device}\" oifname \"{device}\" ct status dnat masquerade");
    }
    text
}

/// Returns the redirects from published ports to sandboxes, for packets to the host's addresses. An
/// internal network publishes nothing.
fn published(networks: &[&Network]) -> String {
    let mut text = String::new();
    for network in networks.iter().filter(|network| !network.internal) {
        for lease in network.leases.values() {
            for one in &lease.published {
                for to in [IpAddr::V4(lease.ipv4), IpAddr::V6(lease.ipv6)] {
                    text.extend(redirect(one, to));
                }
            }
        }
    }
    text
}

/// Returns the redirect from a published port to the sandbox with the address `to`. Returns `None`
/// if the port is published on an address of the other IP version.
fn redirect(one: &Published, to: IpAddr) -> Option<String> {
    let Published { host, container, protocol, .. } = one;
    let (family, target) = match to {
        IpAddr::V4(_) => ("ip", format!("{to}:{container}")),
        IpAddr::V6(_) => ("ip6", format!("[{to}]:{container}")),
    };
    let only = match one.address {
        Some(address) if address.is_ipv4() != to.is_ipv4() => return None,
        Some(address) => format!("{family} daddr {address}"),
        None => format!("meta nfproto ipv{}", if to.is_ipv4() { 4 } else { 6 }),
    };
    let protocol = protocol.as_str();
    Some(format!("{only} {protocol} dport {host} dnat {family} to {target}\n"))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::Mac;
    use crate::ledger::Lease;

    fn network(name: &str, device: &str, third: u8) -> Network {
        let subnet = format!("10.0.{third}.0/24").parse().unwrap();
        let prefix = format!("fd00:{third}::/64").parse().unwrap();
        let mut network = Network::new(name.into(), device.into(), subnet, prefix);
        let lease = Lease {
            name: "web".into(),
            mac: Mac::derived(Ipv4Addr::new(10, 0, third, 2)),
            ipv4: Ipv4Addr::new(10, 0, third, 2),
            ipv6: format!("fd00:{third}::2").parse().unwrap(),
            published: Vec::new(),
            attached: false,
            sequence: 0,
        };
        network.leases.insert("id".into(), lease);
        network
    }

    #[test]
    fn without_networks_there_is_no_table() {
        let text = ruleset("slipway", &[], &Policy::default(), OnlyForSandboxes::default());
        assert_eq!(text, "add table inet slipway\ndelete table inet slipway\n");
    }

    #[test]
    fn a_host_whose_switches_stay_on_after_its_last_network_is_no_router() {
        let only = OnlyForSandboxes { ipv4: true, ipv6: false };
        let text = ruleset("slipway", &[], &Policy::default(), only);
        let others = "iifname != \"slip*\" oifname != \"slip*\" drop";
        assert!(text.contains(&format!("meta nfproto ipv4 {others}")), "{text}");
    }

    #[test]
    fn published_ports_go_to_their_sandbox_only() {
        let mut web = network("web", "slip0", 1);
        let mut publish = |text: &str| {
            let lease = web.leases.get_mut("id").unwrap();
            lease.published.extend(Published::parse(text).unwrap());
        };
        publish("8080:80");
        publish("192.0.2.1:53:53/udp");
        publish("[2001:db8::1]:443:443");
        let text = published(&[&web]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "meta nfproto ipv4 tcp dport 8080 dnat ip to 10.0.1.2:80",
                "meta nfproto ipv6 tcp dport 8080 dnat ip6 to [fd00:1::2]:80",
                "ip daddr 192.0.2.1 udp dport 53 dnat ip to 10.0.1.2:53",
                "ip6 daddr 2001:db8::1 tcp dport 443 dnat ip6 to [fd00:1::2]:443",
            ]
        );
        // An internal network publishes nothing.
        web.internal = true;
        assert_eq!(published(&[&web]), "");
        assert_eq!(postrouting(&[&web]), "");
    }

    #[test]
    fn a_published_port_is_no_door_for_other_networks() {
        let (mut one, two) = (network("one", "slip0", 1), network("two", "slip1", 2));
        let lease = one.leases.get_mut("id").unwrap();
        lease.published.extend(Published::parse("8080:80").unwrap());
        lease.published.extend(Published::parse("192.0.2.1:53:53/udp").unwrap());
        let text = input(&[&one, &two]);
        assert!(text.contains("iifname { \"slip1\" } tcp dport 8080 drop"), "{text}");
        assert!(
            text.contains("iifname { \"slip1\" } ip daddr 192.0.2.1 udp dport 53 drop"),
            "{text}"
        );
        let names = text.find("th dport 53 accept").unwrap();
        assert!(names < text.find("dport 8080 drop").unwrap());
        assert!(!input(&[&one]).contains("8080"), "nobody else is there");
    }

    #[test]
    fn where_packets_go_is_looked_at_before_anything_is_accepted() {
        let policy = Policy::parse("all", &[], &[]).unwrap();
        let only = OnlyForSandboxes { ipv4: true, ipv6: false };
        let text = ruleset("slipway", &[&network("one", "slip0", 1)], &policy, only);
        let forward = text.find("chain forward").unwrap();
        let at =
            |what: &str| forward + text[forward..].find(what).unwrap_or_else(|| panic!("{text}"));
        let others = "iifname != \"slip*\" oifname != \"slip*\" drop";
        assert!(at(&format!("meta nfproto ipv4 {others}")) < at("jump beyond"));
        assert!(!text.contains("nfproto ipv6 iifname"), "{text}");
        assert!(at("iifname \"slip0\" oifname != \"slip*\" jump beyond") < at("established"));
        assert!(text.find("jump host").unwrap() < text.find("dport 53 accept").unwrap());
        assert!(at("chain beyond") < at("169.254.0.0/16"));
    }

    #[test]
    fn networks_do_not_see_each_other() {
        let (one, two) = (network("one", "slip0", 1), network("two", "slip1", 2));
        let text = forward(&[&one, &two]);
        let drop =
            |from: &str| format!("iifname \"{from}\" oifname {{ \"slip0\", \"slip1\" }} drop");
        for device in ["slip0", "slip1"] {
            assert!(text.contains(&drop(device)), "{text}");
        }
        // All drops come before the first accept.
        let first_accept = text.find("established").unwrap();
        assert!(text.rfind(&drop("slip1")).unwrap() < first_accept);
    }
}
