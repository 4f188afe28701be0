//! The stream in which a VMM sends the memory of a machine that is saved: a record for each page
//! that has bytes other than zeros, by ascending offsets, and [`END`].
//!
//! | bytes of a record | content |
//! |---|---|
//! | 0 to 7 | the page's offset in the file of the memory, little-endian; a multiple of [`PAGE`] |
//! | 8 to 4103 | the page |
//!
//! The memory of a machine that runs comes in rounds, each of which ends with [`ROUND`], and the
//! last one with [`END`] behind that. A later round has pages that were written to since their last
//! record, also those that are zeros.

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Bytes of a record.
pub const RECORD: usize = 8 + PAGE;

/// Records that the VMM writes at once, and that its reader has room for.
pub const BATCH: usize = 64;

/// The end of a round: a record of the offset `u64::MAX - 1`, without a page.
pub const ROUND: [u8; 8] = (u64::MAX - 1).to_le_bytes();

/// The most rounds of a stream.
pub const ROUNDS: usize = 8;

/// The end of the stream: a record of the offset `u64::MAX`, without a page.
pub const END: [u8; 8] = u64::MAX.to_le_bytes();
