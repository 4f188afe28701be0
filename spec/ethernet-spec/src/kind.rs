//! Kinds of frames, and how packets print.

use core::fmt;
use core::net::{IpAddr, SocketAddr};

use crate::view::Bytes;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// ARP.
    Arp,
    /// TCP over IPv4.
    Tcp4,
    /// UDP over IPv4.
    Udp4,
    /// ICMP.
    Icmp4,
    /// Anything else over IPv4.
    Ipv4,
    /// TCP directly over IPv6.
    Tcp6,
    /// UDP directly over IPv6.
    Udp6,
    /// ICMPv6 directly over IPv6.
    Icmp6,
    /// Anything else over IPv6, extension headers included.
    Ipv6,
    /// Anything else.
    Other,
}

impl FrameKind {
    /// Every kind, with its name.
    pub const ALL: [(Self, &'static str); 10] = [
        (Self::Arp, "arp"),
        (Self::Tcp4, "tcp"),
        (Self::Udp4, "udp"),
        (Self::Icmp4, "icmp"),
        (Self::Ipv4, "ipv4"),
        (Self::Tcp6, "tcp6"),
        (Self::Udp6, "udp6"),
        (Self::Icmp6, "icmp6"),
        (Self::Ipv6, "ipv6"),
        (Self::Other, "other"),
    ];

    /// Returns the ports at the beginning of `payload`, or `None` if the kind has none or the
    /// payload is too short.
    #[inline]
    pub(crate) fn ports(self, payload: &[u8]) -> Option<(u16, u16)> {
        let has_ports = matches!(self, Self::Tcp4 | Self::Udp4 | Self::Tcp6 | Self::Udp6);
        let bytes = Bytes(payload);
        (has_ports && payload.len() >= 4).then(|| (bytes.half(0), bytes.half(2)))
    }
}

impl fmt::Display for FrameKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL[*self as usize].1)
    }
}

/// Prints a packet.
pub(crate) fn print(
    f: &mut fmt::Formatter<'_>,
    kind: FrameKind,
    (from, to): (IpAddr, IpAddr),
    ports: Option<(u16, u16)>,
) -> fmt::Result {
    write!(f, "{kind} ")?;
    match ports {
        Some((source, destination)) => {
            write!(f, "{} > {}", SocketAddr::new(from, source), SocketAddr::new(to, destination))
        }
        None => write!(f, "{from} > {to}"),
    }
}
