//! Anonymous memory that costs nothing until it is written.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Zeroed memory of this process alone, of any size: pages appear when they are written
/// (`MAP_NORESERVE`) and can be given back.
pub(crate) struct Anonymous {
    base: *mut u8,
    len: usize,
    /// In a file that others may hold, but nobody else uses.
    shared: bool,
}

// SAFETY: plain memory owned by this value; `&self` reads it and `&mut self` changes it.
unsafe impl Send for Anonymous {}
// SAFETY: as above.
unsafe impl Sync for Anonymous {}

/// Smallest page of this machine, in bytes.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Bytes that are fetched ahead of a copy: enough for the processor to find the rest by itself, and
/// few enough not to fill its queue of outstanding misses for long. (Of 0, 1 and 4 KiB, 1 KiB was
/// the fastest for random 4 KiB pieces.)
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
    /// `len` zero bytes, at least one.
    ///
    /// # Errors
    /// What mmap(2) says: no address space, or strict overcommit and not that much memory.
    pub fn new(len: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len.max(1), prot, flags)? };
        let memory = Self { base: base.cast(), len: len.max(1), shared: false };
        // What a guest stored is no business of this process's core dump.
        memory.advise(Advice::LinuxDontDump);
        Ok(memory)
    }

    /// `len` bytes from `start`, a multiple of the page size, of `file`: a memfd that is sealed against
    /// shrinking and has that many. Nobody else may map them as long as this value lives. Reading what
    /// was never written makes a page here, as [`Anonymous::new`]'s does not.
    ///
    /// # Errors
    /// As for [`Anonymous::new`].
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

    /// Forbids huge pages, so that a small write costs a small page.
    pub fn small_pages(self) -> Self {
        self.advise(Advice::LinuxNoHugepage);
        self
    }

    /// Asks for huge pages: one costs 2 MiB at the first write to it, and random accesses then need
    /// few entries of the processor's address translation. A kernel that has none gives small ones.
    pub fn huge_pages(self) -> Self {
        self.advise(Advice::LinuxHugepage);
        self
    }

    /// Has the processor fetch the first bytes of `range`, up to [`AHEAD`] of them, for reading or
    /// for writing. A hint; whatever lies outside is not fetched.
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

    /// All of it. Reading what was never written allocates nothing, unless it is a file's.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped readable for `len` bytes as long as `self` lives, private to this
        // process, and changed through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    /// All of it, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    /// All whole words of it.
    pub fn words(&self) -> &[u64] {
        // SAFETY: as for `bytes`; a mapping begins at a page, and any bytes are words.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len / 8) }
    }

    /// All whole words of it, to change.
    pub fn words_mut(&mut self) -> &mut [u64] {
        // SAFETY: as for `words`; `&mut self` makes the borrow unique.
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

    /// Whether the kernel took the pages back; they read as zeros then.
    fn give_back(&mut self, pages: Range<usize>) -> bool {
        let at = self.bytes_mut()[pages.clone()].as_mut_ptr();
        let advice = if self.shared { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        // SAFETY: whole pages of our own mapping, borrowed uniquely: nothing refers to their
        // bytes. Private anonymous pages read as zeros afterwards (madvise(2), MADV_DONTNEED), and so
        // do those of a file in memory (MADV_REMOVE).
        unsafe { rustix::mm::madvise(at.cast(), pages.len(), advice).is_ok() }
    }

    fn advise(&self, advice: Advice) {
        // SAFETY: our own mapping; these advices change no byte. A kernel that does not know one
        // loses an economy, nothing else.
        let _ = unsafe { rustix::mm::madvise(self.base.cast(), self.len, advice) };
    }
}

/// A file of `bytes` zero bytes that is memory, takes pages as they are written, and outlives this
/// process as long as somebody holds the descriptor. `seals` keep its size as it is.
///
/// # Errors
/// No descriptors left; strict overcommit, under which the kernel may refuse a page at its first touch,
/// by a signal.
pub(crate) fn memory_file(bytes: u64, seals: SealFlags) -> io::Result<OwnedFd> {
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?;
    if overcommit.trim() == "2" {
        let text =
            "a disk in memory that is shared or kept needs vm.overcommit_memory to be 0 or 1";
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("slipway-disk", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Seals of a file whose size is for ever.
pub(crate) const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Size of a file that nobody can shrink; `InvalidData` for others.
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
        // SAFETY: mapped by `new` with this length; no borrow of it can be alive.
        unsafe { slipway_ram::unmap(self.base, self.len) };
    }
}
