//! The number of granules in each state.

use super::outside::Ordering;
use super::{LateMemory, states};

/// The number of granules in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Granules {
    /// Granules without a page, and a template's holes, which may have one.
    pub absent: usize,
    /// Granules with an earlier user's bytes.
    pub dirty: usize,
    /// Granules whose first bytes are being written.
    pub busy: usize,
    /// Granules of zeros that nobody was given.
    pub untouched: usize,
    /// Granules that the present user was given.
    pub clean: usize,
    /// Granules whose bytes are in the template only.
    pub shared: usize,
}

impl std::iter::Sum for Granules {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            absent: sum.absent + one.absent,
            dirty: sum.dirty + one.dirty,
            busy: sum.busy + one.busy,
            untouched: sum.untouched + one.untouched,
            clean: sum.clean + one.clean,
            shared: sum.shared + one.shared,
        })
    }
}

impl LateMemory {
    /// Counts the granules by their states. Others may change them meanwhile.
    pub fn count(&self) -> Granules {
        let mut count = Granules::default();
        for state in self.states() {
            *match state.load(Ordering::Relaxed) {
                states::ABSENT => &mut count.absent,
                states::BUSY => &mut count.busy,
                states::UNTOUCHED => &mut count.untouched,
                states::CLEAN => &mut count.clean,
                states::SHARED => &mut count.shared,
                _ => &mut count.dirty,
            } += 1;
        }
        count
    }
}
