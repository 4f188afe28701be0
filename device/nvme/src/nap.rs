//! How a lane stops looking at doorbells without missing one.
//!
//! Where writes of doorbell registers are trapped the function's own thread has them, stores the cell
//! and wakes the lane the cell belongs to, but only a lane that has lain down: waking one is a system
//! call, and while it has work it looks by itself.
//!
//! # No doorbell is lost
//! Lane: store the nap N, full barrier, look at the cell. The function's thread: store the cell C,
//! full barrier, look for the nap. Of two such stores with a full barrier before the looks at least one
//! is seen by the other side. Either the lane's last look finds C, and it gets up by itself; or the
//! other side finds N, and wakes it. Between waking and getting up the nap stays, so more doorbells
//! wake again: a wake too many is harmless. `tests/nap.rs` has loom go through the interleavings.

use super::outside::{AtomicBool, Ordering, fence};

/// Whether a lane has to be woken for a doorbell.
#[derive(Default)]
pub(crate) struct Nap(AtomicBool);

impl Nap {
    /// The lane will look once more and then no longer.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The lane looks by itself again.
    pub fn end(&self) {
        if self.0.load(Ordering::Relaxed) {
            self.0.store(false, Ordering::Relaxed);
        }
    }

    /// Whether the lane has to be woken: asked after a doorbell's cell was stored.
    pub fn misses(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}
