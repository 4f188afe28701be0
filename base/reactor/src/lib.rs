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
//! thread sleeps it looks for events without sleeping for [`Settings::poll_budget`]; the budget
//! starts anew with every piece of work, so a loaded reactor never sleeps and an idle one sleeps
//! for good.
//!
//! # No wake-up is lost
//! A message (a new task, a wake) is pushed to a mailbox under its lock; whoever finds the mailbox
//! empty also writes the mailbox's eventfd, *after* the push. The reactor, woken, first drains the
//! eventfd and then takes all messages. Take any push P and the first drain D after which the
//! reactor takes nothing newer: if P came before that taking, it was taken. If it came after, P
//! found the mailbox empty or with a message that also came after; the first of those writes the
//! eventfd after D, and no drain follows D before the reactor sleeps, so epoll, being
//! level-triggered, returns at once. Descriptors of tasks are level-triggered too: what a step
//! leaves unread wakes the task again.
//!
//! # Panics
//! A panic in a step is that task's end, not the thread's: the task is dropped and
//! [`Settings::on_panic`] is told.
//!
//! Not here: work stealing (a task stays where it is put, see [`Task::leave`] for moving one),
//! blocking calls, I/O other than readiness.
//!
//! Dependencies: `rustix` for epoll, eventfd and affinity; `thiserror` for [`Stopped`].

mod context;
mod mailbox;
mod reactor;
mod run;
mod task;

pub use context::{Context, Event, Interest};
pub use mailbox::{Handle, Stopped};
pub use reactor::{Reactor, Settings};
pub use task::{Step, Task, TaskId};
