//! Cutting frames that are too long for a link, and the checksums of the pieces.
//!
//! The frame is a private copy; its content is hostile all the same.

use slipway_ethernet_spec::checksum::{fold, sum};
use slipway_ethernet_spec::{HEADER, TAG, TYPE, ethertype, ipv4, ipv6, protocol};

use crate::burst::{Offload, Segmentation};

/// Bytes of the longest headers of a piece: a tagged Ethernet header, and IP and TCP with all
/// options.
pub(crate) const MAX_HEADER: usize = HEADER + TAG + 60 + 60;

/// Offsets in a TCP header (RFC 9293, section 3.1).
mod tcp {
    pub const SEQUENCE: usize = 4;
    pub const DATA_OFFSET: usize = 12;
    pub const FLAGS: usize = 13;
    pub const CHECKSUM: usize = 16;
    pub const MIN_HEADER: usize = 20;
    pub const FIN: u8 = 1;
    pub const PSH: u8 = 8;
    pub const CWR: u8 = 128;
}

/// Offsets in a UDP header (RFC 768).
mod udp {
    pub const LENGTH: usize = 4;
    pub const CHECKSUM: usize = 6;
    pub const HEADER: usize = 8;
}

/// Fills in a checksum at `offset` from `start`, where the frame holds the pseudo header's sum.
/// Returns `None` if that lies beyond the frame.
pub(crate) fn fill_checksum(frame: &mut [u8], (start, offset): (u16, u16)) -> Option<()> {
    let (start, offset) = (usize::from(start), usize::from(offset));
    let part = frame.get_mut(start..)?;
    // The checksum's own place is part of the sum.
    let value = !fold(sum(part));
    // 0 would mean that a UDP datagram has no checksum (RFC 768); elsewhere both values are equal.
    let value = if value == 0 { 0xffff } else { value };
    part.get_mut(offset..offset + 2)?.copy_from_slice(&value.to_be_bytes());
    Some(())
}

/// The offsets of a frame's headers.
struct Headers {
    /// The offset of the IP header.
    network: usize,
    is_ipv4: bool,
    /// The offset of the TCP or UDP header.
    transport: usize,
    is_tcp: bool,
    /// The offset of the payload.
    end: usize,
}

fn headers(frame: &[u8], segmentation: Segmentation) -> Option<Headers> {
    let kind = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
    let tagged = kind(TYPE)? == ethertype::VLAN;
    let network = HEADER + if tagged { TAG } else { 0 };
    let is_ipv4 = match kind(network - 2)? {
        ethertype::IPV4 => true,
        ethertype::IPV6 => false,
        _ => return None,
    };
    let packet = frame.get(network..)?;
    let (length, next) = match is_ipv4 {
        true => (usize::from(packet.first()? & 15) * 4, *packet.get(ipv4::PROTOCOL)?),
        false => (ipv6::HEADER, *packet.get(ipv6::NEXT_HEADER)?),
    };
    let transport = network + length;
    let is_tcp = segmentation != Segmentation::Udp;
    let wanted = match segmentation {
        Segmentation::Tcp4 if is_ipv4 => protocol::TCP,
        Segmentation::Tcp6 if !is_ipv4 => protocol::TCP,
        Segmentation::Udp => protocol::UDP,
        _ => return None,
    };
    let own = match is_tcp {
        true => usize::from(frame.get(transport + tcp::DATA_OFFSET)? >> 4) * 4,
        false => udp::HEADER,
    };
    let end = transport + own;
    let whole = length >= ipv4::MIN_HEADER && (!is_tcp || own >= tcp::MIN_HEADER);
    (next == wanted && whole && end < frame.len()).then_some(Headers {
        network,
        is_ipv4,
        transport,
        is_tcp,
        end,
    })
}

/// A function that takes a piece's headers, payload and offload, and returns `None` to refuse the
/// piece.
pub(crate) type Add<'a> = dyn FnMut(&[u8], &[u8], Offload) -> Option<()> + 'a;

/// Cuts a frame into pieces of up to `offload.segment` bytes of payload, and passes each one's
/// headers, payload and offload to `add`. With `leave_checksum` the peer fills checksums in.
///
/// Returns `None` if the frame does not match its offload, or if `add` refused a piece.
pub(crate) fn cut(
    frame: &[u8],
    offload: &Offload,
    leave_checksum: bool,
    add: &mut Add<'_>,
) -> Option<()> {
    let headers = headers(frame, offload.segmentation)?;
    let (fixed, payload) = frame.split_at(headers.end);
    let segment = usize::from(offload.segment);
    if segment == 0 {
        return None;
    }
    let count = payload.len().div_ceil(segment);
    for (number, part) in payload.chunks(segment).enumerate() {
        let mut bytes = [0; MAX_HEADER];
        let header = bytes.get_mut(..fixed.len())?;
        header.copy_from_slice(fixed);
        headers.adapt(header, part.len(), number, number * segment, number + 1 == count);
        if leave_checksum {
            headers.begin_checksum(header, part.len());
        } else {
            headers.finish_checksum(header, part);
        }
        let place = if headers.is_tcp { tcp::CHECKSUM } else { udp::CHECKSUM };
        let checksum = leave_checksum.then_some((headers.transport as u16, place as u16));
        add(header, part, Offload { checksum, ..Offload::NONE })?;
    }
    Some(())
}

impl Headers {
    /// Changes the headers to those of piece `number`, which begins `before` bytes into the
    /// payload.
    fn adapt(&self, header: &mut [u8], payload: usize, number: usize, before: usize, last: bool) {
        let above = header.len() - self.transport + payload;
        let (_, ip) = header.split_at_mut(self.network);
        if self.is_ipv4 {
            let length = self.transport - self.network;
            put(ip, ipv4::TOTAL_LENGTH, (length + above) as u16);
            let first = get(ip, ipv4::IDENTIFICATION);
            put(ip, ipv4::IDENTIFICATION, first.wrapping_add(number as u16));
            put(ip, ipv4::CHECKSUM, 0);
            let value = !fold(sum(&ip[..length]));
            put(ip, ipv4::CHECKSUM, value);
        } else {
            put(ip, ipv6::PAYLOAD_LENGTH, above as u16);
        }
        let (_, transport) = header.split_at_mut(self.transport);
        if !self.is_tcp {
            put(transport, udp::LENGTH, above as u16);
            return;
        }
        let sequence = &mut transport[tcp::SEQUENCE..tcp::SEQUENCE + 4];
        let first = sequence.iter().fold(0, |value, byte| value << 8 | u32::from(*byte));
        sequence.copy_from_slice(&first.wrapping_add(before as u32).to_be_bytes());
        let flags = &mut transport[tcp::FLAGS];
        *flags &= if last { 0xff } else { !(tcp::FIN | tcp::PSH) };
        // CWR is sent once (RFC 3168, section 6.1.2).
        *flags &= if number == 0 { 0xff } else { !tcp::CWR };
    }

    /// Returns the sum of the pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1).
    fn pseudo(&self, header: &[u8], payload: usize) -> u64 {
        let addresses = match self.is_ipv4 {
            true => self.network + ipv4::SOURCE..self.network + ipv4::SOURCE + 8,
            false => self.network + ipv6::SOURCE..self.network + ipv6::SOURCE + 32,
        };
        let kind = if self.is_tcp { protocol::TCP } else { protocol::UDP };
        let above = header.len() - self.transport + payload;
        sum(&header[addresses]) + u64::from(kind) + above as u64
    }

    fn place(&self) -> usize {
        self.transport + if self.is_tcp { tcp::CHECKSUM } else { udp::CHECKSUM }
    }

    /// Writes the pseudo header's sum to the checksum's place.
    fn begin_checksum(&self, header: &mut [u8], payload: usize) {
        let value = fold(self.pseudo(header, payload));
        put(header, self.place(), value);
    }

    fn finish_checksum(&self, header: &mut [u8], payload: &[u8]) {
        put(header, self.place(), 0);
        // The transport header has an even length, so the payload's words are aligned with its
        // words.
        let all = self.pseudo(header, payload.len()) + sum(&header[self.transport..]);
        let value = !fold(all + sum(payload));
        put(header, self.place(), if value == 0 { 0xffff } else { value });
    }
}

fn get(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
