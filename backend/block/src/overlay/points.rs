//! Either side of every store that a successor could see: in tests the process may end there.

#[cfg(not(test))]
#[inline(always)]
pub(super) fn point() {}

#[cfg(test)]
pub(super) use testing::point;

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::Cell;

    thread_local!(static LEFT: Cell<Option<u64>> = const { Cell::new(None) });

    /// What a test's "kill" unwinds with.
    pub struct Killed;

    /// Kills after `points` more points; None: never.
    pub fn kill_after(points: Option<u64>) {
        LEFT.set(points);
    }

    pub fn point() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Killed));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
