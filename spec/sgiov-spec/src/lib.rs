//! The protocol between a program and a socket engine: control messages and shared memory.
//!
//! A program (its library) *attaches* to an engine over a Unix socket of type `SOCK_SEQPACKET`.
//! Processes that descend from one process by fork(2) are a *family*: they share a [`table`] of
//! open sockets, and each has a connection of its own ([`control::Request::Fork`]), by whose end
//! the engine knows that the process has died. An open socket is an *endpoint*: an entry of the
//! table and one side of a stream in an arena of FIFOs (`slipway_ring::cross`), whose other side is
//! another family's, or the engine's.
//!
//! - [`control`]: requests and replies;
//! - [`table`]: the layout of a family's table;
//! - [`link`]: the protocol between two engines;
//! - [`function`]: a guest's socket function, between the engine in a guest and the machine's.
//!
//! All numbers are little-endian. No dependencies, no allocation.
#![no_std]

pub mod control;
pub mod function;
pub mod link;
pub mod table;
mod words;

/// An address and a port; IPv4 addresses are mapped into IPv6 (`::ffff:a.b.c.d`, RFC 4291 section
/// 2.5.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address {
    /// The address in network order.
    pub ip: [u8; 16],
    /// The port, 0 to 65,535.
    pub port: u16,
}

impl Address {
    /// No address and no port.
    pub const ANY: Self = Self { ip: [0; 16], port: 0 };
    /// The prefix of IPv4 addresses that are mapped into IPv6.
    pub const MAPPED: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

    /// Returns an IPv4 address.
    pub const fn v4(ip: [u8; 4], port: u16) -> Self {
        let [a, b, c, d] = ip;
        Self { ip: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d], port }
    }

    /// Returns the IPv4 address, or `None` if this is another one.
    pub fn as_v4(&self) -> Option<[u8; 4]> {
        let (prefix, rest) = self.ip.split_at(12);
        (prefix == Self::MAPPED).then(|| [rest[0], rest[1], rest[2], rest[3]])
    }

    /// Returns whether this is the unspecified address of either IP version.
    pub fn is_unspecified(&self) -> bool {
        self.ip == [0; 16] || self.as_v4() == Some([0; 4])
    }

    /// Returns whether this is a loopback address of either IP version.
    pub fn is_loopback(&self) -> bool {
        self.as_v4().is_some_and(|ip| ip[0] == 127) || self.ip == Self::LOOPBACK
    }

    const LOOPBACK: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
}
