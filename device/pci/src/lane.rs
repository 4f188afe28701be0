//! The contract of a part of a function that has a thread of its own.

use crate::{Progress, Turn};

/// A part of a function that is polled apart from it, on another thread if the host likes: some of
/// its queues, say, with all that their commands need. See
/// [`Function::take_lanes`](crate::Function::take_lanes). Function and lanes talk by messages among
/// themselves; a host only sees to it that who has got one is polled.
///
/// Duties of the host: it owns the lane on one thread and calls it from there only; it polls when the
/// lane's waker was called, when one of the lane's backends' descriptors wakes, and while `poll`
/// returns [`Progress::Busy`] or [`Progress::Behind`]; after [`Progress::Watching`] polling ends with
/// `rest` and not without. Where a client maps doorbells it looks at those for the lane too. It goes
/// on while the function is quiesced, which is how that gets quiet; the function, when it has, keeps
/// the lane quiet until it is polled itself. When the function is gone the lane is of no more use, and
/// is dropped once it is quiet.
///
/// Duties of the lane: those of a function. A lane that waits for its function's messages costs
/// nothing.
pub trait Lane: Send {
    /// How much polls may do from now on; [`Turn::Long`] at first.
    fn set_turn(&mut self, turn: Turn);

    /// Does what there is to do, a bounded amount.
    fn poll(&mut self) -> Progress;

    /// Told before the host stops polling after [`Progress::Watching`]; as
    /// [`Function::rest`](crate::Function::rest). What announces work from now on is the waker.
    fn rest(&mut self) -> Progress;

    /// Starts no new access to guest memory and tells whether none is in flight, when the function is
    /// gone.
    fn quiesce(&mut self) -> bool;
}
