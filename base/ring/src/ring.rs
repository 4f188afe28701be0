//! One ring: its producer and its consumer.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::{Lasting, Span, fetch, fetch_to_write};

use crate::link::Geometry;
use crate::{Descriptor, layout, sleep};

/// Words of a ring, of 8 bytes each.
const HEAD: usize = layout::HEAD / 8;
const TAIL: usize = layout::TAIL / 8;
const ASLEEP: usize = layout::ASLEEP / 8;
const DESCRIPTORS: usize = layout::DESCRIPTORS / 8;

/// The other side's counter cannot be: it is broken, or lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side of the link moved its counter where it cannot be")]
pub struct Broken;

/// What producer and consumer of a ring have in common. With a side's counters it is less than a line:
/// who has many rings reads one line of each before the ring itself.
#[repr(C)]
#[derive(Clone)]
pub(crate) struct Ring {
    words: NonNull<AtomicU64>,
    /// The slots, in the same mapping.
    slots: *mut u8,
    mask: u32,
    stride: u32,
    memory: Arc<Memory>,
}

/// What a ring lies in.
struct Memory {
    words: Lasting,
    /// The slots, mapped once more.
    data: Span,
}

// SAFETY: words are reached as atomics only, slots by raw copies only, and `memory` keeps both.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// The ring in `words`, which lie at `at` of `whole`.
    ///
    /// # Panics
    /// When there are too few words for such a ring: a programmer's error.
    pub fn new(words: Lasting, whole: &Span, at: usize, geometry: &Geometry) -> Self {
        let from = layout::data(geometry);
        let len = geometry.slots as usize * geometry.stride();
        assert!(words.len() >= from + len, "a ring beyond its memory");
        let data = whole.slice(at + from, len);
        let first = NonNull::from(words.words()).cast();
        Self {
            words: first,
            slots: words.as_ptr().wrapping_add(from),
            mask: geometry.slots - 1,
            // At most 65,536 and 64.
            stride: geometry.stride() as u32,
            memory: Arc::new(Memory { words, data }),
        }
    }

    /// One of the counters, or of the descriptors.
    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < self.memory.words.words().len());
        // SAFETY: `new` has seen that there are as many words as a ring of this geometry has, which stay
        // as long as `memory`; an index is that of a counter, or made with `mask`.
        unsafe { self.words.add(index).as_ref() }
    }

    #[inline]
    fn descriptor(&self, slot: u64) -> &AtomicU64 {
        self.word(DESCRIPTORS + self.index(slot))
    }

    #[inline]
    fn index(&self, slot: u64) -> usize {
        (slot & u64::from(self.mask)) as usize
    }

    #[inline]
    fn place(&self, slot: u64) -> usize {
        self.index(slot) * self.stride as usize
    }

    #[inline]
    fn address(&self, slot: u64) -> *mut u8 {
        // Within the slots: no slot's place is beyond them.
        self.slots.wrapping_add(self.place(slot))
    }

    /// Where a slot begins, of which `len` bytes are to be copied.
    ///
    /// # Panics
    /// When a slot has fewer.
    #[inline]
    fn piece(&self, slot: u64, len: usize) -> *mut u8 {
        assert!(len <= self.stride as usize, "more than a slot holds");
        self.address(slot)
    }

    /// `head - tail` of what one side says and the other knows.
    #[inline]
    fn distance(&self, head: u64, tail: u64) -> Result<usize, Broken> {
        let distance = head.wrapping_sub(tail);
        if distance > u64::from(self.mask) + 1 { Err(Broken) } else { Ok(distance as usize) }
    }
}

/// The side that fills slots. Slots are named by their number among those not published yet.
#[repr(C)]
pub struct Producer {
    head: u64,
    /// The consumer's tail when it was looked at last.
    tail: u64,
    ring: Ring,
}

impl Producer {
    /// Goes on where the ring is.
    pub(crate) fn new(ring: Ring) -> Self {
        let head = ring.word(HEAD).load(Ordering::Relaxed);
        // A look that cannot be is found at the first use.
        let tail = head;
        let mut new = Self { ring, head, tail };
        new.tail = new.ring.word(TAIL).load(Ordering::Relaxed);
        new
    }

    /// How many slots can be filled; looks at what the consumer did only when it knows of fewer than
    /// `wanted`.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn free(&mut self, wanted: usize) -> Result<usize, Broken> {
        let slots = self.ring.mask as usize + 1;
        let mut used = self.ring.distance(self.head, self.tail)?;
        if slots - used < wanted {
            // Pairs with the release in `Consumer::release`: slots were read before they are filled.
            self.tail = self.ring.word(TAIL).load(Ordering::Acquire);
            used = self.ring.distance(self.head, self.tail)?;
        }
        Ok(slots - used)
    }

    /// The memory of all slots.
    #[inline]
    pub fn memory(&self) -> &Span {
        &self.ring.memory.data
    }

    /// Where in the memory slot `number` begins.
    #[inline]
    pub fn place(&self, number: usize) -> usize {
        self.ring.place(self.head + number as u64)
    }

    /// The same as an address in this process, for as long as this value lives. The memory does not go
    /// away meanwhile (its file is sealed against shrinking), but the other side may change it.
    #[inline]
    pub fn address(&self, number: usize) -> *mut u8 {
        self.ring.address(self.head + number as u64)
    }

    /// Copies `from` to the beginning of slot `number`.
    ///
    /// # Panics
    /// When it is longer than a slot: a programmer's error.
    #[inline]
    pub fn write(&self, number: usize, from: &[u8]) {
        let to = self.ring.piece(self.head + number as u64, from.len());
        // SAFETY: as many bytes are there, mapped as long as the ring and never taken away (the file is
        // sealed against shrinking); nobody has a reference to them, and what the other side makes of
        // them meanwhile is its own affair.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// Has the processor fetch slot `number`, soon to be filled and described.
    #[inline]
    pub fn fetch(&self, number: usize) {
        fetch_to_write(self.address(number));
        fetch_to_write(self.ring.descriptor(self.head + number as u64));
    }

    /// Has the processor fetch what will be written when the next `count` slots are filled and
    /// published.
    #[inline]
    pub fn fetch_next(&self, count: usize) {
        fetch_to_write(self.ring.word(HEAD));
        for number in 0..count {
            self.fetch(number);
        }
    }

    /// Says what slot `number` holds.
    #[inline]
    pub fn describe(&self, number: usize, descriptor: Descriptor) {
        self.ring.descriptor(self.head + number as u64).store(descriptor.0, Ordering::Relaxed);
    }

    /// Gives the next `count` slots, which are filled, to the consumer. It may sleep: see
    /// [`Producer::must_tell`].
    #[inline]
    pub fn publish(&mut self, count: usize) {
        self.head += count as u64;
        sleep::publish(self.ring.word(HEAD), self.head);
    }

    /// Whether the consumer sleeps and is to be told of what was published. To be asked after a
    /// [`barrier`](crate::barrier), of which one serves any number of rings.
    #[inline]
    pub fn must_tell(&self) -> bool {
        sleep::is_asleep(self.ring.word(ASLEEP))
    }
}

/// The side that empties slots. Slots are named by their number among those not released yet.
#[repr(C)]
pub struct Consumer {
    tail: u64,
    /// The producer's head when it was looked at last.
    head: u64,
    ring: Ring,
}

impl Consumer {
    /// Goes on where the ring is.
    pub(crate) fn new(ring: Ring) -> Self {
        let tail = ring.word(TAIL).load(Ordering::Relaxed);
        Self { ring, tail, head: tail }
    }

    /// How many slots hold something; looks at what the producer did only when it knows of fewer than
    /// `wanted`.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn available(&mut self, wanted: usize) -> Result<usize, Broken> {
        if ((self.head - self.tail) as usize) < wanted {
            // Pairs with the release in `sleep::publish`: slots were filled before they are read.
            let head = self.ring.word(HEAD).load(Ordering::Acquire);
            self.ring.distance(head, self.tail)?;
            // One that went back is as wrong.
            self.head = if head < self.head { return Err(Broken) } else { head };
        }
        Ok((self.head - self.tail) as usize)
    }

    /// The memory of all slots.
    #[inline]
    pub fn memory(&self) -> &Span {
        &self.ring.memory.data
    }

    /// Where in the memory slot `number` begins.
    #[inline]
    pub fn place(&self, number: usize) -> usize {
        self.ring.place(self.tail + number as u64)
    }

    /// The same as an address in this process, for as long as this value lives. The memory does not go
    /// away meanwhile (its file is sealed against shrinking), but the other side may change it.
    #[inline]
    pub fn address(&self, number: usize) -> *const u8 {
        self.ring.address(self.tail + number as u64)
    }

    /// Copies the beginning of slot `number` to `into`.
    ///
    /// # Panics
    /// When that is longer than a slot: a programmer's error.
    #[inline]
    pub fn read(&self, number: usize, into: &mut [u8]) {
        let from = self.ring.piece(self.tail + number as u64, into.len());
        // SAFETY: as for `Producer::write`. What the other side changes meanwhile is copied in some mix.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Has the processor fetch slot `number` and what it says of itself, soon to be read.
    #[inline]
    pub fn fetch(&self, number: usize) {
        fetch(self.ring.descriptor(self.tail + number as u64));
        fetch(self.address(number));
    }

    /// Has the processor fetch what is read to find whether there is anything: for a program that looks at
    /// many rings in turn, some rings ahead. Slots are better fetched once they are known to be filled:
    /// the producer has them before, and would have to take them back.
    #[inline]
    pub fn fetch_next(&self) {
        fetch(self.ring.word(HEAD));
    }

    /// What slot `number` holds, as the producer says now: it may say something else the next time.
    #[inline]
    pub fn descriptor(&self, number: usize) -> Descriptor {
        let word = self.ring.descriptor(self.tail + number as u64);
        Descriptor(word.load(Ordering::Relaxed))
    }

    /// Gives the next `count` slots back.
    ///
    /// # Panics
    /// When they were not available: a programmer's error.
    #[inline]
    pub fn release(&mut self, count: usize) {
        assert!(count as u64 <= self.head - self.tail, "slots that were not available");
        self.tail += count as u64;
        self.ring.word(TAIL).store(self.tail, Ordering::Release);
    }

    /// Asks to be told when there is more than [`Consumer::available`] said last. True: there is, and
    /// nobody may tell.
    pub fn arm(&mut self) -> bool {
        sleep::arm(self.ring.word(HEAD), self.ring.word(ASLEEP), self.head)
    }
}
