//! Counters of a device, which any thread may read.

use std::sync::atomic::{AtomicU64, Ordering};

use slipway_e1000_spec::register;

/// A number that one thread counts and any thread reads.
#[derive(Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub fn add(&self, more: u64) {
        // Only one thread writes, so no atomic addition is needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The registers whose accesses are counted one by one, with their names: those that drivers use
/// while frames move. The others are counted together.
pub const COUNTED: [(u32, &str); 13] = [
    (register::TDT, "TDT"),
    (register::RDT, "RDT"),
    (register::ICR, "ICR"),
    (register::IMC, "IMC"),
    (register::IMS, "IMS"),
    (register::ICS, "ICS"),
    (register::ITR, "ITR"),
    (register::STATUS, "STATUS"),
    (register::TDH, "TDH"),
    (register::RDH, "RDH"),
    (register::CSBK, "CSBK"),
    (register::CTRL, "CTRL"),
    (register::RCTL, "RCTL"),
];

/// The place of registers that are not in [`COUNTED`].
const OTHERS: usize = COUNTED.len();

/// Reads and writes of registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Accesses {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
}

/// Live counts of accesses, which the function's thread changes.
#[derive(Default)]
pub(crate) struct AccessCounts {
    reads: [Count; OTHERS + 1],
    writes: [Count; OTHERS + 1],
}

#[inline]
fn place(offset: u32) -> usize {
    COUNTED.iter().position(|(counted, _)| *counted == offset).unwrap_or(OTHERS)
}

impl AccessCounts {
    #[inline]
    pub fn read(&self, offset: u32) {
        self.reads[place(offset)].add(1);
    }

    #[inline]
    pub fn wrote(&self, offset: u32) {
        self.writes[place(offset)].add(1);
    }

    fn at(&self, place: usize) -> Accesses {
        Accesses { reads: self.reads[place].get(), writes: self.writes[place].get() }
    }
}

/// Live counts of one device. The data path changes them, except for `accesses`, `kicks`,
/// `announced` and `tail`, which the function changes.
#[derive(Default)]
pub(crate) struct Live {
    pub accesses: AccessCounts,
    pub kicks: Count,
    pub announced: Count,
    pub sent: Count,
    pub received: Count,
    pub shape: Count,
    pub short: Count,
    pub long: Count,
    pub offload: Count,
    pub memory: Count,
    pub tail: Count,
    pub filtered: Count,
    pub too_large: Count,
    pub no_buffer: Count,
    pub arms: Count,
}

/// Counts since the device was made.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Counters {
    /// Accesses to the registers of [`COUNTED`], in that order.
    pub registers: [Accesses; COUNTED.len()],
    /// Accesses to all other registers.
    pub other_registers: Accesses,
    /// Writes of the transmit tail, or of CSBK, that woke the switch. Those that one event
    /// announced are one.
    pub kicks: u64,
    /// Writes of the tails and of CSBK that an event announced. They are not among the accesses:
    /// the device does not know which register it was.
    pub announced: u64,
    /// Times that the interrupt pin was asserted.
    pub interrupts: u64,
    /// Frames that the driver sent, a segment that is to be cut as one.
    pub sent: u64,
    /// Frames that the driver received.
    pub received: u64,
    /// Sent frames dropped that had more descriptors than a frame may have, or descriptors of an
    /// unknown type.
    pub bad_shape: u64,
    /// Sent frames dropped that were shorter than an Ethernet header.
    pub too_short: u64,
    /// Sent frames dropped that were longer than 64 KiB.
    pub too_long: u64,
    /// Sent frames dropped because their offloads were invalid, or are not implemented.
    pub bad_offload: u64,
    /// Frames dropped because a ring or a buffer is not in memory.
    pub bad_memory: u64,
    /// Tails beyond the ring that were written to a register. They are ignored.
    pub bad_tail: u64,
    /// Frames that the driver's filter did not want.
    pub filtered: u64,
    /// Frames dropped that were longer than the driver takes.
    pub too_large: u64,
    /// Frames dropped since the driver had no buffer for them.
    pub no_buffer: u64,
    /// Times that the switch fell asleep and asked for a kick.
    pub arms: u64,
}

impl Live {
    /// Returns the counts, with the number of `interrupts`.
    pub fn snapshot(&self, interrupts: u64) -> Counters {
        Counters {
            registers: std::array::from_fn(|place| self.accesses.at(place)),
            other_registers: self.accesses.at(OTHERS),
            kicks: self.kicks.get(),
            announced: self.announced.get(),
            interrupts,
            sent: self.sent.get(),
            received: self.received.get(),
            bad_shape: self.shape.get(),
            too_short: self.short.get(),
            too_long: self.long.get(),
            bad_offload: self.offload.get(),
            bad_memory: self.memory.get(),
            bad_tail: self.tail.get(),
            filtered: self.filtered.get(),
            too_large: self.too_large.get(),
            no_buffer: self.no_buffer.get(),
            arms: self.arms.get(),
        }
    }
}
