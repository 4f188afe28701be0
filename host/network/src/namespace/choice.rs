//! The choice of a sandbox's interfaces among the links of a network namespace.

use slipway_ethernet_spec::Mac as Ethernet;
use slipway_netlink::{Address, LinkInfo};

use super::is_link_local;

/// The interface that is taken if it exists; the name that CNI runtimes ask for.
const USUAL: &str = "eth0";
/// The name of the guest's loopback interface.
const LOOPBACK: &str = "lo";
/// The range of MTUs: the least of IPv4 (RFC 791), and the most that a virtio interface can have.
const MTU: std::ops::RangeInclusive<u32> = 68..=65_535;
/// The most interfaces of a sandbox.
pub const MOST_INTERFACES: u32 = 4;
/// The kinds of links that a sandbox gets beside its first interface, by the kernel's names.
/// Hardware has none.
const ORDINARY: [&str; 7] = ["", "veth", "macvlan", "macvtap", "ipvlan", "tun", "vlan"];
/// Kinds of links whose frames come in at another link first.
const STACKED: [&str; 4] = ["macvlan", "macvtap", "ipvlan", "vlan"];

/// Chooses all interfaces of a sandbox: the first as [`choose`] does, and then all others of
/// ordinary kinds that are up, as Multus and runtimes with several networks leave them. Of links
/// upon each other one alone can be had: the rule that keeps the namespace's kernel off the frames
/// of the lower one drops those of the upper one.
pub(super) fn choose_all(links: Vec<LinkInfo>) -> Result<Vec<LinkInfo>, String> {
    let first = choose(links.clone())?;
    let index = first.index;
    let is_further = |link: &LinkInfo| {
        link.index != index && link.up && has_mac(link) && ORDINARY.contains(&link.kind.as_str())
    };
    let mut further: Vec<LinkInfo> = links.into_iter().filter(is_further).collect();
    further.sort_by_key(|link| link.index);
    let indices = further.iter().map(|link| link.index);
    let indices: Vec<u32> = std::iter::once(index).chain(indices).collect();
    further.retain(|link| {
        !is_upon(&first, link.index) && !indices.iter().any(|lower| is_upon(link, *lower))
    });
    let all: Vec<LinkInfo> = std::iter::once(first).chain(further).collect();
    if all.len() > MOST_INTERFACES as usize {
        let names: Vec<_> = all.iter().map(|link| link.name.as_str()).collect();
        return Err(format!(
            "a sandbox has at most {MOST_INTERFACES} interfaces, and there are {}: {}",
            all.len(),
            names.join(", ")
        ));
    }
    all.iter().try_for_each(check)?;
    // The guest's agent tells interfaces by their addresses.
    for (at, link) in all.iter().enumerate() {
        if let Some(other) = all[..at].iter().find(|other| other.mac == link.mac) {
            return Err(format!(
                "the interfaces {} and {} have the same MAC address: set one of them down",
                other.name, link.name
            ));
        }
    }
    Ok(all)
}

/// Returns whether the frames of a link come in at the link number `lower` first.
fn is_upon(link: &LinkInfo, lower: u32) -> bool {
    STACKED.contains(&link.kind.as_str()) && link.lower == Some(lower)
}

/// Returns whether a link has an Ethernet address. Tunnels that each namespace has from the start
/// have none, or one of zeros.
fn has_mac(link: &LinkInfo) -> bool {
    link.mac.is_some_and(|mac| Ethernet(mac).is_unicast())
}

/// Chooses the first interface as runtimes with CNI do.
fn choose(links: Vec<LinkInfo>) -> Result<LinkInfo, String> {
    let mut links: Vec<LinkInfo> = links.into_iter().filter(has_mac).collect();
    let link = match links.iter().position(|link| link.name == USUAL) {
        Some(at) => links.swap_remove(at),
        None if links.len() > 1 => {
            let names: Vec<_> = links.into_iter().map(|link| link.name).collect();
            return Err(format!(
                "which interface is the sandbox's? There are {}; name it {USUAL}",
                names.join(", ")
            ));
        }
        None => links.pop().ok_or("there is no Ethernet interface; a CNI plugin makes one")?,
    };
    check(&link)?;
    Ok(link)
}

/// Refuses an interface that no sandbox can have.
fn check(link: &LinkInfo) -> Result<(), String> {
    // The name becomes a word in the packet filter's language, and that of the guest's interface.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@:+".contains(&byte);
    if link.name == LOOPBACK || !link.name.bytes().all(plain) {
        return Err(format!("the name of the interface {:?} cannot be used", link.name));
    }
    if !link.up {
        return Err(format!("the interface {0} is down; `ip link set {0} up` there", link.name));
    }
    if !MTU.contains(&link.mtu) {
        return Err(format!("the interface {} has an MTU of {} bytes", link.name, link.mtu));
    }
    Ok(())
}

/// Returns the names of the interfaces that are not `taken`, are up and have an address, such as
/// tunnels and dummies.
pub(super) fn left_out(
    links: &[LinkInfo],
    taken: &[LinkInfo],
    addresses: &[Address],
) -> Vec<String> {
    let has_address = |link: &LinkInfo| {
        let is_its = |one: &Address| one.index == link.index && !one.address.is_loopback();
        addresses.iter().any(|one| is_its(one) && !is_link_local(one.address))
    };
    let is_taken = |link: &LinkInfo| taken.iter().any(|one| one.index == link.index);
    let others = links.iter().filter(|link| !is_taken(link) && link.up && has_address(link));
    others.map(|link| link.name.clone()).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn link(index: u32, name: &str, mac: Option<[u8; 6]>) -> LinkInfo {
        let (name, kind) = (name.to_owned(), String::new());
        LinkInfo { index, name, mac, mtu: 1500, up: true, kind, lower: None }
    }

    pub(in crate::namespace) fn station(index: u32, name: &str) -> LinkInfo {
        link(index, name, Some([2, 0, 0, 0, 0, index as u8]))
    }

    #[test]
    fn the_interface_is_eth0_or_the_only_one() {
        let nobodys =
            || vec![link(1, "lo", Some([0; 6])), link(2, "sit0", None), link(3, "g", Some([0; 6]))];
        let with = |more: Vec<LinkInfo>| choose([nobodys(), more].concat());
        assert_eq!(with(vec![station(4, "net1")]).unwrap().name, "net1");
        assert_eq!(with(vec![station(4, "net1"), station(5, "eth0")]).unwrap().index, 5);
        assert!(with(vec![]).unwrap_err().contains("no Ethernet interface"));
        let two = with(vec![station(4, "net1"), station(5, "net2")]).unwrap_err();
        assert!(two.contains("net1, net2"), "{two}");
        let down = LinkInfo { up: false, ..station(4, "eth0") };
        assert!(with(vec![down]).unwrap_err().contains("is down"));
        for bad in ["a\"b", "a\\", "a;b", "ä", "lo"] {
            assert!(with(vec![station(4, bad)]).unwrap_err().contains("cannot be used"), "{bad}");
        }
        for (mtu, good) in [(67, false), (68, true), (65_535, true), (65_536, false)] {
            assert_eq!(with(vec![LinkInfo { mtu, ..station(4, "eth0") }]).is_ok(), good, "{mtu}");
        }
    }

    #[test]
    fn further_interfaces_are_those_of_ordinary_kinds_that_are_up() {
        let of =
            |index, name: &str, kind: &str| LinkInfo { kind: kind.into(), ..station(index, name) };
        let names = |links: Vec<LinkInfo>| -> Result<Vec<String>, String> {
            Ok(choose_all(links)?.into_iter().map(|link| link.name).collect())
        };
        let down = LinkInfo { up: false, ..of(3, "net0", "veth") };
        let others = vec![
            link(1, "lo", Some([0; 6])),
            of(9, "net2", "macvlan"),
            down,
            of(4, "d0", "dummy"),
            of(5, "br0", "bridge"),
            of(6, "net1", "veth"),
            link(8, "wg0", None),
            of(7, "eth0", "tun"),
        ];
        assert_eq!(names(others.clone()).unwrap(), ["eth0", "net1", "net2"]);
        let more = |links: Vec<LinkInfo>| names([others.clone(), links].concat());
        assert_eq!(more(vec![station(10, "net3")]).unwrap().len(), 4, "hardware");
        let many = more(vec![station(10, "net3"), of(11, "net4", "vlan")]).unwrap_err();
        assert!(many.ends_with("there are 5: eth0, net1, net2, net3, net4"), "{many}");
        let same = LinkInfo { mac: station(6, "").mac, ..of(10, "net3", "ipvlan") };
        assert!(more(vec![same]).unwrap_err().contains("net1 and net3 have the same MAC"));
        assert!(more(vec![of(10, "a;b", "veth")]).unwrap_err().contains("cannot be used"));
        assert!(
            more(vec![LinkInfo { mtu: 60, ..station(10, "net3") }]).unwrap_err().contains("MTU")
        );
    }

    #[test]
    fn of_links_upon_each_other_one_is_taken() {
        let upon = |index, name: &str, kind: &str, lower| LinkInfo {
            kind: kind.into(),
            lower: Some(lower),
            ..station(index, name)
        };
        let names = |links: Vec<LinkInfo>| -> Vec<String> {
            choose_all(links).unwrap().into_iter().map(|link| link.name).collect()
        };
        // A VLAN has the address of the link below it.
        let vlan = LinkInfo { mac: station(4, "").mac, ..upon(5, "eth0.7", "vlan", 4) };
        let upper = upon(6, "mac0", "macvlan", 7);
        let links = vec![station(4, "eth0"), vlan, upper, station(7, "net1")];
        assert_eq!(names(links), ["eth0", "net1"]);
        assert_eq!(names(vec![station(3, "wire"), upon(4, "eth0", "macvlan", 3)]), ["eth0"]);
        // Peers are not upon each other, and a link that is not taken has no rule.
        let pair = vec![station(4, "eth0"), upon(5, "a", "veth", 6), upon(6, "b", "veth", 5)];
        assert_eq!(names(pair), ["eth0", "a", "b"]);
        let dummy = LinkInfo { kind: "dummy".into(), ..station(5, "d0") };
        let links = vec![station(4, "eth0"), dummy, upon(6, "net1", "macvlan", 5)];
        assert_eq!(names(links), ["eth0", "net1"]);
    }

    #[test]
    fn other_interfaces_are_left_out_that_are_up_and_have_an_address() {
        let address =
            |index, text: &str| Address { index, address: text.parse().unwrap(), prefix: 64 };
        let down = LinkInfo { up: false, ..station(7, "net3") };
        let links = [
            link(1, "lo", Some([0; 6])),
            station(4, "eth0"),
            station(5, "net1"),
            station(6, "net2"),
            down,
            link(8, "wg0", None),
        ];
        let addresses = [
            address(1, "127.0.0.1"),
            address(1, "::1"),
            address(4, "10.1.1.2"),
            address(5, "10.2.1.2"),
            address(6, "fe80::6"),
            address(7, "10.4.1.2"),
            address(8, "fd00::8"),
        ];
        let taken = [station(4, "eth0")];
        assert_eq!(left_out(&links, &taken, &addresses), ["net1", "wg0"]);
        let taken = [station(4, "eth0"), station(5, "net1")];
        assert_eq!(left_out(&links, &taken, &addresses), ["wg0"]);
    }
}
