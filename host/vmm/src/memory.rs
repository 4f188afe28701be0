//! The guest's memory: one file in memory that the launcher made, mapped once.
//!
//! KVM's memory slots, the loader and the devices of this process share the one mapping. Servers of
//! vfio-user functions map the same file themselves.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};

use kvm_ioctls::VmFd;
use rustix::mm::Advice;
use rustix::thread::MembarrierCommand;
use slipway_machine::HotRegion;
use slipway_pool_wire::{HandOver, Range};
use slipway_ram::{DmaMap, Memory, PAGE, Permissions};

use crate::hot_memory::{self, HotMemory};
use crate::layout::{self, GIB, HUGE_PAGE as HUGE, MIB};
use crate::part::Part;
use crate::shared::SharedPages;
use crate::{Error, Result};

/// The memory of a guest.
pub struct GuestRam {
    file: OwnedFd,
    map: DmaMap,
    bytes: u64,
    parts: Vec<Part>,
    /// Pages behind the RAM that the guest can only read.
    shared: Option<SharedPages>,
    /// Regions of which the guest plugs and unplugs blocks.
    hot: Vec<HotMemory>,
    /// The connection to the pool that gave the memory and serves its faults. Its end tells the
    /// pool to look whether this process is gone.
    lease: Option<OwnedFd>,
    /// Set for memory of a pool that did not begin as a template: its pages are the pool's.
    recycled: bool,
}

impl GuestRam {
    /// Maps `file`, all of whose bytes are RAM, for tests.
    ///
    /// # Errors
    /// As for [`GuestRam::with_hot_memory`].
    #[cfg(any(test, feature = "fuzz"))]
    pub fn new(file: OwnedFd) -> Result<Self> {
        Self::with_hot_memory(file, &[])
    }

    /// Maps `file`, at whose end are the bytes of `regions`, in their order; the bytes before are
    /// the RAM.
    ///
    /// # Errors
    /// [`Error::Memory`]: the file has a size that the machine does not support, is not sealed
    /// against shrinking, or cannot be mapped. [`Error::Config`] for regions that no machine can
    /// have.
    pub fn with_hot_memory(file: OwnedFd, regions: &[HotRegion]) -> Result<Self> {
        let ram = Self::map(file, regions)?;
        if ram.map.regions().iter().any(|(_, region)| region.is_guarded()) {
            let what = "its file is not a memfd that is sealed against shrinking";
            return Err(Error::Memory(what.into()));
        }
        Ok(ram)
    }

    /// Maps `file`: the RAM, and behind it the regions.
    fn map(file: OwnedFd, regions: &[HotRegion]) -> Result<Self> {
        let failed = |error: io::Error| Error::Memory(error.to_string());
        let room = hot_memory::check(regions)?;
        let found = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
        let bytes = u64::try_from(found.st_size).unwrap_or(0).saturating_sub(room);
        if !(layout::MIN_MEMORY..=layout::MAX_MEMORY).contains(&bytes) || bytes % MIB != 0 {
            return Err(Error::Memory(format!(
                "{bytes} bytes; a machine has {} MiB to {} GiB, in whole MiB",
                layout::MIN_MEMORY / MIB,
                layout::MAX_MEMORY / GIB
            )));
        }
        let mut map = DmaMap::new();
        let mut parts = Vec::new();
        for (range, offset) in layout::ram(bytes) {
            let len = range.end - range.start;
            let place = (range.start, offset, len);
            let part = Part::new(&mut map, file.as_fd(), place, Permissions::READ_WRITE);
            parts.push(part.map_err(failed)?);
        }
        let starts = layout::hot_memory(bytes, regions.iter().map(|region| region.bytes));
        let (mut hot, mut offset) = (Vec::new(), bytes);
        for (region, start) in regions.iter().zip(starts) {
            let (place, unit) = ((start, offset), layout::hot_memory_block(bytes));
            let mapped = HotMemory::new(&mut map, file.as_fd(), place, *region, unit);
            hot.push(mapped.map_err(failed)?);
            offset += region.bytes;
        }
        let (shared, lease, recycled) = (None, None, false);
        Ok(Self { file, map, bytes, parts, shared, hot, lease, recycled })
    }

    /// Maps `file`, memory of a pool whose pages may still have the bytes of an earlier guest, and
    /// hands the faults of the mappings to the pool over `connection`. On return, each page is zero
    /// when this process or the guest first sees it, or the template's, and no descriptor shows
    /// anything else. Its pages may be huge: the pool has them reserved, so that none is missing.
    ///
    /// Memory that began as a template has the bytes of `regions` at its end, as
    /// [`GuestRam::with_hot_memory`] has them: both mappings of a region are handed over.
    ///
    /// # Errors
    /// As for [`GuestRam::with_hot_memory`]; or the pool does not serve the faults.
    /// [`Error::Config`] for regions in recycled memory, whose pages are the pool's to give back.
    pub fn leased(file: OwnedFd, connection: OwnedFd, regions: &[HotRegion]) -> Result<Self> {
        let failed = |error: slipway_pool_wire::WireError| Error::Memory(error.to_string());
        let hand_over = HandOver::begin(connection).map_err(failed)?;
        let recycled = !hand_over.traits.fork;
        if recycled && !regions.is_empty() {
            return Err(Error::Config("recycled memory of a pool has no hot-plug memory".into()));
        }
        let ram = Self::map(file, regions)?;
        let range = |part: &Part| Range {
            address: part.span.io_vector().0.addr() as u64,
            len: part.len,
            offset: part.offset,
        };
        let hot = ram.hot.iter().flat_map(|hot| [&hot.devices, &hot.guest]);
        let ranges: Vec<Range> = ram.parts.iter().chain(hot).map(range).collect();
        let (connection, token) = hand_over.finish(&ranges).map_err(failed)?;
        Ok(Self { file: token, lease: Some(connection), recycled, ..ram })
    }

    /// Returns the size of the guest's RAM in bytes, which is there from the start.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the handle by which devices and the loader reach the memory.
    pub fn memory(&self) -> Memory {
        self.map.memory()
    }

    /// Returns the ranges of guest-physical addresses that hold RAM, ascending.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Adds the pages of `file` behind the RAM, for the guest and for devices to read.
    ///
    /// # Errors
    /// [`Error::SharedPages`].
    pub fn share(&mut self, file: OwnedFd) -> Result<()> {
        let start = layout::shared_pages(self.bytes);
        self.shared = Some(SharedPages::new(&mut self.map, file, start)?);
        Ok(())
    }

    /// Returns the pages behind the RAM that the guest can only read.
    pub fn shared(&self) -> Option<&SharedPages> {
        self.shared.as_ref()
    }

    /// Returns the regions of which the guest plugs and unplugs blocks, in the order of the
    /// configuration.
    pub fn hot_memory(&self) -> &[HotMemory] {
        &self.hot
    }

    /// Returns a descriptor that names the file of the memory. That of a pool can be neither read
    /// nor mapped.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns whether a pool gave the memory and its pages are the pool's to give back, since an
    /// earlier guest may have had them. Memory that began as a template has pages of its own.
    pub fn is_recycled(&self) -> bool {
        self.recycled
    }

    /// Gives each part, shared pages, and each region of hot-plug memory to KVM as a memory slot of
    /// `vm`, numbered from 0.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn give_to(&self, vm: &VmFd) -> Result<()> {
        for (slot, part) in self.slots().enumerate() {
            // SAFETY: `self` has the part, and a `Machine` owns it together with all CPUs.
            unsafe { part.give_to(vm, slot) }?;
        }
        Ok(())
    }

    /// Has KVM and this process note the pages of the RAM that they write to, from the return on;
    /// or stop doing so. KVM has the memory as slots of `vm`.
    ///
    /// # Errors
    /// [`Error::Kvm`]. Some of the writes may be noted then, or may still be.
    pub(crate) fn set_log(&self, vm: &VmFd, log: bool) -> Result<()> {
        let regions = self.map.regions();
        let is_ram = |start: u64| self.parts.iter().any(|part| part.start == start);
        let own: Vec<_> = regions.iter().filter(|(start, _)| is_ram(*start)).collect();
        self.end_own_log();
        for (slot, part) in self.parts.iter().enumerate() {
            // SAFETY: as in `give_to`.
            unsafe { part.set_log(vm, slot, log) }?;
        }
        if log {
            for (_, region) in &own {
                region.log_writes();
            }
            // A device on another thread that has found no log has written its bytes before this
            // returns.
            let barrier = rustix::thread::membarrier(MembarrierCommand::Global);
            barrier.map_err(Error::system("waiting for the devices' threads"))?;
        }
        Ok(())
    }

    /// Ends the log of this process's writes. Without it nobody tells what was written to.
    pub(crate) fn end_own_log(&self) {
        self.map.regions().iter().for_each(|(_, region)| region.end_log());
    }

    /// Returns a bit for each page of each part that KVM or this process has written to since the
    /// last call: the first page's is the lowest of the first word.
    ///
    /// # Errors
    /// [`Error::Kvm`]; [`Error::State`] if writes are not noted. Bits may be lost then.
    pub(crate) fn take_written(&self, vm: &VmFd) -> Result<Vec<Vec<u64>>> {
        let regions = self.map.regions();
        let of_part = |(slot, part): (usize, &Part)| -> Result<Vec<u64>> {
            let words = vm.get_dirty_log(slot as u32, part.len as usize);
            let mut words = words.map_err(Error::kvm("tell what the guest has written"))?;
            let pages = part.len as usize / PAGE;
            words.resize(pages.div_ceil(64), 0);
            let region = regions.iter().find(|(start, _)| *start == part.start);
            let taken = region.is_some_and(|(_, region)| region.take_written(0..pages, &mut words));
            let missing = || Error::State("writes to the memory are not noted".into());
            taken.then_some(words).ok_or_else(missing)
        };
        self.parts.iter().enumerate().map(of_part).collect()
    }

    fn slots(&self) -> impl Iterator<Item = &Part> {
        let shared = self.shared.iter().map(|shared| &shared.part);
        let hot = self.hot.iter().map(|hot| &hot.guest);
        self.parts.iter().chain(shared).chain(hot)
    }

    /// Makes one huge page of the [`layout::HUGE_PAGE`] bytes at the guest-physical address
    /// `start`, which stay as they are. Returns `false` if the kernel cannot, or they are not all
    /// RAM; memory of a pool stays as the pool gave it.
    pub(crate) fn make_huge(&self, start: u64) -> bool {
        let part = self.parts.iter().find(|part| part.holds(start, HUGE));
        let Some(part) = part.filter(|_| self.lease.is_none()) else { return false };
        let (base, len) = part.span.slice((start - part.start) as usize, HUGE as usize).io_vector();
        // SAFETY: the range is pinned, and advice changes no byte of it.
        let advise = |len, advice| unsafe { libc::madvise(base.cast(), len, advice) == 0 };
        // Where there is no page at all, none can be collapsed.
        advise(1, libc::MADV_POPULATE_WRITE) && advise(len, libc::MADV_COLLAPSE)
    }

    /// Makes a hole in the file where the [`layout::HUGE_PAGE`] bytes from the guest-physical
    /// address `start` on are, in RAM or hot-plug memory: the host has their pages back, and they
    /// read as zeros. Bytes of a template that were not copied yet have no page, and stay as they
    /// are. The hole is made by the mapping, since no descriptor of a pool's memory can be written
    /// to. Returns `None` if the bytes are not all in such memory.
    pub(crate) fn discard(&self, start: u64) -> Option<io::Result<()>> {
        let hot = self.hot.iter().map(|hot| &hot.devices);
        let part = self.parts.iter().chain(hot).find(|part| part.holds(start, HUGE))?;
        let (base, len) = part.span.slice((start - part.start) as usize, HUGE as usize).extent();
        // SAFETY: the range is pinned and of whole pages. The guest has given up its bytes, and no
        // Rust reference points into guest memory.
        let removed = unsafe { rustix::mm::madvise(base.cast(), len, Advice::LinuxRemove) };
        Some(removed.map_err(io::Error::from))
    }

    /// Reads `len` bytes at `offset` of `file` to the guest-physical address `start`, without a
    /// copy in between. From 2 MiB on, the memory gets huge pages if there are any.
    ///
    /// # Errors
    /// `InvalidInput` if the range is not within one part of the RAM, `UnexpectedEof` if the file
    /// ends before, or an error of pread(2).
    pub(crate) fn load(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        start: u64,
        len: u64,
    ) -> io::Result<()> {
        let part = self.parts.iter().find(|part| part.holds(start, len));
        let part = part.ok_or(io::ErrorKind::InvalidInput)?;
        let span = part.span.slice((start - part.start) as usize, len as usize);
        let (base, len) = span.io_vector();
        let mut done = 0;
        while done < len {
            use std::os::fd::AsRawFd;
            let at = i64::try_from(offset + done as u64).map_err(io::Error::other)?;
            let address = start + done as u64;
            let page = address & !(HUGE - 1);
            if len as u64 >= HUGE && (done == 0 || address == page) {
                self.make_huge(page);
            }
            let most = (page + HUGE - address).min((len - done) as u64) as usize;
            // SAFETY: the kernel writes at most `most` bytes within the span, which is pinned. No
            // Rust reference points into guest memory.
            let read = unsafe { libc::pread(file.as_raw_fd(), base.add(done).cast(), most, at) };
            match read {
                ..0 => match io::Error::last_os_error() {
                    error if error.kind() == io::ErrorKind::Interrupted => {}
                    error => return Err(error),
                },
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read as usize,
            }
        }
        Ok(())
    }
}

/// Bytes of memory from which on KVM takes longer for the slots than it takes to start a thread.
const MANY_BYTES: u64 = GIB;

/// Memory that KVM is about to have as memory slots. KVM makes its tables of the pages meanwhile:
/// 0.3 to 0.5 ms for each GiB, in which the rest of the machine is made.
#[must_use]
pub(crate) struct MemorySlots(Option<Receiver<Result<()>>>);

impl MemorySlots {
    /// Begins to give `ram` to `vm`. From 1 GiB on a thread does it, which ends by itself.
    ///
    /// # Errors
    /// [`Error::Kvm`]; [`Error::System`] if no thread can be started.
    pub fn begin(vm: &Arc<VmFd>, ram: &Arc<GuestRam>) -> Result<Self> {
        if ram.slots().map(|part| part.len).sum::<u64>() < MANY_BYTES {
            return ram.give_to(vm).map(|()| Self(None));
        }
        let (tell, told) = mpsc::sync_channel(1);
        let (vm, ram) = (Arc::clone(vm), Arc::clone(ram));
        let builder = std::thread::Builder::new().name("slots".into());
        let thread = builder.spawn(move || tell.send(ram.give_to(&vm)));
        thread.map_err(Error::system("starting a thread"))?;
        Ok(Self(Some(told)))
    }

    /// Waits until KVM has the memory.
    ///
    /// # Errors
    /// [`Error::Kvm`]; [`Error::System`] if the thread ended without an answer.
    pub fn finish(&mut self) -> Result<()> {
        let Some(told) = self.0.take() else { return Ok(()) };
        let ended = |_| Error::system("giving memory to KVM")(io::Error::other("the thread ended"));
        told.recv().map_err(ended)?
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rustix::fs::{MemfdFlags, SealFlags};

    use super::*;

    /// Makes a sealed file of `bytes` bytes, as a launcher does.
    pub(crate) fn sealed(bytes: u64) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"guest", flags).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        file
    }

    #[test]
    fn memory_of_an_impossible_size_or_kind_is_refused() {
        let refused = |file| GuestRam::new(file).err().unwrap().to_string();
        assert!(refused(sealed(0)).contains("64 MiB to 256 GiB"));
        assert!(refused(sealed(64 * MIB + 4096)).contains("in whole MiB"));
        assert!(refused(sealed(257 * GIB)).contains("64 MiB to 256 GiB"));
        let open = rustix::fs::memfd_create(c"guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&open, 64 * MIB).unwrap();
        assert!(refused(open).contains("sealed"));
    }

    #[test]
    fn without_a_log_nobody_tells_what_was_written() {
        let Ok(kvm) = kvm_ioctls::Kvm::new() else {
            println!("SKIPPED: without_a_log_nobody_tells_what_was_written: needs /dev/kvm");
            return;
        };
        let (vm, ram) = (kvm.create_vm().unwrap(), GuestRam::new(sealed(64 * MIB)).unwrap());
        ram.give_to(&vm).unwrap();
        assert!(ram.take_written(&vm).is_err());
        for _ in 0..2 {
            ram.memory().write(4096, &[1]).unwrap();
            ram.set_log(&vm, true).unwrap();
            assert!(ram.take_written(&vm).unwrap()[0].iter().all(|word| *word == 0));
            ram.memory().write(65 * 4096, &[1]).unwrap();
            let written = ram.take_written(&vm).unwrap();
            assert_eq!((written.len(), written[0].len()), (1, 256));
            assert_eq!(written[0][..3], [0, 2, 0]);
            ram.end_own_log();
            assert!(ram.take_written(&vm).is_err(), "KVM's part alone is not all");
            ram.set_log(&vm, false).unwrap();
            assert!(ram.take_written(&vm).is_err());
        }
    }

    #[test]
    fn what_is_given_back_is_a_hole_and_its_neighbours_stay() {
        let ram = GuestRam::new(sealed(64 * MIB)).unwrap();
        ram.memory().write(0, &vec![7; 3 * HUGE as usize]).unwrap();
        let pages = || rustix::fs::fstat(ram.file()).unwrap().st_blocks / 8;
        assert_eq!(pages(), 3 * 512);
        for _ in 0..2 {
            ram.discard(HUGE).unwrap().unwrap();
            assert_eq!(pages(), 2 * 512);
        }
        for (at, expected) in [(HUGE - 1, [7, 0]), (2 * HUGE - 1, [0, 7])] {
            let mut bytes = [1; 2];
            ram.memory().read(at, &mut bytes).unwrap();
            assert_eq!(bytes, expected);
        }
        for outside in [64 * MIB, 63 * MIB, u64::MAX - HUGE + 1, !0] {
            assert!(ram.discard(outside).is_none(), "{outside:#x}");
        }
    }

    #[test]
    fn a_file_is_loaded_into_ram_and_nowhere_else() {
        let ram = GuestRam::new(sealed(64 * MIB)).unwrap();
        let file = rustix::fs::memfd_create(c"kernel", MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, b"0123456789").unwrap();
        ram.load(file.as_fd(), 2, 0x1000, 5).unwrap();
        let mut bytes = [0; 6];
        ram.memory().read(0x1000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"23456\0");
        let failure = |offset, start, len| ram.load(file.as_fd(), offset, start, len).unwrap_err();
        assert_eq!(failure(0, 0, 11).kind(), io::ErrorKind::UnexpectedEof);
        for (start, len) in [(64 * MIB - 1, 2), (u64::MAX, 2), (64 * MIB, 1)] {
            assert_eq!(failure(0, start, len).kind(), io::ErrorKind::InvalidInput);
        }
    }
}
