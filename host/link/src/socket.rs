//! TCP sockets to other engines, none of which blocks.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

fn socket(at: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// An IPv4 address as an IPv4-mapped one, or the 64-bit prefix of an IPv6 address, all of which one
/// peer may own.
pub(crate) type Network = [u8; 16];

/// Returns the network of an address.
pub(crate) fn network(ip: IpAddr) -> Network {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some() => ip.octets(),
        IpAddr::V6(ip) => {
            let mut octets = ip.octets();
            octets[8..].fill(0);
            octets
        }
    }
}

/// Returns a listener at an address.
pub(crate) fn listen(at: SocketAddr) -> std::io::Result<OwnedFd> {
    let socket = socket(at)?;
    // A restarted engine must be able to listen at once.
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &at)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Returns a socket that connects to an address, or has connected.
pub(crate) fn connect(at: SocketAddr) -> std::io::Result<OwnedFd> {
    let socket = socket(at)?;
    rustix::net::sockopt::set_tcp_nodelay(&socket, true)?;
    match rustix::net::connect(&socket, &at) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}
