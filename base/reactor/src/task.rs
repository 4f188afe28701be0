//! The tasks that a reactor runs.

use std::time::{Duration, Instant};

use crate::Context;

/// The number of a task on its reactor; never used twice by one reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub(crate) u64);

/// A task's request after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Another step soon, after one of every other ready task.
    Busy,
    /// Like `Busy`, with more work waiting than one step takes. The task's peer does not wait for
    /// each piece of a backlog, so other tasks need not keep their steps short
    /// ([`Context::is_shared`]).
    Behind,
    /// Like `Busy`, but the step found no work: the task polls memory that no descriptor announces.
    /// Such a step counts as no work, so it does not restart the reactor's polling time.
    Looking,
    /// No step until a watched descriptor is ready, a [`crate::Handle::wake`] arrives, or the given
    /// time has come.
    Idle(Option<Instant>),
    /// Like `Idle`, and [`Task::stirs`] is called once per given period, for all tasks of this
    /// period together; the task has a step if it returns `true`.
    Sweep(Duration, Option<Instant>),
    /// The task has ended: its descriptors are no longer watched and it is dropped.
    Done,
    /// The task leaves the reactor: its descriptors are no longer watched and [`Task::leave`] is
    /// called.
    Leave,
}

/// A state machine that one reactor owns.
///
/// Duties of the implementer: a step is short (a few microseconds, a bounded number of messages)
/// and never blocks, since every other task of the reactor waits meanwhile; a watched descriptor
/// that is ready is handled in the step that [`Context::events`] reports it to, or the task is
/// polled again at once.
///
/// Duties of the reactor: `start` comes first and once per reactor (a task that was left behind has
/// a new one); calls never overlap, and nothing else touches the task between two calls. All calls
/// come from one thread at a time, which changes if another task's step sleeps.
pub trait Task: Send {
    /// Watches descriptors. Called once per reactor, on its thread, before the first step, which
    /// follows.
    ///
    /// # Errors
    /// Any; the task is then dropped and [`crate::Settings::on_panic`] is called.
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let _ = context;
        Ok(())
    }

    /// Does a bounded amount of work.
    fn poll(&mut self, context: &mut Context<'_>) -> Step;

    /// Returns whether there may be work that no descriptor announces. Called after
    /// [`Step::Sweep`]. Quick, as thousands of tasks may be asked at a time.
    fn stirs(&mut self) -> bool {
        true
    }

    /// Moves the task after [`Step::Leave`], typically to another reactor.
    fn leave(self: Box<Self>) {}
}
