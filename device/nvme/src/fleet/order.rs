//! Messages between a home and its lanes.

use crate::cell::ShadowPages;
use crate::features::Tuning;
use crate::inspect::ThreadView;
use crate::journal::UsedSlot;
use crate::limiter::Limiter;
use crate::namespace::Namespace;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::trace::{Latencies, Tracer};

/// The callback that takes an answer, on the thread that answers.
pub type Answer<T> = Box<dyn FnOnce(T) + Send>;

/// The settings that a lane gets when the guest has enabled the controller.
#[derive(Clone)]
pub(crate) struct Settings {
    pub tuning: Tuning,
    pub page_size: u64,
    pub shadow: Option<ShadowPages>,
}

/// An order of the home to a lane.
pub(crate) enum Order {
    /// Serve queues from now on.
    Begin(Settings),
    /// Start nothing more, let the commands in flight end, and then publish this number.
    Stop(u64),
    /// Start commands again after a stop.
    GoOn,
    /// Give up all queues, and stop.
    Reset(u64),
    /// Stop everything after a fatal error.
    Fail,
    AddCompletion(CompletionQueue),
    AddSubmission(SubmissionQueue),
    /// Delete a submission queue, and tell when it is gone.
    DeleteSubmission(u16),
    /// Do something for an admin command, and answer with the number.
    Ask(u64, Question),
    Limit(Limiter),
    Tune(Tuning),
    Attach(Namespace),
    /// Take a namespace away, and tell when its requests have ended.
    Detach(u32),
    /// Take over the size of a namespace's disk, and then tell with the number.
    Refresh(u32, u64),
    /// Carry out again commands of a predecessor.
    Restart(Vec<UsedSlot>),
    /// Trace with this tracer, or stop, and answer with the previous one.
    Trace(Option<Box<Tracer>>, Answer<Option<Box<Tracer>>>),
    /// Go on counting in these latencies, and answer with the counts so far.
    TakeLatencies(Latencies, Answer<Option<Latencies>>),
    /// Answer with a view of the lane.
    Inspect(Answer<ThreadView>),
}

/// A part of an admin command that lanes carry out. The command ends when all have answered.
#[derive(Clone)]
pub(crate) enum Question {
    /// Removes a completion queue.
    RemoveCompletion(u16),
    /// Aborts a command: queue, command ID. The answer is 1 if it was not aborted.
    Abort(u16, u16),
    /// Looks at these shadow pages.
    Follow(ShadowPages),
    /// Takes over the features.
    Tune(Tuning),
}

/// A message of a lane to its home, at most one for each order.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reply {
    /// The number of a question, and the answer.
    Answer(u64, u32),
    /// A submission queue was deleted.
    SubmissionGone(u16),
    /// The requests of a namespace that was taken away have ended.
    NamespaceLeft(u32),
    /// The size of a disk is taken over; the number is that of the order.
    Refreshed(u64),
}
