//! The memory of many streams between two parties.

use std::io::{Error, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::mm::Advice;
use slipway_peer::Bin;
use slipway_ram::Lasting;

use super::index::{Inbox, PAGE, Region};

const MAGIC: u64 = u64::from_le_bytes(*b"slipfifo");
const VERSION: u64 = 1;
/// The number of regions of an arena that may wait for their pages to be released.
const PUNCHES: usize = 4096;

/// The number of words of an inbox. It fills two cache lines, so that a look for a wish, which is
/// rare, never waits for the line of the counters, which the other side keeps writing.
const INBOX: usize = 16;
/// The word with the number of times that side 0 was woken. That of side 1 has the next cache line.
const RAISED: usize = 8;
/// The word at which inboxes begin.
const INBOXES: usize = PAGE / 8;

/// One of the two parties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Side 0.
    Zero = 0,
    /// Side 1.
    One = 1,
}

impl Side {
    /// Returns the other side.
    #[inline]
    pub fn other(self) -> Self {
        if self == Self::Zero { Self::One } else { Self::Zero }
    }
}

/// The size of an arena. It is address space only: pages cost nothing until they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The number of streams: 1 to 2^20.
    pub streams: u32,
    /// The number of pages of 4,096 bytes in each of the two areas: `streams` to 2^22 - 1.
    pub pages: u32,
}

impl Shape {
    /// Returns whether an arena may have this shape.
    pub fn is_possible(&self) -> bool {
        (1..=1 << 20).contains(&self.streams) && (self.streams..1 << 22).contains(&self.pages)
    }

    fn areas(&self) -> usize {
        (PAGE + self.streams as usize * 2 * INBOX * 8).next_multiple_of(PAGE)
    }

    fn area(&self) -> usize {
        self.pages as usize * PAGE
    }

    /// Returns the shape with this many streams and as many pages as fit in `bytes`. Returns `None`
    /// if there is not a page for each stream.
    pub fn filling(streams: u32, bytes: usize) -> Option<Self> {
        let none = Self { streams, pages: 0 };
        let pages = bytes.checked_sub(none.areas())? / 2 / PAGE;
        let shape = Self { streams, pages: u32::try_from(pages).ok()? };
        shape.is_possible().then_some(shape)
    }

    /// Returns the size of the arena's file in bytes.
    pub fn bytes(&self) -> usize {
        self.areas() + 2 * self.area()
    }
}

/// An arena, mapped. Cheap to clone.
#[derive(Clone)]
pub struct Arena {
    words: Lasting,
    shape: Shape,
    across_machines: bool,
    /// Set if pages are allocated and released one by one. Pages of a huge page, or of memory
    /// without a file, stay.
    has_small_pages: bool,
    /// The bin on whose threads pages are released.
    bin: Bin,
    /// Set if this side made the arena, as an engine does, whose threads serve many peers.
    made_here: bool,
}

/// The mode of fallocate(2) that releases pages.
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Releases pages when it is dropped.
struct Punch<F: FnOnce()> {
    arena: Arena,
    range: (u64, u64),
    then: Option<F>,
}

impl<F: FnOnce()> Drop for Punch<F> {
    fn drop(&mut self) {
        // Pages that cannot be released cost memory and nothing else.
        let _ = self.arena.fallocate(PUNCH, self.range);
        if let Some(then) = self.then.take() {
            then();
        }
    }
}

impl Arena {
    /// Makes an arena in memory of its own.
    ///
    /// # Errors
    /// `InvalidInput` if the shape is invalid; the system's error if there is no memory.
    pub fn new(shape: Shape) -> std::io::Result<Self> {
        if !shape.is_possible() {
            return Err(ErrorKind::InvalidInput.into());
        }
        let words = Lasting::new("slipway-fifo", shape.bytes())?;
        Ok(Self { made_here: true, ..Self::made(words, shape, false) })
    }

    /// Makes an arena in existing memory of zeros, between a guest and its host: a process that
    /// opens it treats it as one across machines. In a huge page, and in memory without a file, all
    /// its pages stay allocated.
    ///
    /// # Errors
    /// `InvalidInput` if the shape is invalid or does not fit.
    pub fn within(words: Lasting, shape: Shape) -> std::io::Result<Self> {
        if !shape.is_possible() || words.len() < shape.bytes() {
            return Err(ErrorKind::InvalidInput.into());
        }
        Ok(Self::made(words, shape, true))
    }

    fn made(words: Lasting, shape: Shape, across_machines: bool) -> Self {
        let header =
            [MAGIC, VERSION, shape.streams.into(), shape.pages.into(), across_machines.into()];
        for (word, value) in words.words().iter().zip(header) {
            word.store(value, Ordering::Relaxed);
        }
        Self::of(words, shape, across_machines)
    }

    /// Opens an arena that another process made.
    ///
    /// # Errors
    /// `InvalidData` if the file is no arena, or is of another version.
    pub fn open(file: OwnedFd) -> std::io::Result<Self> {
        Self::over(Lasting::of(file)?)
    }

    /// Opens an arena that another process made in `words`.
    ///
    /// # Errors
    /// As for [`Arena::open`].
    pub fn over(words: Lasting) -> std::io::Result<Self> {
        let word = |at: usize| words.words().get(at).map_or(0, |word| word.load(Ordering::Relaxed));
        let number = |at: usize| u32::try_from(word(at)).unwrap_or(0);
        let shape = Shape { streams: number(2), pages: number(3) };
        let known = word(0) == MAGIC && word(1) == VERSION && shape.is_possible();
        if !known || words.len() < shape.bytes() {
            let text = "a file that is no arena of FIFOs, or of another version";
            return Err(Error::new(ErrorKind::InvalidData, text));
        }
        let across_machines = word(4) & 1 != 0;
        Ok(Self::of(words, shape, across_machines))
    }

    fn of(words: Lasting, shape: Shape, across_machines: bool) -> Self {
        super::outside::register();
        let has_small_pages = words.has_small_pages();
        Self { words, shape, across_machines, has_small_pages, bin: Bin::new(), made_here: false }
    }

    /// Returns the arena as one whose other side is a guest or the host: a barrier on this machine
    /// does not reach the other side's processors.
    #[must_use]
    pub fn across_machines(mut self) -> Self {
        self.across_machines = true;
        self
    }

    /// Returns whether the other side is on another machine.
    #[inline]
    pub fn is_across_machines(&self) -> bool {
        self.across_machines
    }

    /// Returns the arena's shape.
    #[inline]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the arena's file, to be passed on.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.words.file()
    }

    /// Returns the words of stream `number` that the other side writes and `side` reads.
    ///
    /// # Panics
    /// If the arena has no such stream: a programmer's error.
    #[inline]
    pub fn inbox(&self, number: u32, side: Side) -> Inbox<'_> {
        assert!(number < self.shape.streams, "no such stream");
        let at = INBOXES + (number as usize * 2 + side as usize) * INBOX;
        let words: &[AtomicU64; INBOX] = self.words.words()[at..at + INBOX]
            .try_into()
            .unwrap_or_else(|_| unreachable!("a slice of that length"));
        let [tail, head, since, .., data_wanted, space_wanted, is_timed, _, _, _, _, _] = words;
        Inbox { tail, head, data_wanted, space_wanted, since, is_timed }
    }

    /// Notes that threads of `side` were woken, after that. Whoever sees what the waker does next
    /// sees this, too.
    pub fn note_raised(&self, side: Side) {
        self.words.words()[RAISED + side as usize * 8].fetch_add(1, Ordering::Release);
    }

    /// Returns how often threads of `side` were woken. A hostile other side notes any number.
    #[inline]
    pub fn raised(&self, side: Side) -> u64 {
        self.words.words()[RAISED + side as usize * 8].load(Ordering::Acquire)
    }

    /// Clears the inboxes of both sides of stream `number`.
    pub fn clear(&self, number: u32) {
        for side in [Side::Zero, Side::One] {
            let inbox = self.inbox(number, side);
            let Inbox { tail, head, data_wanted, space_wanted, since, is_timed } = inbox;
            for word in [tail, head, data_wanted, space_wanted, since, is_timed] {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Returns the address of `region` of the area that `writer` writes, valid for as long as this
    /// value lives. The other side may change the bytes at any time.
    ///
    /// # Panics
    /// If the region lies beyond the area: a programmer's error.
    #[inline]
    pub fn address(&self, writer: Side, region: Region) -> *mut u8 {
        let end = region.page as usize * PAGE + region.len();
        assert!(end <= self.shape.area(), "a region beyond its area");
        self.words.as_ptr().wrapping_add(self.offset(writer, region))
    }

    /// Returns the offset of `region` of the area that `writer` writes, in bytes of the arena.
    #[inline]
    pub fn offset(&self, writer: Side, region: Region) -> usize {
        self.shape.areas() + writer as usize * self.shape.area() + region.page as usize * PAGE
    }

    /// Allocates the region's pages, so that writes to them cannot fail. In a huge page, and in
    /// memory without a file, they are always allocated.
    ///
    /// The pages are faulted in. fallocate(2) would wait for the file's lock, which the other party
    /// can hold for ever, with a write(2) to the file from memory that a third party never
    /// provides.
    ///
    /// # Errors
    /// No memory is left. In an arena that the other side made, the region then has no pages.
    pub fn reserve(&self, writer: Side, region: Region) -> std::io::Result<()> {
        if !self.has_small_pages {
            return Ok(());
        }
        let reserved = self.populate(writer, region);
        if reserved.is_err() && !self.made_here {
            // Some pages were allocated. A program at its group's limit would have no memory left
            // for anything else, other threads included. The call can wait for the own
            // connection's peer only.
            let _ = self.fallocate(PUNCH, self.range(writer, region));
        }
        Ok(reserved?)
    }

    fn populate(&self, writer: Side, region: Region) -> Result<(), Errno> {
        let (at, length) = (self.address(writer, region).cast(), region.len());
        // SAFETY: `address` lies in the mapping that this value holds, and the region with it. The
        // call writes nothing.
        let populate = || unsafe { rustix::mm::madvise(at, length, Advice::LinuxPopulateWrite) };
        match rustix::io::retry_on_intr(populate) {
            // The kernel is older than Linux 5.14.
            Err(Errno::INVAL) => {
                self.fallocate(FallocateFlags::KEEP_SIZE, self.range(writer, region))
            }
            done => done,
        }
    }

    /// Releases the region's pages, soon, and calls `then`. The pages read as zeros from then on,
    /// unless they are pages that stay, which do not change. This happens on another thread, since
    /// the other party can make the call last for ever; `then` is never called in that case.
    pub fn punch(&self, writer: Side, region: Region, then: impl FnOnce() + Send + 'static) {
        if self.bin.held() > PUNCHES {
            // Too many wait, since the other party blocks them. The pages hold only bytes that the
            // two parties have written to each other.
            return then();
        }
        self.punch_range(self.range(writer, region), then);
    }

    /// Releases all pages of the arena, as [`Arena::punch`] does.
    pub fn punch_all(&self, then: impl FnOnce() + Send + 'static) {
        self.punch_range((0, self.shape.bytes() as u64), then);
    }

    fn punch_range(&self, range: (u64, u64), then: impl FnOnce() + Send + 'static) {
        if !self.has_small_pages {
            return then();
        }
        // The bin belongs to this arena and its copies, so no other arena waits for it.
        self.bin.discard_value(Punch { arena: self.clone(), range, then: Some(then) });
    }

    fn range(&self, writer: Side, region: Region) -> (u64, u64) {
        (self.offset(writer, region) as u64, region.len() as u64)
    }

    fn fallocate(&self, how: FallocateFlags, (offset, length): (u64, u64)) -> Result<(), Errno> {
        let Some(file) = self.file() else { return Ok(()) };
        // A signal interrupts the call.
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, how, offset, length))
    }

    /// Returns the first words, for tests that spoil them.
    #[doc(hidden)]
    pub fn words(&self) -> &[AtomicU64] {
        self.words.words()
    }
}
