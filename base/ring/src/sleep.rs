//! The protocol by which one side falls asleep and the other wakes it.
//!
//! The side that may sleep has a [`SleepWord`], which both sides can reach. Sleeper: store the
//! events that it waits for in the word, full barrier, look for such events, sleep. Waker: store
//! the change that makes an event, full barrier, load the word. Of two such stores with a full
//! barrier before the loads, at least one is seen by the other side's load. Either the sleeper sees
//! the change and does not sleep, or the waker sees that it sleeps and wakes it. The cost of a lost
//! wake-up would be work that lies there until more comes.
//!
//! The waker that is to wake sets the word to 0, so a sleep is ended once, by one of any number of
//! wakers. It does so only if the word still has the value that it has loaded. Otherwise another
//! waker was faster, or the sleeper has stored the word since. Then the barrier before the
//! sleeper's next look comes after the waker's, and that look sees the change. A sleeper that was
//! woken, or found something, announces itself again before it sleeps again.
//!
//! One barrier serves any number of words: a sleeper with several sets all of them, passes the
//! barrier, and looks everywhere; a waker makes all its changes, passes the barrier, and takes from
//! all words. `cross::heavy` is such a barrier, too. How a sleeper is woken (an eventfd, an
//! interrupt) is up to the users. `tests/sleep.rs` has loom go through the interleavings.

use super::outside::{AtomicU64, Ordering, fence};

/// The event of a word whose sleeper does not tell events apart.
pub const ANY: u64 = 1;

/// The full barrier of both sides: between an announcement and the look, and between a change and
/// [`SleepWord::take`].
#[inline]
pub fn barrier() {
    fence(Ordering::SeqCst);
}

/// A word of shared memory with the events, as bits, for which a side is to be woken: 0 while that
/// side is awake. The word needs no trust: whatever the other side stores, a sleeper is woken too
/// often or not at all, and nothing else happens.
#[derive(Clone, Copy)]
pub struct SleepWord<'a>(&'a AtomicU64);

impl<'a> SleepWord<'a> {
    /// Makes this view of `word`.
    #[inline]
    pub fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// The sleeper asks to be woken for any of `events`, which is not 0. [`barrier`] must follow,
    /// and then a look for all of `events`.
    #[inline]
    pub fn announce(self, events: u64) {
        self.0.store(events, Ordering::Relaxed);
    }

    /// The sleeper is awake: it looks by itself from now on. A wake-up may still be under way.
    #[inline]
    pub fn withdraw(self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// The sleeper asks to be woken for any of `events`, passes the barrier, and calls `look`,
    /// which returns whether there is such an event. Returns what `look` returned; after `true` the
    /// request is withdrawn, and no wake-up may come.
    #[inline]
    pub fn arm(self, events: u64, look: impl FnOnce() -> bool) -> bool {
        self.announce(events);
        barrier();
        let found = look();
        if found {
            self.withdraw();
        }
        found
    }

    /// Returns whether the waker must wake the sleeper for one of `events`, which it has made.
    /// Returns `true` once for each announcement. To be called after [`barrier`].
    #[inline]
    pub fn take(self, events: u64) -> bool {
        let wanted = self.0.load(Ordering::Relaxed);
        wanted & events != 0
            && self.0.compare_exchange(wanted, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Passes the barrier and returns what [`SleepWord::take`] returns, for a waker that has one
    /// word to look at.
    #[inline]
    pub fn barrier_and_take(self, events: u64) -> bool {
        barrier();
        self.take(events)
    }
}
