//! One ring: its producer and its consumer.

use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::{Lasting, Span};

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

/// What producer and consumer of a ring have in common.
#[derive(Clone)]
pub(crate) struct Ring {
    words: Lasting,
    /// The slots.
    data: Span,
    mask: u64,
    stride: usize,
}

impl Ring {
    /// The ring in `words`, which lie at `at` of `whole`.
    pub fn new(words: Lasting, whole: &Span, at: usize, geometry: &Geometry) -> Self {
        let from = at + layout::data(geometry);
        let data = whole.slice(from, geometry.slots as usize * geometry.stride());
        Self { words, data, mask: u64::from(geometry.slots) - 1, stride: geometry.stride() }
    }

    #[inline]
    fn word(&self, index: usize) -> &AtomicU64 {
        &self.words.words()[index]
    }

    #[inline]
    fn descriptor(&self, slot: u64) -> &AtomicU64 {
        self.word(DESCRIPTORS + (slot & self.mask) as usize)
    }

    #[inline]
    fn place(&self, slot: u64) -> usize {
        (slot & self.mask) as usize * self.stride
    }

    #[inline]
    fn address(&self, slot: u64) -> *mut u8 {
        // Within the slots: no slot's place is beyond them.
        self.data.io_vector().0.wrapping_add(self.place(slot))
    }

    /// `head - tail` of what one side says and the other knows.
    #[inline]
    fn distance(&self, head: u64, tail: u64) -> Result<usize, Broken> {
        let distance = head.wrapping_sub(tail);
        if distance > self.mask + 1 { Err(Broken) } else { Ok(distance as usize) }
    }
}

/// Has the processor fetch the word's line, soon to be read. A hint.
#[inline]
fn prefetch(word: &AtomicU64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing as far as the program can tell, and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(word).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// Has the processor take the word's line, soon to be written, from whoever has it. A hint.
#[inline]
fn prefetch_to_write(word: &AtomicU64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch changes nothing and never faults.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) word, options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = word;
}

/// The side that fills slots. Slots are named by their number among those not published yet.
pub struct Producer {
    ring: Ring,
    head: u64,
    /// The consumer's tail when it was looked at last.
    tail: u64,
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
        &self.ring.data
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

    /// Has the processor fetch slot `number`, soon to be filled and described.
    #[inline]
    pub fn fetch(&self, number: usize) {
        self.ring.data.prefetch_to_write(self.place(number));
        prefetch_to_write(self.ring.descriptor(self.head + number as u64));
    }

    /// Has the processor fetch what will be written when the next `count` slots are filled and
    /// published.
    #[inline]
    pub fn fetch_next(&self, count: usize) {
        prefetch_to_write(self.ring.word(HEAD));
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
pub struct Consumer {
    ring: Ring,
    tail: u64,
    /// The producer's head when it was looked at last.
    head: u64,
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
        &self.ring.data
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

    /// Has the processor fetch slot `number`, soon to be read.
    #[inline]
    pub fn fetch(&self, number: usize) {
        self.ring.data.prefetch(self.place(number));
    }

    /// Has the processor fetch what is read to find whether there is anything, and the next slot: for a
    /// program that looks at many rings in turn, some rings ahead.
    #[inline]
    pub fn fetch_next(&self) {
        prefetch(self.ring.word(HEAD));
        prefetch(self.ring.descriptor(self.tail));
        self.fetch(0);
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
