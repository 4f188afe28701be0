//! Checks that every disk makes before it carries out a request.

use slipway_ram::Span;

use crate::{Completion, DiskError, Geometry, Operation, Request};

/// The bytes of the disk that an admitted request concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// First byte.
    pub start: u64,
    /// Bytes; 0 for a flush.
    pub len: u64,
}

/// Checks a request against the geometry.
///
/// # Panics
/// If the spans do not have the length that the request says, which is the caller's duty (see
/// [`Disk`](crate::Disk)). Going on would move bytes that were not asked for.
#[inline]
pub(crate) fn check_request(geometry: &Geometry, request: &Request) -> Result<Extent, DiskError> {
    let Request { operation, lba, blocks, .. } = *request;
    match operation {
        Operation::Flush => Ok(Extent { start: 0, len: 0 }),
        _ => check_transfer(geometry, operation, (lba, blocks), &request.spans),
    }
}

/// Checks `blocks` logical blocks from `lba` against the geometry, for every operation except a
/// flush, and for [`Disk::transfer`](crate::Disk::transfer).
///
/// # Panics
/// If the spans of a read or write do not have the length of the blocks.
#[inline]
pub(crate) fn check_transfer(
    geometry: &Geometry,
    operation: Operation,
    (lba, blocks): (u64, u32),
    spans: &[Span],
) -> Result<Extent, DiskError> {
    if !geometry.holds(lba, u64::from(blocks)) {
        return Err(DiskError::OutOfRange);
    }
    if geometry.read_only && operation != Operation::Read {
        return Err(DiskError::ReadOnly);
    }
    let block = u64::from(geometry.block_size);
    let extent = Extent { start: lba * block, len: u64::from(blocks) * block };
    if matches!(operation, Operation::Read | Operation::Write) {
        let lent: u64 = spans.iter().map(|span| span.len() as u64).sum();
        assert_eq!(lent, extent.len, "spans hold exactly the blocks");
    }
    Ok(extent)
}

/// Ends a request and gives its spans back.
pub(crate) fn complete(request: Request, result: Result<(), DiskError>) -> Completion {
    Completion { tag: request.tag, result, spans: request.spans }
}

/// Returns whether a disk may have blocks of `size` bytes.
pub(crate) fn is_block_size(size: u32) -> bool {
    size.is_power_of_two() && (512..=4096).contains(&size)
}
