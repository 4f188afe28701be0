//! The reasons why a record is not made or not opened.

use crate::header::HeaderError;
use crate::key::KeyError;

/// The reason why a record was not made or not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
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
}
