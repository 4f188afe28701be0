//! The contract of a lane: a part of a function that has a thread of its own.

use crate::{Progress, TurnLength};

/// A part of a function that is polled separately, on another thread if the host likes: for example
/// some of its queues, with everything that their commands need. See
/// [`Function::take_lanes`](crate::Function::take_lanes). A function and its lanes exchange
/// messages by themselves; a host only makes sure that a lane or function with a message is polled.
///
/// Duties of the host:
/// - It owns the lane on one thread and calls it only from there.
/// - It polls when the lane's waker was called, when a descriptor of one of the lane's backends
///   wakes, at the time that [`Progress::Idle`] or [`Progress::Watching`] gives, and while `poll`
///   returns [`Progress::Busy`] or [`Progress::Behind`].
/// - After [`Progress::Watching`] it calls `rest` before it stops polling.
/// - Where a client maps doorbells, it looks at them for the lane, too.
/// - It goes on polling while the function is quiesced, since only polled lanes become quiet. Once
///   the function is quiet, the function keeps the lane quiet until the function is polled itself.
/// - When the function is gone, the lane is useless: the host drops it once it is quiet.
///
/// Duties of the lane: those of a function. A lane that waits for its function's messages costs
/// nothing.
pub trait Lane: Send {
    /// Sets how much polls may do from now on; [`TurnLength::Long`] at first.
    fn set_turn(&mut self, turn: TurnLength);

    /// Does a bounded amount of the waiting work.
    fn poll(&mut self) -> Progress;

    /// Prepares for the end of polling after [`Progress::Watching`], like
    /// [`Function::rest`](crate::Function::rest). From then on the waker announces work.
    fn rest(&mut self) -> Progress;

    /// Starts no new access to guest memory, and returns whether none is in flight. For a lane
    /// whose function is gone.
    fn quiesce(&mut self) -> bool;
}
