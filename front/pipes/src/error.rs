//! The reasons why a transform fails.

use slipway_ram::Fault;

use slipway_warp::record::HeaderError;
use slipway_warp::{KeyError, RecordError};

/// The reason why a transform failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransformError {
    /// The memory of a ring was unmapped or refused.
    #[error("ring memory: {0}")]
    Memory(#[from] Fault),
    /// The output has no room for the result, the input exceeds a record, or the input is empty.
    #[error("{input} bytes do not fit into {room}")]
    NoRoom {
        /// Bytes of input.
        input: usize,
        /// Bytes of room in the output.
        room: usize,
    },
    /// The bytes are not a record.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The bytes are less than the whole record, or more.
    #[error("{there} bytes of a record of {record}")]
    NotWhole {
        /// Bytes that were passed.
        there: usize,
        /// Bytes of the record.
        record: usize,
    },
    /// The key cannot seal or open the record.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The record is plain where a sealed one is expected, or sealed where a plain one is.
    #[error("a record that is sealed, or that is not, against what was agreed")]
    Sealing,
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

impl From<RecordError> for TransformError {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::NoRoom { input, room } => Self::NoRoom { input, room },
            RecordError::Header(error) => Self::Header(error),
            RecordError::NotWhole { there, record } => Self::NotWhole { there, record },
            RecordError::Key(error) => Self::Key(error),
            RecordError::Sealing => Self::Sealing,
        }
    }
}
