//! Executors, which do the jobs.

mod core;
mod simulated;

use std::collections::VecDeque;
use std::time::Duration;

pub use self::core::Core;
pub use simulated::Simulated;

use slipway_warp::Class;

use crate::{Completion, Job, Needs};

/// Does jobs: a core of the host, an accelerator, or a simulated one.
///
/// Duties of the caller: it submits at most [`Executor::room`] jobs at a time; the source and the
/// sink of a job do not overlap, nor does a sink overlap the memory of another job in flight;
/// pieces wrap only where [`Executor::needs`] permits; every submitted job is polled for until it
/// has completed.
///
/// Duties of the implementer: every job completes exactly once, and jobs with the same tag complete
/// in the order in which they were submitted; `submit` and `poll` never wait; a peer that changes a
/// ring meanwhile changes bytes of that ring's stream and nothing else; `busy` of all completions
/// together is no more than the time that passed.
pub trait Executor: Send {
    /// Returns the executor's class.
    fn class(&self) -> Class;

    /// Returns which sides of a piece must be contiguous. Constant.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Returns the number of jobs that the executor can take now.
    fn room(&self) -> usize;

    /// Takes jobs from the front of `jobs` as long as there is room. Appends those that end at once
    /// to `completions`.
    fn submit(&mut self, jobs: &mut VecDeque<Job>, completions: &mut Vec<Completion>);

    /// Appends the jobs that have ended since the last call. Cheap if none has.
    fn poll(&mut self, completions: &mut Vec<Completion>);

    /// Returns the time, by the executor's clock, at which the next job ends, for callers that step
    /// a clock by hand. Returns `None` if no job is in flight or the time is not known.
    fn due(&self) -> Option<Duration> {
        None
    }
}
