//! The host's end of a network: interfaces and addresses.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use slipway_netlink::{Address, LinkChange, Netlink, no_autoconfiguration};

use crate::ledger::Network;
use crate::{Error, Result};

/// Prefix of the names of networks' interfaces; a number follows.
pub(crate) const DEVICE: &str = "slip";
/// The pool of subnets for networks that ask for none: 10.213.0.0/16, a /24 for each network.
/// Others rarely use it.
const POOL: [u8; 2] = [10, 213];
/// The most random prefixes that are tried for a network. Each of them is free unless the host's
/// networks have a large part of fd00::/8.
const MOST_PREFIXES: usize = 100;

/// The interfaces and networks of the host that a new network must not collide with.
#[derive(Debug, Default)]
pub struct Surroundings {
    devices: Vec<String>,
    /// Networks of the host's addresses and routes.
    used: Vec<(IpNet, String)>,
}

impl Surroundings {
    /// Reads the host's interfaces, addresses and routes, except those of the interface `except`.
    ///
    /// # Errors
    /// [`Error::Host`].
    pub fn look(except: &str) -> Result<Self> {
        Self::read(except).map_err(Error::host("cannot look at the host's interfaces"))
    }

    fn read(except: &str) -> std::io::Result<Self> {
        let mut netlink = Netlink::open()?;
        let links = netlink.links()?;
        let name_of = |index: u32| {
            let link = links.iter().find(|link| link.index == index);
            link.map_or("", |link| link.name.as_str())
        };
        let addresses = netlink.addresses()?.into_iter();
        let addresses = addresses.map(|one| (one.address, one.prefix, one.index));
        let routes = netlink.routes()?.into_iter();
        let routes = routes.map(|one| (one.destination.0, one.destination.1, one.index));
        let mut used = Vec::new();
        for (address, prefix, index) in addresses.chain(routes) {
            let Ok(net) = IpNet::new(address, prefix) else { continue };
            let (net, name) = (net.trunc(), name_of(index));
            let is_excepted = !except.is_empty() && name == except;
            if !is_excepted && !is_way_out(&net) {
                used.push((net, format!("{net} of the interface {name}")));
            }
        }
        Ok(Self { devices: links.into_iter().map(|link| link.name).collect(), used })
    }

    /// Adds the interface and the networks of `network`, whether or not its interface exists.
    pub fn add(&mut self, network: &Network) {
        self.devices.push(network.device.clone());
        let name = format!("the network \"{}\"", network.name);
        self.used.push((network.subnet.into(), format!("{} of {name}", network.subnet)));
        self.used.push((network.prefix.into(), format!("{} of {name}", network.prefix)));
    }

    /// Checks that nothing overlaps `net`.
    ///
    /// # Errors
    /// [`Error::Overlap`].
    pub fn check(&self, net: IpNet) -> Result<()> {
        let overlaps = |other: &IpNet| other.contains(&net) || net.contains(other);
        match self.used.iter().find(|(other, _)| overlaps(other)) {
            Some((_, other)) => {
                Err(Error::Overlap { subnet: net.to_string(), other: other.clone() })
            }
            None => Ok(()),
        }
    }

    /// Returns an unused name for an interface.
    pub fn free_device(&self) -> String {
        let mut names = (0..).map(|number: u32| format!("{DEVICE}{number}"));
        // There are fewer interfaces than numbers.
        names.find(|name| !self.devices.contains(name)).unwrap_or_default()
    }

    /// Returns a subnet that nothing overlaps.
    ///
    /// # Errors
    /// [`Error::Host`]: the pool is used up.
    pub fn free_subnet(&self) -> Result<Ipv4Net> {
        let [a, b] = POOL;
        let subnets = (0..=255).filter_map(|c| Ipv4Net::new([a, b, c, 0].into(), 24).ok());
        let mut free = subnets.filter(|subnet| self.check((*subnet).into()).is_ok());
        free.next().ok_or_else(|| {
            Error::Host(format!("no subnet of {a}.{b}.0.0/16 is free; `--subnet` takes another"))
        })
    }

    /// Returns a random prefix as of RFC 4193, section 3.2, that nothing overlaps.
    ///
    /// # Errors
    /// [`Error::Host`]: no random numbers, or the host's networks leave no prefix.
    pub fn free_prefix(&self) -> Result<Ipv6Net> {
        for _ in 0..MOST_PREFIXES {
            let mut octets = [0; 16];
            let flags = rustix::rand::GetRandomFlags::empty();
            rustix::rand::getrandom(&mut octets[1..8], flags)
                .map_err(|error| Error::Host(format!("no random numbers: {error}")))?;
            octets[0] = 0xfd;
            if let Ok(prefix) = Ipv6Net::new(octets.into(), 64)
                && self.check(prefix.into()).is_ok()
            {
                return Ok(prefix);
            }
        }
        let none = "no IPv6 prefix below fd00::/8 is free; `--ipv6-subnet` takes another";
        Err(Error::Host(none.to_owned()))
    }
}

/// Returns whether a network of the host's routes is the way to everything else, and not a place
/// where somebody has addresses. Clients of VPNs make such routes in place of a default route: one
/// for each half of all addresses, and one with all unique local addresses (fd00::/8 or wider).
fn is_way_out(net: &IpNet) -> bool {
    let is_unique_local = |net: &Ipv6Net| {
        let first = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0);
        net.prefix_len() <= 8 && net.contains(&first)
    };
    net.prefix_len() <= 1 || matches!(net, IpNet::V6(net) if is_unique_local(net))
}

/// Gives the network's interface its addresses and sets it up. A repetition changes nothing.
///
/// # Errors
/// [`Error::Host`].
pub fn set_up(network: &Network) -> Result<()> {
    let device = &network.device;
    let failed = |what: &str| Error::host(format!("cannot {what} {device}"));
    let mut netlink = Netlink::open().map_err(failed("reach"))?;
    let link = netlink.link(device).map_err(failed("find"))?;
    let link = link.ok_or_else(|| Error::Host(format!("there is no interface {device}")))?;
    // Before the interface is up: the host takes no router advertisements there, and does no
    // duplicate address detection.
    no_autoconfiguration(device);
    let mac = network.gateway_mac().octets();
    if link.mac != Some(mac) {
        let change = LinkChange { mac: Some(mac), ..Default::default() };
        netlink.change(link.index, change).map_err(failed("set the address of"))?;
    }
    let change = LinkChange { mtu: Some(network.mtu), up: Some(true), ..Default::default() };
    netlink.change(link.index, change).map_err(failed("set up"))?;
    let four = (IpAddr::V4(network.gateway), network.subnet.prefix_len());
    let six = (IpAddr::V6(network.gateway6()), network.prefix.prefix_len());
    for (address, prefix) in [four, six] {
        let added = netlink.add_address(&Address { index: link.index, address, prefix });
        match added {
            // The host has IPv6 switched off.
            Err(error) if address.is_ipv6() => {
                tracing::warn!(%error, device, "the network has no IPv6 on this host");
            }
            added => added.map_err(failed(&format!("give the address {address} to")))?,
        }
    }
    Ok(())
}

/// Returns those of `wanted` that are addresses of the host.
///
/// # Errors
/// [`Error::Host`].
pub fn has(wanted: &[IpAddr]) -> Result<Vec<IpAddr>> {
    let all = Netlink::open().and_then(|mut netlink| netlink.addresses());
    let all = all.map_err(Error::host("cannot look at the host's addresses"))?;
    let there = |address: &&IpAddr| all.iter().any(|one| one.address == **address);
    Ok(wanted.iter().filter(there).copied().collect())
}

/// Removes the network's interface, if it exists.
///
/// # Errors
/// [`Error::Host`].
pub fn remove(device: &str) -> Result<()> {
    let remove = || -> std::io::Result<()> {
        let mut netlink = Netlink::open()?;
        match netlink.link(device)? {
            Some(link) => netlink.remove(link.index),
            None => Ok(()),
        }
    };
    remove().map_err(Error::host(format!("cannot remove the interface {device}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_refused_and_free_networks_are_found() {
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let mut around = Surroundings {
            devices: vec!["lo".into(), "slip0".into(), "slip2".into()],
            used: vec![(net("10.213.0.0/23"), "a VPN".into())],
        };
        assert_eq!(around.free_device(), "slip1");
        assert_eq!(around.free_subnet().unwrap().to_string(), "10.213.2.0/24");
        for bad in ["10.213.0.0/24", "10.0.0.0/8", "10.213.1.128/30"] {
            let error = around.check(net(bad)).unwrap_err().to_string();
            assert!(error.contains("a VPN") && error.contains(bad), "{error}");
        }
        let prefix = around.free_prefix().unwrap();
        assert_eq!((prefix.network().octets()[0], prefix.prefix_len()), (0xfd, 64));
        let subnet = around.free_subnet().unwrap();
        around.add(&Network::new("blue".into(), "slip1".into(), subnet, prefix));
        assert_eq!(around.free_device(), "slip3");
        assert_eq!(around.free_subnet().unwrap().to_string(), "10.213.3.0/24");
        assert!(around.check(prefix.into()).unwrap_err().to_string().contains("\"blue\""));
        around.used.push((net("10.213.0.0/16"), "all".into()));
        assert!(around.free_subnet().is_err());
        around.used.push((net("fd00::/8"), "all".into()));
        assert!(around.free_prefix().is_err());
    }

    #[test]
    fn routes_in_place_of_a_default_route_are_no_collisions() {
        let is_way_out = |text: &str| is_way_out(&text.parse().unwrap());
        for route in ["0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1", "8000::/1", "fc00::/7", "fd00::/8"] {
            assert!(is_way_out(route), "{route}");
        }
        for network in ["10.0.0.0/8", "2000::/3", "fc00::/8", "fd00::/9", "fd12:3456:789a::/48"] {
            assert!(!is_way_out(network), "{network}");
        }
    }
}
