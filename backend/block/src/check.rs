//! What every disk checks before it does anything.

use slipway_ram::Span;

use crate::{Completion, DiskError, Geometry, Operation, Request};

/// A request that was admitted: where it lies on the disk.
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
/// When the spans do not hold what the request says: the caller's duty, see [`Disk`](crate::Disk).
/// A disk that went on would move bytes that were not asked for.
#[inline]
pub(crate) fn admit(geometry: &Geometry, request: &Request) -> Result<Extent, DiskError> {
    let Request { operation, lba, blocks, .. } = *request;
    match operation {
        Operation::Flush => Ok(Extent { start: 0, len: 0 }),
        _ => admit_transfer(geometry, operation, (lba, blocks), &request.spans),
    }
}

/// As [`admit`], for all but a flush, and for what [`Disk::transfer`](crate::Disk::transfer) is asked
/// for: from logical block `lba` on, `blocks` of them.
#[inline]
pub(crate) fn admit_transfer(
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

/// Ends a request, giving its spans back.
pub(crate) fn complete(request: Request, result: Result<(), DiskError>) -> Completion {
    Completion { tag: request.tag, result, spans: request.spans }
}

/// Whether `size` is a block size that a disk may have.
pub(crate) fn is_block_size(size: u32) -> bool {
    size.is_power_of_two() && (512..=4096).contains(&size)
}
