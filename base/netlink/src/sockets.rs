//! TCP and UDP connections of a network namespace (sock_diag(7), linux/inet_diag.h).

use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;
use rustix::net::netlink::SOCK_DIAG;

use crate::message::Request;
use crate::{AF_INET, AF_INET6, Netlink, ip, unless};

// linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
/// The size of `struct inet_diag_sockid`: ports, addresses, interface, cookie.
const ID: usize = 48;
/// The states of a TCP connection that lives (include/net/tcp_states.h): all but TIME_WAIT (6),
/// CLOSE (7) and LISTEN (10).
const TCP_STATES: u32 = 0b1_1011_0011_1110;
/// The state of a UDP socket that has a peer: ESTABLISHED (1).
const UDP_STATES: u32 = 0b10;

/// A transport protocol; the value is its number in IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp = 6,
    /// UDP.
    Udp = 17,
}

/// A TCP or UDP socket with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// The socket's own address. That of a connection of IPv4 by a socket of IPv6 is IPv4-mapped.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
    transport: Transport,
    family: u8,
    /// The kernel's name of the socket. No later socket has it.
    id: [u8; ID],
}

/// A socket to the kernel's sock_diag, in the network namespace of the thread that opened it.
pub struct Sockets(Netlink);

impl Sockets {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn open() -> io::Result<Self> {
        Ok(Self(Netlink::open_for(Some(SOCK_DIAG))?))
    }

    /// Returns sockets of IPv4 and IPv6 that have a peer. TCP sockets that listen, or wait for the
    /// last segments of a connection that has ended, have none. If there are more than 65,536 of
    /// either family, the rest of them is left out.
    ///
    /// # Errors
    /// The kernel's errors: [`io::ErrorKind::NotFound`] if it cannot list sockets of this protocol.
    pub fn connected(&mut self, transport: Transport) -> io::Result<Vec<Socket>> {
        let states = match transport {
            Transport::Tcp => TCP_STATES,
            Transport::Udp => UDP_STATES,
        };
        let mut all = Vec::new();
        for family in [AF_INET, AF_INET6] {
            let body = request(family, transport, states, &[0; ID]);
            let kind = SOCK_DIAG_BY_FAMILY;
            let (entries, _) = self.0.dump_some(kind, &body, kind, parse)?;
            all.extend(entries.into_iter().filter_map(|(family, id)| {
                let (local, remote) = addresses(family, &id)?;
                Some(Socket { local, remote, transport, family, id })
            }));
        }
        Ok(all)
    }

    /// Ends a connection: its owner gets the error ECONNABORTED. The peer of a TCP connection gets
    /// a RST, if a route leads there. A socket that is gone is no error.
    ///
    /// # Errors
    /// The kernel's errors: no right; EOPNOTSUPP if it does not end connections
    /// (CONFIG_INET_DIAG_DESTROY), or not those in the socket's state.
    pub fn destroy(&mut self, socket: &Socket) -> io::Result<()> {
        let mut message = Request::new(SOCK_DESTROY);
        message.body(&request(socket.family, socket.transport, 0, &socket.id));
        unless(Errno::NOENT, self.0.exchange(message, |_, _| {}))
    }
}

/// Lays out `struct inet_diag_req_v2`: family, protocol, extensions, padding, states, socket.
fn request(family: u8, transport: Transport, states: u32, id: &[u8; ID]) -> Vec<u8> {
    [&[family, transport as u8, 0, 0][..], &states.to_ne_bytes(), id].concat()
}

/// Reads family and name of a socket from `struct inet_diag_msg`: family, state, timer,
/// retransmissions, socket.
fn parse(body: &[u8]) -> Option<(u8, [u8; ID])> {
    Some((*body.first()?, body.get(4..4 + ID)?.try_into().ok()?))
}

/// Returns the own address and the peer's of a socket's name. Returns `None` for another family.
fn addresses(family: u8, id: &[u8; ID]) -> Option<(SocketAddr, SocketAddr)> {
    let length = match family {
        AF_INET => 4,
        AF_INET6 => 16,
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes(id.get(at..at + 2)?.try_into().ok()?));
    let address = |at: usize| ip(id.get(at..at + length)?);
    Some(((address(4)?, port(0)?).into(), (address(20)?, port(2)?).into()))
}
