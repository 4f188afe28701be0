//! Blocks of a pcapng file (IETF draft-ietf-opsawg-pcapng, sections 3 and 4) as a writer needs
//! them: one section, one Ethernet interface with times in nanoseconds, its packets, and its
//! statistics.
//!
//! Everything is written little-endian; a reader detects this from the section's byte-order magic.
//! Blocks and options are padded to four bytes. Not here: reading, name resolution, secrets,
//! comments.
//!
//! No dependencies.
#![no_std]

/// Link type of Ethernet (the draft's section 7, and tcpdump's list of link types).
pub const ETHERNET: u16 = 1;

/// Types of blocks (section 11.1).
mod block {
    pub const SECTION_HEADER: u32 = 0x0a0d_0d0a;
    pub const INTERFACE: u32 = 1;
    pub const STATISTICS: u32 = 5;
    pub const ENHANCED_PACKET: u32 = 6;
}

/// Codes of options (sections 3.5, 4.2, 4.3 and 4.6).
mod option {
    pub const INTERFACE_NAME: u16 = 2;
    pub const INTERFACE_TIME_RESOLUTION: u16 = 9;
    pub const PACKET_FLAGS: u16 = 2;
    pub const STATISTICS_RECEIVED: u16 = 4;
    pub const STATISTICS_DROPPED: u16 = 5;
}

/// The direction of a packet at its interface (section 4.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Direction {
    /// Received by the interface.
    Inbound = 1,
    /// Sent by the interface.
    Outbound = 2,
}

/// A destination for blocks.
pub trait Sink {
    /// Appends bytes.
    fn put(&mut self, bytes: &[u8]);
}

impl<F: FnMut(&[u8])> Sink for F {
    fn put(&mut self, bytes: &[u8]) {
        self(bytes);
    }
}

/// Writes the Section Header Block (section 4.1) that begins a file, with unknown section length.
pub fn section(to: &mut impl Sink) {
    const BYTES: u32 = 28;
    word(to, block::SECTION_HEADER);
    word(to, BYTES);
    // Byte-order magic, version 1.0, section length unknown.
    word(to, 0x1a2b_3c4d);
    half(to, 1);
    half(to, 0);
    long(to, u64::MAX);
    word(to, BYTES);
}

/// Writes the Interface Description Block (section 4.2) of an Ethernet interface, with a snap
/// length of `snap` bytes (0: whole packets are captured). A name longer than 255 bytes is cut.
pub fn interface(to: &mut impl Sink, name: &str, snap: u32) {
    let mut end = name.len().min(255);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    let name = &name.as_bytes()[..end];
    // Type, length, link type and reserved, snap length; name, resolution, end; length.
    let bytes = 16 + 4 + padded(name.len()) + 8 + 4 + 4;
    word(to, block::INTERFACE);
    word(to, bytes as u32);
    half(to, ETHERNET);
    half(to, 0);
    word(to, snap);
    option(to, option::INTERFACE_NAME, name);
    // Nanoseconds: ten to the power of minus nine.
    option(to, option::INTERFACE_TIME_RESOLUTION, &[9]);
    word(to, 0);
    word(to, bytes as u32);
}

/// Writes an Enhanced Packet Block (section 4.3) of interface 0: `bytes` are the first of the
/// packet's `len`, and `time` counts nanoseconds since the epoch.
pub fn packet(to: &mut impl Sink, time: u64, direction: Direction, len: u32, bytes: &[u8]) {
    // Type, length, interface, time (2), captured and original length; data; flags, end; length.
    let total = 28 + padded(bytes.len()) + 8 + 4 + 4;
    word(to, block::ENHANCED_PACKET);
    word(to, total as u32);
    word(to, 0);
    time_stamp(to, time);
    word(to, bytes.len() as u32);
    word(to, len);
    put_padded(to, bytes);
    option(to, option::PACKET_FLAGS, &(direction as u32).to_le_bytes());
    word(to, 0);
    word(to, total as u32);
}

/// Writes an Interface Statistics Block (section 4.6) of interface 0 at `time`, with the number of
/// packets that passed, and of those among them that were dropped for lack of room.
pub fn statistics(to: &mut impl Sink, time: u64, received: u64, dropped: u64) {
    // Type, length, interface, time (2); two options, end; length.
    const BYTES: u32 = 20 + 2 * 12 + 4 + 4;
    word(to, block::STATISTICS);
    word(to, BYTES);
    word(to, 0);
    time_stamp(to, time);
    option(to, option::STATISTICS_RECEIVED, &received.to_le_bytes());
    option(to, option::STATISTICS_DROPPED, &dropped.to_le_bytes());
    word(to, 0);
    word(to, BYTES);
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(4)
}

fn put_padded(to: &mut impl Sink, bytes: &[u8]) {
    to.put(bytes);
    to.put(&[0; 3][..padded(bytes.len()) - bytes.len()]);
}

fn option(to: &mut impl Sink, code: u16, value: &[u8]) {
    half(to, code);
    // Every caller's value has at most 255 bytes.
    half(to, value.len() as u16);
    put_padded(to, value);
}

/// Writes a timestamp: upper half first, whatever the byte order.
fn time_stamp(to: &mut impl Sink, time: u64) {
    word(to, (time >> 32) as u32);
    word(to, time as u32);
}

fn half(to: &mut impl Sink, value: u16) {
    to.put(&value.to_le_bytes());
}

fn word(to: &mut impl Sink, value: u32) {
    to.put(&value.to_le_bytes());
}

fn long(to: &mut impl Sink, value: u64) {
    to.put(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use std::vec::Vec;

    fn written(write: impl FnOnce(&mut dyn FnMut(&[u8]))) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut |part: &[u8]| bytes.extend_from_slice(part));
        bytes
    }

    fn at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the types of consecutive blocks. Checks that both lengths of each block agree and
    /// that the blocks fill `bytes`.
    fn types(bytes: &[u8]) -> Vec<u32> {
        let (mut types, mut place) = (Vec::new(), 0);
        while place < bytes.len() {
            let len = at(bytes, place + 4);
            assert_eq!(len % 4, 0);
            assert_eq!(at(bytes, place + len as usize - 4), len, "the length at the end");
            types.push(at(bytes, place));
            place += len as usize;
        }
        assert_eq!(place, bytes.len());
        types
    }

    #[test]
    fn blocks_follow_each_other() {
        for len in 0..9 {
            let bytes = written(|mut to| {
                section(&mut to);
                interface(&mut to, &"é".repeat(len * 40), 262_144);
                packet(&mut to, 7, Direction::Inbound, 1514, &[1; 8][..len.min(8)]);
                statistics(&mut to, 8, 2, 1);
            });
            assert_eq!(types(&bytes), [0x0a0d_0d0a, 1, 6, 5]);
        }
    }

    #[test]
    fn a_packet_is_as_the_draft_has_it() {
        let bytes =
            written(|mut to| packet(&mut to, 0x1_0000_0002, Direction::Outbound, 60, &[0xaa; 5]));
        let words: Vec<_> = (0..bytes.len() / 4).map(|word| at(&bytes, word * 4)).collect();
        let data = [0xaaaa_aaaa, 0xaa];
        assert_eq!(words[..7], [6, bytes.len() as u32, 0, 1, 2, 5, 60]);
        assert_eq!(words[7..9], data);
        assert_eq!(words[9..], [0x0004_0002, 2, 0, bytes.len() as u32]);
    }
}
