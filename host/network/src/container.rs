//! A container's interface: its settings in the container's network namespace.
//!
//! All functions block, on a thread that enters the namespace.

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use slipway_netlink::{Address, Link, LinkChange, Netlink, Route};
use slipway_netns::{Identity, Namespace};

use crate::attachment::Attachment;
use crate::ledger::Network;
use crate::{Error, Result, host};

/// The kind that the kernel names for TUN and TAP interfaces.
const TAP_KIND: &str = "tun";

/// The settings of a container's interface.
#[derive(Clone, Debug)]
pub struct Wanted {
    namespace: std::path::PathBuf,
    identity: Identity,
    interface: String,
    mac: [u8; 6],
    mtu: u32,
    addresses: [IpNet; 2],
    routes: Vec<(IpNet, Option<IpAddr>)>,
}

impl Wanted {
    /// Returns the settings of an attachment's interface.
    ///
    /// # Errors
    /// [`Error::Host`]: the ledger's entry makes no sense.
    pub fn of(attachment: &Attachment, network: &Network) -> Result<Self> {
        let Attachment { key, namespace, device, inode, lease, routes, .. } = attachment;
        let net = |address: IpAddr, prefix| {
            IpNet::new(address, prefix).map_err(|error| Error::Host(error.to_string()))
        };
        Ok(Self {
            namespace: namespace.clone(),
            identity: Identity { device: *device, inode: *inode },
            interface: key.interface.clone(),
            mac: lease.mac.octets(),
            mtu: network.mtu,
            addresses: [
                net(lease.ipv4.into(), network.subnet.prefix_len())?,
                net(lease.ipv6.into(), network.prefix.prefix_len())?,
            ],
            routes: routes.clone(),
        })
    }
}

/// Returns the identity of the namespace at `path`, which may be one of another kind than networks.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Invalid`] for the host's own namespace.
pub fn identity(path: &Path) -> Result<Identity> {
    let namespace = Namespace::open_any(path)?;
    let own = slipway_netns::own().map_err(Error::host("cannot look at /proc/self/ns/net"))?;
    if namespace.identity() == own {
        return Err(Error::Invalid(format!(
            "{} is the host's own network namespace; a container has one of its own",
            path.display()
        )));
    }
    Ok(namespace.identity())
}

/// Returns whether the namespace of an attachment is still at its path.
pub fn is_there(attachment: &Attachment) -> bool {
    let identity = Identity { device: attachment.device, inode: attachment.inode };
    Namespace::open_any(&attachment.namespace).is_ok_and(|found| found.identity() == identity)
}

/// Runs `work` in the namespace, with a netlink socket there.
fn within<T: Send>(
    path: &Path,
    identity: Identity,
    work: impl FnOnce(&mut Netlink) -> Result<T> + Send,
) -> Result<T> {
    let namespace = Namespace::open_any(path)?;
    if namespace.identity() != identity {
        return Err(slipway_netns::Error::NotOne(path.to_owned()).into());
    }
    namespace.run(|| {
        let opened = Netlink::open().map_err(Error::host("cannot reach the kernel's interfaces"));
        work(&mut opened?)
    })?
}

/// Sets an interface up with its addresses and routes. An interface that is up already, with its
/// MAC address, stays as it is. Returns whether it has IPv6.
///
/// # Errors
/// [`Error::Namespace`], [`Error::Host`].
pub fn configure(wanted: &Wanted) -> Result<bool> {
    within(&wanted.namespace, wanted.identity, |netlink| configure_here(netlink, wanted))
}

fn configure_here(netlink: &mut Netlink, wanted: &Wanted) -> Result<bool> {
    let name = &wanted.interface;
    let failed = |what: String| Error::host(format!("cannot {what} {name}"));
    let link = find(netlink, name)?;
    if link.up && link.mac == Some(wanted.mac) {
        return Ok(true);
    }
    // Each address is given once, and no router sends advertisements to containers.
    host::setting(&format!("ipv6/conf/{name}/accept_dad"), "0");
    host::setting(&format!("ipv6/conf/{name}/accept_ra"), "0");
    let change = LinkChange { up: Some(true), mtu: Some(wanted.mtu), mac: None };
    netlink.change(link.index, change).map_err(failed("set up".into()))?;
    let mut has_ipv6 = true;
    for net in wanted.addresses {
        let address = Address { index: link.index, address: net.addr(), prefix: net.prefix_len() };
        match netlink.add_address(&address) {
            // The namespace has IPv6 switched off.
            Err(_) if address.address.is_ipv6() => has_ipv6 = false,
            added => added.map_err(failed(format!("give the address {net} to")))?,
        }
    }
    for (to, gateway) in &wanted.routes {
        if to.addr().is_ipv4() || has_ipv6 {
            let route = Route::new((to.addr(), to.prefix_len()), *gateway, link.index);
            netlink.add_route(&route).map_err(failed(format!("add the route to {to} by")))?;
        }
    }
    Ok(has_ipv6)
}

fn find(netlink: &mut Netlink, name: &str) -> Result<Link> {
    let link = netlink.link(name).map_err(Error::host(format!("cannot find {name}")))?;
    link.ok_or_else(|| Error::Host(format!("the interface {name} is not there any more")))
}

/// Compares an interface with its settings. Returns whether it has IPv6.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Host`] that says what differs.
pub fn check(wanted: &Wanted) -> Result<bool> {
    within(&wanted.namespace, wanted.identity, |netlink| check_here(netlink, wanted))
}

fn check_here(netlink: &mut Netlink, wanted: &Wanted) -> Result<bool> {
    let name = &wanted.interface;
    let link = find(netlink, name)?;
    let differs = |what: String| Err(Error::Host(format!("the interface {name} {what}")));
    if link.mac != Some(wanted.mac) {
        return differs("has another MAC address than it was given".into());
    }
    if !link.up {
        return differs(format!("is down; `ip link set {name} up` there"));
    }
    let failed = |error| Error::host("cannot look at the namespace's addresses and routes")(error);
    let addresses = netlink.addresses().map_err(failed)?;
    let has = |net: &IpNet| {
        let mut own = addresses.iter().filter(|one| one.index == link.index);
        own.any(|one| (one.address, one.prefix) == (net.addr(), net.prefix_len()))
    };
    let has_ipv6 = has(&wanted.addresses[1]);
    let ipv6_there = addresses.iter().any(|one| one.index == link.index && one.address.is_ipv6());
    for net in &wanted.addresses {
        // Without any IPv6 address the namespace has IPv6 switched off.
        if !has(net) && (net.addr().is_ipv4() || ipv6_there) {
            return differs(format!("has lost its address {net}"));
        }
    }
    let routes = netlink.routes().map_err(failed)?;
    for (to, gateway) in &wanted.routes {
        let is = |route: &Route| {
            let same = route.destination == (to.addr(), to.prefix_len());
            same && route.index == link.index && route.gateway == *gateway
        };
        if (to.addr().is_ipv4() || has_ipv6) && !routes.iter().any(is) {
            return differs(format!("has lost its route to {to}"));
        }
    }
    Ok(has_ipv6)
}

/// Removes the interface of an attachment that has no port. A namespace or an interface that is
/// gone is no error. A link of another kind than TAP interfaces stays: the container gave it the
/// name and the MAC address of the one that it removed.
///
/// # Errors
/// [`Error::Host`]: the kernel refuses, perhaps because of what the container did.
pub fn remove(attachment: &Attachment) -> Result<()> {
    let identity = Identity { device: attachment.device, inode: attachment.inode };
    let name = &attachment.key.interface;
    let removed = within(&attachment.namespace, identity, |netlink| {
        let failed = || Error::host(format!("cannot remove the interface {name}"));
        let link = netlink.link(name).map_err(failed())?;
        // Another one of that name is somebody else's.
        let is =
            |link: &Link| link.kind == TAP_KIND && link.mac == Some(attachment.lease.mac.octets());
        match link.filter(is) {
            Some(link) => netlink.remove(link.index).map_err(failed()),
            None => Ok(()),
        }
    });
    match removed {
        Err(Error::Namespace(_)) => Ok(()),
        removed => removed,
    }
}
