//! The memory of a region of hot-plug memory, as its device changes it.

use std::ops::Range;
use std::sync::Arc;

use rustix::mm::MprotectFlags;
use slipway_virtio_mem::{MemoryHost, PIECE, Refused};

use crate::hot_memory::HotMemory;
use crate::memory::GuestRam;

/// The host of a region's memory, for its device.
pub(crate) struct HotHost {
    ram: Arc<GuestRam>,
    index: usize,
}

impl HotHost {
    /// Returns the host of region `index`. It refuses everything if there is no such region.
    pub fn new(ram: &Arc<GuestRam>, index: usize) -> Self {
        Self { ram: Arc::clone(ram), index }
    }

    fn region(&self) -> Result<&HotMemory, Refused> {
        self.ram.hot_memory().get(self.index).ok_or(Refused)
    }
}

impl MemoryHost for HotHost {
    fn reveal(&mut self, end: u64) -> Result<(), Refused> {
        self.region()?.reveal(end, self.ram.file()).map_err(|_| Refused)
    }

    fn plug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // Fails if the process has too many mappings, or the kernel no memory for one more.
        self.region()?.protect(&range, access).map_err(|_| Refused)
    }

    fn unplug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        self.region()?.protect(&range, MprotectFlags::empty()).map_err(|_| Refused)
    }

    fn discard(&mut self, piece: Range<u64>) -> Result<(), Refused> {
        debug_assert_eq!(piece.end - piece.start, PIECE);
        let start = self.region()?.devices.start + piece.start;
        self.ram.discard(start).and_then(Result::ok).ok_or(Refused)
    }
}

#[cfg(test)]
mod tests {
    use slipway_machine::HotRegion;
    use slipway_virtio_mem::MIN_BLOCK;

    use super::*;
    use crate::Result;
    use crate::layout::{GIB, MIB};
    use crate::memory::tests::sealed;

    fn ram(regions: &[HotRegion]) -> Result<GuestRam> {
        let hot: u64 = regions.iter().map(|region| region.bytes).sum();
        GuestRam::with_hot_memory(sealed(64 * MIB + hot), regions)
    }

    /// Returns the bytes of the file that have pages.
    fn touched(ram: &GuestRam) -> u64 {
        rustix::fs::fstat(ram.file()).unwrap().st_blocks.cast_unsigned() * 512
    }

    #[test]
    fn regions_are_behind_the_ram_and_at_the_end_of_its_file() {
        let region = |mib, node| HotRegion { bytes: mib * MIB, node };
        let ram = ram(&[region(128, 1), region(256, 2)]).unwrap();
        assert_eq!(ram.bytes(), 64 * MIB);
        let [first, second] = ram.hot_memory() else { panic!("two regions") };
        assert_eq!((first.devices.start, first.devices.offset), (68 * GIB, 64 * MIB));
        assert_eq!((second.devices.start, second.devices.offset), (70 * GIB, 192 * MIB));
        assert_eq!((first.geometry().block, second.geometry().node), (MIN_BLOCK, 2));
        ram.memory().write(68 * GIB, b"device").unwrap();
        assert!(ram.memory().write(68 * GIB + 128 * MIB, b"x").is_err());
    }

    #[test]
    fn an_unplugged_piece_is_a_hole() {
        let ram = Arc::new(ram(&[HotRegion { bytes: 128 * MIB, node: 1 }]).unwrap());
        let mut host = HotHost::new(&ram, 0);
        assert!(HotHost::new(&ram, 1).plug(0..MIN_BLOCK).is_err());
        host.plug(0..3 * PIECE).unwrap();
        let at = 68 * GIB;
        ram.memory().write(at, &vec![7; 3 * PIECE as usize]).unwrap();
        assert_eq!(touched(&ram), 3 * PIECE);
        host.unplug(PIECE..2 * PIECE).unwrap();
        host.discard(PIECE..2 * PIECE).unwrap();
        assert_eq!(touched(&ram), 2 * PIECE);
        let mut bytes = [1; 2];
        ram.memory().read(at + PIECE - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 0]);
        host.unplug(0..2 * PIECE).unwrap();
        host.plug(0..PIECE).unwrap();
        host.plug(PIECE..2 * PIECE).unwrap();
    }

    #[test]
    fn only_plugged_blocks_can_be_touched() {
        let ram = Arc::new(ram(&[HotRegion { bytes: 128 * MIB, node: 1 }]).unwrap());
        let mut host = HotHost::new(&ram, 0);
        let hot = &ram.hot_memory()[0];
        // The kernel checks the address of the buffer, so that the test meets no fault.
        let accessible = |offset: usize| {
            let (base, _) = hot.guest.span.slice(offset, 1).io_vector();
            let (read, write) = rustix::pipe::pipe().unwrap();
            rustix::io::write(&write, &[9]).unwrap();
            use std::os::fd::AsRawFd;
            // SAFETY: the kernel writes one byte within the span, or fails.
            unsafe { libc::read(read.as_raw_fd(), base.cast(), 1) == 1 }
        };
        assert!(!accessible(0) && !accessible(127 << 20));
        host.plug(PIECE..3 * PIECE).unwrap();
        let piece = PIECE as usize;
        assert!(!accessible(piece - 1) && accessible(piece) && accessible(3 * piece - 1));
        host.unplug(2 * PIECE..3 * PIECE).unwrap();
        host.discard(2 * PIECE..3 * PIECE).unwrap();
        assert!(accessible(2 * piece - 1) && !accessible(2 * piece));
        assert_eq!(touched(&ram), 2 * 4096, "of three pages that were touched");
    }

    #[test]
    fn a_file_without_room_for_its_regions_is_refused() {
        let only = HotRegion { bytes: 128 * MIB, node: 1 };
        let small = GuestRam::with_hot_memory(sealed(128 * MIB), &[only]).err().unwrap();
        assert!(small.to_string().contains("0 bytes; a machine has 64 MiB"), "{small}");
        let short = GuestRam::with_hot_memory(sealed(64 * MIB), &[only]).err().unwrap();
        assert!(short.to_string().contains("64 MiB"), "{short}");
    }
}
