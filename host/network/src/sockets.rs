//! Sockets of the host, bound to exactly one address.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// The kind of a socket: TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketKind {
    /// A listening TCP socket.
    Stream,
    /// A UDP socket.
    Datagram,
}

/// Makes a non-blocking socket. An IPv6 socket is for IPv6 only, so that an IPv4 socket can have
/// the same port.
///
/// # Errors
/// The kernel's error; `AddrInUse` if another socket has the address.
pub fn bind(address: SocketAddr, kind: SocketKind) -> io::Result<OwnedFd> {
    let family = match address.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let socket_type = match kind {
        SocketKind::Stream => SocketType::STREAM,
        SocketKind::Datagram => SocketType::DGRAM,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, socket_type, flags, None)?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    if kind == SocketKind::Stream {
        // Closing connections of the last daemon must not block the port.
        sockopt::set_socket_reuseaddr(&socket, true)?;
    }
    rustix::net::bind(&socket, &address)?;
    if kind == SocketKind::Stream {
        rustix::net::listen(&socket, BACKLOG)?;
    }
    Ok(socket)
}

/// Returns the port of a socket.
///
/// # Errors
/// The kernel's error.
pub fn port(socket: &OwnedFd) -> io::Result<u16> {
    let address = SocketAddr::try_from(rustix::net::getsockname(socket)?)?;
    Ok(address.port())
}
