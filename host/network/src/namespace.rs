//! The interfaces that somebody else, such as a CNI plugin, made in a network namespace of the
//! host, for a sandbox that has them in place of an interface in a network.
//!
//! The sandbox's guest takes over an interface's MAC address, addresses and routes. They stay in
//! the namespace too, so that whoever made them finds them there (CHECK of CNI). The namespace's
//! own kernel must not answer beside the guest (ARP, ICMP, resets of TCP), so a rule of the packet
//! filter drops each frame that comes in there. The switch's port gets frames before that rule
//! does: packet sockets are first in the kernel's receive path.

mod choice;

use std::net::IpAddr;
use std::path::Path;

use slipway_ethernet_spec::Mac as Ethernet;
use slipway_netlink::{Address, LinkInfo, Neighbour, Netlink, Route};
use slipway_netns::{Identity, Namespace};
use slipway_plane_api::network_v1 as v1;

pub use self::choice::MOST_INTERFACES;
use self::choice::{choose_all, left_out};
use crate::ledger::{Lease, Uplink};
use crate::{Error, Mac, Result, nft};

/// The most addresses, routes and neighbours together.
const MOST: usize = 1024;
/// The name of the packet filter's table in the namespace for the first interface of a sandbox. The
/// names for its further ones have their numbers at the end.
const TABLE: &str = "slipway_uplink";

/// An interface with its settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Interface {
    link: LinkInfo,
    mac: Mac,
    addresses: Vec<Address>,
    routes: Vec<Route>,
    neighbours: Vec<Neighbour>,
}

/// The interfaces of a namespace.
#[derive(Debug)]
pub struct NamespaceInterfaces {
    /// The namespace.
    pub identity: Identity,
    /// The sandbox's interfaces, the first of them its main one.
    pub interfaces: Vec<Interface>,
    /// The names of other interfaces that are up and have an address. The sandbox does not get
    /// them.
    pub left_out: Vec<String>,
}

/// Finds the interfaces of the namespace at `path`; blocks.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Invalid`] for the host's own namespace; [`Error::Host`] if there
/// is no usable interface, several could be the first one, or there are more than a sandbox can
/// have.
pub fn look(path: &Path) -> Result<NamespaceInterfaces> {
    let namespace = Namespace::open(path)?;
    let own = slipway_netns::own().map_err(Error::host("cannot look at /proc/self/ns/net"))?;
    if namespace.identity() == own {
        return Err(Error::Invalid(format!(
            "{} is the host's own network namespace: a sandbox would take the host's interface; \
             `--network` joins a network of Slipway's",
            path.display()
        )));
    }
    let read = || -> std::io::Result<Result<(Vec<Interface>, Vec<String>)>> {
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let taken = match choose_all(links.clone()) {
            Ok(taken) => taken,
            Err(why) => return Ok(Err(Error::Host(format!("{}: {why}", path.display())))),
        };
        let (addresses, routes) = (netlink.addresses()?, netlink.routes()?);
        let neighbours = netlink.neighbours()?;
        let left_out = left_out(&links, &taken, &addresses);
        let all = || (addresses.clone(), routes.clone(), neighbours.clone());
        let found = taken.into_iter().map(|link| Interface::of(link, all()));
        let found = found.collect::<Result<Vec<_>>>();
        Ok(found.map(|found| (found, left_out)))
    };
    let read = namespace.run(read)?;
    let read = read.map_err(Error::host(format!("cannot look at {}", path.display())))?;
    let (interfaces, left_out) = read?;
    Ok(NamespaceInterfaces { identity: namespace.identity(), interfaces, left_out })
}

fn mac_of(link: &LinkInfo) -> Result<Mac> {
    Ethernet(link.mac.unwrap_or_default()).to_string().parse()
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

impl Interface {
    /// Selects what belongs to `link`, without the link-local address and route of IPv6, which each
    /// kernel makes itself.
    fn of(link: LinkInfo, all: (Vec<Address>, Vec<Route>, Vec<Neighbour>)) -> Result<Self> {
        let (mut addresses, mut routes, mut neighbours) = all;
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
        Ok(Self { link, mac, addresses, routes, neighbours })
    }

    /// Returns the entry of the ledger for sandbox `name`, whose interface of this number it is.
    pub fn uplink(
        &self,
        (name, number): (&str, u32),
        namespace: &Path,
        identity: Identity,
    ) -> Uplink {
        Uplink {
            sandbox: name.to_owned(),
            namespace: namespace.to_owned(),
            device: identity.device,
            inode: identity.inode,
            interface: self.link.name.clone(),
            index: self.link.index,
            mac: self.mac,
            network: None,
            number,
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
            pool: String::new(),
            owner: String::new(),
        }
    }
}

/// Keeps the namespace's own kernel off the frames of an interface; blocks. A repetition changes
/// nothing.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Host`], also if the interface is gone.
pub fn close(uplink: &Uplink) -> Result<()> {
    let table = table(uplink);
    let drop_all = format!(
        "add table netdev {table}\ndelete table netdev {table}\ntable netdev {table} {{\nchain \
         frames {{\ntype filter hook ingress device \"{}\" priority -500; policy drop;\n}}\n}}\n",
        uplink.interface
    );
    in_namespace(uplink, || {
        let links = Netlink::open().and_then(|mut netlink| netlink.links());
        let links = links.map_err(Error::host("cannot look at the namespace's interfaces"))?;
        let is = |link: &&LinkInfo| {
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
    let table = table(uplink);
    let nothing = format!("add table netdev {table}\ndelete table netdev {table}\n");
    match in_namespace(uplink, || nft::apply_here(&nothing)) {
        Err(Error::Namespace(_)) => Ok(()),
        done => done,
    }
}

/// Returns the name of the packet filter's table in the namespace.
fn table(uplink: &Uplink) -> String {
    match uplink.number {
        0 => TABLE.to_owned(),
        number => format!("{TABLE}_{number}"),
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
    use super::choice::tests::station;
    use super::*;

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
        let all = (addresses.clone(), routes, neighbours);
        let found = Interface::of(station(4, "eth0"), all).unwrap();
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
        let error = Interface::of(station(4, "eth0"), (many, vec![], vec![])).unwrap_err();
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
            let all = (addresses, routes, vec![]);
            let mut found = Interface::of(station(4, "eth0"), all).unwrap();
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
