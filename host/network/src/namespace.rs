//! The interface that somebody else, such as a CNI plugin, made in a network namespace of the host,
//! for a sandbox that has it in place of an interface in a network.
//!
//! The sandbox's guest takes over the interface's MAC address, addresses and routes. They stay in
//! the namespace too, so that whoever made them finds them there (CHECK of CNI). The namespace's
//! own kernel must not answer beside the guest (ARP, ICMP, resets of TCP), so a rule of the packet
//! filter drops each frame that comes in there. The switch's port gets frames before that rule
//! does: packet sockets are first in the kernel's receive path.

use std::net::IpAddr;
use std::path::Path;

use slipway_ethernet_spec::Mac as Ethernet;
use slipway_netlink::{Address, Link, Neighbour, Netlink, Route};
use slipway_netns::{Identity, Namespace};
use slipway_plane_api::network_v1 as v1;

use crate::ledger::{Lease, Uplink};
use crate::{Error, Mac, Result, nft};

/// The interface that is taken if it exists; the name that CNI runtimes ask for.
const USUAL: &str = "eth0";
/// The range of MTUs: the least of IPv4 (RFC 791), and the most that a virtio interface can have.
const MTU: std::ops::RangeInclusive<u32> = 68..=65_535;
/// The most addresses, routes and neighbours together.
const MOST: usize = 1024;
/// The name of the packet filter's table in the namespace.
const TABLE: &str = "slipway_uplink";

/// An interface with its settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Interface {
    link: Link,
    mac: Mac,
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
    left_out: Vec<String>,
}

/// Finds the interface of the namespace at `path`; blocks.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Invalid`] for the host's own namespace; [`Error::Host`] if there
/// is no usable interface, or several.
pub fn look(path: &Path) -> Result<(Identity, Interface)> {
    let namespace = Namespace::open(path)?;
    let own = slipway_netns::own().map_err(Error::host("cannot look at /proc/self/ns/net"))?;
    if namespace.identity() == own {
        return Err(Error::Invalid(format!(
            "{} is the host's own network namespace: a sandbox would take the host's interface; \
             `--network` joins a network of Slipway's",
            path.display()
        )));
    }
    let read = || -> std::io::Result<Result<Interface>> {
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let link = match choose(links.clone()) {
            Ok(link) => link,
            Err(why) => return Ok(Err(Error::Host(format!("{}: {why}", path.display())))),
        };
        let (addresses, routes) = (netlink.addresses()?, netlink.routes()?);
        let left_out = left_out(&links, link.index, &addresses);
        let found = Interface::of(link, addresses, routes, netlink.neighbours()?);
        Ok(found.map(|found| Interface { left_out, ..found }))
    };
    let read = namespace.run(read)?;
    let interface = read.map_err(Error::host(format!("cannot look at {}", path.display())))??;
    Ok((namespace.identity(), interface))
}

/// Chooses the interface as runtimes with CNI do. Tunnels that each namespace has from the start
/// have no Ethernet address, or one of zeros.
fn choose(links: Vec<Link>) -> Result<Link, String> {
    let has_mac = |link: &Link| link.mac.is_some_and(|mac| Ethernet(mac).is_unicast());
    let mut links: Vec<Link> = links.into_iter().filter(has_mac).collect();
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
    // The name becomes a word in the packet filter's language.
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@:+".contains(&byte);
    if !link.name.bytes().all(plain) {
        return Err(format!("the name of the interface {:?} cannot be used", link.name));
    }
    if !link.up {
        return Err(format!("the interface {0} is down; `ip link set {0} up` there", link.name));
    }
    if !MTU.contains(&link.mtu) {
        return Err(format!("the interface {} has an MTU of {} bytes", link.name, link.mtu));
    }
    Ok(link)
}

/// Returns the names of the other interfaces that are up and have an address, such as those that
/// Multus adds to a pod's namespace.
fn left_out(links: &[Link], taken: u32, addresses: &[Address]) -> Vec<String> {
    let has_address = |link: &Link| {
        let is_its = |one: &Address| one.index == link.index && !one.address.is_loopback();
        addresses.iter().any(|one| is_its(one) && !is_link_local(one.address))
    };
    let others = links.iter().filter(|link| link.index != taken && link.up && has_address(link));
    others.map(|link| link.name.clone()).collect()
}

fn mac_of(link: &Link) -> Result<Mac> {
    Ethernet(link.mac.unwrap_or_default()).to_string().parse()
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

impl Interface {
    /// Selects what belongs to `link`, without the link-local address and route of IPv6, which each
    /// kernel makes itself.
    fn of(
        link: Link,
        mut addresses: Vec<Address>,
        mut routes: Vec<Route>,
        mut neighbours: Vec<Neighbour>,
    ) -> Result<Self> {
        let index = link.index;
        addresses.retain(|one| one.index == index && !is_link_local(one.address));
        routes.retain(|one| one.index == index && !is_link_local(one.destination.0));
        neighbours.retain(|one| one.index == index);
        let count = addresses.len() + routes.len() + neighbours.len();
        if count > MOST {
            return Err(Error::Host(format!(
                "the interface {} has {count} addresses, routes and neighbours: at most {MOST}",
                link.name
            )));
        }
        let mac = mac_of(&link)?;
        Ok(Self { link, mac, addresses, routes, neighbours, left_out: Vec::new() })
    }

    /// Returns the names of the namespace's other interfaces that are up and have an address. The
    /// sandbox does not get them.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Returns the entry of the ledger for sandbox `name`.
    pub fn uplink(&self, name: &str, namespace: &Path, identity: Identity) -> Uplink {
        Uplink {
            sandbox: name.to_owned(),
            namespace: namespace.to_owned(),
            device: identity.device,
            inode: identity.inode,
            interface: self.link.name.clone(),
            index: self.link.index,
            mac: self.mac,
            network: None,
        }
    }

    /// Drops the IP addresses that are not the lease's, and the routes that need them: a sandbox at
    /// a network's own switch has its lease's addresses and no others, whatever was added in the
    /// namespace. The IPv6 address stays if the namespace has it.
    pub fn restrict(&mut self, lease: &Lease, prefix: u8) {
        let (ipv4, ipv6) = (IpAddr::V4(lease.ipv4), IpAddr::V6(lease.ipv6));
        self.addresses.retain(|one| one.address == ipv6);
        self.addresses.truncate(1);
        let has_ipv6 = !self.addresses.is_empty();
        self.addresses.insert(0, Address { index: self.link.index, address: ipv4, prefix });
        self.routes.retain(|route| {
            let usable = route.destination.0.is_ipv4() || has_ipv6;
            usable && route.source.is_none_or(|source| source == ipv4 || source == ipv6)
        });
    }

    /// Returns the interface for a sandbox whose switch is `switch`.
    pub fn describe(&self, switch: String) -> v1::Interface {
        let address = |one: &Address| v1::InterfaceAddress {
            address: one.address.to_string(),
            prefix: one.prefix.into(),
        };
        let text = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
        let route = |one: &Route| v1::InterfaceRoute {
            destination: one.destination.0.to_string(),
            prefix: one.destination.1.into(),
            gateway: text(one.gateway),
            on_link: one.on_link,
            source: text(one.source),
            metric: one.metric,
        };
        let neighbour = |one: &Neighbour| v1::InterfaceNeighbour {
            address: one.address.to_string(),
            mac: Ethernet(one.mac).to_string(),
        };
        v1::Interface {
            switch,
            name: self.link.name.clone(),
            mac: self.mac.to_string(),
            mtu: self.link.mtu,
            addresses: self.addresses.iter().map(address).collect(),
            routes: self.routes.iter().map(route).collect(),
            neighbours: self.neighbours.iter().map(neighbour).collect(),
            rates: None,
            traceparent: String::new(),
        }
    }
}

/// Keeps the namespace's own kernel off the frames of an interface; blocks. A repetition changes
/// nothing.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Host`], also if the interface is gone.
pub fn close(uplink: &Uplink) -> Result<()> {
    let drop_all = format!(
        "add table netdev {TABLE}\ndelete table netdev {TABLE}\ntable netdev {TABLE} {{\nchain \
         frames {{\ntype filter hook ingress device \"{}\" priority -500; policy drop;\n}}\n}}\n",
        uplink.interface
    );
    in_namespace(uplink, || {
        let links = Netlink::open().and_then(|mut netlink| netlink.links());
        let links = links.map_err(Error::host("cannot look at the namespace's interfaces"))?;
        let is = |link: &&Link| {
            (link.index, &link.name) == (uplink.index, &uplink.interface)
                && mac_of(link).is_ok_and(|mac| mac == uplink.mac)
        };
        if links.iter().find(is).is_none() {
            return Err(Error::Host(format!(
                "the interface {} of {} is not there any more",
                uplink.interface,
                uplink.namespace.display()
            )));
        }
        nft::apply_here(&drop_all)
    })
}

/// Lets the namespace's own kernel have the frames of an interface again; blocks. A namespace that
/// is gone is no error.
///
/// # Errors
/// [`Error::Host`].
pub fn open_again(uplink: &Uplink) -> Result<()> {
    let nothing = format!("add table netdev {TABLE}\ndelete table netdev {TABLE}\n");
    match in_namespace(uplink, || nft::apply_here(&nothing)) {
        Err(Error::Namespace(_)) => Ok(()),
        done => done,
    }
}

fn in_namespace(uplink: &Uplink, work: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    let namespace = Namespace::open(&uplink.namespace)?;
    let identity = Identity { device: uplink.device, inode: uplink.inode };
    if namespace.identity() != identity {
        return Err(slipway_netns::Error::NotOne(uplink.namespace.clone()).into());
    }
    namespace.run(work)?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str, mac: Option<[u8; 6]>) -> Link {
        Link { index, name: name.into(), mac, mtu: 1500, up: true, kind: String::new() }
    }

    fn station(index: u32, name: &str) -> Link {
        link(index, name, Some([2, 0, 0, 0, 0, index as u8]))
    }

    #[test]
    fn the_interface_is_eth0_or_the_only_one() {
        let nobodys =
            || vec![link(1, "lo", Some([0; 6])), link(2, "sit0", None), link(3, "g", Some([0; 6]))];
        let with = |more: Vec<Link>| choose([nobodys(), more].concat());
        assert_eq!(with(vec![station(4, "net1")]).unwrap().name, "net1");
        assert_eq!(with(vec![station(4, "net1"), station(5, "eth0")]).unwrap().index, 5);
        assert!(with(vec![]).unwrap_err().contains("no Ethernet interface"));
        let two = with(vec![station(4, "net1"), station(5, "net2")]).unwrap_err();
        assert!(two.contains("net1, net2"), "{two}");
        let down = Link { up: false, ..station(4, "eth0") };
        assert!(with(vec![down]).unwrap_err().contains("is down"));
        for bad in ["a\"b", "a\\", "a;b", "ä"] {
            assert!(with(vec![station(4, bad)]).unwrap_err().contains("cannot be used"), "{bad}");
        }
        for (mtu, good) in [(67, false), (68, true), (65_535, true), (65_536, false)] {
            assert_eq!(with(vec![Link { mtu, ..station(4, "eth0") }]).is_ok(), good, "{mtu}");
        }
    }

    #[test]
    fn other_interfaces_are_left_out_that_are_up_and_have_an_address() {
        let address =
            |index, text: &str| Address { index, address: text.parse().unwrap(), prefix: 64 };
        let down = Link { up: false, ..station(7, "net3") };
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
        assert_eq!(left_out(&links, 4, &addresses), ["net1", "wg0"]);
    }

    #[test]
    fn settings_are_those_of_the_interface() {
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let address = |index, text, prefix| Address { index, address: ip(text), prefix };
        let addresses = vec![
            address(1, "127.0.0.1", 8),
            address(4, "10.1.1.2", 24),
            address(4, "fd00::2", 64),
            address(4, "fe80::2", 64),
        ];
        let gateway = Some(ip("10.1.1.1"));
        let routes = vec![
            Route { source: Some(ip("10.1.1.2")), ..Route::new((ip("10.1.1.1"), 32), None, 4) },
            Route::new((ip("0.0.0.0"), 0), gateway, 4),
            Route { metric: 256, ..Route::new((ip("fe80::"), 64), None, 4) },
            Route::new((ip("::"), 0), Some(ip("fe80::1")), 4),
            Route::new((ip("10.9.0.0"), 16), gateway, 9),
        ];
        let near = Neighbour { index: 4, address: ip("10.1.1.1"), mac: [0xee; 6] };
        let neighbours = vec![near, Neighbour { index: 1, ..near }];
        let found =
            Interface::of(station(4, "eth0"), addresses.clone(), routes, neighbours).unwrap();
        let told = found.describe("uplink.x".into());
        assert_eq!(
            (told.mac.as_str(), told.mtu, told.name.as_str()),
            ("02:00:00:00:00:04", 1500, "eth0")
        );
        let texts: Vec<_> = told.addresses.iter().map(|one| one.address.as_str()).collect();
        assert_eq!(texts, ["10.1.1.2", "fd00::2"]);
        let texts: Vec<_> = told
            .routes
            .iter()
            .map(|one| (one.destination.as_str(), one.gateway.as_str()))
            .collect();
        assert_eq!(texts, [("10.1.1.1", ""), ("0.0.0.0", "10.1.1.1"), ("::", "fe80::1")]);
        assert_eq!(told.routes[0].source, "10.1.1.2");
        assert_eq!(told.neighbours.len(), 1);
        let many = vec![addresses[1]; MOST + 1];
        let error = Interface::of(station(4, "eth0"), many, vec![], vec![]).unwrap_err();
        assert!(error.to_string().contains("at most 1024"), "{error}");
    }

    #[test]
    fn a_sandbox_at_a_network_s_switch_has_the_addresses_of_its_lease() {
        let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
        let address = |text, prefix| Address { index: 4, address: ip(text), prefix };
        let from = |text, source| Route {
            source: Some(ip(source)),
            ..Route::new((ip(text), 24), None, 4)
        };
        let lease = Lease {
            name: "web".into(),
            mac: Mac::derived([10, 1, 1, 2].into()),
            ipv4: [10, 1, 1, 2].into(),
            ipv6: "fd00::2".parse().unwrap(),
            published: Vec::new(),
            attached: true,
            sequence: 1,
        };
        let own = from("10.1.1.0", "10.1.1.2");
        let six = Route::new((ip("::"), 0), Some(ip("fd00::1")), 4);
        let routes = vec![own, from("10.1.9.0", "10.1.1.3"), six];
        let restricted = |addresses: Vec<Address>| {
            let routes = routes.clone();
            let mut found = Interface::of(station(4, "eth0"), addresses, routes, vec![]).unwrap();
            found.restrict(&lease, 24);
            (found.addresses, found.routes)
        };
        let (four, other) = (address("10.1.1.2", 24), address("10.1.1.3", 24));
        let (v6, other6) = (address("fd00::2", 64), address("fd00::3", 64));
        let all = restricted(vec![other, four, other6, v6]);
        assert_eq!(all, (vec![four, v6], vec![own, six]));
        // Without IPv6 in the namespace, and where the IPv4 address was taken away there.
        assert_eq!(restricted(vec![other, four]), (vec![four], vec![own]));
        assert_eq!(restricted(vec![other6]), (vec![four], vec![own]));
    }
}
