//! IPv4 packets (RFC 791, section 3.1).

use core::fmt;
use core::net::Ipv4Addr;

use crate::checksum::{fold, sum};
use crate::kind::{FrameKind, print};
use crate::numbers::protocol;
use crate::view::{FrameError, view};

/// Bytes of a header without options.
pub const MIN_HEADER: usize = 20;

/// Version 4 and a header of five words.
const PLAIN: u8 = 0x45;
const TOTAL_LENGTH: usize = 2;
const IDENTIFICATION: usize = 4;
const FRAGMENT: usize = 6;
/// Mask of the fragment's offset, and of the offset and the flag "more fragments".
const OFFSET: u16 = 0x1fff;
const FRAGMENTED: u16 = 0x3fff;
const TIME_TO_LIVE: usize = 8;
const PROTOCOL: usize = 9;
const CHECKSUM: usize = 10;
const SOURCE: usize = 12;
const DESTINATION: usize = 16;

view! {
    /// An IPv4 packet. Its total length is not checked.
    Ipv4Packet
}

impl<T: AsRef<[u8]>> Ipv4Packet<T> {
    #[inline]
    fn check(&self) -> Result<(), FrameError> {
        let len = self.0.len();
        match self.header_len() {
            _ if len < MIN_HEADER => Err(FrameError::Short),
            _ if self.0.byte(0) >> 4 != 4 => Err(FrameError::Version),
            header if header < MIN_HEADER => Err(FrameError::HeaderLength),
            header if header > len => Err(FrameError::Short),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the header, with options: 20 to 60 if the packet was checked.
    #[inline]
    pub fn header_len(&self) -> usize {
        usize::from(self.0.byte(0) & 15) * 4
    }

    /// Returns the bytes of header and payload, as the header says.
    #[inline]
    pub fn total_length(&self) -> u16 {
        self.0.half(TOTAL_LENGTH)
    }

    /// Returns the identification.
    #[inline]
    pub fn identification(&self) -> u16 {
        self.0.half(IDENTIFICATION)
    }

    /// Returns whether this is a fragment of a packet, the first one included.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.0.half(FRAGMENT) & FRAGMENTED != 0
    }

    /// Returns the protocol of the payload.
    #[inline]
    pub fn protocol(&self) -> u8 {
        self.0.byte(PROTOCOL)
    }

    /// Returns the source address.
    #[inline]
    pub fn source(&self) -> Ipv4Addr {
        self.0.get::<4>(SOURCE).into()
    }

    /// Returns the destination address.
    #[inline]
    pub fn destination(&self) -> Ipv4Addr {
        self.0.get::<4>(DESTINATION).into()
    }

    /// Returns the source and destination ports of TCP and UDP. Returns `None` for another
    /// protocol, and for fragments after the first, which have none.
    #[inline]
    pub fn ports(&self) -> Option<(u16, u16)> {
        let has_header = self.0.half(FRAGMENT) & OFFSET == 0;
        has_header.then(|| self.kind().ports(self.payload())).flatten()
    }

    /// Returns whether the header's checksum is right.
    #[inline]
    pub fn is_checksum_right(&self) -> bool {
        fold(sum(self.0.until(self.header_len()))) == 0xffff
    }

    /// Returns the sum of the pseudo header of TCP or UDP, not folded, for `len` bytes of segment
    /// or datagram (RFC 9293, section 3.1).
    #[inline]
    pub fn pseudo_sum(&self, len: usize) -> u64 {
        sum(&self.0.get::<8>(SOURCE)) + u64::from(self.protocol()) + len as u64
    }

    /// Returns the bytes behind the header.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        self.0.rest(self.header_len())
    }

    /// Returns the kind of the packet.
    #[inline]
    pub fn kind(&self) -> FrameKind {
        match self.protocol() {
            protocol::TCP => FrameKind::Tcp4,
            protocol::UDP => FrameKind::Udp4,
            protocol::ICMP => FrameKind::Icmp4,
            _ => FrameKind::Ipv4,
        }
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Ipv4Packet<T> {
    /// Makes the header one without options, for a payload of `protocol` that passes at most
    /// `time_to_live` routers. Keeps the other fields.
    pub fn set_plain(&mut self, protocol: u8, time_to_live: u8) {
        self.0.put(0, [PLAIN]);
        self.0.put(TIME_TO_LIVE, [time_to_live]);
        self.0.put(PROTOCOL, [protocol]);
    }

    /// Writes the bytes of header and payload.
    #[inline]
    pub fn set_total_length(&mut self, length: u16) {
        self.0.put_half(TOTAL_LENGTH, length);
    }

    /// Writes the identification.
    #[inline]
    pub fn set_identification(&mut self, identification: u16) {
        self.0.put_half(IDENTIFICATION, identification);
    }

    /// Writes the source address.
    #[inline]
    pub fn set_source(&mut self, address: Ipv4Addr) {
        self.0.put(SOURCE, address.octets());
    }

    /// Writes the destination address.
    #[inline]
    pub fn set_destination(&mut self, address: Ipv4Addr) {
        self.0.put(DESTINATION, address.octets());
    }

    /// Writes the header's checksum.
    #[inline]
    pub fn set_checksum(&mut self, checksum: u16) {
        self.0.put_half(CHECKSUM, checksum);
    }

    /// Computes the header's checksum and writes it.
    #[inline]
    pub fn fill_checksum(&mut self) {
        self.set_checksum(0);
        self.set_checksum(!fold(sum(self.0.until(self.header_len()))));
    }
}

impl<T: AsRef<[u8]>> fmt::Display for Ipv4Packet<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.kind(), (self.source().into(), self.destination().into()), self.ports())
    }
}
