//! Kill points before and after every store that a successor could see, at which tests end the
//! process.

#[cfg(not(test))]
#[inline(always)]
pub(super) fn point() {}

#[cfg(test)]
pub(super) use testing::point;

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::Cell;

    thread_local!(static LEFT: Cell<Option<u64>> = const { Cell::new(None) });

    /// The payload with which a simulated kill unwinds.
    pub struct Killed;

    /// Kills the process after `points` more points, or never if it is `None`.
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
