//! Memory that takes no pages until it is written.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Zeroed memory for this process's use only, of any size. Pages appear when they are written
/// (`MAP_NORESERVE`) and can be given back.
pub(crate) struct Anonymous {
    base: *mut u8,
    len: usize,
    /// The memory is a file's, which other processes may hold but do not use.
    shared: bool,
}

// SAFETY: plain memory owned by this value; `&self` reads it and `&mut self` changes it.
unsafe impl Send for Anonymous {}
// SAFETY: plain memory owned by this value; `&self` only reads it.
unsafe impl Sync for Anonymous {}

/// Returns the bytes of this machine's smallest page.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Bytes that are prefetched ahead of a copy: enough for the processor's own prefetcher to find the
/// rest, and few enough not to fill its queue of outstanding misses for long. (Of 0, 1 and 4 KiB, 1
/// KiB was the fastest for random 4 KiB pieces.)
const AHEAD: usize = 1024;
/// Bytes of a cache line.
const LINE: usize = 64;

#[cfg(target_arch = "x86_64")]
#[inline]
fn prefetch_line(line: *const u8, write: bool) {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch reads nothing as far as the program can tell, and never faults.
    unsafe {
        if write {
            _mm_prefetch::<_MM_HINT_ET0>(line.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T1>(line.cast());
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line(_line: *const u8, _write: bool) {}

impl Anonymous {
    /// Maps `len` zero bytes, at least one.
    ///
    /// # Errors
    /// The errors of mmap(2): no address space, or strict overcommit without that much memory.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len.max(1), prot, flags)? };
        let memory = Self { base: base.cast(), len: len.max(1), shared: false };
        // Guest data must not appear in this process's core dump.
        memory.advise(Advice::LinuxDontDump);
        Ok(memory)
    }

    /// Maps `len` bytes of `file` from `start`, a multiple of the page size. The file must be a
    /// memfd that is sealed against shrinking and has that many bytes. Nobody else may use them
    /// while this value lives. Unlike in [`Anonymous::new`]'s memory, reading an unwritten page
    /// allocates it.
    ///
    /// # Errors
    /// The errors of [`Anonymous::new`].
    pub fn of(file: &OwnedFd, start: u64, len: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, file, start)? };
        let memory = Self { base: base.cast(), len, shared: true };
        memory.advise(Advice::LinuxDontDump);
        Ok(memory)
    }

    /// Forbids huge pages, so that a small write takes a small page.
    pub fn small_pages(self) -> Self {
        self.advise(Advice::LinuxNoHugepage);
        self
    }

    /// Asks for huge pages: each takes 2 MiB at the first write to it, and random accesses then
    /// need few TLB entries. A kernel without huge pages gives small ones.
    pub fn huge_pages(self) -> Self {
        self.advise(Advice::LinuxHugepage);
        self
    }

    /// Prefetches the first bytes of `range`, up to [`AHEAD`] of them, for reading or for writing.
    /// A hint; a range that begins or ends outside the memory is ignored.
    #[inline]
    pub fn prefetch(&self, range: Range<usize>, write: bool) {
        let len = range.len().min(AHEAD);
        let Some(bytes) = self.bytes().get(range.start..range.start.saturating_add(len)) else {
            return;
        };
        for line in bytes.chunks(LINE) {
            prefetch_line(line.as_ptr(), write);
        }
    }

    /// Returns all of the memory. Reading unwritten pages allocates nothing, except those of a
    /// file.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped readable for `len` bytes as long as `self` lives, used by nobody else, and
        // changed through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    /// Returns all of the memory, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped writable for `len` bytes and used by nobody else; `&mut self` makes the
        // borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    /// Returns all whole words of the memory.
    pub fn words(&self) -> &[u64] {
        // SAFETY: mapped readable for `len` bytes and changed through `&mut self` only; a mapping
        // begins at a page, and any bytes are words.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len / 8) }
    }

    /// Returns all whole words of the memory, mutable.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: mapped writable for `len` bytes, page-aligned, and any bytes are words; `&mut
        // self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.len / 8) }
    }

    /// Makes `range` read as zeros and gives its whole pages back.
    pub fn zero(&mut self, range: Range<usize>) {
        let page = page_size();
        let first = range.start.next_multiple_of(page);
        let last = if range.end == self.len { range.end } else { range.end / page * page };
        if first >= last || !self.give_back(first..last) {
            self.bytes_mut()[range].fill(0);
            return;
        }
        self.bytes_mut()[range.start..first].fill(0);
        self.bytes_mut()[last..range.end].fill(0);
    }

    /// Gives pages back to the kernel, after which they read as zeros. The range consists of whole
    /// pages. Returns whether the kernel took them; otherwise nothing has changed.
    pub fn give_back(&mut self, pages: Range<usize>) -> bool {
        let at = self.bytes_mut()[pages.clone()].as_mut_ptr();
        let advice = if self.shared { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: whole pages of our own mapping, borrowed uniquely: nothing refers to their bytes.
        // Private anonymous pages read as zeros afterwards (madvise(2), MADV_DONTNEED), and so do
        // those of a memfd (MADV_REMOVE).
        unsafe { rustix::mm::madvise(at.cast(), pages.len(), advice).is_ok() }
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: our own mapping; these kinds of advice change no byte. A kernel that does not
        // know one only forgoes an optimisation.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, advice) };
    }
}

/// Creates a memfd of `bytes` zero bytes, which takes pages as they are written and outlives this
/// process as long as a process holds the descriptor. `seals` restrict changes of its size.
///
/// # Errors
/// If no descriptors are left, or under strict overcommit, under which the kernel may refuse a page
/// at its first touch, by a signal.
pub(crate) fn memory_file(bytes: u64, seals: SealFlags) -> io::Result<OwnedFd> {
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?;
    if overcommit.trim() == "2" {
        let text = "overlays, and disks in memory that are shared or kept, need \
                    vm.overcommit_memory to be 0 or 1";
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("slipway-disk", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// The seals of a file whose size never changes.
pub(crate) const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Returns the size of a file that is sealed against shrinking, or `InvalidData` for any other
/// file.
pub(crate) fn sealed_len(file: &OwnedFd) -> io::Result<u64> {
    let sealed = rustix::fs::fcntl_get_seals(file).is_ok_and(|s| s.contains(SealFlags::SHRINK));
    match u64::try_from(rustix::fs::fstat(file)?.st_size) {
        Ok(bytes) if sealed => Ok(bytes),
        _ => {
            let text = "a file that is no memory of a disk";
            Err(io::Error::new(io::ErrorKind::InvalidData, text))
        }
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` or `of` with this length; no borrow of it can be alive.
        unsafe { slipway_ram::unmap(self.base, self.len) };
    }
}
