//! Jobs for executors, and their completions.

use std::time::Duration;

use slipway_ram::Span;

use crate::memory::{Input, Output};
use crate::{Options, Stretch, TransformError};

/// A key that an executor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyId(pub u32);

/// The work of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Leaves the bytes where they are and counts them as moved (class Z).
    Pass,
    /// Copies as much as the sink has room for.
    Copy,
    /// Copies, and returns the CRC32C of the copied bytes.
    CopyChecked,
    /// Makes one record of the source, sealed if there is a key.
    Seal(Option<KeyId>, Options),
    /// Opens the source, which is one record, sealed if there is a key.
    Open(Option<KeyId>),
}

/// One end of a job: its source or its sink.
#[derive(Clone, Debug)]
pub enum JobEnd {
    /// A stretch of a ring, whose memory is the span.
    Ring(Span, Stretch),
    /// Memory of this process: a source's bytes, or a sink that is overwritten from its beginning.
    Buffer(Vec<u8>),
}

impl JobEnd {
    /// Returns the number of bytes.
    pub fn length(&self) -> usize {
        match self {
            Self::Ring(_, at) => at.length(),
            Self::Buffer(bytes) => bytes.len(),
        }
    }

    /// Returns a view for reading.
    pub fn input(&self) -> Input<'_> {
        match self {
            Self::Ring(memory, at) => Input::Ring(memory, *at),
            Self::Buffer(bytes) => Input::Bytes(bytes),
        }
    }

    /// Returns a view for writing.
    pub fn output(&mut self) -> Output<'_> {
        match self {
            Self::Ring(memory, at) => Output::Ring(memory, *at),
            Self::Buffer(bytes) => Output::Bytes(bytes),
        }
    }
}

/// A piece of work that an executor does in one go.
#[derive(Debug)]
pub struct Job {
    /// The submitter's tag, which the completion hands back. All jobs of a pipe have the same tag.
    pub tag: u64,
    /// The work to do.
    pub work: Work,
    /// The source's bytes, lent until the completion.
    pub source: JobEnd,
    /// The sink's bytes, lent until the completion.
    pub sink: JobEnd,
}

/// The result of a successful job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The number of bytes of the source that were consumed.
    pub consumed: usize,
    /// The number of bytes of the sink that were written.
    pub produced: usize,
    /// The CRC32C of the payload, if the work computes it.
    pub checksum: Option<u32>,
}

/// The end of a job.
#[derive(Debug)]
pub struct Completion {
    /// The job, whose memory belongs to the submitter again.
    pub job: Job,
    /// The bytes that the job moved, or the reason why it failed.
    pub result: Result<Moved, TransformError>,
    /// The time that the executor was busy with the job, from which capacities are measured.
    pub busy: Duration,
}
