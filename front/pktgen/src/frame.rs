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

use slipway_ethernet_spec::{HEADER, Mac, SOURCE, TYPE, ethertype, ipv4};

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
    sum: u32,
    number: u64,
}

impl Stream {
    /// Makes frames from `from` to `to` in `flows` flows, which differ in the fields of `vary`.
    /// `id` tells the run from others.
    pub fn new(from: Mac, to: Mac, id: u16, flows: u32, vary: Vary) -> Self {
        let mut template = [0; SHORTEST];
        template[..6].copy_from_slice(&to.0);
        template[SOURCE..TYPE].copy_from_slice(&from.0);
        template[TYPE..HEADER].copy_from_slice(&ethertype::IPV4.to_be_bytes());
        let ip = &mut template[HEADER..UDP];
        // Version 4, five words of header; 64 hops; UDP.
        (ip[0], ip[8], ip[ipv4::PROTOCOL]) = (0x45, 64, 17);
        ip[ipv4::IDENTIFICATION..][..2].copy_from_slice(&id.to_be_bytes());
        ip[ipv4::SOURCE..][..4].copy_from_slice(&[198, 18, 0, 1]);
        ip[ipv4::SOURCE + 4..][..4].copy_from_slice(&[198, 19, 0, 1]);
        let sum = ip.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        template[UDP..][..2].copy_from_slice(&FIRST_PORT.to_be_bytes());
        template[UDP + 2..][..2].copy_from_slice(&PORT.to_be_bytes());
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
        if flow > 0 {
            let [_, b, c, d] = flow.to_be_bytes();
            if self.vary.mac {
                // The address's own bytes still tell it from those of other runs.
                for (byte, more) in frame[SOURCE + 3..TYPE].iter_mut().zip([b, c, d]) {
                    *byte ^= more;
                }
            }
            if self.vary.ip {
                // Addresses from 198.18.0.1, within 198.18.0.0/16.
                let host = 1 + (flow % u32::from(u16::MAX)) as u16;
                frame[HEADER + ipv4::SOURCE + 2..][..2].copy_from_slice(&host.to_be_bytes());
                sum += u32::from(host) - 1;
            }
            if self.vary.port {
                let port = FIRST_PORT + (flow % u32::from(u16::MAX - FIRST_PORT)) as u16;
                frame[UDP..][..2].copy_from_slice(&port.to_be_bytes());
            }
        }
        let total = (len - HEADER) as u16;
        sum += u32::from(total);
        frame[HEADER + ipv4::TOTAL_LENGTH..][..2].copy_from_slice(&total.to_be_bytes());
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame[HEADER + ipv4::CHECKSUM..][..2].copy_from_slice(&sum.to_be_bytes());
        let length = total - ipv4::MIN_HEADER as u16;
        frame[UDP + 4..][..2].copy_from_slice(&length.to_be_bytes());
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
        let head: &[u8; SHORTEST] = frame.get(..SHORTEST)?.try_into().ok()?;
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let ours = word(TYPE) == ethertype::IPV4 && head[MARK..NUMBER] == MARK_WORD;
        let long = |at: usize| u64::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let id = word(HEADER + ipv4::IDENTIFICATION);
        (ours && head[HEADER] == 0x45 && head[HEADER + ipv4::PROTOCOL] == 17).then_some(Self {
            id,
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
    let (to, from) = frame[..TYPE].split_at_mut(SOURCE);
    to.swap_with_slice(from);
    let (source, rest) = frame[HEADER + ipv4::SOURCE..].split_at_mut(4);
    source.swap_with_slice(&mut rest[..4]);
    let (source, rest) = frame[UDP..].split_at_mut(2);
    source.swap_with_slice(&mut rest[..2]);
}

/// Makes a frame that only tells a switch where the station `mac` is (type 0x88b5, for
/// experiments).
pub(crate) fn announcement(slot: &mut [u8], mac: Mac) -> usize {
    slot[..SHORTEST].fill(0);
    slot[..SOURCE].fill(0xff);
    slot[SOURCE..TYPE].copy_from_slice(&mac.0);
    slot[TYPE..HEADER].copy_from_slice(&[0x88, 0xb5]);
    SHORTEST
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Vary = Vary { mac: true, ip: true, port: true };

    fn header_sum(frame: &[u8]) -> u32 {
        let words = frame[HEADER..UDP].chunks(2);
        let sum: u32 = words.map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        (sum & 0xffff) + (sum >> 16)
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
            assert_eq!(header_sum(&slot), 0xffff, "{number}");
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
        assert_eq!(header_sum(&slot), 0xffff);
        turn_round(&mut slot);
        assert_eq!(slot, before);
    }
}
