//! The indices of a Cross-FIFO: the words with their writers, their checks, and the protocol of
//! sleeping.
//!
//! Both sides of a stream have an [`Inbox`], which the other side writes and only its owner reads.
//! So no side ever waits for a read across the bus, and a cache line moves in one direction only.
//!
//! A side that wants to sleep stores a wish in the other's inbox: the position before which it has
//! nothing to do. The sleeper stores the wish, passes a full barrier, and loads the counter in its
//! own inbox. The other side stores the counter in the sleeper's inbox, passes a full barrier, and
//! loads the wish in its own inbox. At least one of the two loads sees the other side's store, so
//! no wake-up is lost (`tests/cross.rs` has loom try every interleaving). The side that wakes the
//! sleeper clears the wish, so it wakes it once. `outside.rs` explains how the barrier that each
//! message has to pass is made cheap. `sleep.rs` has another protocol: its word says for which
//! events to wake, a wish says at which position. The place of wishes in memory is part of version
//! 1 of arenas.

use super::outside::{AtomicU64, Ordering, heavy, light, now};

/// The bits of a position: the number of bytes since the stream's beginning, modulo 2^36.
const POSITION: u64 = (1 << 36) - 1;
const PAGE_SHIFT: u32 = 36;
const PAGE_BITS: u64 = (1 << 22) - 1;
const CLASS_SHIFT: u32 = 58;
const CLASS_BITS: u64 = 0xf;
/// The bit of a tail that nothing follows, or of a head whose side reads no more.
const END: u64 = 1 << 62;
/// The bit of a tail or a head whose side has reset the stream.
const RESET: u64 = 1 << 63;
/// A private bit of `seen`, never published: the producer waits for the FIFO to drain so that it
/// can make the FIFO larger.
const PINCHED: u64 = 1 << 40;
/// The bit of a wish that is set.
const WANTED: u64 = 1 << 63;

/// The largest [`Region::order`]: 4 MiB.
pub const MAX_ORDER: u32 = 10;
/// The unit of regions, in bytes.
pub const PAGE: usize = 4096;

/// The other side's words are invalid: it is faulty or hostile. The stream cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spoiled;

/// Returns `to - from` of two positions.
#[inline]
fn distance(to: u64, from: u64) -> u64 {
    to.wrapping_sub(from) & POSITION
}

/// The place of a FIFO's bytes in the producer's area: `4096 << order` bytes from `page` pages on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Offset in the area, in units of 4,096 bytes: below 2^22.
    pub page: u32,
    /// 0 to [`MAX_ORDER`].
    pub order: u32,
}

impl Region {
    /// Returns the region's length in bytes.
    #[inline]
    pub fn len(self) -> usize {
        PAGE << self.order
    }

    /// Returns `false`: a region has at least one page.
    pub fn is_empty(self) -> bool {
        false
    }
}

/// A producer's word: its position, the region of its bytes, and whether more will come.
///
/// | bits | what |
/// |---|---|
/// | 0-35 | position |
/// | 36-57 | page of the region |
/// | 58-61 | 0: no region; n: one of order n - 1 |
/// | 62 | nothing follows |
/// | 63 | reset |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Tail(pub u64);

impl Tail {
    /// Returns the number of bytes produced since the beginning, modulo 2^36.
    #[inline]
    pub fn position(self) -> u64 {
        self.0 & POSITION
    }

    /// Returns the region with the bytes between head and tail, or `None` if there are none.
    #[inline]
    pub fn region(self) -> Option<Region> {
        let class = (self.0 >> CLASS_SHIFT & CLASS_BITS) as u32;
        let page = (self.0 >> PAGE_SHIFT & PAGE_BITS) as u32;
        Some(Region { page, order: class.checked_sub(1)? })
    }

    /// Returns the size of the region in bytes, or 0 if there is none.
    #[inline]
    pub fn size(self) -> u64 {
        self.region().map_or(0, |region| region.len() as u64)
    }

    /// Returns the same position in another region, or in none.
    #[must_use]
    pub fn placed(self, region: Option<Region>) -> Self {
        let bits = region.map_or(0, |region| {
            u64::from(region.page) << PAGE_SHIFT | u64::from(region.order + 1) << CLASS_SHIFT
        });
        Self(self.0 & (POSITION | END | RESET) | bits)
    }

    #[inline]
    fn moved(self, count: u64) -> Self {
        Self(self.0 & !POSITION | self.0.wrapping_add(count) & POSITION)
    }

    /// Returns whether nothing follows this position.
    #[inline]
    pub fn is_end(self) -> bool {
        self.0 & END != 0
    }

    /// Returns whether the stream was reset.
    #[inline]
    pub fn is_reset(self) -> bool {
        self.0 & RESET != 0
    }

    #[inline]
    fn place(self) -> u64 {
        self.0 >> PAGE_SHIFT & 0x3ff_ffff
    }
}

/// Words that one side reads and the other writes.
#[derive(Clone, Copy)]
pub struct Inbox<'a> {
    /// The other side's [`Tail`], as a producer.
    pub tail: &'a AtomicU64,
    /// The other side's head, as a consumer: bits 0-35 are the position; bit 62 is set if it reads
    /// no more, bit 63 if it has reset the stream.
    pub head: &'a AtomicU64,
    /// The other side's wish for data: bits 0-35 are the position that it waits for; bit 63 is set
    /// if there is a wish.
    pub data_wanted: &'a AtomicU64,
    /// The other side's wish for space: the position up to which its data is to be read, with the
    /// same bits.
    pub space_wanted: &'a AtomicU64,
    /// The time when the other side wrote into an empty FIFO last, in monotonic nanoseconds; 0 if
    /// it never did while its `is_timed` was set.
    pub since: &'a AtomicU64,
    /// Nonzero if the other side wants `since` in its own inbox.
    pub is_timed: &'a AtomicU64,
}

/// A side's private state of one direction, in memory that the other side cannot write. Forked
/// processes may share it, so its words are atomics; the owner holds a lock while it uses them.
#[derive(Clone, Copy)]
pub struct Own<'a> {
    /// This side's counter: a [`Tail`] or a head.
    pub own: &'a AtomicU64,
    /// The other side's counter at the last look.
    pub seen: &'a AtomicU64,
}

impl Own<'_> {
    fn own(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }

    fn seen(&self) -> u64 {
        self.seen.load(Ordering::Relaxed)
    }
}

/// Returns whether a wish in the own inbox is fulfilled by `position`, or by `always`, and takes
/// the wish back if so.
#[inline]
fn fulfil(wanted: &AtomicU64, position: u64, always: bool) -> bool {
    let wish = wanted.load(Ordering::Relaxed);
    // Positions wrap. Less than half of their range apart, `position` is the later one; a FIFO is
    // far smaller, so no valid wish is half of the range ahead of it.
    let reached = || distance(position, wish & POSITION) < 1 << 35;
    wish & WANTED != 0
        && (always || reached())
        && wanted.compare_exchange(wish, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// The producer's side of the indices.
#[derive(Clone, Copy)]
pub struct Sending<'a> {
    /// The words that the other side writes.
    pub mine: Inbox<'a>,
    /// The words that this side writes.
    pub theirs: Inbox<'a>,
    /// `own`: the tail; `seen`: the head.
    pub state: Own<'a>,
    /// Set if the other side is on another machine.
    pub across_machines: bool,
}

impl Sending<'_> {
    /// Returns this side's tail.
    #[inline]
    pub fn tail(&self) -> Tail {
        Tail(self.state.own())
    }

    /// Returns the number of unread bytes, as far as this side knows.
    #[inline]
    pub fn used(&self) -> u64 {
        distance(self.tail().position(), self.state.seen() & POSITION)
    }

    /// Looks at the other side's head. Returns the number of unread bytes.
    ///
    /// # Errors
    /// [`Spoiled`].
    #[inline]
    pub fn refresh(&self) -> Result<u64, Spoiled> {
        // Pairs with the release in `Receiving::release`: bytes are read before they are
        // overwritten.
        let head = self.mine.head.load(Ordering::Acquire);
        let used = distance(self.tail().position(), head & POSITION);
        // The head may move neither beyond the tail nor backwards.
        if used > self.used() {
            return Err(Spoiled);
        }
        let seen = head & !PINCHED | self.state.seen() & PINCHED;
        self.state.seen.store(seen, Ordering::Relaxed);
        Ok(used)
    }

    /// Returns whether this side waits for an empty FIFO so that it can make the FIFO larger.
    #[inline]
    pub fn is_pinched(&self) -> bool {
        self.state.seen() & PINCHED != 0
    }

    /// Sets whether this side waits for an empty FIFO.
    pub fn pinch(&self, pinched: bool) {
        let bit = if pinched { PINCHED } else { 0 };
        self.state.seen.store(self.state.seen() & !PINCHED | bit, Ordering::Relaxed);
    }

    /// Returns whether the other side will not read bytes that are written from now on.
    pub fn is_shut(&self) -> bool {
        self.mine.head.load(Ordering::Relaxed) & (END | RESET) != 0
    }

    /// Returns whether the other side reset the stream.
    pub fn is_reset(&self) -> bool {
        self.mine.head.load(Ordering::Relaxed) & RESET != 0
    }

    /// Publishes the next `count` bytes, which are written. Returns whether the consumer is to be
    /// woken.
    #[inline]
    pub fn publish(&self, count: u64) -> bool {
        self.store(self.tail().moved(count), false)
    }

    /// Ends the stream's data. Returns whether the consumer is to be woken.
    pub fn finish(&self) -> bool {
        self.store(Tail(self.tail().0 | END), true)
    }

    /// Resets the stream. Returns whether the consumer is to be woken.
    pub fn reset(&self) -> bool {
        self.store(Tail(self.tail().0 | END | RESET), true)
    }

    /// Places later bytes in another region, or gives the region up, if all bytes were read.
    /// Returns `false` and does nothing if they were not.
    pub fn place(&self, region: Option<Region>) -> bool {
        let empty = self.used() == 0;
        if empty {
            // The next publication wakes the consumer; no side waits for a region.
            let tail = self.tail().placed(region);
            self.state.own.store(tail.0, Ordering::Relaxed);
            self.theirs.tail.store(tail.0, Ordering::Release);
        }
        empty
    }

    #[inline]
    fn store(&self, tail: Tail, always: bool) -> bool {
        if self.mine.is_timed.load(Ordering::Relaxed) != 0 && !self.across_machines {
            self.note_time();
        }
        self.state.own.store(tail.0, Ordering::Relaxed);
        // Release: a consumer that sees the tail sees the bytes before it, and their time.
        self.theirs.tail.store(tail.0, Ordering::Release);
        light(self.across_machines);
        fulfil(self.mine.data_wanted, tail.position(), always)
    }

    /// Tells the consumer when the bytes that it is about to see were written, if it has read all
    /// that came before them. A consumer that reads the rest at this very moment sees the time of
    /// the bytes before.
    fn note_time(&self) {
        let head = self.mine.head.load(Ordering::Relaxed) & POSITION;
        if head == self.tail().position() {
            self.theirs.since.store(now(), Ordering::Relaxed);
        }
    }

    /// Asks to be woken when all but `left` of the written bytes are read, or when no more will be.
    /// A barrier ([`heavy`]) and [`Sending::is_wish_fulfilled`] must follow; one barrier serves any
    /// number.
    pub fn wish(&self, left: u64) {
        let until = self.tail().position().wrapping_sub(left) & POSITION;
        self.theirs.space_wanted.store(WANTED | until, Ordering::Relaxed);
    }

    /// Returns whether the wish is fulfilled already. If so, takes it back, and the other side may
    /// not wake this one.
    ///
    /// # Errors
    /// [`Spoiled`].
    pub fn is_wish_fulfilled(&self, left: u64) -> Result<bool, Spoiled> {
        let is_so = self.refresh()? <= left || self.is_shut();
        if is_so {
            self.theirs.space_wanted.store(0, Ordering::Relaxed);
        }
        Ok(is_so)
    }

    /// Makes the wish, passes the barrier, and looks. Returns `true` if the wish is fulfilled
    /// already; the other side may not wake this one then.
    ///
    /// # Errors
    /// [`Spoiled`].
    pub fn arm(&self, left: u64) -> Result<bool, Spoiled> {
        self.wish(left);
        heavy();
        self.is_wish_fulfilled(left)
    }
}

/// The consumer's side of the indices.
#[derive(Clone, Copy)]
pub struct Receiving<'a> {
    /// The words that the other side writes.
    pub mine: Inbox<'a>,
    /// The words that this side writes.
    pub theirs: Inbox<'a>,
    /// `own`: the head; `seen`: the tail.
    pub state: Own<'a>,
    /// The number of pages of the other side's area, which no region may exceed.
    pub pages: u32,
    /// Set if the other side is on another machine.
    pub across_machines: bool,
}

impl Receiving<'_> {
    /// Returns the number of bytes consumed since the beginning, modulo 2^36.
    #[inline]
    pub fn position(&self) -> u64 {
        self.state.own() & POSITION
    }

    /// Returns the producer's tail at the last look.
    #[inline]
    pub fn tail(&self) -> Tail {
        Tail(self.state.seen())
    }

    /// Returns the number of bytes that can be read, as far as this side knows.
    #[inline]
    pub fn known(&self) -> u64 {
        distance(self.tail().position(), self.position())
    }

    /// Looks at the other side's tail. Returns the number of bytes that can be read.
    ///
    /// # Errors
    /// [`Spoiled`].
    #[inline]
    pub fn refresh(&self) -> Result<u64, Spoiled> {
        // Pairs with the release in `Sending::store`: bytes are written before they are read.
        let tail = Tail(self.mine.tail.load(Ordering::Acquire));
        let (known, available) = (self.known(), distance(tail.position(), self.position()));
        if available < known || available > tail.size() {
            return Err(Spoiled);
        }
        if tail.place() != self.tail().place() {
            self.check_place(tail, known)?;
        }
        self.state.seen.store(tail.0, Ordering::Relaxed);
        Ok(available)
    }

    /// Returns whether a region lies within the other side's area.
    #[inline]
    pub(super) fn fits(&self, region: Region) -> bool {
        region.order <= MAX_ORDER && region.page + (1 << region.order) <= self.pages
    }

    /// Checks that the region changed only after all of the last one was read, and that it lies
    /// within the area.
    #[cold]
    fn check_place(&self, tail: Tail, known: u64) -> Result<(), Spoiled> {
        let fits = tail.region().is_none_or(|region| self.fits(region));
        if fits && known == 0 { Ok(()) } else { Err(Spoiled) }
    }

    /// Asks the producer to note the time whenever it writes into an empty FIFO, from now on.
    pub fn want_times(&self) {
        self.theirs.is_timed.store(1, Ordering::Relaxed);
    }

    /// Returns the time when the producer wrote into an empty FIFO last, in monotonic nanoseconds
    /// of its clock: when the first byte that can be read was written, unless it was read in part.
    /// Returns `None` if the producer noted no time. A hostile producer notes any.
    #[inline]
    pub fn since(&self) -> Option<u64> {
        Some(self.mine.since.load(Ordering::Relaxed)).filter(|since| *since != 0)
    }

    /// Releases the next `count` bytes, which were read. Returns whether the producer is to be
    /// woken.
    #[inline]
    pub fn release(&self, count: u64) -> bool {
        debug_assert!(count <= self.known());
        let head = self.state.own();
        let head = head & !POSITION | head.wrapping_add(count) & POSITION;
        self.store(head, false)
    }

    /// Ends reading. Returns whether the producer is to be woken.
    pub fn shut(&self) -> bool {
        self.store(self.state.own() | END, true)
    }

    /// Resets the stream. Returns whether the producer is to be woken.
    pub fn reset(&self) -> bool {
        self.store(self.state.own() | END | RESET, true)
    }

    #[inline]
    fn store(&self, head: u64, always: bool) -> bool {
        self.state.own.store(head, Ordering::Relaxed);
        // Release: the bytes before the head were read.
        self.theirs.head.store(head, Ordering::Release);
        light(self.across_machines);
        fulfil(self.mine.space_wanted, head & POSITION, always)
    }

    /// Asks to be woken when `least` bytes can be read, or when no more will come. A barrier
    /// ([`heavy`]) and [`Receiving::is_wish_fulfilled`] must follow; one barrier serves any number.
    pub fn wish(&self, least: u64) {
        let until = self.position().wrapping_add(least) & POSITION;
        self.theirs.data_wanted.store(WANTED | until, Ordering::Relaxed);
    }

    /// Returns whether the wish is fulfilled already. If so, takes it back, and the other side may
    /// not wake this one.
    ///
    /// # Errors
    /// [`Spoiled`].
    pub fn is_wish_fulfilled(&self, least: u64) -> Result<bool, Spoiled> {
        let is_so = self.refresh()? >= least || self.tail().is_end();
        if is_so {
            self.theirs.data_wanted.store(0, Ordering::Relaxed);
        }
        Ok(is_so)
    }

    /// Makes the wish, passes the barrier, and looks. Returns `true` if the wish is fulfilled
    /// already; the other side may not wake this one then.
    ///
    /// # Errors
    /// [`Spoiled`].
    pub fn arm(&self, least: u64) -> Result<bool, Spoiled> {
        self.wish(least);
        heavy();
        self.is_wish_fulfilled(least)
    }
}
