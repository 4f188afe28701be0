//! Cutting frames that are too long for a link, and the checksums of the pieces.
//!
//! The frame is a private copy; its content is hostile all the same.

use slipway_ethernet_spec::checksum::{finish, fold, sum};
use slipway_ethernet_spec::{
    EthernetFrame, HEADER, Ipv4Packet, Ipv6Packet, TAG, TcpSegment, UdpDatagram, ethertype, ipv6,
    protocol, tcp, udp,
};

use crate::burst::{Offload, Segmentation};

/// Bytes of the longest headers of a piece: a tagged Ethernet header, and IP and TCP with all
/// options.
pub(crate) const MAX_HEADER: usize = HEADER + TAG + 60 + 60;

/// Fills in a checksum at `offset` from `start`, where the frame holds the pseudo header's sum.
/// Returns `None` if that lies beyond the frame.
pub(crate) fn fill_checksum(frame: &mut [u8], (start, offset): (u16, u16)) -> Option<()> {
    let (start, offset) = (usize::from(start), usize::from(offset));
    let part = frame.get_mut(start..)?;
    // The checksum's own place is part of the sum.
    let value = finish(sum(part));
    part.get_mut(offset..)?.first_chunk_mut().map(|place| *place = value.to_be_bytes())
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
    let ethernet = EthernetFrame::new_checked(frame).ok()?;
    let (is_ipv4, length, next) = match ethernet.ethertype() {
        ethertype::IPV4 => {
            let packet = Ipv4Packet::new_checked(ethernet.payload()).ok()?;
            (true, packet.header_len(), packet.protocol())
        }
        ethertype::IPV6 => {
            let packet = Ipv6Packet::new_checked(ethernet.payload()).ok()?;
            (false, ipv6::HEADER, packet.next_header())
        }
        _ => return None,
    };
    let network = ethernet.header_len();
    let transport = network + length;
    let above = frame.get(transport..)?;
    let (wanted, own) = match segmentation {
        Segmentation::Tcp4 if is_ipv4 => (protocol::TCP, tcp_header(above)?),
        Segmentation::Tcp6 if !is_ipv4 => (protocol::TCP, tcp_header(above)?),
        Segmentation::Udp => (protocol::UDP, udp::HEADER),
        _ => return None,
    };
    let (is_tcp, end) = (wanted == protocol::TCP, transport + own);
    let headers = Headers { network, is_ipv4, transport, is_tcp, end };
    (next == wanted && end < frame.len()).then_some(headers)
}

fn tcp_header(segment: &[u8]) -> Option<usize> {
    TcpSegment::new_checked(segment).ok().map(|segment| segment.header_len())
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
        let last = number + 1 == count;
        let pseudo = headers.adapt(header, part.len(), number, number * segment, last);
        headers.set_checksum(header, part, pseudo, leave_checksum)?;
        let place = headers.checksum_offset() as u16;
        let checksum = leave_checksum.then_some((headers.transport as u16, place));
        add(header, part, Offload { checksum, ..Offload::NONE })?;
    }
    Some(())
}

impl Headers {
    /// Changes the headers to those of piece `number`, which begins `before` bytes into the
    /// payload. Returns the sum of the pseudo header.
    fn adapt(
        &self,
        header: &mut [u8],
        payload: usize,
        number: usize,
        before: usize,
        last: bool,
    ) -> u64 {
        let above = header.len() - self.transport + payload;
        let (ip, transport) = header.split_at_mut(self.transport);
        let ip = &mut ip[self.network..];
        if self.is_tcp {
            let mut segment = TcpSegment::new_unchecked(transport);
            segment.set_sequence(segment.sequence().wrapping_add(before as u32));
            let mut flags = segment.flags();
            flags &= if last { 0xff } else { !(tcp::flag::FIN | tcp::flag::PSH) };
            // CWR is sent once (RFC 3168, section 6.1.2).
            flags &= if number == 0 { 0xff } else { !tcp::flag::CWR };
            segment.set_flags(flags);
        } else {
            UdpDatagram::new_unchecked(transport).set_length(above as u16);
        }
        if self.is_ipv4 {
            let mut packet = Ipv4Packet::new_unchecked(ip);
            packet.set_total_length((packet.header_len() + above) as u16);
            packet.set_identification(packet.identification().wrapping_add(number as u16));
            packet.fill_checksum();
            packet.pseudo_sum(above)
        } else {
            let mut packet = Ipv6Packet::new_unchecked(ip);
            packet.set_payload_length(above as u16);
            packet.pseudo_sum(above)
        }
    }

    /// Returns the checksum's offset in the TCP or UDP header.
    fn checksum_offset(&self) -> usize {
        if self.is_tcp { tcp::CHECKSUM } else { udp::CHECKSUM }
    }

    /// Writes the checksum, or only the sum of the pseudo header if the peer fills the checksum in.
    fn set_checksum(
        &self,
        header: &mut [u8],
        payload: &[u8],
        pseudo: u64,
        leave: bool,
    ) -> Option<()> {
        let transport = header.get_mut(self.transport..)?;
        let at = self.checksum_offset();
        transport.get_mut(at..at + 2)?.fill(0);
        // The transport header has an even length, so the payload's words are aligned with its
        // words.
        let value = match leave {
            true => fold(pseudo),
            false => finish(pseudo + sum(transport) + sum(payload)),
        };
        transport.get_mut(at..at + 2)?.copy_from_slice(&value.to_be_bytes());
        Some(())
    }
}
