//! The frames of a run.
//!
//! | offset | what |
//! |---|---|
//! | 0 | destination, source, type IPv4 |
//! | 14 | IPv4: addresses of 198.18.0.0/15; the identification is the run's |
//! | 34 | UDP, without a checksum (RFC 768 allows that over IPv4) |
//! | 42 | `0x5167`, the frame's number (8 bytes), the sender's monotonic clock in ns (8 bytes) |
//!
//! 198.18.0.0/15 is reserved for benchmarks (RFC 2544, appendix C.2.2).

use std::net::Ipv4Addr;

use slipway_ethernet_spec::checksum::{fold, sum};
use slipway_ethernet_spec::{
    EthernetFrame, HEADER, Ipv4Packet, Mac, SOURCE, TYPE, UdpDatagram, ethertype, ipv4, protocol,
};

/// Bytes of the shortest frame. It is Ethernet's shortest, which the fields just fill.
pub const SHORTEST: usize = slipway_ethernet_spec::MIN_FRAME;
/// Bytes of the longest frame: the header and the longest IPv4 packet.
pub const LONGEST: usize = HEADER + 65_535;

const UDP: usize = HEADER + ipv4::MIN_HEADER;
const MARK: usize = UDP + 8;
const MARK_WORD: [u8; 2] = [0x51, 0x67];
const NUMBER: usize = MARK + 2;
const TIME: usize = NUMBER + 8;
/// The port of the discard service (RFC 863): a host that gets such a datagram by mistake discards
/// it.
const PORT: u16 = 9;
/// The first source address, and the destination address.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const TO: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 1);
/// The lowest source port.
const FIRST_PORT: u16 = 1024;

/// The fields that differ between the flows of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vary {
    /// The source MAC address.
    pub mac: bool,
    /// The source IP address.
    pub ip: bool,
    /// The source UDP port.
    pub port: bool,
}

/// Makes the frames of a run.
pub struct Stream {
    /// The bytes that are equal in all frames.
    template: [u8; SHORTEST],
    vary: Vary,
    flows: u32,
    /// Sum of the IPv4 header's words, without those that differ between flows.
    sum: u64,
    number: u64,
}

impl Stream {
    /// Makes frames from `from` to `to` in `flows` flows, which differ in the fields of `vary`.
    /// `id` tells the run from others.
    pub fn new(from: Mac, to: Mac, id: u16, flows: u32, vary: Vary) -> Self {
        let mut template = [0; SHORTEST];
        let mut frame = EthernetFrame::new_unchecked(&mut template[..]);
        frame.set_destination(to);
        frame.set_source(from);
        frame.set_ethertype(ethertype::IPV4);
        let ip = &mut template[HEADER..UDP];
        let mut packet = Ipv4Packet::new_unchecked(&mut *ip);
        packet.set_plain(protocol::UDP, 64);
        packet.set_identification(id);
        packet.set_source(FIRST);
        packet.set_destination(TO);
        let sum = sum(ip);
        let mut datagram = UdpDatagram::new_unchecked(&mut template[UDP..]);
        datagram.set_source(FIRST_PORT);
        datagram.set_destination(PORT);
        template[MARK..NUMBER].copy_from_slice(&MARK_WORD);
        Self { template, vary, flows: flows.max(1), sum, number: 0 }
    }

    /// Returns the number of frames made, which is the number of the next frame.
    pub fn made(&self) -> u64 {
        self.number
    }

    /// Makes the next frame, of `len` bytes, at the beginning of `slot`. Bytes behind the first 60
    /// keep their contents.
    ///
    /// # Panics
    /// If the slot is shorter than 60 bytes, or `len` is below 60 or above [`LONGEST`]: a
    /// programmer's error.
    #[inline]
    pub fn make(&mut self, slot: &mut [u8], len: usize, now_ns: u64) {
        assert!((SHORTEST..=LONGEST).contains(&len), "a frame of {len} bytes");
        let frame = &mut slot[..SHORTEST];
        frame.copy_from_slice(&self.template);
        let flow = if self.flows == 1 { 0 } else { (self.number % u64::from(self.flows)) as u32 };
        let mut sum = self.sum;
        let (ethernet, rest) = frame.split_at_mut(HEADER);
        let (ip, udp) = rest.split_at_mut(UDP - HEADER);
        let mut packet = Ipv4Packet::new_unchecked(ip);
        let mut datagram = UdpDatagram::new_unchecked(udp);
        if flow > 0 {
            let [_, b, c, d] = flow.to_be_bytes();
            if self.vary.mac {
                // The address's own bytes still tell it from those of other runs.
                for (byte, more) in ethernet[SOURCE + 3..TYPE].iter_mut().zip([b, c, d]) {
                    *byte ^= more;
                }
            }
            if self.vary.ip {
                // Addresses from 198.18.0.1, within 198.18.0.0/16.
                let host = flow % u32::from(u16::MAX);
                packet.set_source(Ipv4Addr::from_bits(FIRST.to_bits() + host));
                sum += u64::from(host);
            }
            if self.vary.port {
                let port = FIRST_PORT + (flow % u32::from(u16::MAX - FIRST_PORT)) as u16;
                datagram.set_source(port);
            }
        }
        let total = (len - HEADER) as u16;
        packet.set_total_length(total);
        packet.set_checksum(!fold(sum + u64::from(total)));
        datagram.set_length(total - ipv4::MIN_HEADER as u16);
        frame[NUMBER..TIME].copy_from_slice(&self.number.to_be_bytes());
        frame[TIME..].copy_from_slice(&now_ns.to_be_bytes());
        self.number += 1;
    }
}

/// The payload of a run's frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The id of the run.
    pub id: u16,
    /// The number of the frame in the run.
    pub number: u64,
    /// The time when the frame was made, by the sender's clock.
    pub time_ns: u64,
}

impl Probe {
    /// Reads the payload of `frame`. Returns `None` if the frame belongs to no run.
    #[inline]
    pub fn read(frame: &[u8]) -> Option<Self> {
        let head: &[u8; SHORTEST] = frame.first_chunk()?;
        let frame = EthernetFrame::new_unchecked(head);
        let packet = Ipv4Packet::new_checked(&head[HEADER..]).ok()?;
        let is_plain = frame.tag().is_none() && packet.header_len() == ipv4::MIN_HEADER;
        let is_udp = frame.ethertype() == ethertype::IPV4 && packet.protocol() == protocol::UDP;
        let ours = is_plain && is_udp && head[MARK..NUMBER] == MARK_WORD;
        let long = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        ours.then(|| Self {
            id: packet.identification(),
            number: long(NUMBER),
            time_ns: long(TIME),
        })
    }
}

/// Exchanges a frame's source and destination, in addresses and ports. The checksum stays right.
///
/// # Panics
/// If the frame is shorter than 60 bytes: a programmer's error.
pub(crate) fn turn_round(frame: &mut [u8]) {
    let (ethernet, rest) = frame[..SHORTEST].split_at_mut(HEADER);
    let (to, from) = ethernet[..TYPE].split_at_mut(SOURCE);
    to.swap_with_slice(from);
    let (ip, udp) = rest.split_at_mut(UDP - HEADER);
    let mut packet = Ipv4Packet::new_unchecked(ip);
    let (from, to) = (packet.source(), packet.destination());
    packet.set_source(to);
    packet.set_destination(from);
    let mut datagram = UdpDatagram::new_unchecked(udp);
    let (from, to) = (datagram.source(), datagram.destination());
    datagram.set_source(to);
    datagram.set_destination(from);
}

/// Makes a frame that only tells a switch where the station `mac` is (type 0x88b5, for
/// experiments).
pub(crate) fn announcement(slot: &mut [u8], mac: Mac) -> usize {
    let slot = &mut slot[..SHORTEST];
    slot.fill(0);
    let mut frame = EthernetFrame::new_unchecked(slot);
    frame.set_destination(Mac::BROADCAST);
    frame.set_source(mac);
    frame.set_ethertype(0x88b5);
    SHORTEST
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Vary = Vary { mac: true, ip: true, port: true };

    fn is_summed(frame: &[u8]) -> bool {
        Ipv4Packet::new_checked(&frame[HEADER..]).unwrap().is_checksum_right()
    }

    #[test]
    fn frames_are_whole_and_say_what_they_should() {
        let (from, to) = (Mac::local(1), Mac::local(2));
        let mut stream = Stream::new(from, to, 0xfffe, 70_000, ALL);
        let mut slot = vec![0xaa; LONGEST];
        for number in 0..70_000 {
            let len = SHORTEST + number as usize % (LONGEST - SHORTEST + 1);
            stream.make(&mut slot, len, 5 * number);
            let probe = Probe { id: 0xfffe, number, time_ns: 5 * number };
            assert_eq!(Probe::read(&slot[..SHORTEST]), Some(probe));
            assert!(is_summed(&slot), "{number}");
            let total = u16::from_be_bytes([slot[16], slot[17]]);
            assert_eq!((usize::from(total) + HEADER, slot[60]), (len, 0xaa));
        }
        assert_eq!(Probe::read(&slot[..59]), None);
        slot[MARK] = 0;
        assert_eq!(Probe::read(&slot), None);
    }

    #[test]
    fn flows_differ_as_they_should() {
        let flows = |vary: Vary, of: std::ops::Range<usize>| {
            let mut stream = Stream::new(Mac::local(1), Mac::local(2), 1, 1000, vary);
            let mut slot = [0; SHORTEST];
            let seen = (0..3000).map(|_| {
                stream.make(&mut slot, SHORTEST, 0);
                slot[of.clone()].to_vec()
            });
            seen.collect::<std::collections::BTreeSet<_>>().len()
        };
        let only = |mac, ip, port| Vary { mac, ip, port };
        assert_eq!(flows(only(true, false, false), SOURCE..TYPE), 1000);
        assert_eq!(flows(only(false, true, false), 26..30), 1000);
        assert_eq!(flows(only(false, false, true), UDP..UDP + 2), 1000);
        assert_eq!(flows(only(false, true, true), SOURCE..TYPE), 1);
    }

    #[test]
    fn a_frame_turned_round_comes_back() {
        let mut stream = Stream::new(Mac::local(1), Mac::local(2), 1, 1, ALL);
        let mut slot = [0; SHORTEST];
        stream.make(&mut slot, SHORTEST, 7);
        let before = slot;
        turn_round(&mut slot);
        assert_eq!((&slot[..6], &slot[6..12]), (&Mac::local(1).0[..], &Mac::local(2).0[..]));
        assert_eq!(Probe::read(&slot), Probe::read(&before));
        assert!(is_summed(&slot));
        turn_round(&mut slot);
        assert_eq!(slot, before);
    }
}
