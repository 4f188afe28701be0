//! Memory that a guest is given, and gives back, while it runs: regions behind the RAM, of which
//! the guest has what it has plugged ([`crate::own::memory`]).
//!
//! The bytes of the regions are the end of the file of the guest's memory, so that servers of
//! functions, which know that file and take no other, do DMA there. Everything is mapped when the
//! machine is made: no memory slot of KVM's and no DMA map changes later, each of which takes
//! milliseconds.
//!
//! KVM has a mapping of each region for itself. Of that, the blocks that are not plugged allow no
//! access (mprotect(2)): a guest that touches one ends, and cannot keep pages that it has given
//! back. A region has at most [`MAX_BLOCKS`] blocks, and so at most as many mappings of the
//! kernel's whichever of them a guest plugs: eight regions have about half of what
//! `vm.max_map_count` allows.
//!
//! The devices of this process, and the servers of functions, have other mappings, in which all of
//! a region can be accessed. A device that a guest lets write to an unplugged block makes a page
//! there that the host does not get back before the block is plugged and unplugged again: at most
//! the region's bytes, which the guest could have plugged.
//!
//! An unplugged block is a hole in the file: the host has its pages at once.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::mm::MprotectFlags;
use slipway_machine::{HotRegion, MAX_HOT_REGIONS, MAX_NODE};
use slipway_ram::{DmaMap, Permissions};
use slipway_virtio_mem::{Geometry, MIN_BLOCK};

use crate::layout::{self, GIB, MIB};
use crate::part::Part;
use crate::{Error, Result};

/// The most blocks of a region.
pub const MAX_BLOCKS: u64 = 4096;

// A device gives back pieces of the size that the filters of system calls allow.
const _: () = assert!(slipway_virtio_mem::PIECE == slipway_machine::MAX_HOLE);
const _: () = assert!(slipway_virtio_balloon::PIECE == slipway_machine::MAX_HOLE);
const _: () = assert!(layout::HUGE_PAGE == slipway_machine::MAX_HOLE);

/// Returns the bytes of a region's block: 2 MiB, or more if that would be more than [`MAX_BLOCKS`].
fn block(region: &HotRegion) -> u64 {
    (region.bytes / MAX_BLOCKS).next_power_of_two().max(MIN_BLOCK)
}

/// Checks the regions of a machine. Returns their bytes in all.
///
/// # Errors
/// [`Error::Config`].
pub fn check(regions: &[HotRegion]) -> Result<u64> {
    let most = MAX_HOT_REGIONS;
    if regions.len() > most {
        let count = regions.len();
        return Err(Error::Config(format!("{count} regions of hot-plug memory: at most {most}")));
    }
    let mut sum = 0u64;
    for HotRegion { bytes, node } in regions {
        let (unit, largest) = (layout::HOT_MEMORY_UNIT, layout::MAX_HOT_MEMORY);
        sum = sum.saturating_add(*bytes);
        if *bytes == 0 || !bytes.is_multiple_of(unit) || sum > largest {
            let (mib, unit, most) = (bytes / MIB, unit / MIB, largest / GIB);
            let what = format!("a region of {mib} MiB of hot-plug memory: its size is a multiple");
            return Err(Error::Config(format!("{what} of {unit} MiB, and all have {most} GiB")));
        }
        if *node > MAX_NODE {
            let most = MAX_NODE;
            return Err(Error::Config(format!("hot-plug memory in node {node}: 0 to {most}")));
        }
    }
    Ok(sum)
}

/// A region of a machine.
pub struct HotMemory {
    /// The mapping of the devices.
    devices: Part,
    /// The mapping of the guest's CPUs.
    guest: Part,
    region: HotRegion,
}

impl HotMemory {
    /// Maps a region at `start` of the guest's addresses, whose bytes are at `offset` of `file`.
    /// Nothing of it is plugged.
    pub(crate) fn new(
        map: &mut DmaMap,
        file: BorrowedFd<'_>,
        (start, offset): (u64, u64),
        region: HotRegion,
    ) -> io::Result<Self> {
        let place = (start, offset, region.bytes);
        let devices = Part::new(map, file, place, Permissions::READ_WRITE)?;
        // A map that no device has: nothing of this process touches the mapping.
        let guest = Part::new(&mut DmaMap::new(), file, place, Permissions::READ_WRITE)?;
        let hot = Self { devices, guest, region };
        hot.protect(&(0..region.bytes), MprotectFlags::empty())?;
        Ok(hot)
    }

    /// Returns the mapping of the devices.
    pub fn devices(&self) -> &Part {
        &self.devices
    }

    /// Returns the mapping of the guest's CPUs.
    pub(crate) fn guest(&self) -> &Part {
        &self.guest
    }

    /// Returns the NUMA node.
    pub fn node(&self) -> u8 {
        self.region.node
    }

    /// Returns the region's place, blocks and node.
    pub fn geometry(&self) -> Geometry {
        let (address, HotRegion { bytes, node, .. }) = (self.devices.start, self.region);
        Geometry { address, bytes, block: block(&self.region), node: node.into() }
    }

    /// Sets the access that the guest has to a range, as offsets in the region.
    pub(crate) fn protect(&self, range: &Range<u64>, access: MprotectFlags) -> io::Result<()> {
        let (start, len) = (range.start as usize, (range.end - range.start) as usize);
        let (base, len) = self.guest.span.slice(start, len).io_vector();
        // SAFETY: the range is pinned and of whole pages. Only KVM reads and writes by this
        // mapping, on the guest's behalf, and makes an error of an access that is not allowed.
        Ok(unsafe { rustix::mm::mprotect(base.cast(), len, access) }?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_regions_are_refused() {
        let refused = |bytes, node, count| {
            check(&vec![HotRegion { bytes, node }; count]).unwrap_err().to_string()
        };
        assert_eq!(check(&[HotRegion { bytes: 256 * GIB, node: 0 }]).unwrap(), 256 * GIB);
        assert!(refused(0, 1, 1).contains("multiple of 128 MiB"));
        assert!(refused(64 * MIB, 1, 1).contains("a region of 64 MiB"));
        assert!(refused(129 * GIB, 1, 2).contains("all have 256 GiB"));
        assert!(refused(!(128 * MIB - 1), 1, 2).contains("256 GiB"));
        assert!(refused(128 * MIB, 16, 1).contains("node 16: 0 to 15"));
        assert!(refused(128 * MIB, 1, 9).contains("9 regions"));
    }

    #[test]
    fn a_region_has_a_bounded_number_of_blocks() {
        for (gib, expected) in [(1, 2), (8, 2), (9, 4), (16, 4), (17, 8), (256, 64)] {
            let region = HotRegion { bytes: gib * GIB, node: 1 };
            assert_eq!(block(&region), expected * MIB, "{gib} GiB");
            assert!(region.bytes / block(&region) <= MAX_BLOCKS);
        }
    }
}
