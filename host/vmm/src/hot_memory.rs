//! Hot-plug memory: regions behind the RAM, of which a guest plugs and unplugs blocks while it runs
//! ([`crate::own::memory`], virtio-mem).
//!
//! The bytes of the regions are the end of the file of the guest's memory. Servers of functions
//! know that file and accept no other, so they can do DMA there. This process maps all regions when
//! the machine is made: a later change of a memory slot of KVM would take milliseconds.
//!
//! Each region is mapped twice. KVM uses one mapping, in which the blocks that are not plugged
//! allow no access (mprotect(2)). A guest that touches such a block ends, so it cannot keep pages
//! that it has given back. A region has at most [`MAX_BLOCKS`] blocks, so whichever of them are
//! plugged, it needs at most as many mappings of the kernel: eight regions need about half of
//! `vm.max_map_count`.
//!
//! The devices of this process use the other mapping, which allows access to the whole region. The
//! pages that they touch are charged to this process's control group.
//!
//! A server of a function touches pages that are charged to the server's own control group. It
//! therefore maps the *usable part* of a region alone: the start of the region, up to the largest
//! size that the host has ever asked the guest to plug, in units of Linux's memory hot plug. When
//! the host asks for more, the event loop has each server map the difference. It never has one
//! unmap anything: plugging and unplugging change no map, so no function has to wait for its
//! requests in flight. The price is a known weakness: a guest can have a function write to an
//! unplugged block of the usable part, and the page that this makes is not the host's again before
//! the block has been plugged and unplugged.
//!
//! An unplugged block is a hole in the file: the host has its pages at once.
//!
//! The file may be memory of a pool that began as a template ([`crate::memory::GuestRam::leased`]).
//! The pool then serves the faults of both mappings where the template has bytes, those of blocks
//! that were plugged when it was saved, and leaves the rest to the kernel. A page of such a block
//! that nobody has touched is not in the file: unplugging costs and changes nothing there, and a
//! guest that plugs the block again finds the template's bytes. If the pool copies all of the
//! template later, as for a snapshot of the fork, the page is in the file until the guest has
//! plugged and unplugged the block.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use rustix::mm::MprotectFlags;
use slipway_machine::{HotRegion, MAX_HOT_REGIONS, MAX_NODE};
use slipway_ram::{DmaMap, Permissions};
use slipway_vfio_user_client::{FunctionError, RemoteFunction};
use slipway_virtio_mem::{Geometry, MIN_BLOCK};

use crate::layout::{self, GIB, MIB};
use crate::lock::lock;
use crate::part::Part;
use crate::{Error, Result};

/// The most blocks of a region.
pub const MAX_BLOCKS: u64 = 4096;

// A device gives back pieces of the size that the filters of system calls allow.
const _: () = assert!(slipway_virtio_mem::PIECE == slipway_machine::MAX_HOLE);
const _: () = assert!(slipway_virtio_balloon::PIECE == slipway_machine::MAX_HOLE);
const _: () = assert!(layout::HUGE_PAGE == slipway_machine::MAX_HOLE);

/// Returns the size of a region's blocks in bytes: 2 MiB, or the smallest power of two for which
/// the region has no more than [`MAX_BLOCKS`] blocks.
fn block(region: &HotRegion) -> u64 {
    (region.bytes / MAX_BLOCKS).next_power_of_two().max(MIN_BLOCK)
}

/// Checks the regions of a machine. Returns the sum of their sizes in bytes.
///
/// # Errors
/// [`Error::Config`].
pub fn check(regions: &[HotRegion]) -> Result<u64> {
    if regions.len() > MAX_HOT_REGIONS {
        let (count, most) = (regions.len(), MAX_HOT_REGIONS);
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

/// A region of hot-plug memory.
pub struct HotMemory {
    /// The mapping of the devices.
    pub devices: Part,
    /// The mapping of the guest's CPUs.
    pub(crate) guest: Part,
    region: HotRegion,
    /// The unit in bytes by which the usable part grows.
    unit: u64,
    reach: Mutex<Reach>,
}

/// The part of a region that servers of functions have mapped.
#[derive(Default)]
struct Reach {
    /// The size of the usable part in bytes.
    usable: u64,
    /// The functions, each with the number of bytes of the usable part that its server has mapped.
    functions: Vec<(Weak<RemoteFunction>, u64)>,
}

impl HotMemory {
    /// Maps a region at `start` of the guest's addresses, whose bytes are at `offset` of `file`.
    /// Nothing of it is plugged. Its usable part, which is empty, grows by `unit` bytes.
    pub(crate) fn new(
        map: &mut DmaMap,
        file: BorrowedFd<'_>,
        (start, offset): (u64, u64),
        region: HotRegion,
        unit: u64,
    ) -> io::Result<Self> {
        let place = (start, offset, region.bytes);
        let devices = Part::new(map, file, place, Permissions::READ_WRITE)?;
        // A map that no device has: nothing of this process touches the mapping.
        let guest = Part::new(&mut DmaMap::new(), file, place, Permissions::READ_WRITE)?;
        let hot = Self { devices, guest, region, unit, reach: Mutex::default() };
        hot.protect(&(0..region.bytes), MprotectFlags::empty())?;
        Ok(hot)
    }

    /// Returns the region's place, blocks and node.
    pub fn geometry(&self) -> Geometry {
        let (address, HotRegion { bytes, node, .. }) = (self.devices.start, self.region);
        let (block, unit) = (block(&self.region), self.unit);
        Geometry { address, bytes, block, unit, node: node.into() }
    }

    /// Has the server of a new function map the usable part, which lies in `file`, and remembers
    /// the function for [`HotMemory::reveal`]. Waits for the server.
    ///
    /// # Errors
    /// The server refuses.
    pub(crate) fn show_to(
        &self,
        function: &Arc<RemoteFunction>,
        file: BorrowedFd<'_>,
    ) -> Result<(), FunctionError> {
        let mut reach = lock(&self.reach);
        reach.functions.push((Arc::downgrade(function), 0));
        self.extend(&mut reach, file)
    }

    /// Makes the region usable up to byte `end`: the servers of all functions map it. Waits for
    /// each of them as long as a function may be silent before it is broken.
    ///
    /// # Errors
    /// A server refuses. The usable part is then as before, though other servers may have mapped
    /// more.
    pub(crate) fn reveal(&self, end: u64, file: BorrowedFd<'_>) -> Result<(), FunctionError> {
        let mut reach = lock(&self.reach);
        let before = std::mem::replace(&mut reach.usable, end);
        self.extend(&mut reach, file).inspect_err(|_| reach.usable = before)
    }

    /// Has each function's server map the rest of the usable part.
    fn extend(&self, reach: &mut Reach, file: BorrowedFd<'_>) -> Result<(), FunctionError> {
        let (start, offset) = (self.devices.start, self.devices.offset);
        reach.functions.retain(|(function, _)| function.strong_count() > 0);
        for (function, end) in &mut reach.functions {
            let len = reach.usable.saturating_sub(*end);
            let Some(function) = function.upgrade().filter(|_| len > 0) else { continue };
            match function.map(start + *end, len, file, offset + *end, true) {
                // A function that is broken reaches nothing any more.
                Ok(()) | Err(FunctionError::Broken(_)) => *end = reach.usable,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sets the access that the guest has to a range of the region, which is given by offsets in
    /// it.
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
