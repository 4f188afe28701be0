//! Huge pages for the memory that a guest touches at its start.
//!
//! A page of 4 KiB that a guest touches for the first time costs an exit to KVM and two page
//! faults of the host, and Debian's kernel touches some 18,000 of them until the agent runs. They
//! lie close together: the kernel, what it allocates from there up, and what it allocates from the
//! top down while it has no allocator yet. There, huge pages cost a few MiB more and 40 faults.
//! They need no setting of the host's: `MADV_COLLAPSE` of madvise(2), since Linux 6.1. Where it
//! fails, pages are small as ever.

use std::ops::Range;
use std::sync::Arc;

use crate::layout::{self, HUGE_PAGE as HUGE, MIB};
use crate::memory::GuestRam;

/// Bytes above the kernel that Linux touches until the agent runs.
const ABOVE_KERNEL: u64 = 26 * MIB;
/// Bytes at the top of memory that Linux touches, in addition to the description of memory.
const AT_TOP: u64 = 6 * MIB;
/// The description of memory: Linux keeps 64 bytes for each page of 4 KiB, at the top.
const BYTES_DESCRIBED_BY_ONE: u64 = 64;

/// The memory that a guest will touch soon.
pub struct Ahead {
    ram: Arc<GuestRam>,
    ranges: Vec<Range<u64>>,
}

impl Ahead {
    /// Returns what a guest whose kernel ends at the guest-physical address `kernel_end` touches
    /// beside its kernel and initramfs.
    pub(crate) fn new(ram: Arc<GuestRam>, kernel_end: u64) -> Self {
        let ranges = ranges(kernel_end, ram.bytes());
        Self { ram, ranges }
    }

    /// Makes the pages, one after the other. The guest may run meanwhile.
    pub fn make(&self) {
        let pages = self.ranges.iter().flat_map(|range| range.clone().step_by(HUGE as usize));
        for start in pages {
            if !self.ram.make_huge(start) {
                return;
            }
        }
    }
}

/// Returns ranges in whole huge pages, for a guest of `bytes` bytes of memory.
fn ranges(kernel_end: u64, bytes: u64) -> Vec<Range<u64>> {
    let parts = layout::ram(bytes);
    let (Some((first, _)), Some((last, _))) = (parts.first(), parts.last()) else {
        return Vec::new();
    };
    let above = kernel_end.next_multiple_of(HUGE);
    let above = above..(above + ABOVE_KERNEL).min(first.end & !(HUGE - 1));
    let len = (AT_TOP + bytes / BYTES_DESCRIBED_BY_ONE).next_multiple_of(HUGE);
    let end = last.end & !(HUGE - 1);
    let top = end.saturating_sub(len).max(last.start).max(above.end)..end;
    [above, top].into_iter().filter(|range| range.start < range.end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::GIB;

    fn mib(ranges: &[Range<u64>]) -> Vec<(u64, u64)> {
        ranges.iter().map(|range| (range.start / MIB, range.end / MIB)).collect()
    }

    #[test]
    fn ranges_are_above_the_kernel_and_at_the_top() {
        assert_eq!(mib(&ranges(62 * MIB, 256 * MIB)), [(62, 88), (246, 256)]);
        assert_eq!(mib(&ranges(61 * MIB, 256 * MIB)), [(62, 88), (246, 256)]);
        // The description of 8 GiB takes 128 MiB; 3 GiB are below the window.
        assert_eq!(mib(&ranges(62 * MIB, 8 * GIB)), [(62, 88), (9 * 1024 - 134, 9 * 1024)]);
    }

    #[test]
    fn little_memory_has_less_of_both() {
        assert_eq!(mib(&ranges(62 * MIB, 91 * MIB)), [(62, 88), (88, 90)]);
        assert_eq!(mib(&ranges(62 * MIB, 64 * MIB)), [(62, 64)]);
        assert_eq!(mib(&ranges(64 * MIB, 64 * MIB)), []);
        assert_eq!(mib(&ranges(63 * MIB, 3 * GIB + MIB)), [(64, 90)]);
    }
}
