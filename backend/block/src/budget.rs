//! Bounds on the memory that overlays hold: those of one owner together, and those of all owners.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A bound on the memory that overlays hold together, in bytes. Clones share it.
///
/// A budget may be a part of a larger one: what is held counts in both, and a write that exceeds
/// either is refused with [`DiskError::NoSpace`](crate::DiskError::NoSpace). Memory is counted when
/// a page is first written and when it is given back, so other requests cost nothing.
#[derive(Clone)]
pub struct Budget(Arc<Inner>);

struct Inner {
    most: u64,
    held: AtomicU64,
    refused: AtomicU64,
    whole: Option<Whole>,
}

/// The larger budget that a budget is a part of.
struct Whole {
    budget: Budget,
    /// Called with the first refusal of each kind.
    report: Box<dyn Fn(Refusal) + Send + Sync>,
    /// Set if a refusal of a kind was reported, in the order of [`Refusal`].
    reported: [AtomicBool; 2],
}

/// The bound that a refused write would have exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The bound of the owner's own budget.
    Part,
    /// The bound of the budget of all owners.
    Whole,
}

impl Budget {
    /// Creates a budget of `most` bytes.
    pub fn new(most: u64) -> Self {
        Self::with(most, None)
    }

    /// Creates a part of this budget with at most `most` bytes. Its first refusal of each kind is
    /// given to `report`, on the thread of the disk, so `report` must not block for long.
    pub fn part(&self, most: u64, report: impl Fn(Refusal) + Send + Sync + 'static) -> Self {
        let (budget, report) = (self.clone(), Box::new(report));
        Self::with(most, Some(Whole { budget, report, reported: Default::default() }))
    }

    fn with(most: u64, whole: Option<Whole>) -> Self {
        let (held, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Self(Arc::new(Inner { most, held, refused, whole }))
    }

    /// Returns the bound in bytes.
    pub fn most(&self) -> u64 {
        self.0.most
    }

    /// Returns the bytes that are held. They exceed the bound in two cases only: the maps of
    /// overlays count and are never refused, and a predecessor with a larger bound may have left
    /// more.
    pub fn held(&self) -> u64 {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Returns the number of refused writes.
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Counts `bytes` here and in the whole, or in neither. Returns whether they are counted.
    fn take(&self, bytes: u64) -> bool {
        let Err(refusal) = self.reserve(bytes) else { return true };
        self.0.refused.fetch_add(1, Ordering::Relaxed);
        if let Some(whole) = &self.0.whole {
            if refusal == Refusal::Whole {
                whole.budget.0.refused.fetch_add(1, Ordering::Relaxed);
            }
            if !whole.reported[refusal as usize].swap(true, Ordering::Relaxed) {
                (whole.report)(refusal);
            }
        }
        false
    }

    // The counters guard no memory, so their order does not matter. The part is counted first: a
    // refused write of one owner must not make the whole look full to others for a moment.
    fn reserve(&self, bytes: u64) -> Result<(), Refusal> {
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= self.0.most);
        let counted = self.0.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        counted.map_err(|_| Refusal::Part)?;
        let Some(whole) = &self.0.whole else { return Ok(()) };
        if whole.budget.reserve(bytes).is_ok() {
            return Ok(());
        }
        self.0.held.fetch_sub(bytes, Ordering::Relaxed);
        Err(Refusal::Whole)
    }

    /// Counts `bytes` beyond the bound if need be.
    fn force(&self, bytes: u64) {
        self.0.held.fetch_add(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.0.whole {
            whole.budget.force(bytes);
        }
    }

    fn give_back(&self, bytes: u64) {
        self.0.held.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(whole) = &self.0.whole {
            whole.budget.give_back(bytes);
        }
    }
}

/// The bytes of a budget that one overlay holds. They are given back once: by
/// [`Charge::give_back`], or when this value is dropped.
pub(crate) struct Charge {
    budget: Budget,
    bytes: u64,
}

impl Charge {
    /// Creates a charge of nothing.
    pub fn new(budget: Budget) -> Self {
        Self { budget, bytes: 0 }
    }

    /// Returns the bytes that are held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes `bytes` more. Returns `false`, and takes nothing, if a bound does not allow them.
    pub fn take(&mut self, bytes: u64) -> bool {
        let taken = self.budget.take(bytes);
        self.bytes += if taken { bytes } else { 0 };
        taken
    }

    /// Takes `bytes` more, beyond the bounds if need be: they are held already.
    pub fn force(&mut self, bytes: u64) {
        self.budget.force(bytes);
        self.bytes += bytes;
    }

    /// Gives `bytes` back, at most those that are held.
    pub fn give_back(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.budget.give_back(bytes);
        self.bytes -= bytes;
    }

    /// Holds the same bytes of another budget.
    pub fn move_to(&mut self, budget: Budget) {
        let mut moved = Self::new(budget);
        moved.force(self.bytes);
        // The former charge is dropped, and so gives its bytes back.
        *self = moved;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn what_is_held_counts_in_the_part_and_in_the_whole_and_is_given_back_once() {
        let whole = Budget::new(10);
        let (one, two) = (whole.part(6, |_| {}), whole.part(9, |_| {}));
        let mut first = Charge::new(one.clone());
        let mut second = Charge::new(two.clone());
        assert!(first.take(5) && second.take(4));
        assert_eq!((one.held(), two.held(), whole.held()), (5, 4, 9));
        // Neither the part's bound nor that of the whole leaves a trace of what was refused.
        assert!(!first.take(2) && !second.take(2));
        assert_eq!((one.held(), two.held(), whole.held()), (5, 4, 9));
        assert_eq!((one.refused(), two.refused(), whole.refused()), (1, 1, 1));
        first.give_back(100);
        first.give_back(1);
        assert_eq!((one.held(), whole.held()), (0, 4));
        assert!(second.take(2));
        drop(first);
        drop(second);
        assert_eq!((one.held(), two.held(), whole.held()), (0, 0, 0));
    }

    #[test]
    fn what_is_held_already_may_exceed_the_bound_and_moves_whole() {
        let (small, large) = (Budget::new(4), Budget::new(100));
        let mut charge = Charge::new(large.clone());
        assert!(charge.take(9));
        charge.move_to(small.clone());
        assert_eq!((large.held(), small.held(), charge.bytes()), (0, 9, 9));
        assert!(!charge.take(1) && !charge.take(u64::MAX));
        charge.give_back(6);
        assert!(charge.take(1));
        assert_eq!(small.held(), 4);
    }

    #[test]
    fn the_first_refusal_of_each_kind_is_reported() {
        let reports = Arc::new(Mutex::new(Vec::new()));
        let (whole, told) = (Budget::new(8), reports.clone());
        let part = whole.part(4, move |refusal| told.lock().unwrap().push(refusal));
        let mut charge = Charge::new(part.clone());
        assert!(!charge.take(5) && !charge.take(6));
        let mut other = Charge::new(whole.clone());
        assert!(other.take(8));
        assert!(!charge.take(1) && !charge.take(1));
        assert_eq!(*reports.lock().unwrap(), [Refusal::Part, Refusal::Whole]);
        assert_eq!((part.refused(), whole.refused()), (4, 2));
    }

    #[test]
    fn threads_never_exceed_a_bound_together() {
        let whole = Budget::new(1000);
        let taken: u64 = std::thread::scope(|threads| {
            let take = |_| {
                let part = whole.part(u64::MAX, |_| {});
                threads.spawn(move || {
                    let mut charge = Charge::new(part);
                    let taken = (0..1000).filter(|_| charge.take(1)).count() as u64;
                    // Nothing is given back before all threads have taken.
                    std::mem::forget(charge);
                    taken
                })
            };
            let all: Vec<_> = (0..4).map(take).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!((taken, whole.held()), (1000, 1000));
    }
}
