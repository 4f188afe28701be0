//! Executors: who does the jobs.

mod core;
mod simulated;

use std::collections::VecDeque;
use std::time::Duration;

pub use self::core::Core;
pub use simulated::Simulated;

use crate::{Completion, Job, Needs};

/// How an executor relates to the transfer that a pipe makes anyway: SG-IOV's letters. The slides name
/// units of a SmartNIC; what each is where the executor is a host core stands behind the colon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Zero-copy across nodes: the socket to the other engine takes bytes from where they lie, the core
    /// copies none.
    Z,
    /// Full copy: the core copies from ring to ring and nothing else.
    F,
    /// In-line accelerator and transfer: the core transforms while it copies from the ring to what leaves
    /// the node, so that a byte is fetched once.
    I,
    /// Loopback in-line: the same with both ends on this node.
    L,
    /// Look-aside: source and sink are buffers of the engine, before or after a transfer that another
    /// executor makes.
    A,
    /// In-motion look-aside: as A, on pieces of a transfer that goes on meanwhile.
    M,
}

impl Class {
    /// Its letter in the slides.
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

/// Does jobs: a core of the host, an accelerator, or something that stands for one.
///
/// Duties of the caller: at most [`Executor::room`] jobs a submission; source and sink of a job do not
/// overlap each other, nor does a sink overlap anything of another job in flight; what
/// [`Executor::needs`] says about wraps is kept to; every submitted job is polled for until it has
/// completed.
///
/// Duties of the implementer: every job completes exactly once, and jobs of one tag's pipe in the order
/// in which they were submitted; `submit` and `poll` never wait; what a peer does to a ring meanwhile
/// changes bytes of that ring's stream and nothing else; `busy` of all completions together is no more
/// than the time that passed.
pub trait Executor: Send {
    /// What it is.
    fn class(&self) -> Class;

    /// What it cannot take in two parts. Constant.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// How many jobs it takes now.
    fn room(&self) -> usize;

    /// Takes jobs from the front of `jobs` as far as there is room. Those that end at once are appended to
    /// `completions`.
    fn submit(&mut self, jobs: &mut VecDeque<Job>, completions: &mut Vec<Completion>);

    /// Appends what has ended since the last call. Cheap when nothing has.
    fn poll(&mut self, completions: &mut Vec<Completion>);

    /// When, by its clock, the next job ends, if that is known: for who steps a clock by hand. None when
    /// nothing is in flight.
    fn due(&self) -> Option<Duration> {
        None
    }
}
