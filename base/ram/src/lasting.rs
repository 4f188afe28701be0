//! Memory that outlives this process, from which a successor process goes on.
//!
//! A [`Lasting`] is a memfd, mapped shared, as words. The keeper holds its descriptor and gives it
//! to the next process, which maps the same bytes. A process that is killed stops between two
//! instructions, so the memory holds a prefix of its stores in program order: stores with release
//! ordering are enough for "first this, then that", and no flush is needed. (Power loss is another
//! matter: everything here is memory.)
//!
//! A [`Snapshots`] holds a value of variable length that changes atomically: two places, and a word
//! that tells which of them is current.
//!
//! The bytes were written by this program, of this or of an earlier version: a successor validates
//! them and refuses unknown contents, but no attacker writes here. Words that are shared with
//! another party, through a passed descriptor or over that party's memory ([`Lasting::over`]), are
//! untrusted.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::pages::{self, Pages};
use crate::{Access, Span};

/// Size and alignment of a huge page in bytes.
const HUGE: usize = 2 << 20;
/// Largest file in bytes that the dropping thread closes and unmaps itself; a disposal thread takes
/// larger ones.
const AT_ONCE: u64 = 32 << 20;

/// 64-bit words in a memfd that outlives the process, in guest memory, or on the heap for tests.
/// Cheap to clone.
#[derive(Clone)]
pub struct Lasting {
    memory: Arc<Memory>,
    start: usize,
    len: usize,
}

struct Memory {
    base: *mut u8,
    words: usize,
    holder: Holder,
}

/// Owner of the memory, which decides how it is freed.
enum Holder {
    /// Memory mapped from this file.
    File(OwnedFd),
    /// A pinned piece of another party's memory.
    Span(#[allow(dead_code)] Span), // held, not read
    Heap,
    /// The memory is being freed: `drop` has taken the holder out.
    None,
}

// SAFETY: the words are accessed as atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.holder, Holder::None) {
            Holder::File(file) => {
                let len = rustix::fs::fstat(&file).map_or(u64::MAX, |stat| stat.st_size as u64);
                // SAFETY: mapped in `map` with this length; all borrows of the words have ended.
                let pages = unsafe { Pages::new(self.base.cast(), self.words * 8, 1) };
                // The last close frees all of the file's pages.
                if len > AT_ONCE {
                    pages::own().discard_value((pages, file));
                }
            }
            Holder::Span(_) | Holder::None => {}
            Holder::Heap => {
                let words = std::ptr::slice_from_raw_parts_mut(self.base.cast(), self.words);
                // SAFETY: leaked from a box of this type and length in `heap`.
                drop(unsafe { Box::<[AtomicU64]>::from_raw(words) });
            }
        }
    }
}

impl Lasting {
    /// Creates a memfd of `bytes` zero bytes, rounded up to whole pages. Pages take no memory until
    /// they are written.
    ///
    /// # Errors
    /// If no descriptor or no address space is left.
    pub fn new(name: &str, bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        // So that a mapping of the file cannot lose its pages.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, bytes)
    }

    /// Creates a zeroed huge page of 2 MiB in a memfd of its own. It is physically contiguous and
    /// does not move.
    ///
    /// # Errors
    /// If no huge page is free (`vm.nr_hugepages`), or no descriptor is left.
    pub fn huge(name: &str) -> std::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file =
            rustix::fs::memfd_create(name, flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        rustix::fs::ftruncate(&file, HUGE as u64)?;
        // Allocates the page now: otherwise a touch could raise SIGBUS.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HUGE as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, HUGE)
    }

    /// Returns the words of a pinned piece of another party's memory. Returns `None` if the region
    /// does not allow both reads and writes, if its owner may take it away (a touch would raise
    /// SIGBUS), if the address is not a multiple of 8, or if it is shorter than a word.
    pub fn over(span: Span) -> Option<Self> {
        let (base, len) = span.io_vector();
        let words = len / 8;
        let fits = base.addr().is_multiple_of(align_of::<AtomicU64>()) && words > 0;
        let allowed = span.allows(Access::Read) && span.allows(Access::Write);
        (fits && allowed && !span.is_guarded()).then(|| {
            let memory = Memory { base, words, holder: Holder::Span(span) };
            Self { memory: Arc::new(memory), start: 0, len: words }
        })
    }

    /// Maps the memory that a predecessor left in `file`.
    ///
    /// # Errors
    /// `InvalidData` if the file is empty, no multiple of 8 bytes or not sealed against shrinking;
    /// errors of fstat(2) and mmap(2).
    pub fn of(file: OwnedFd) -> std::io::Result<Self> {
        let bytes = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        Self::beginning_of(file, bytes)
    }

    /// Maps the first `bytes` bytes of a predecessor's file, whose rest holds something else.
    ///
    /// # Errors
    /// As for [`Lasting::of`]; also `InvalidData` if the file is shorter than `bytes`, or `bytes`
    /// is 0 or no multiple of 8.
    pub fn beginning_of(file: OwnedFd, bytes: usize) -> std::io::Result<Self> {
        let held = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        let sealed =
            rustix::fs::fcntl_get_seals(&file).is_ok_and(|s| s.contains(SealFlags::SHRINK));
        if bytes == 0 || bytes > held || !bytes.is_multiple_of(8) || !sealed {
            let text = "a file that is no memory of a predecessor";
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, text));
        }
        Self::map(file, bytes)
    }

    /// Maps the first `bytes` bytes of a file that cannot shrink.
    fn map(file: OwnedFd, bytes: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of this
        // process.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, &file, 0)?
        };
        let words = bytes / 8;
        let memory = Memory { base: base.cast(), words, holder: Holder::File(file) };
        Ok(Self { memory: Arc::new(memory), start: 0, len: words })
    }

    /// Returns zeroed words on the heap, for tests in which the successor is another object of the
    /// same process.
    pub fn heap(bytes: usize) -> Self {
        let words: Box<[AtomicU64]> = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let (len, base) = (words.len(), Box::into_raw(words).cast());
        Self { memory: Arc::new(Memory { base, words: len, holder: Holder::Heap }), start: 0, len }
    }

    /// Returns the descriptor to give to the keeper. Returns `None` on the heap and over another
    /// party's memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory.holder {
            Holder::File(file) => Some(file.as_fd()),
            Holder::Span(_) | Holder::Heap | Holder::None => None,
        }
    }

    /// Returns whether unused pages can be freed and allocated anew: only ordinary pages of a memfd
    /// can. A hole in a huge page's file can only be the whole page.
    pub fn has_small_pages(&self) -> bool {
        self.file().is_some_and(|file| {
            rustix::fs::fstatfs(file)
                .is_ok_and(|system| system.f_bsize as usize == rustix::param::page_size())
        })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len * 8
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Splits after the first `bytes` bytes, a multiple of 8. Returns `None` if there are fewer.
    pub fn split(&self, bytes: usize) -> Option<(Self, Self)> {
        let words = bytes / 8;
        let rest = self.len.checked_sub(words)?;
        let part = |start, len| Self { memory: self.memory.clone(), start, len };
        Some((part(self.start, words), part(self.start + words, rest)))
    }

    /// Returns the words.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: aligned to 8 bytes at least and mapped, or allocated, or pinned, for as long as
        // `memory` lives; the file is sealed against shrinking, and so is the file of a span that
        // is not guarded; `split` keeps parts within the whole. All access by this process is
        // atomic.
        unsafe {
            let base = self.memory.base.cast::<AtomicU64>().add(self.start);
            std::slice::from_raw_parts(base, self.len)
        }
    }

    /// Returns the address of the bytes, for system calls that write to them. It is valid, and
    /// stays the same, as long as this value lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.words().as_ptr().cast_mut().cast()
    }

    /// Stores `from` from the first word on, and zeros behind it up to a whole word. Bytes beyond
    /// the memory are dropped.
    fn store_bytes(&self, from: &[u8]) {
        for (word, bytes) in self.words().iter().zip(from.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
    }

    /// Returns the first `len` bytes, or all if there are fewer.
    fn load_bytes(&self, len: usize) -> Vec<u8> {
        let words = self.words().iter().take(len.div_ceil(8));
        let mut bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// A value of bounded length that changes atomically.
///
/// Word 0 counts the changes; the value of change `n` is in place `n % 2`, and the lengths of the
/// two places' values are in words 1 and 2. A change writes the place that is not current, then
/// word 0.
pub struct Snapshots {
    head: Lasting,
    places: [Lasting; 2],
}

impl Snapshots {
    /// Bytes of the header: a cache line.
    const HEAD: usize = 64;
    /// The word that counts the changes.
    const CHANGES: usize = 0;
    /// The words with the lengths of the two places' values.
    const LENGTHS: [usize; 2] = [1, 2];

    /// Uses all of `memory`, of which a value may fill a little less than half. Returns `None` if
    /// `memory` is shorter than the header.
    pub fn new(memory: &Lasting) -> Option<Self> {
        let (head, rest) = memory.split(Self::HEAD)?;
        // Half of the rest, in whole words.
        let (first, second) = rest.split(rest.len() / 16 * 8)?;
        Some(Self { head, places: [first, second] })
    }

    /// Replaces the value. Returns `false`, with nothing changed, if it is too long.
    #[must_use]
    pub fn store(&self, value: &[u8]) -> bool {
        let words = self.head.words();
        let next = words[Self::CHANGES].load(Ordering::Relaxed).wrapping_add(1);
        let at = (next % 2) as usize;
        if value.len() > self.places[at].len() {
            return false;
        }
        self.places[at].store_bytes(value);
        words[Self::LENGTHS[at]].store(value.len() as u64, Ordering::Relaxed);
        // Release: a reader that sees the count sees the value.
        words[Self::CHANGES].store(next, Ordering::Release);
        true
    }

    /// Returns the value, or `None` if none was stored or its length is invalid.
    pub fn load(&self) -> Option<Vec<u8>> {
        let words = self.head.words();
        let count = words[Self::CHANGES].load(Ordering::Acquire);
        let at = (count % 2) as usize;
        let len = usize::try_from(words[Self::LENGTHS[at]].load(Ordering::Relaxed)).ok()?;
        let place = &self.places[at];
        (count != 0 && len <= place.len()).then(|| place.load_bytes(len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_sees_the_last_whole_value() {
        let here = Lasting::new("test", 4096).unwrap();
        let snapshots = Snapshots::new(&here).unwrap();
        assert_eq!(snapshots.load(), None);
        for value in [&b"one"[..], b"a longer one", b""] {
            assert!(snapshots.store(value));
            let file = here.file().unwrap().try_clone_to_owned().unwrap();
            let there = Lasting::of(file).unwrap();
            assert_eq!(Snapshots::new(&there).unwrap().load().unwrap(), value);
        }
        assert!(!snapshots.store(&[1; 4096]));
        assert_eq!(snapshots.load().unwrap(), b"");
        // Half of a change: only the place that is not current was written.
        snapshots.places[0].store_bytes(b"garbage");
        assert_eq!(snapshots.load().unwrap(), b"");
    }

    #[test]
    fn another_partys_memory_is_words_if_it_can_be_relied_on() {
        let memory = crate::Memory::heap(8192);
        let mut spans = Vec::new();
        memory.pin(0, 8192, Access::Write, &mut spans).unwrap();
        let words = Lasting::over(spans[0].slice(4096, 4096)).unwrap();
        assert_eq!((words.len(), words.file().is_none()), (4096, true));
        assert!(!words.has_small_pages());
        memory.write(4104, &7_u64.to_le_bytes()).unwrap();
        assert_eq!(words.words()[1].load(Ordering::Relaxed), 7);
        words.words()[2].store(9, Ordering::Relaxed);
        let mut bytes = [0; 8];
        memory.read(4112, &mut bytes).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), 9);
        assert!(Lasting::over(spans[0].slice(4, 64)).is_none(), "not aligned");
        assert!(Lasting::over(spans[0].slice(0, 4)).is_none(), "no word");
        let plain = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(Lasting::over(Span::file(plain.as_fd(), 0, 4096).unwrap()).is_none(), "guarded");
        let sealed = Lasting::new("test", 4096).unwrap();
        assert!(sealed.has_small_pages());
        let span = Span::file(sealed.file().unwrap(), 0, 4096).unwrap();
        Lasting::over(span).unwrap().words()[0].store(1, Ordering::Relaxed);
        assert_eq!(sealed.words()[0].load(Ordering::Relaxed), 1);
    }

    /// Needs a free huge page; without one the test ends at once.
    #[test]
    fn a_huge_page_is_whole() {
        let Ok(page) = Lasting::huge("test") else { return };
        assert_eq!((page.len(), page.has_small_pages()), (HUGE, false));
        page.words()[HUGE / 8 - 1].store(1, Ordering::Relaxed);
        let file = page.file().unwrap().try_clone_to_owned().unwrap();
        assert_eq!(Lasting::of(file).unwrap().words()[HUGE / 8 - 1].load(Ordering::Relaxed), 1);
    }

    #[test]
    fn parts_are_apart_and_files_of_others_are_refused() {
        let whole = Lasting::heap(64);
        let (first, second) = whole.split(16).unwrap();
        assert_eq!((first.len(), second.len()), (16, 48));
        second.words()[0].store(7, Ordering::Relaxed);
        assert_eq!(whole.words()[2].load(Ordering::Relaxed), 7);
        assert!(whole.split(72).is_none());
        let plain = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(Lasting::of(plain).is_err());
        let file =
            || Lasting::new("test", 8192).unwrap().file().unwrap().try_clone_to_owned().unwrap();
        assert_eq!(Lasting::beginning_of(file(), 4096).unwrap().len(), 4096);
        for bytes in [0, 4095, 8200, usize::MAX - 7] {
            assert!(Lasting::beginning_of(file(), bytes).is_err(), "{bytes}");
        }
    }
}
