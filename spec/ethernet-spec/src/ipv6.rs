//! IPv6 packets (RFC 8200).

use core::fmt;
use core::net::Ipv6Addr;

use crate::checksum::sum;
use crate::kind::{FrameKind, print};
use crate::numbers::protocol;
use crate::view::{FrameError, view};

/// Bytes of a header without extension headers.
pub const HEADER: usize = 40;

const PAYLOAD_LENGTH: usize = 4;
const NEXT_HEADER: usize = 6;
const SOURCE: usize = 8;
const DESTINATION: usize = 24;

view! {
    /// An IPv6 packet. Its payload length is not checked.
    Ipv6Packet
}

impl<T: AsRef<[u8]>> Ipv6Packet<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        if self.0.len() < HEADER {
            return Err(FrameError::Short);
        }
        if self.0.byte(0) >> 4 != 6 { Err(FrameError::Version) } else { Ok(()) }
    }

    /// Returns the bytes of the payload, as the header says.
    #[inline]
    pub fn payload_length(&self) -> u16 {
        self.0.half(PAYLOAD_LENGTH)
    }

    /// Returns the protocol of the payload, or of the first extension header.
    #[inline]
    pub fn next_header(&self) -> u8 {
        self.0.byte(NEXT_HEADER)
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> Ipv6Addr {
        self.0.get::<16>(SOURCE).into()
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> Ipv6Addr {
        self.0.get::<16>(DESTINATION).into()
    }

    /// Returns the source and destination ports of TCP and UDP. Returns `None` for another
    /// protocol, and behind extension headers.
    #[inline]
    pub fn ports(&self) -> Option<(u16, u16)> {
        self.kind().ports(self.payload())
    }

    /// Returns the ICMPv6 message in the packet, which is empty if the packet has another protocol.
    /// Returns `None` if extension headers reach beyond the known part of the packet, so that the
    /// protocol is unknown. (Receivers refuse neighbour discovery in fragments: RFC 6980.)
    pub fn icmpv6(&self) -> Option<&[u8]> {
        let (mut next, mut at) = (self.next_header(), HEADER);
        loop {
            let rest = self.0.rest(at);
            let unit = match next {
                protocol::ICMPV6 => return Some(rest).filter(|message| !message.is_empty()),
                protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION => 8,
                protocol::AUTHENTICATION => 4,
                _ => return Some(&[]),
            };
            let [following, length] = *rest.first_chunk()?;
            // The length is in units, not counting the first (for authentication, the first two).
            at += unit * (usize::from(length) + if unit == 8 { 1 } else { 2 });
            next = following;
        }
    }

    /// Returns the sum of the pseudo header of TCP or UDP that directly follows, not folded, for
    /// `len` bytes of segment or datagram (section 8.1).
    #[inline]
    pub fn pseudo_sum(&self, len: usize) -> u64 {
        sum(&self.0.get::<32>(SOURCE)) + u64::from(self.next_header()) + len as u64
    }

    /// Returns the bytes behind the header, extension headers included.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.0.rest(HEADER)
    }

    /// Returns the kind of the packet.
    #[inline]
    pub fn kind(&self) -> FrameKind {
        match self.next_header() {
            protocol::TCP => FrameKind::Tcp6,
            protocol::UDP => FrameKind::Udp6,
            protocol::ICMPV6 => FrameKind::Icmp6,
            _ => FrameKind::Ipv6,
        }
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Ipv6Packet<T> {
    /// Writes the bytes of the payload.
    #[inline]
    pub fn set_payload_length(&mut self, length: u16) {
        self.0.put_half(PAYLOAD_LENGTH, length);
    }
}

impl<T: AsRef<[u8]>> fmt::Display for Ipv6Packet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.kind(), (self.source().into(), self.destination().into()), self.ports())
    }
}
