//! The races between an interrupt and its mask, for edge-triggered and level-triggered interrupts.

use super::outside::{AtomicBool, AtomicU8, Ordering};

/// The mask of an edge-triggered interrupt, and the flag that the interrupt is pending behind it.
#[derive(Default)]
pub(crate) struct Mask {
    masked: AtomicBool,
    pending: AtomicBool,
}

impl Mask {
    /// Delivers an interrupt, or keeps it pending while masked.
    ///
    /// Races with [`Mask::unmask`]. Both sides swap `pending` after `masked` was loaded here or
    /// cleared there, and one of two swaps of one word comes first, so the other sees it. If the
    /// swap here comes first, `unmask` finds the interrupt pending. If the swap in `unmask` comes
    /// first, this side sees the store before it, that the mask is cleared, and takes the interrupt
    /// back. Should `unmask` run once more meanwhile, the last swap lets exactly one of them
    /// deliver. The tests have loom go through every interleaving.
    pub(crate) fn signal(&self, deliver: impl FnOnce()) {
        if !self.masked.load(Ordering::SeqCst) {
            return deliver();
        }
        self.pending.swap(true, Ordering::SeqCst);
        if !self.masked.load(Ordering::SeqCst) && self.pending.swap(false, Ordering::SeqCst) {
            deliver();
        }
    }

    pub(crate) fn is_masked(&self) -> bool {
        self.masked.load(Ordering::SeqCst)
    }

    pub(crate) fn mask(&self) {
        self.masked.store(true, Ordering::SeqCst);
    }

    /// Unmasks the interrupt and delivers it if it is pending.
    pub(crate) fn unmask(&self, deliver: impl FnOnce()) {
        self.masked.store(false, Ordering::SeqCst);
        if self.pending.swap(false, Ordering::SeqCst) {
            deliver();
        }
    }

    /// Unmasks the interrupt and drops a pending one.
    pub(crate) fn clear(&self) {
        self.masked.store(false, Ordering::SeqCst);
        self.pending.store(false, Ordering::SeqCst);
    }
}

/// A level-triggered interrupt that is delivered once and then waits to be unmasked ("automasked").
/// If it is still asserted then, it is delivered again. Its state is one word, so every change sees
/// every other.
#[derive(Default)]
pub(crate) struct Level(AtomicU8);

/// Bit: the function asserts the interrupt.
const ASSERTED: u8 = 1;
/// Bit: the client has masked the interrupt.
const MASKED: u8 = 1 << 1;
/// Bit: the interrupt was delivered and not unmasked since.
const DELIVERED: u8 = 1 << 2;

impl Level {
    /// Asserts or deasserts the interrupt. After asserting it, the caller calls [`Level::look`].
    pub(crate) fn set(&self, asserted: bool) {
        if asserted {
            self.0.fetch_or(ASSERTED, Ordering::SeqCst);
        } else {
            self.0.fetch_and(!ASSERTED, Ordering::SeqCst);
        }
    }

    /// Delivers the interrupt if it is asserted, not masked, and not waiting to be unmasked. Of
    /// several concurrent calls, one changes the word, and that one delivers. `deliver` returns
    /// `false` if nobody receives the interrupt: the interrupt is due as before then, and this
    /// returns `false`, too.
    ///
    /// A receiver may come meanwhile, whose call finds the interrupt delivered and does nothing.
    /// Both sides write the word: that call after the receiver has come, and this one before the
    /// caller looks for a receiver again. So the caller calls again until there is no receiver or
    /// this returns `true`.
    pub(crate) fn look(&self, deliver: impl FnOnce() -> bool) -> bool {
        // Changes nothing: the write for the other side.
        self.0.fetch_or(0, Ordering::SeqCst);
        let due = ASSERTED | DELIVERED;
        let is_due = self.0.compare_exchange(ASSERTED, due, Ordering::SeqCst, Ordering::SeqCst);
        if is_due.is_ok() && !deliver() {
            self.0.fetch_and(!DELIVERED, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Returns whether the client masked the interrupt.
    pub(crate) fn is_masked(&self) -> bool {
        self.0.load(Ordering::SeqCst) & MASKED != 0
    }

    pub(crate) fn mask(&self) {
        self.0.fetch_or(MASKED, Ordering::SeqCst);
    }

    /// Unmasks the interrupt, whether the client or a delivery masked it; the caller then calls
    /// [`Level::look`]. The interrupt stays asserted or deasserted.
    pub(crate) fn unmask(&self) {
        self.0.fetch_and(!(MASKED | DELIVERED), Ordering::SeqCst);
    }
}
