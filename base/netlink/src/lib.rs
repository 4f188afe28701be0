//! Links, addresses and routes by rtnetlink (RFC 3549, rtnetlink(7)): what a host does to the end
//! of a sandbox's network, and the agent to its own. Connections by sock_diag(7).
//!
//! [`Netlink`] is a socket to the kernel; each call is one request and waits for its answer, which
//! the kernel gives at once. A [`Batch`] is several requests that are sent together, and
//! [`InterfaceSettings`] are made by one. `message` lays requests out and takes answers apart,
//! `exchange` sends and receives them. `link` has the parts that describe a link, `neighbour` those
//! of a neighbour, and `vf` sets the addresses, VLANs and rates of virtual functions. [`Sockets`]
//! lists TCP and UDP connections and ends them.
//!
//! Written here because the agent lives in an initramfs whose size is start-up time: the usual
//! crates for this are asynchronous and come with a model of all of rtnetlink. Not here:
//! namespaces (`slipway-netns` has them), rules, queueing disciplines, notifications.
//!
//! Dependencies: `rustix` for the socket.

mod batch;
mod exchange;
mod interface;
mod link;
mod message;
mod neighbour;
mod sockets;
mod vf;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, Protocol, SocketFlags, SocketType};

pub use batch::Batch;
pub use interface::{InterfaceSettings, no_autoconfiguration};
pub use link::{LinkChange, LinkInfo};
use message::{Request, attributes, u32_at};
pub use neighbour::Neighbour;
pub use sockets::{Socket, Sockets, Transport};
pub use vf::{is_supported, physical_link};

/// Largest part of an answer; the kernel's own limit for one read is 32 KiB.
const ANSWER: usize = 64 << 10;

// linux/rtnetlink.h, linux/netlink.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
/// No duplicate address detection: the callers give each address to one interface only.
const IFA_F_NODAD: u32 = 2;
/// The kernel adds no route to the address's network.
const IFA_F_NOPREFIXROUTE: u32 = 0x200;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;
const RTA_PRIORITY: u16 = 6;
const RTA_PREFSRC: u16 = 7;
/// A next hop of another protocol than the route's: family in two bytes, then the address.
const RTA_VIA: u16 = 18;
const RTNH_F_ONLINK: u32 = 4;
/// A copy of a route that the kernel keeps for one destination.
const RTM_F_CLONED: u32 = 0x200;
const RT_TABLE_MAIN: u8 = 254;
const RT_SCOPE_UNIVERSE: u8 = 0;
const RT_SCOPE_LINK: u8 = 253;
const RTPROT_STATIC: u8 = 4;
const RTN_UNICAST: u8 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Number of the link.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Length of its network's prefix in bits.
    pub prefix: u8,
}

/// A route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The destination: an address and the length of its prefix in bits, which is 0 for the default
    /// route.
    pub destination: (IpAddr, u8),
    /// The next hop, or `None` if the destination is on the link. A route with several next hops
    /// (multipath) is read without them: it has no gateway, and the index 0.
    pub gateway: Option<IpAddr>,
    /// Number of the link, or 0 if the route names no link, or several next hops.
    pub index: u32,
    /// `true` if the next hop is on the link although no other route leads to it.
    pub on_link: bool,
    /// The address that the host sends from by this route, or `None` if the host chooses one.
    pub source: Option<IpAddr>,
    /// The metric, or 0 for the kernel's default. Of several routes to a destination, the one with
    /// the lowest metric is taken.
    pub metric: u32,
}

impl Route {
    /// Returns the route to `destination`, an address and the length of its prefix, by `gateway`
    /// or, with `None`, on the link number `index`.
    pub fn new(destination: (IpAddr, u8), gateway: Option<IpAddr>, index: u32) -> Self {
        Self { destination, gateway, index, on_link: false, source: None, metric: 0 }
    }
}

/// A socket to the kernel's rtnetlink, in the network namespace of the thread that opened it.
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn open() -> io::Result<Self> {
        Self::open_for(None) // NETLINK_ROUTE is protocol 0
    }

    fn open_for(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(family, SocketType::RAW, flags, protocol)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; ANSWER] })
    }

    /// Returns all links.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn links(&mut self) -> io::Result<Vec<LinkInfo>> {
        // struct ifinfomsg: family, padding, type, index, flags, change.
        self.dump(RTM_GETLINK, &[0; 16], RTM_NEWLINK, parse_link)
    }

    /// Returns the link with the name `name`. Returns `None` if there is no such link.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn link(&mut self, name: &str) -> io::Result<Option<LinkInfo>> {
        if !link::can_be_a_name(name) {
            return Ok(None);
        }
        let mut request = Request::new(RTM_GETLINK);
        link::named(&mut request, name);
        match self.ask(request, RTM_NEWLINK, parse_link) {
            Err(error) if is(&error, Errno::NODEV) => Ok(None),
            asked => Ok(asked?.filter(|link| link.name == name)),
        }
    }

    /// Changes the link number `index`.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link, an MTU that the link's driver does not support.
    pub fn change(&mut self, index: u32, change: LinkChange) -> io::Result<()> {
        self.exchange(change_request(index, change), |_, _| {})
    }

    /// Gives the link number `index`, which is down, another name.
    ///
    /// # Errors
    /// `InvalidInput` for no name of a link; the kernel's errors: no right, no such link, a name
    /// that another link has, a link that is up.
    pub fn rename(&mut self, index: u32, name: &str) -> io::Result<()> {
        if !link::can_be_a_name(name) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut request = Request::new(RTM_NEWLINK);
        link::rename(&mut request, index, name);
        self.exchange(request, |_, _| {})
    }

    /// Removes the link number `index`.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link, a link that cannot be removed.
    pub fn remove(&mut self, index: u32) -> io::Result<()> {
        let mut request = Request::new(RTM_DELLINK);
        request.body(&link::header(index, 0, 0));
        self.exchange(request, |_, _| {})
    }

    /// Returns the addresses of all links.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn addresses(&mut self) -> io::Result<Vec<Address>> {
        // struct ifaddrmsg: family, prefix length, flags, scope, index.
        self.dump(RTM_GETADDR, &[0; 8], RTM_NEWADDR, parse_address)
    }

    /// Returns the addresses of all links, or `None` if there are more than `most`. In that case
    /// the socket lists nothing more: the caller drops it.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn addresses_within(&mut self, most: usize) -> io::Result<Option<Vec<Address>>> {
        self.dump_within(most, (RTM_GETADDR, &[0; 8]), RTM_NEWADDR, parse_address)
    }

    /// Gives a link an address. An address that the link has already stays as it is. An IPv6
    /// address can be used at once.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link, a link without that protocol.
    pub fn add_address(&mut self, address: &Address) -> io::Result<()> {
        self.exchange(address_request(address, 0), |_, _| {})
    }

    /// Gives a link an address as [`Netlink::add_address`] does, without a route to the address's
    /// network.
    ///
    /// # Errors
    /// The errors of [`Netlink::add_address`].
    pub fn add_address_only(&mut self, address: &Address) -> io::Result<()> {
        self.exchange(address_request(address, IFA_F_NOPREFIXROUTE), |_, _| {})
    }

    /// Takes all addresses away from a link, those with a peer's address included.
    ///
    /// # Errors
    /// The kernel's errors: no right.
    pub fn remove_addresses(&mut self, index: u32) -> io::Result<()> {
        let mut all = self.addresses()?;
        all.retain(|address| address.index == index);
        for Address { address, prefix, .. } in all {
            let mut request = Request::new(RTM_DELADDR);
            request.body(&[family(address), prefix, 0, 0]);
            request.body(&index.to_ne_bytes());
            request.attribute(IFA_LOCAL, &octets(address));
            // An address may go with another one that was removed before it.
            unless(Errno::ADDRNOTAVAIL, self.exchange(request, |_, _| {}))?;
        }
        Ok(())
    }

    /// Returns the unicast routes of the main table.
    ///
    /// # Errors
    /// The kernel's errors.
    pub fn routes(&mut self) -> io::Result<Vec<Route>> {
        self.dump(RTM_GETROUTE, &[0; 12], RTM_NEWROUTE, parse_route)
    }

    /// Adds a route, or replaces the route with the same destination and metric.
    ///
    /// # Errors
    /// The kernel's errors: no right, no such link, a next hop that is not on the link.
    pub fn add_route(&mut self, route: &Route) -> io::Result<()> {
        self.exchange(route_request(route), |_, _| {})
    }
}

/// Returns whether an error of the kernel's is `errno`.
fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

/// Returns `outcome`, and success in place of the error `errno`.
fn unless(errno: Errno, outcome: io::Result<()>) -> io::Result<()> {
    match outcome {
        Err(error) if is(&error, errno) => Ok(()),
        outcome => outcome,
    }
}

fn parse_link(body: &[u8]) -> Option<LinkInfo> {
    let (index, flags) = (u32_at(body, 4)?, u32_at(body, 8)?);
    Some(link::parse(index, flags, body.get(16..).unwrap_or_default()))
}

/// Lays out the change of a link.
fn change_request(index: u32, change: LinkChange) -> Request {
    let mut request = Request::new(RTM_NEWLINK);
    link::change(&mut request, index, change);
    request
}

/// Lays out a new address with these flags. An IPv6 address is not looked for on the link first.
fn address_request(address: &Address, flags: u32) -> Request {
    let mut request = Request::replace(RTM_NEWADDR);
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    request.body(&[family(address.address), address.prefix, 0, 0]);
    request.body(&address.index.to_ne_bytes());
    request.attribute(IFA_LOCAL, &octets(address.address));
    request.attribute(IFA_ADDRESS, &octets(address.address));
    let flags = if address.address.is_ipv6() { flags | IFA_F_NODAD } else { flags };
    if flags != 0 {
        request.attribute(IFA_FLAGS, &flags.to_ne_bytes());
    }
    request
}

/// Lays out a new route.
fn route_request(route: &Route) -> Request {
    let mut request = Request::replace(RTM_NEWROUTE);
    route_body(&mut request, route);
    request
}

fn parse_address(body: &[u8]) -> Option<Address> {
    let (prefix, index) = (*body.get(1)?, u32_at(body, 4)?);
    let (mut local, mut peer) = (None, None);
    for (kind, value) in attributes(body.get(8..)?) {
        match kind {
            IFA_LOCAL => local = ip(value),
            IFA_ADDRESS => peer = ip(value),
            _ => {}
        }
    }
    Some(Address { index, address: local.or(peer)?, prefix })
}

fn route_body(request: &mut Request, route: &Route) {
    let (destination, prefix) = route.destination;
    let scope = if route.gateway.is_none() { RT_SCOPE_LINK } else { RT_SCOPE_UNIVERSE };
    let flags = if route.on_link { RTNH_F_ONLINK } else { 0 };
    // struct rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type,
    // flags.
    let own = family(destination);
    request.body(&[own, prefix, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
    request.body(&flags.to_ne_bytes());
    if prefix > 0 {
        request.attribute(RTA_DST, &octets(destination));
    }
    match route.gateway {
        Some(gateway) if family(gateway) == own => {
            request.attribute(RTA_GATEWAY, &octets(gateway));
        }
        Some(gateway) => {
            let via = [&u16::from(family(gateway)).to_ne_bytes()[..], &octets(gateway)].concat();
            request.attribute(RTA_VIA, &via);
        }
        None => {}
    }
    request.attribute(RTA_OIF, &route.index.to_ne_bytes());
    if let Some(source) = route.source {
        request.attribute(RTA_PREFSRC, &octets(source));
    }
    if route.metric > 0 {
        request.attribute(RTA_PRIORITY, &route.metric.to_ne_bytes());
    }
}

/// Reads a route. Returns `None` if it is not a unicast route of the main table.
fn parse_route(body: &[u8]) -> Option<Route> {
    let (family, prefix, table, kind) = (body.first()?, *body.get(1)?, body.get(4)?, body.get(7)?);
    let flags = u32_at(body, 8)?;
    if *table != RT_TABLE_MAIN || *kind != RTN_UNICAST || flags & RTM_F_CLONED != 0 {
        return None;
    }
    let any = match *family {
        AF_INET => IpAddr::from([0; 4]),
        AF_INET6 => IpAddr::from([0; 16]),
        _ => return None,
    };
    let mut route = Route::new((any, prefix), None, 0);
    route.on_link = flags & RTNH_F_ONLINK != 0;
    for (kind, value) in attributes(body.get(12..)?) {
        match kind {
            RTA_DST => route.destination.0 = ip(value)?,
            RTA_GATEWAY => route.gateway = ip(value),
            RTA_VIA => route.gateway = value.get(2..).and_then(ip),
            RTA_OIF => route.index = u32_at(value, 0)?,
            RTA_PREFSRC => route.source = ip(value),
            RTA_PRIORITY => route.metric = u32_at(value, 0)?,
            _ => {}
        }
    }
    Some(route)
}

fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { AF_INET } else { AF_INET6 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(bytes) {
        return Some(octets.into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from)
}
