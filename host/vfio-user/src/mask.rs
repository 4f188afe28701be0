//! The race between an interrupt and its mask.

use super::outside::{AtomicBool, Ordering};

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
