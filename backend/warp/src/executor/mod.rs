//! Executors, which do the jobs.

mod core;
mod simulated;

use std::collections::VecDeque;
use std::time::Duration;

pub use self::core::Core;
pub use simulated::Simulated;

use crate::{Completion, Job, Needs};

/// SG-IOV's letter for how an executor relates to the transfer that a pipe makes anyway. The slides
/// name units of a SmartNIC; the text behind each colon says what the class is on a host core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Zero-copy across nodes: the socket to the other engine takes bytes from where they lie, and
    /// the core copies none.
    Z,
    /// Full copy: the core copies from ring to ring and nothing else.
    F,
    /// In-line accelerator and transfer: the core transforms while it copies from the ring to the
    /// memory that is sent to the other node, so that a byte is fetched once.
    I,
    /// Loopback in-line: the core transforms while it copies, with both ends on this node.
    L,
    /// Look-aside: source and sink are buffers of the engine, before or after a transfer that
    /// another executor makes.
    A,
    /// In-motion look-aside: as class A, on pieces of a transfer that goes on meanwhile.
    M,
}

impl Class {
    /// Returns the class's letter in the slides.
    pub fn letter(self) -> char {
        match self {
            Self::Z => 'Z',
            Self::F => 'F',
            Self::I => 'I',
            Self::L => 'L',
            Self::A => 'A',
            Self::M => 'M',
        }
    }
}

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
