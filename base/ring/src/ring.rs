//! One ring: its producer and its consumer.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::{Lasting, Span, fetch, fetch_to_write};

use crate::Descriptor;
use crate::layout::{self, Geometry};
use crate::sleep::{ANY, SleepWord};

/// The head's index in the words of a ring, of 8 bytes each.
const HEAD: usize = layout::HEAD / 8;
const TAIL: usize = layout::TAIL / 8;
const ASLEEP: usize = layout::ASLEEP / 8;
const DESCRIPTORS: usize = layout::DESCRIPTORS / 8;

/// The error of an impossible counter: the other side is broken, or hostile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the other side of the link moved its counter where it cannot be")]
pub struct Broken;

/// The part that producer and consumer of a ring have in common. Together with a side's counters it
/// fits into one cache line: a thread with many rings reads one line of each before the ring.
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

/// The memory of a ring.
struct Memory {
    words: Lasting,
    /// A second mapping of the slots.
    data: Span,
}

// SAFETY: words are reached as atomics only, slots by raw copies only, and `memory` keeps both.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// Makes the ring in `words`, which lie at offset `at` of `whole`.
    ///
    /// # Panics
    /// If there are too few words for such a ring: a programmer's error.
    pub fn new(words: Lasting, whole: &Span, at: usize, geometry: &Geometry) -> Self {
        let from = layout::data(geometry);
        let len = geometry.slots as usize * layout::stride(geometry);
        assert!(words.len() >= from + len, "a ring beyond its memory");
        let data = whole.slice(at + from, len);
        let first = NonNull::from(words.words()).cast();
        Self {
            words: first,
            slots: words.as_ptr().wrapping_add(from),
            mask: geometry.slots - 1,
            // The stride is at most 65,536 + 64.
            stride: layout::stride(geometry) as u32,
            memory: Arc::new(Memory { words, data }),
        }
    }

    /// Returns a counter or a descriptor, by its index.
    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        debug_assert!(index < self.memory.words.words().len());
        // SAFETY: `new` has checked that there are as many words as a ring of this geometry has.
        // They live as long as `memory`. An index is that of a counter, or made with `mask`.
        unsafe { self.words.add(index).as_ref() }
    }

    /// Returns the consumer's word of sleep.
    #[inline]
    fn asleep(&self) -> SleepWord<'_> {
        SleepWord::new(self.word(ASLEEP))
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
        // The address is within the slots: no slot's place is beyond them.
        self.slots.wrapping_add(self.place(slot))
    }

    /// Returns the address of a slot of which `len` bytes are to be copied.
    ///
    /// # Panics
    /// If a slot has fewer bytes.
    #[inline]
    fn piece(&self, slot: u64, len: usize) -> *mut u8 {
        assert!(len <= self.stride as usize, "more than a slot holds");
        self.address(slot)
    }

    /// Returns `head - tail`, given the other side's counter and the own one.
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
    /// The consumer's tail when it was read last.
    tail: u64,
    ring: Ring,
}

impl Producer {
    /// Makes this side of a ring, which continues at the ring's counters.
    pub(crate) fn new(ring: Ring) -> Self {
        let head = ring.word(HEAD).load(Ordering::Relaxed);
        // An impossible counter is found at the first use.
        let tail = head;
        let mut new = Self { ring, head, tail };
        new.tail = new.ring.word(TAIL).load(Ordering::Relaxed);
        new
    }

    /// Returns the number of slots that can be filled. Reads the consumer's tail only if fewer than
    /// `wanted` are known to be free.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn free(&mut self, wanted: usize) -> Result<usize, Broken> {
        let slots = self.ring.mask as usize + 1;
        let mut used = self.ring.distance(self.head, self.tail)?;
        if slots - used < wanted {
            // Pairs with the release in `Consumer::release`: slots were read before they are
            // filled.
            self.tail = self.ring.word(TAIL).load(Ordering::Acquire);
            used = self.ring.distance(self.head, self.tail)?;
        }
        Ok(slots - used)
    }

    /// Returns the memory of all slots.
    #[inline]
    pub fn memory(&self) -> &Span {
        &self.ring.memory.data
    }

    /// Returns the offset of slot `number` in the memory of all slots.
    #[inline]
    pub fn place(&self, number: usize) -> usize {
        self.ring.place(self.head + number as u64)
    }

    /// Returns the address of slot `number` in this process, valid as long as `self`. The memory
    /// does not go away meanwhile (its file is sealed against shrinking), but the other side may
    /// change it.
    #[inline]
    pub fn address(&self, number: usize) -> *mut u8 {
        self.ring.address(self.head + number as u64)
    }

    /// Copies `from` to the beginning of slot `number`.
    ///
    /// # Panics
    /// If `from` is longer than a slot: a programmer's error.
    #[inline]
    pub fn write(&self, number: usize, from: &[u8]) {
        let to = self.ring.piece(self.head + number as u64, from.len());
        // SAFETY: as many bytes are mapped as long as the ring lives, and never taken away (the
        // file is sealed against shrinking). No reference to them exists. The other side may write
        // to them at the same time, which spoils only its own data.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
    }

    /// Prefetches slot `number`, which is about to be filled and described.
    #[inline]
    pub fn fetch(&self, number: usize) {
        fetch_to_write(self.address(number));
        fetch_to_write(self.ring.descriptor(self.head + number as u64));
    }

    /// Prefetches the lines that are written when the next `count` slots are filled and published.
    #[inline]
    pub fn fetch_next(&self, count: usize) {
        fetch_to_write(self.ring.word(HEAD));
        for number in 0..count {
            self.fetch(number);
        }
    }

    /// Sets the descriptor of slot `number`.
    #[inline]
    pub fn describe(&self, number: usize, descriptor: Descriptor) {
        self.ring.descriptor(self.head + number as u64).store(descriptor.0, Ordering::Relaxed);
    }

    /// Gives the next `count` slots, which are filled, to the consumer. The consumer may sleep: see
    /// [`Producer::must_tell`].
    #[inline]
    pub fn publish(&mut self, count: usize) {
        self.head += count as u64;
        // Release: a consumer that sees the head sees what was written to the slots before it.
        self.ring.word(HEAD).store(self.head, Ordering::Release);
    }

    /// Returns whether the consumer sleeps and must be woken for what was published. To be called
    /// after a [`barrier`](crate::barrier), of which one serves any number of rings.
    #[inline]
    pub fn must_tell(&self) -> bool {
        self.ring.asleep().take(ANY)
    }
}

/// The side that empties slots. Slots are named by their number among those not released yet.
#[repr(C)]
pub struct Consumer {
    tail: u64,
    /// The producer's head when it was read last.
    head: u64,
    ring: Ring,
}

impl Consumer {
    /// Makes this side of a ring, which continues at the ring's counters.
    pub(crate) fn new(ring: Ring) -> Self {
        let tail = ring.word(TAIL).load(Ordering::Relaxed);
        Self { ring, tail, head: tail }
    }

    /// Returns the number of filled slots. Reads the producer's head only if fewer than `wanted`
    /// are known to be filled.
    ///
    /// # Errors
    /// [`Broken`].
    #[inline]
    pub fn available(&mut self, wanted: usize) -> Result<usize, Broken> {
        if ((self.head - self.tail) as usize) < wanted {
            // Pairs with the release in `Producer::publish`: slots are filled before they are read.
            let head = self.ring.word(HEAD).load(Ordering::Acquire);
            self.ring.distance(head, self.tail)?;
            // A head that went back is as wrong.
            self.head = if head < self.head { return Err(Broken) } else { head };
        }
        Ok((self.head - self.tail) as usize)
    }

    /// Returns the memory of all slots.
    #[inline]
    pub fn memory(&self) -> &Span {
        &self.ring.memory.data
    }

    /// Returns the offset of slot `number` in the memory of all slots.
    #[inline]
    pub fn place(&self, number: usize) -> usize {
        self.ring.place(self.tail + number as u64)
    }

    /// Returns the address of slot `number` in this process, valid as long as `self`. The memory
    /// does not go away meanwhile (its file is sealed against shrinking), but the other side may
    /// change it.
    #[inline]
    pub fn address(&self, number: usize) -> *const u8 {
        self.ring.address(self.tail + number as u64)
    }

    /// Copies the beginning of slot `number` to `into`.
    ///
    /// # Panics
    /// If `into` is longer than a slot: a programmer's error.
    #[inline]
    pub fn read(&self, number: usize, into: &mut [u8]) {
        let from = self.ring.piece(self.tail + number as u64, into.len());
        // SAFETY: as for `Producer::write`. Bytes that the other side changes meanwhile are copied
        // in some mix of old and new.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Prefetches slot `number` and its descriptor, which are about to be read.
    #[inline]
    pub fn fetch(&self, number: usize) {
        fetch(self.ring.descriptor(self.tail + number as u64));
        fetch(self.address(number));
    }

    /// Prefetches the head, for a program that polls many rings in turn, some rings ahead. Slots
    /// are better prefetched once they are known to be filled: before that the producer owns their
    /// lines, and would have to fetch them back.
    #[inline]
    pub fn fetch_next(&self) {
        fetch(self.ring.word(HEAD));
    }

    /// Returns the descriptor of slot `number`. The producer may change it before the next call.
    #[inline]
    pub fn descriptor(&self, number: usize) -> Descriptor {
        let word = self.ring.descriptor(self.tail + number as u64);
        Descriptor(word.load(Ordering::Relaxed))
    }

    /// Gives the next `count` slots back to the producer.
    ///
    /// # Panics
    /// If they were not available: a programmer's error.
    #[inline]
    pub fn release(&mut self, count: usize) {
        assert!(count as u64 <= self.head - self.tail, "slots that were not available");
        self.tail += count as u64;
        self.ring.word(TAIL).store(self.tail, Ordering::Release);
    }

    /// Asks to be woken when there is more than [`Consumer::available`] returned last. Returns
    /// `true` if there is more already, and then no wake-up may come.
    pub fn arm(&mut self) -> bool {
        let has_moved = || self.ring.word(HEAD).load(Ordering::Acquire) != self.head;
        self.ring.asleep().arm(ANY, has_moved)
    }
}
