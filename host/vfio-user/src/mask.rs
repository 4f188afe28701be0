//! The races between an interrupt and its mask: of edges, and of a level.

use super::outside::{AtomicBool, AtomicU8, Ordering};

/// Whether an interrupt is masked, and whether it waits for that to end.
#[derive(Default)]
pub(crate) struct Mask {
    masked: AtomicBool,
    pending: AtomicBool,
}

impl Mask {
    /// An interrupt came: it is delivered, or pending while masked.
    ///
    /// Races with [`Mask::unmask`]. Both swap `pending` once the mask has been looked at or taken
    /// away, and of two swaps of one word one comes first and the other sees it. If this one comes
    /// first, `unmask` finds the interrupt pending. If `unmask`'s comes first, this one sees what
    /// was stored before it, that the mask is gone, and takes the interrupt back; should `unmask`
    /// run once more meanwhile, the last swap lets exactly one of them deliver. The tests have
    /// loom go through every interleaving.
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

    /// Unmasks and delivers what came meanwhile.
    pub(crate) fn unmask(&self, deliver: impl FnOnce()) {
        self.masked.store(false, Ordering::SeqCst);
        if self.pending.swap(false, Ordering::SeqCst) {
            deliver();
        }
    }

    /// As at the start: not masked, nothing pending.
    pub(crate) fn clear(&self) {
        self.masked.store(false, Ordering::SeqCst);
        self.pending.store(false, Ordering::SeqCst);
    }
}

/// A level that is delivered once and then waits to be unmasked ("automasked"): delivered again if
/// it is still asserted then. All of it is one word, so every change sees every other.
#[derive(Default)]
pub(crate) struct Level(AtomicU8);

/// The function asserts it.
const ASSERTED: u8 = 1;
/// The client masked it.
const MASKED: u8 = 1 << 1;
/// It was delivered and not unmasked since.
const DELIVERED: u8 = 1 << 2;

impl Level {
    /// Asserts or deasserts it; who asserts it looks at it then.
    pub(crate) fn set(&self, asserted: bool) {
        if asserted {
            self.0.fetch_or(ASSERTED, Ordering::SeqCst);
        } else {
            self.0.fetch_and(!ASSERTED, Ordering::SeqCst);
        }
    }

    /// Delivers it if it is asserted and nothing holds it back. Of several who look at once one makes
    /// the change of the word, and that one delivers.
    pub(crate) fn look(&self, deliver: impl FnOnce()) {
        let due = ASSERTED | DELIVERED;
        if self.0.compare_exchange(ASSERTED, due, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            deliver();
        }
    }

    /// Whether the client masked it.
    pub(crate) fn is_masked(&self) -> bool {
        self.0.load(Ordering::SeqCst) & MASKED != 0
    }

    pub(crate) fn mask(&self) {
        self.0.fetch_or(MASKED, Ordering::SeqCst);
    }

    /// Unmasks it, whatever masked it; who does looks at it then. Whether it is asserted is the
    /// function's affair.
    pub(crate) fn unmask(&self) {
        self.0.fetch_and(!(MASKED | DELIVERED), Ordering::SeqCst);
    }
}
