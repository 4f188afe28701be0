//! Memory that outlives this process: what a successor reads to go on.
//!
//! A [`Lasting`] is a memfd, mapped shared, as words. Whoever keeps its descriptor (a keeper
//! process) gives it to the next process, which maps the same bytes. A process that is killed stops
//! between two instructions, so what it leaves is a prefix of its stores in program order: stores
//! with release ordering are enough for "first this, then that", and no flush is needed. (Power
//! loss is another matter: everything here is memory.)
//!
//! [`Snapshots`] are values of any length that change whole or not at all: two places, and a word
//! that says which of them counts.
//!
//! The bytes are this program's own, of this or of an earlier version: a successor checks what it
//! reads and refuses what it does not understand, but nobody hostile writes here. Who shares such
//! words with another party, in a descriptor that it passed on or over memory of that party
//! ([`Lasting::over`]), believes nothing that it reads there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::pages::{self, Pages};
use crate::{Access, Span};

/// Bytes of a huge page, and their alignment.
const HUGE: usize = 2 << 20;
/// A file up to so many bytes is closed and unmapped by whoever drops it; a larger one elsewhere.
const AT_ONCE: u64 = 32 << 20;

/// Words in memory that outlives the process, in a guest's, or on the heap for tests. Cheap to
/// clone.
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

/// Whose the memory is, until it is dropped.
enum Holder {
    /// Mapped from this file.
    File(OwnedFd),
    /// A piece of another party's memory, pinned.
    Span(#[allow(dead_code)] Span), // held, not read
    Heap,
    /// Only while it is dropped.
    None,
}

// SAFETY: the words are reached as atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.holder, Holder::None) {
            Holder::File(file) => {
                let len = rustix::fs::fstat(&file).map_or(u64::MAX, |stat| stat.st_size as u64);
                // SAFETY: mapped in `map` with this length; borrows of the words have ended.
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
    /// `bytes` zero bytes, rounded up to whole pages, in a memfd. Pages cost nothing until they are
    /// written.
    ///
    /// # Errors
    /// No descriptors or no address space left.
    pub fn new(name: &str, bytes: usize) -> std::io::Result<Self> {
        let bytes = bytes.next_multiple_of(rustix::param::page_size());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, bytes as u64)?;
        // A mapping of it cannot lose its pages then.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, bytes)
    }

    /// A huge page of 2 MiB, of zeros, in a memfd of its own: physically contiguous, and it stays
    /// where it is.
    ///
    /// # Errors
    /// No huge page is free (`vm.nr_hugepages`), or no descriptor.
    pub fn huge(name: &str) -> std::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file =
            rustix::fs::memfd_create(name, flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
        rustix::fs::ftruncate(&file, HUGE as u64)?;
        // Now, or a touch would raise SIGBUS.
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, HUGE as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Self::map(file, HUGE)
    }

    /// The words of a piece of another party's memory. None: it may not be both read and written,
    /// its owner may take it away (a touch would raise SIGBUS), or it does not begin at a multiple
    /// of 8.
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

    /// What a predecessor left in `file`.
    ///
    /// # Errors
    /// `InvalidData` when the file is no such memory; what mmap(2) says.
    pub fn of(file: OwnedFd) -> std::io::Result<Self> {
        let bytes = usize::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        Self::beginning_of(file, bytes)
    }

    /// The first `bytes` bytes of such a file, whose rest is of another kind.
    ///
    /// # Errors
    /// As for [`Lasting::of`]; `InvalidData` also when there are fewer.
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

    fn map(file: OwnedFd, bytes: usize) -> std::io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, prot, MapFlags::SHARED, &file, 0)?
        };
        let words = bytes / 8;
        let memory = Memory { base: base.cast(), words, holder: Holder::File(file) };
        Ok(Self { memory: Arc::new(memory), start: 0, len: words })
    }

    /// The same on the heap: for tests, whose "next process" is the next object.
    pub fn heap(bytes: usize) -> Self {
        let words: Box<[AtomicU64]> = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let (len, base) = (words.len(), Box::into_raw(words).cast());
        Self { memory: Arc::new(Memory { base, words: len, holder: Holder::Heap }), start: 0, len }
    }

    /// The descriptor to keep; None on the heap, and over another party's memory.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.memory.holder {
            Holder::File(file) => Some(file.as_fd()),
            Holder::Span(_) | Holder::Heap | Holder::None => None,
        }
    }

    /// Whether pages of it that hold nothing can be given back, and got anew: they are small ones
    /// of a file of its own. What is punched out of a huge page's file is only ever all of it.
    pub fn has_small_pages(&self) -> bool {
        self.file().is_some_and(|file| {
            rustix::fs::fstatfs(file)
                .is_ok_and(|system| system.f_bsize as usize == rustix::param::page_size())
        })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len * 8
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `bytes` bytes, a multiple of 8, and the rest; None when there are fewer.
    pub fn split(&self, bytes: usize) -> Option<(Self, Self)> {
        let words = bytes / 8;
        let rest = self.len.checked_sub(words)?;
        let part = |start, len| Self { memory: self.memory.clone(), start, len };
        Some((part(self.start, words), part(self.start + words, rest)))
    }

    /// The words.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: aligned to 8 bytes at least and mapped, or allocated, or pinned, for as long as
        // `memory` lives; the file is sealed against shrinking, and so is what a span is of that is
        // not guarded; `split` keeps parts within the whole. All access by this process is atomic.
        unsafe {
            let base = self.memory.base.cast::<AtomicU64>().add(self.start);
            std::slice::from_raw_parts(base, self.len)
        }
    }

    /// Where the bytes are, for system calls that write to them: valid as long as this value, at
    /// one address.
    pub fn as_ptr(&self) -> *mut u8 {
        self.words().as_ptr().cast_mut().cast()
    }

    fn store_bytes(&self, from: &[u8]) {
        for (word, bytes) in self.words().iter().zip(from.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(value), Ordering::Relaxed);
        }
    }

    fn load_bytes(&self, len: usize) -> Vec<u8> {
        let words = self.words().iter().take(len.div_ceil(8));
        let mut bytes: Vec<u8> =
            words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// A value of up to a certain length that changes whole or not at all.
///
/// The first word counts the changes; the value of change `n` is in place `n % 2`, whose own length
/// is in words 1 and 2. A change writes the place that does not count, then the word.
pub struct Snapshots {
    head: Lasting,
    places: [Lasting; 2],
}

impl Snapshots {
    const HEAD: usize = 64;

    /// In all of `memory`. Values may be a little shorter than half of it.
    pub fn new(memory: &Lasting) -> Option<Self> {
        let (head, rest) = memory.split(Self::HEAD)?;
        let (first, second) = rest.split(rest.len() / 16 * 8)?;
        Some(Self { head, places: [first, second] })
    }

    /// Replaces the value. False, and nothing changed, when it is too long.
    #[must_use]
    pub fn store(&self, value: &[u8]) -> bool {
        let words = self.head.words();
        let next = words[0].load(Ordering::Relaxed).wrapping_add(1);
        let at = (next % 2) as usize;
        if value.len() > self.places[at].len() {
            return false;
        }
        self.places[at].store_bytes(value);
        words[1 + at].store(value.len() as u64, Ordering::Relaxed);
        // Release: whoever sees the count sees the value.
        words[0].store(next, Ordering::Release);
        true
    }

    /// The value; None when there never was one.
    pub fn load(&self) -> Option<Vec<u8>> {
        let words = self.head.words();
        let count = words[0].load(Ordering::Acquire);
        let at = (count % 2) as usize;
        let len = usize::try_from(words[1 + at].load(Ordering::Relaxed)).ok()?;
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
        // Half of a change: the place that does not count.
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

    /// Needs a free huge page; without one there is nothing to see but the error.
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
