//! Jobs: what is handed to an executor, and what comes back.

use std::time::Duration;

use slipway_ram::Span;

use crate::memory::{Input, Output};
use crate::{Options, Stretch, TransformError};

/// A key that an executor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(pub u32);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Nothing: the bytes stay where they are and count as moved (class Z).
    Pass,
    /// Copies as much as there is room for.
    Copy,
    /// Copies, and tells the CRC32C of what was copied.
    CopyChecked,
    /// Makes one record of the source; sealed when there is a key.
    Seal(Option<KeyId>, Options),
    /// Opens the one record that the source is, sealed when there is a key.
    Open(Option<KeyId>),
}

/// One end of a job.
#[derive(Clone, Debug)]
pub enum Place {
    /// A stretch of a ring, whose memory is the span.
    Ring(Span, Stretch),
    /// Memory of this process: as a source its bytes, as a sink what is to be written over, from the
    /// beginning.
    Buffer(Vec<u8>),
}

impl Place {
    /// Bytes.
    pub fn length(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Buffer(bytes) => bytes.len(),
        }
    }

    /// To be read.
    pub fn input(&self) -> Input<'_> {
        match self {
            Self::Ring(memory, at) => Input::Ring(memory, *at),
            Self::Buffer(bytes) => Input::Bytes(bytes),
        }
    }

    /// To be written.
    pub fn output(&mut self) -> Output<'_> {
        match self {
            Self::Ring(memory, at) => Output::Ring(memory, *at),
            Self::Buffer(bytes) => Output::Bytes(bytes),
        }
    }
}

/// Something for an executor to do in one go.
#[derive(Debug)]
pub struct Job {
    /// The submitter's name for it, handed back. Unique among those in flight.
    pub tag: u64,
    /// What to do.
    pub work: Work,
    /// Where from; lent until the completion.
    pub source: Place,
    /// Where to; lent until the completion.
    pub sink: Place,
}

/// What a job moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of the source that are done with.
    pub consumed: usize,
    /// Bytes of the sink that hold something.
    pub produced: usize,
    /// The CRC32C of the payload, where the work tells it.
    pub checksum: Option<u32>,
}

/// The end of a job.
#[derive(Debug)]
pub struct Completion {
    /// The job, whose memory is the submitter's again.
    pub job: Job,
    /// What it moved, or why not.
    pub result: Result<Moved, TransformError>,
    /// Time that the executor was busy with it: what capacities are measured by.
    pub busy: Duration,
}
