//! Regions of memory that a guest is given, and gives back, while it runs.

/// A region, as a machine's configuration has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotRegion {
    /// The size in bytes, a multiple of 128 MiB.
    pub bytes: u64,
    /// The NUMA node of the guest, 0 to [`MAX_NODE`]. RAM and CPUs are in node 0.
    pub node: u8,
}

/// The most regions of a machine.
pub const MAX_HOT_REGIONS: usize = 8;
/// The largest number of a NUMA node.
pub const MAX_NODE: u8 = 15;
/// The most bytes that a VMM gives back at once: a process that copies from guest memory waits as
/// long as a hole takes.
pub const MAX_HOLE: u64 = 2 << 20;
