//! Links, addresses and routes by rtnetlink (RFC 3549, rtnetlink(7)): what a host does to the end
//! of a sandbox's network, and the agent to its own.
//!
//! [`Netlink`] is a socket to the kernel; each call is one request and waits for its answer, which
//! the kernel gives at once. `message` lays requests out and takes answers apart, and `link`
//! the parts that describe a link.
//!
//! Written here because the agent lives in an initramfs whose size is start-up time: the usual
//! crates for this are asynchronous and come with a model of all of rtnetlink. Not here:
//! namespaces (`slipway-netns` has them), rules, queueing disciplines, notifications.
//!
//! Dependencies: `rustix` for the socket.

mod link;
mod message;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

pub use link::{Link, LinkChange};
use message::{Answer, Request, attributes, u32_at};

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
const RTM_NEWNEIGH: u16 = 28;
const RTM_GETNEIGH: u16 = 30;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_FLAGS: u16 = 8;
/// No duplicate address detection: whoever gives out the addresses knows that each is given once.
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
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NUD_PERMANENT: u16 = 0x80;
const RT_TABLE_MAIN: u8 = 254;
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
    /// Where it leads: an address and the length of its prefix; 0 is the default route.
    pub destination: (IpAddr, u8),
    /// The next hop; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Number of the link; 0: it names none, or several.
    pub index: u32,
    /// The next hop is on the link, whatever the other routes say.
    pub on_link: bool,
    /// The address that the host sends from by this route; `None`: it chooses one.
    pub source: Option<IpAddr>,
    /// The route with the lowest metric is taken; 0: the kernel's default.
    pub metric: u32,
}

impl Route {
    /// Returns the route to `destination`, an address and the length of its prefix, by `gateway`
    /// or, with `None`, on the link number `index`.
    pub fn new(destination: (IpAddr, u8), gateway: Option<IpAddr>, index: u32) -> Self {
        Self { destination, gateway, index, on_link: false, source: None, metric: 0 }
    }
}

/// A permanent entry of the neighbour table: the hardware address of an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Number of the link.
    pub index: u32,
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// The neighbour's hardware address.
    pub mac: [u8; 6],
}

/// A socket to the kernel's rtnetlink, in the network namespace of the thread that opened it.
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens it.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn open() -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None, // NETLINK_ROUTE is protocol 0
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket, sequence: 0, buffer: vec![0; ANSWER] })
    }

    /// All links.
    ///
    /// # Errors
    /// The kernel's.
    pub fn links(&mut self) -> io::Result<Vec<Link>> {
        // struct ifinfomsg: family, padding, type, index, flags, change.
        let mut request = Request::dump(RTM_GETLINK);
        request.body(&[0; 16]);
        let mut links = Vec::new();
        self.exchange(request, |kind, body| {
            if kind == RTM_NEWLINK {
                links.extend(parse_link(body));
            }
        })?;
        Ok(links)
    }

    /// The link of this name.
    ///
    /// # Errors
    /// The kernel's.
    pub fn link(&mut self, name: &str) -> io::Result<Option<Link>> {
        if !link::can_be_a_name(name) {
            return Ok(None);
        }
        let mut request = Request::new(RTM_GETLINK);
        link::named(&mut request, name);
        let mut found = None;
        let asked = self.exchange(request, |kind, body| {
            if kind == RTM_NEWLINK {
                found = found.take().or(parse_link(body));
            }
        });
        match asked {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => {
                Ok(None)
            }
            asked => asked.map(|()| found.filter(|link| link.name == name)),
        }
    }

    /// Changes a link.
    ///
    /// # Errors
    /// The kernel's: no right, no such link, an MTU that its driver has not.
    pub fn change(&mut self, index: u32, change: LinkChange) -> io::Result<()> {
        let mut request = Request::new(RTM_NEWLINK);
        link::change(&mut request, index, change);
        self.exchange(request, |_, _| {})
    }

    /// Removes a link.
    ///
    /// # Errors
    /// The kernel's: no right, no such link, one that cannot be removed.
    pub fn remove(&mut self, index: u32) -> io::Result<()> {
        let mut request = Request::new(RTM_DELLINK);
        request.body(&link::header(index, 0, 0));
        self.exchange(request, |_, _| {})
    }

    /// All addresses of all links.
    ///
    /// # Errors
    /// The kernel's.
    pub fn addresses(&mut self) -> io::Result<Vec<Address>> {
        let mut request = Request::dump(RTM_GETADDR);
        request.body(&[0; 8]);
        let mut addresses = Vec::new();
        self.exchange(request, |kind, body| {
            if kind == RTM_NEWADDR {
                addresses.extend(address(body));
            }
        })?;
        Ok(addresses)
    }

    /// Gives a link an address; one that it has stays as it is. An IPv6 address can be used at
    /// once.
    ///
    /// # Errors
    /// The kernel's: no right, no such link, a link without that protocol.
    pub fn add_address(&mut self, address: &Address) -> io::Result<()> {
        self.add_address_with(address, 0)
    }

    /// Gives a link an address as [`Netlink::add_address`] does, but no route to the address's
    /// network.
    ///
    /// # Errors
    /// The errors of [`Netlink::add_address`].
    pub fn add_address_only(&mut self, address: &Address) -> io::Result<()> {
        self.add_address_with(address, IFA_F_NOPREFIXROUTE)
    }

    fn add_address_with(&mut self, address: &Address, flags: u32) -> io::Result<()> {
        let mut request = Request::replace(RTM_NEWADDR);
        address_body(&mut request, address);
        let no_detection = u32::from(address.address.is_ipv6()) * IFA_F_NODAD;
        let flags = flags | no_detection;
        if flags != 0 {
            request.attribute(IFA_FLAGS, &flags.to_ne_bytes());
        }
        self.exchange(request, |_, _| {})
    }

    /// Takes an address away from a link.
    ///
    /// # Errors
    /// The kernel's: no right, no such address.
    pub fn remove_address(&mut self, address: &Address) -> io::Result<()> {
        let mut request = Request::new(RTM_DELADDR);
        address_body(&mut request, address);
        self.exchange(request, |_, _| {})
    }

    /// All routes of the main table.
    ///
    /// # Errors
    /// The kernel's.
    pub fn routes(&mut self) -> io::Result<Vec<Route>> {
        let mut request = Request::dump(RTM_GETROUTE);
        request.body(&[0; 12]);
        let mut routes = Vec::new();
        self.exchange(request, |kind, body| {
            if kind == RTM_NEWROUTE {
                routes.extend(route(body));
            }
        })?;
        Ok(routes)
    }

    /// Adds a route, or replaces the one to the same destination.
    ///
    /// # Errors
    /// The kernel's: no right, no such link, a next hop that is not on it.
    pub fn add_route(&mut self, route: &Route) -> io::Result<()> {
        let mut request = Request::replace(RTM_NEWROUTE);
        route_body(&mut request, route);
        self.exchange(request, |_, _| {})
    }

    /// All permanent neighbours of all links.
    ///
    /// # Errors
    /// The kernel's.
    pub fn neighbours(&mut self) -> io::Result<Vec<Neighbour>> {
        let mut request = Request::dump(RTM_GETNEIGH);
        request.body(&[0; 12]);
        let mut neighbours = Vec::new();
        self.exchange(request, |kind, body| {
            if kind == RTM_NEWNEIGH {
                neighbours.extend(neighbour(body));
            }
        })?;
        Ok(neighbours)
    }

    /// Adds a permanent neighbour, or replaces the entry of the same IP address.
    ///
    /// # Errors
    /// The kernel's: no right, no such link.
    pub fn add_neighbour(&mut self, neighbour: &Neighbour) -> io::Result<()> {
        let mut request = Request::replace(RTM_NEWNEIGH);
        // struct ndmsg: family, padding, index, state, flags, type.
        request.body(&[family(neighbour.address), 0, 0, 0]);
        request.body(&neighbour.index.to_ne_bytes());
        request.body(&NUD_PERMANENT.to_ne_bytes());
        request.body(&[0, 0]);
        request.attribute(NDA_DST, &octets(neighbour.address));
        request.attribute(NDA_LLADDR, &neighbour.mac);
        self.exchange(request, |_, _| {})
    }

    /// Sends a request and hands on each message of its answer, up to its end.
    fn exchange(&mut self, request: Request, mut each: impl FnMut(u16, &[u8])) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = request.finish(self.sequence);
        let kernel = SocketAddrNetlink::new(0, 0);
        rustix::net::sendto(&self.socket, &bytes, SendFlags::empty(), &kernel)?;
        loop {
            #[allow(clippy::disallowed_methods, reason = "a netlink socket's peer is the kernel")]
            let received =
                rustix::net::recv(&self.socket, self.buffer.as_mut_slice(), RecvFlags::empty());
            let length = match received {
                Err(rustix::io::Errno::INTR) => continue,
                received => received?.0,
            };
            for answer in message::answers(self.buffer.get(..length).unwrap_or_default()) {
                match answer {
                    // Of a request whose answer nobody waited for.
                    (sequence, _) if sequence != self.sequence => {}
                    (_, Answer::End(0)) => return Ok(()),
                    (_, Answer::End(errno)) => return Err(io::Error::from_raw_os_error(errno)),
                    (_, Answer::Message(kind, body)) => each(kind, body),
                }
            }
        }
    }
}

fn parse_link(body: &[u8]) -> Option<Link> {
    let (index, flags) = (u32_at(body, 4)?, u32_at(body, 8)?);
    Some(link::parse(index, flags, body.get(16..).unwrap_or_default()))
}

fn address_body(request: &mut Request, address: &Address) {
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    request.body(&[family(address.address), address.prefix, 0, 0]);
    request.body(&address.index.to_ne_bytes());
    request.attribute(IFA_LOCAL, &octets(address.address));
    request.attribute(IFA_ADDRESS, &octets(address.address));
}

fn address(body: &[u8]) -> Option<Address> {
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
    let scope = u8::from(route.gateway.is_none()) * 253; // RT_SCOPE_LINK
    // struct rtmsg: family, lengths of destination and source, tos, table, protocol, scope, type,
    // flags.
    let own = family(destination);
    request.body(&[own, prefix, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST]);
    request.body(&(u32::from(route.on_link) * RTNH_F_ONLINK).to_ne_bytes());
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

fn route(body: &[u8]) -> Option<Route> {
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

fn neighbour(body: &[u8]) -> Option<Neighbour> {
    let index = u32_at(body, 4)?;
    let state = u16::from_ne_bytes(body.get(8..10)?.try_into().ok()?);
    if state & NUD_PERMANENT == 0 {
        return None;
    }
    let (mut address, mut mac) = (None, None);
    for (kind, value) in attributes(body.get(12..)?) {
        match kind {
            NDA_DST => address = ip(value),
            NDA_LLADDR => mac = value.try_into().ok(),
            _ => {}
        }
    }
    Some(Neighbour { index, address: address?, mac: mac? })
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
