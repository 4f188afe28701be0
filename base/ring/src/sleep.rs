//! The protocol by which a consumer falls asleep.
//!
//! Consumer: store asleep = 1, full barrier, load head. Producer: store head, full barrier, load
//! asleep. Of two such stores with a full barrier before the loads, at least one is seen by the
//! other side's load. Either the consumer sees the new head and does not sleep, or the producer
//! sees that it is asleep and wakes it. A producer that wakes the consumer sets asleep to 0, so
//! that it does so once. A consumer that was woken, or found something, must arm again before it
//! sleeps again. The cost of a lost wake-up would be packets that lie in the ring until the next
//! one comes.

use super::outside::{AtomicU64, Ordering, fence};

/// Moves the head. A full barrier and [`is_asleep`] must follow.
#[inline]
pub(crate) fn publish(head: &AtomicU64, value: u64) {
    // Release: a reader that sees the head sees what was written to the slots before it.
    head.store(value, Ordering::Release);
}

/// The full barrier between [`publish`] and [`is_asleep`]; one serves any number of rings.
#[inline]
pub(crate) fn barrier() {
    // Pairs with the one in `arm`.
    fence(Ordering::SeqCst);
}

/// Returns whether the consumer sleeps and must be woken. Returns `true` only once for each sleep.
#[inline]
pub(crate) fn is_asleep(asleep: &AtomicU64) -> bool {
    asleep.load(Ordering::Relaxed) == 1
        && asleep.compare_exchange(1, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Asks to be woken when the head moves on from `seen`. Returns `true` if the head has moved
/// already, and then no wake-up may come.
pub(crate) fn arm(head: &AtomicU64, asleep: &AtomicU64, seen: u64) -> bool {
    asleep.store(1, Ordering::Relaxed);
    // Pairs with the one in `barrier`.
    fence(Ordering::SeqCst);
    let moved = head.load(Ordering::Acquire) != seen;
    if moved {
        asleep.store(0, Ordering::Relaxed);
    }
    moved
}
