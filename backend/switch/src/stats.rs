//! What passed a port, and what did not.

use crate::Delivered;

/// Why a frame was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Drop {
    /// Shorter than an Ethernet header.
    Short,
    /// Its source is a group or all zeros.
    BadSource,
    /// Its source is not the port's address.
    SpoofedMac,
    /// It claims an IP address that is not the port's.
    SpoofedAddress,
    /// A VLAN that the port is not in.
    Vlan,
    /// For a bridge's own protocols (802.1Q, table 8-1).
    Reserved,
    /// Nobody else is there to have it.
    Nobody,
    /// The destination has no room.
    Full,
    /// The destination cannot take it: too long, or its memory was gone.
    Refused,
    /// Its link is down.
    Down,
    /// The peer's descriptors were wrong.
    Malformed,
    /// Its checksum was to be put where no checksum is.
    BadOffload,
    /// An impairment lost it.
    Loss,
    /// The queue of an impairment had no room.
    Queue,
}

impl Drop {
    /// Every cause, with the name that it is reported under.
    pub const ALL: [(Self, &'static str); 14] = [
        (Self::Short, "short"),
        (Self::BadSource, "bad-source"),
        (Self::SpoofedMac, "spoofed-mac"),
        (Self::SpoofedAddress, "spoofed-address"),
        (Self::Vlan, "vlan"),
        (Self::Reserved, "reserved"),
        (Self::Nobody, "nobody"),
        (Self::Full, "full"),
        (Self::Refused, "refused"),
        (Self::Down, "down"),
        (Self::Malformed, "malformed"),
        (Self::BadOffload, "bad-offload"),
        (Self::Loss, "loss"),
        (Self::Queue, "queue"),
    ];
}

/// Counters of a port since it was attached. *In* is from its peer, *out* to its peer.
#[repr(C)] // those of every frame first, in one line
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PortStats {
    /// Frames taken from the peer, those dropped included.
    pub frames_in: u64,
    /// Their bytes, tags included.
    pub bytes_in: u64,
    /// Frames given to the peer.
    pub frames_out: u64,
    /// Their bytes.
    pub bytes_out: u64,
    /// Frames from the peer that went nowhere, by cause.
    pub dropped_in: [u64; Drop::ALL.len()],
    /// Frames for the peer that it did not get, by cause.
    pub dropped_out: [u64; Drop::ALL.len()],
}

impl PortStats {
    /// Counters that are not zero, with the causes' names: dropped on the way in.
    pub fn causes_in(&self) -> impl Iterator<Item = (&'static str, u64)> {
        causes(&self.dropped_in)
    }

    /// As [`PortStats::causes_in`], on the way out.
    pub fn causes_out(&self) -> impl Iterator<Item = (&'static str, u64)> {
        causes(&self.dropped_out)
    }

    #[inline]
    pub(crate) fn drop_in(&mut self, cause: Drop) {
        self.dropped_in[cause as usize] += 1;
    }

    /// Counts a whole burst as dropped; 0 frames of it are left.
    pub(crate) fn drop_all_in(&mut self, cause: Drop, count: usize) -> usize {
        self.dropped_in[cause as usize] += count as u64;
        0
    }

    #[inline]
    pub(crate) fn count_out(&mut self, delivered: &Delivered) {
        self.frames_out += u64::from(delivered.frames);
        self.bytes_out += delivered.bytes;
        // The usual case touches no other line.
        if delivered.full | delivered.refused != 0 {
            self.drop_out(Drop::Full, delivered.full.into());
            self.drop_out(Drop::Refused, delivered.refused.into());
        }
    }

    /// Counts frames that were lost between the peer and the switch; the counters given are reset.
    pub(crate) fn lose_in(&mut self, cause: Drop, frames: &mut u64, bytes: &mut u64) {
        self.dropped_in[cause as usize] += *frames;
        self.frames_in += std::mem::take(frames);
        self.bytes_in += std::mem::take(bytes);
    }

    /// Adds what another counted on the way out.
    pub(crate) fn add_out(&mut self, other: &Self) {
        self.frames_out += other.frames_out;
        self.bytes_out += other.bytes_out;
        self.dropped_out.iter_mut().zip(other.dropped_out).for_each(|(count, more)| *count += more);
    }

    #[inline]
    pub(crate) fn drop_out(&mut self, cause: Drop, count: u64) {
        self.dropped_out[cause as usize] += count;
    }
}

fn causes(counts: &[u64]) -> impl Iterator<Item = (&'static str, u64)> {
    let named = Drop::ALL.iter().map(|(cause, name)| (*name, counts[*cause as usize]));
    named.filter(|(_, count)| *count > 0)
}
