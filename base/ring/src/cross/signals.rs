//! Signals: one small FIFO that carries events for any number of streams.

use std::sync::atomic::Ordering;

use slipway_ram::Lasting;

use super::index::Spoiled;

/// The word of the tail. Tail and head have a cache line each, and each is written by one side.
const TAIL: usize = 0;
const HEAD: usize = 8;
const EVENTS: usize = 16;

/// The error of a FIFO without room for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// A FIFO of events of 64 bits. One side raises events and the other takes them; both have a
/// private counter, and check the other's.
///
/// | offset | what | written by |
/// |---|---|---|
/// | 0 | tail, `u64`: events raised | the raising side |
/// | 64 | head, `u64`: events taken | the taking side |
/// | 128 | events, `u64` each: a power of two of them | the raising side |
pub struct Signals {
    words: Lasting,
    mask: u64,
    own: u64,
    seen: u64,
}

impl Signals {
    /// Returns the size in bytes of a FIFO of `events` events, a power of two.
    pub const fn bytes(events: usize) -> usize {
        (EVENTS + events) * 8
    }

    /// Returns one side of the FIFO in `words`, from its beginning. Returns `None` if `words` do
    /// not hold a power of two of events.
    pub fn new(words: Lasting, events: usize) -> Option<Self> {
        let fits = events.is_power_of_two() && words.len() >= Self::bytes(events);
        fits.then(|| Self { words, mask: events as u64 - 1, own: 0, seen: 0 })
    }

    /// Returns the same side of the same FIFO, which was unmapped and is mapped again as `words`.
    /// Returns `None` as [`Signals::new`] does.
    pub fn onto(&self, words: Lasting) -> Option<Self> {
        let (own, seen) = (self.own, self.seen);
        Self::new(words, self.mask as usize + 1).map(|fresh| Self { own, seen, ..fresh })
    }

    /// Raises an event. The caller wakes the other side if it sleeps, as the users agreed.
    ///
    /// # Errors
    /// `Ok(Err(Full))` as long as the other side takes none; [`Spoiled`] if its counter is invalid.
    #[inline]
    pub fn raise(&mut self, event: u64) -> Result<Result<(), Full>, Spoiled> {
        if self.own.wrapping_sub(self.seen) > self.mask {
            let head = self.words.words()[HEAD].load(Ordering::Acquire);
            if self.own.wrapping_sub(head) > self.mask + 1 {
                return Err(Spoiled);
            }
            self.seen = head;
            if self.own.wrapping_sub(head) > self.mask {
                return Ok(Err(Full));
            }
        }
        let at = EVENTS + (self.own & self.mask) as usize;
        self.words.words()[at].store(event, Ordering::Relaxed);
        self.own = self.own.wrapping_add(1);
        self.words.words()[TAIL].store(self.own, Ordering::Release);
        Ok(Ok(()))
    }

    /// Returns whether there is an event to take, or an invalid counter.
    #[inline]
    pub fn is_raised(&self) -> bool {
        self.words.words()[TAIL].load(Ordering::Acquire) != self.own
    }

    /// Takes the next event, or returns `None`.
    ///
    /// # Errors
    /// [`Spoiled`] if the other side's counter is invalid.
    #[inline]
    pub fn take(&mut self) -> Result<Option<u64>, Spoiled> {
        if self.own == self.seen {
            let tail = self.words.words()[TAIL].load(Ordering::Acquire);
            if tail.wrapping_sub(self.own) > self.mask + 1 {
                return Err(Spoiled);
            }
            self.seen = tail;
            if tail == self.own {
                return Ok(None);
            }
        }
        let at = EVENTS + (self.own & self.mask) as usize;
        let event = self.words.words()[at].load(Ordering::Relaxed);
        self.own = self.own.wrapping_add(1);
        self.words.words()[HEAD].store(self.own, Ordering::Release);
        Ok(Some(event))
    }
}
