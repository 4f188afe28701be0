//! Reactors: threads that own tasks outright, poll while there is work and sleep when there is
//! none.
//!
//! How the pieces meet:
//! - a [`Reactor`] is one thread, pinned or not; dropping it ends the thread and its tasks;
//! - a [`Task`] is a state machine that the thread owns: nothing of it is locked, everything of it
//!   runs in [`Task::poll`], a bounded step that says whether it wants to go on at once, at a time,
//!   or when one of its descriptors is ready;
//! - a [`Context`] is what a step sees of its reactor: the time, which descriptors woke it, and
//!   calls to watch more;
//! - a [`Handle`] is what every other thread sees: it adds tasks and wakes them.
//!
//! # What a wake costs
//! Only tasks that are ready are polled, so a thousand idle ones cost nothing per wake: readiness
//! comes from epoll with the task's number in it, time from a sorted set of deadlines. Before the
//! thread sleeps it looks for events without sleeping, for a time that follows the traffic, up to
//! [`Settings::poll_budget`]; it starts anew with every piece of work, so a loaded reactor never
//! sleeps and an idle one sleeps for good. A deadline at which a task finds nothing to do is no
//! work: the thread sleeps again at once.
//!
//! Every ready task has a step in turn. How long a step may be is up to the task; it can ask
//! whether another one had work lately ([`Context::is_shared`]) and take less at a time then. One
//! that is behind with its work ([`Step::Behind`]) is no reason to: for two of that kind long steps
//! are the better ones.
//!
//! # No wake-up is lost
//! A message (a new task, a wake) is pushed to a mailbox under its lock; whoever finds the mailbox
//! empty also writes the mailbox's eventfd, *after* the push. The reactor, woken, first drains the
//! eventfd and then takes all messages. Take any push P and the first drain D after which the
//! reactor takes nothing newer: if P came before that taking, it was taken. If it came after, P
//! found the mailbox empty or with a message that also came after; the first of those writes the
//! eventfd after D, and no drain follows D before the reactor sleeps, so epoll, being
//! level-triggered, returns at once. `tests/mailbox.rs` has loom go through the interleavings.
//! Descriptors of tasks are level-triggered too: what a step
//! leaves unread wakes the task again.
//!
//! # Panics
//! A panic in a step is that task's end, not the thread's: the task is dropped and
//! [`Settings::on_panic`] is told.
//!
//! # A step that sleeps
//! No step sleeps on purpose, but a peer can make one sleep in a page fault on memory that it takes
//! away at that moment. Then a new thread goes on with all other tasks, within about 30 ms, and the
//! task that sleeps has the old thread to itself until it is done or leaves ([`Context::is_alone`],
//! [`Settings::on_stall`]). `seat` has the reactor during a step; `watchdog` finds the sleeping
//! thread.
//!
//! Not here: work stealing (a task stays where it is put, see [`Task::leave`] for moving one),
//! blocking calls, I/O other than readiness.
//!
//! Dependencies: `rustix` for epoll, eventfd and affinity; `thiserror` for [`Stopped`].

mod bell;
mod context;
mod mailbox;
mod polling;
mod reactor;
mod run;
mod seat;
mod share;
mod sweep;
mod task;
mod tasks;
mod watchdog;

/// What `mailbox` needs of elsewhere: its test puts loom's locks in their place.
mod outside {
    pub(crate) use std::sync::{Arc, Mutex, MutexGuard};

    pub(crate) use crate::bell::Bell;
}

pub use bell::Bell;
pub use context::{Context, Event, Interest};
pub use mailbox::{Handle, Stopped};
pub use reactor::{Reactor, Settings};
pub use task::{Step, Task, TaskId};
