//! A container's interface: its settings in the container's network namespace. The plane makes them
//! with the interface.
//!
//! All functions that look at a namespace block, some on a thread that enters it.

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use slipway_netlink::{InterfaceSettings, LinkInfo, Netlink, Route};
use slipway_netns::{Identity, Namespace};
use slipway_plane_api::v1 as plane_v1;

use crate::attachment::Attachment;
use crate::ledger::Network;
use crate::{Error, Result};

/// The kind that the kernel names for TUN and TAP interfaces.
const TAP_KIND: &str = "tun";

/// Returns the settings of an attachment's interface.
pub fn settings(attachment: &Attachment, network: &Network) -> InterfaceSettings {
    let Attachment { key, lease, routes, .. } = attachment;
    let net = |net: &IpNet| (net.addr(), net.prefix_len());
    InterfaceSettings {
        name: key.interface.clone(),
        mac: lease.mac.octets(),
        mtu: network.mtu,
        addresses: vec![
            (lease.ipv4.into(), network.subnet.prefix_len()),
            (lease.ipv6.into(), network.prefix.prefix_len()),
        ],
        routes: routes.iter().map(|(to, gateway)| (net(to), *gateway)).collect(),
    }
}

/// Returns the settings for the plane, which makes the interface.
pub fn describe(settings: &InterfaceSettings) -> plane_v1::TapSettings {
    let addresses = settings.addresses.iter().map(|(address, prefix)| plane_v1::TapAddress {
        address: address.to_string(),
        prefix: (*prefix).into(),
    });
    let routes = settings.routes.iter().map(|((to, prefix), gateway)| plane_v1::TapRoute {
        destination: to.to_string(),
        prefix: (*prefix).into(),
        gateway: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
    });
    plane_v1::TapSettings {
        mtu: settings.mtu,
        addresses: addresses.collect(),
        routes: routes.collect(),
    }
}

/// Returns the identity of the namespace at `path`, which may be one of another kind than networks.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Invalid`] for the host's own namespace.
pub fn identity(path: &Path) -> Result<Identity> {
    let identity = slipway_netns::identify(path)?;
    let own = slipway_netns::own().map_err(Error::host("cannot look at /proc/self/ns/net"))?;
    if identity == own {
        return Err(Error::Invalid(format!(
            "{} is the host's own network namespace; a container has one of its own",
            path.display()
        )));
    }
    Ok(identity)
}

/// Returns whether the namespace of an attachment is still at its path.
pub fn is_there(attachment: &Attachment) -> bool {
    let found = slipway_netns::identify(&attachment.namespace);
    found.is_ok_and(|found| found == attachment.identity())
}

/// Runs `work` in the namespace of an attachment, with a netlink socket there.
fn within<T: Send>(
    attachment: &Attachment,
    work: impl FnOnce(&mut Netlink) -> Result<T> + Send,
) -> Result<T> {
    let path = &attachment.namespace;
    let namespace = Namespace::open_any(path)?;
    if namespace.identity() != attachment.identity() {
        return Err(slipway_netns::Error::NotOne(path.clone()).into());
    }
    namespace.run(|| {
        let opened = Netlink::open().map_err(Error::host("cannot reach the kernel's interfaces"));
        work(&mut opened?)
    })?
}

/// Compares the interface of an attachment with its settings. Returns whether it has IPv6.
///
/// # Errors
/// [`Error::Namespace`]; [`Error::Host`] that says what differs.
pub fn check(attachment: &Attachment, settings: &InterfaceSettings) -> Result<bool> {
    within(attachment, |netlink| check_here(netlink, settings))
}

fn check_here(netlink: &mut Netlink, wanted: &InterfaceSettings) -> Result<bool> {
    let name = &wanted.name;
    let link = netlink.find(name).map_err(|error| Error::Host(error.to_string()))?;
    let differs = |what: String| Err(Error::Host(format!("the interface {name} {what}")));
    if link.mac != Some(wanted.mac) {
        return differs("has another MAC address than it was given".into());
    }
    if !link.up {
        return differs(format!("is down; `ip link set {name} up` there"));
    }
    let failed = |error| Error::host("cannot look at the namespace's addresses and routes")(error);
    let mut addresses = netlink.addresses().map_err(failed)?;
    addresses.retain(|one| one.index == link.index);
    let has = |net: &(IpAddr, u8)| addresses.iter().any(|one| (one.address, one.prefix) == *net);
    let has_ipv6 = wanted.addresses.iter().any(|net| net.0.is_ipv6() && has(net));
    let ipv6_there = addresses.iter().any(|one| one.address.is_ipv6());
    for net in &wanted.addresses {
        // Without any IPv6 address the namespace has IPv6 switched off.
        if !has(net) && (net.0.is_ipv4() || ipv6_there) {
            return differs(format!("has lost its address {}/{}", net.0, net.1));
        }
    }
    let routes = netlink.routes().map_err(failed)?;
    for (to, gateway) in &wanted.routes {
        let is = |route: &Route| {
            let same = route.destination == *to;
            same && route.index == link.index && route.gateway == *gateway
        };
        if (to.0.is_ipv4() || has_ipv6) && !routes.iter().any(is) {
            return differs(format!("has lost its route to {}/{}", to.0, to.1));
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
    let name = &attachment.key.interface;
    let removed = within(attachment, |netlink| {
        let failed = || Error::host(format!("cannot remove the interface {name}"));
        let link = netlink.link(name).map_err(failed())?;
        // Another one of that name is somebody else's.
        let is = |link: &LinkInfo| {
            link.kind == TAP_KIND && link.mac == Some(attachment.lease.mac.octets())
        };
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
