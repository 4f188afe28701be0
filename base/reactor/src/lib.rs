//! Reactors: threads that own tasks outright, poll while there is work and sleep when there is
//! none.
//!
//! How the pieces meet:
//! - a [`Reactor`] is one thread, pinned or not; dropping it ends the thread and its tasks;
//! - a [`Task`] is a state machine that the thread owns: it needs no lock, and all its work is done
//!   in [`Task::poll`], a bounded step that returns whether the task wants to go on at once, at a
//!   time, or when one of its descriptors is ready;
//! - a [`Context`] is a step's view of its reactor: the time, the descriptors that woke the task,
//!   and calls to watch more;
//! - a [`Handle`] is every other thread's view: it adds tasks and wakes them;
//! - [`Reactor::of_one`] starts a reactor for a single task, with the task's waker.
//!
//! # What a wake costs
//! Only ready tasks are polled, so a thousand idle ones cost nothing per wake: readiness comes from
//! epoll with the task's number in the event, time from a sorted set of deadlines. Before the
//! thread sleeps it polls for events, for a time that follows the traffic, up to
//! [`Settings::poll_budget`]; the time starts anew with every piece of work, so a loaded reactor
//! never sleeps and an idle one sleeps for good. A deadline at which a task finds nothing to do is
//! no work: the thread sleeps again at once. Nor is a message of another thread, or its bell
//! ([`Interest::Bell`]), after which a task finds nothing to do.
//!
//! Every ready task has a step in turn. The length of a step is up to the task; it can ask whether
//! another task had work lately ([`Context::is_shared`]) and then do less at a time. A neighbour
//! with a backlog ([`Step::Behind`]) does not count: for two tasks with backlogs long steps are
//! better.
//!
//! # No wake-up is lost
//! A message (a new task, a wake) is pushed to a mailbox under its lock; a sender that finds the
//! mailbox empty also writes the mailbox's eventfd, *after* the push. The woken reactor first
//! drains the eventfd and then takes all messages. Let P be any push, and D the last drain before
//! the reactor sleeps. If P came before the taking that follows D, P's message was taken. If P came
//! after the taking, P found the mailbox empty or with messages that also came after the taking;
//! the first sender of those writes the eventfd after D, and no drain follows D before the reactor
//! sleeps, so epoll, being level-triggered, returns at once. `tests/mailbox.rs` has loom go through
//! the interleavings. Descriptors of tasks are level-triggered too: data that a step leaves unread
//! wakes the task again.
//!
//! # Panics
//! A panic in a step ends the task, not the thread: the task is dropped and [`Settings::on_panic`]
//! is called.
//!
//! # A step that sleeps
//! No step sleeps on purpose, but a peer can make a step sleep in a page fault on memory that it
//! takes away at that moment. Then a new thread goes on with all other tasks, within about 30 ms,
//! and the sleeping task keeps the old thread to itself until it is done or leaves
//! ([`Context::is_alone`], [`Settings::on_stall`]). `seat` holds the reactor during a step;
//! `watchdog` finds the sleeping thread.
//!
//! The peers of that task still wait for each other. A task that serves several peers can leave out
//! those whose memory made it sleep, by [`Stalls`].
//!
//! Not here: work stealing (a task stays on its reactor; [`Task::leave`] moves one), blocking
//! calls, I/O other than readiness.
//!
//! Dependencies: `rustix` for epoll, eventfd and affinity; `libc` for getrusage(2), which `rustix`
//! lacks; `slipway-peer` for calls that wait as page faults do; `thiserror` for [`Stopped`].

mod bell;
mod context;
mod mailbox;
mod polling;
mod reactor;
mod run;
mod seat;
mod settings;
mod share;
mod stalls;
mod sweep;
mod task;
mod tasks;
mod waker;
mod watchdog;

/// Dependencies of `mailbox`: its test replaces them by loom's locks.
mod outside {
    pub(crate) use std::sync::{Arc, Mutex, MutexGuard};

    pub(crate) use crate::bell::Bell;
}

pub use bell::Bell;
pub use context::{Context, Event, Interest};
pub use mailbox::{Handle, Stopped};
pub use reactor::Reactor;
pub use settings::Settings;
pub use stalls::Stalls;
pub use task::{Step, Task, TaskId};
