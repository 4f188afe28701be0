//! Lets a lane stop looking at doorbells without missing one.
//!
//! Where writes of doorbell registers are trapped, the function's own thread handles them. It
//! stores the cell, or finds that the VMM has stored it, and wakes the cell's lane, but only if the
//! lane rests: waking is a system call, and a lane with work looks by itself.
//!
//! # No doorbell is lost
//! Lane: store the nap N, full barrier, look at the cell. The function's thread: store the cell C,
//! full barrier, look for the nap. Of two such stores with a full barrier before the looks, at
//! least one is seen by the other side. Either the lane's last look finds C, and the lane ends its
//! nap by itself; or the function's thread finds N, and wakes the lane. The nap stays set between
//! the wake-up and its end, so more doorbells wake again: a surplus wake-up is harmless. So a nap
//! is not the word of `slipway_ring::sleep`, which a waker takes: a lane may poll several times in
//! one nap.
//! `tests/nap.rs` has loom go through the interleavings.

use super::outside::{AtomicBool, Ordering, fence};

/// The flag that a lane must be woken for a doorbell.
#[derive(Default)]
pub(crate) struct Nap(AtomicBool);

impl Nap {
    /// Begins the nap: the lane will look once more, and then no longer.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Ends the nap: the lane looks by itself again.
    pub fn end(&self) {
        if self.0.load(Ordering::Relaxed) {
            self.0.store(false, Ordering::Relaxed);
        }
    }

    /// Returns whether the lane must be woken. To be called after a doorbell's cell was stored.
    pub fn misses(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}
