//! What a reactor runs.

use std::time::{Duration, Instant};

use crate::Context;

/// The name of a task on its reactor; never used twice by one reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub(crate) u64);

/// What a task wants after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Another step soon, after every other ready task had one.
    Busy,
    /// The same, and more waits than one step takes: who has that much to do is not waited on for
    /// each thing, so others may take their time ([`Context::is_shared`]).
    Behind,
    /// As `Busy`, but nothing was found: it looks at memory that no descriptor announces. For the
    /// time that the reactor polls before it sleeps this is no work.
    Looking,
    /// Nothing until a watched descriptor is ready, somebody wakes the task or, when there is one,
    /// this time has come.
    Idle(Option<Instant>),
    /// As `Idle`; besides, [`Task::stirs`] is asked every so often, for all tasks of this period
    /// together, and the task has a step when it says so.
    Sweep(Duration, Option<Instant>),
    /// It has ended: its descriptors are forgotten and it is dropped.
    Done,
    /// It wants to be elsewhere: its descriptors are forgotten and [`Task::leave`] gets it.
    Leave,
}

/// A state machine that one reactor owns.
///
/// Duties of the implementer: a step is short (a few microseconds, a bounded number of messages)
/// and never blocks, since every other task of the reactor waits meanwhile; a watched descriptor
/// that is ready is dealt with in the step that [`Context::events`] reports it to, or the task is
/// polled again at once.
///
/// Duties of the reactor: `start` comes first and once per reactor; all calls come from one thread;
/// between two of them nobody else touches the task.
pub trait Task: Send {
    /// Called once on the reactor's thread before the first step: watches descriptors. The first
    /// step follows.
    ///
    /// # Errors
    /// Any; the task is then dropped and [`crate::Settings::on_panic`] is told.
    fn start(&mut self, context: &mut Context<'_>) -> std::io::Result<()> {
        let _ = context;
        Ok(())
    }

    /// Does a bounded amount of work.
    fn poll(&mut self, context: &mut Context<'_>) -> Step;

    /// Asked after [`Step::Sweep`]: whether there may be something to do that no descriptor
    /// announces. Quick, as thousands of tasks may be asked at a time.
    fn stirs(&mut self) -> bool {
        true
    }

    /// Takes itself away after [`Step::Leave`], typically to another reactor.
    fn leave(self: Box<Self>) {}
}
