//! The reasons why a transform fails.

use slipway_ram::Fault;
use slipway_warp::{KeyError, RecordError};

/// The reason why a transform failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// The memory of a ring was unmapped or refused.
    #[error("ring memory: {0}")]
    Memory(#[from] Fault),
    /// The record cannot be made or opened.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The checksum does not match the payload.
    #[error("a wrong checksum")]
    Checksum,
    /// The body does not decompress to the payload's length.
    #[error("a damaged compressed body")]
    Compression,
    /// An executor did less than its job said.
    #[error("{done} bytes done of a piece of {given}")]
    Short {
        /// Bytes that it did.
        done: usize,
        /// Bytes of the job.
        given: usize,
    },
    /// The executor has no such key.
    #[error("no such key")]
    NoKey,
}

impl From<KeyError> for TransformError {
    fn from(error: KeyError) -> Self {
        Self::Record(error.into())
    }
}
