//! A disk in memory.

use std::os::fd::OwnedFd;

use slipway_ram::{Fault, Span};

use crate::check::{Extent, check_request, check_transfer, complete, is_block_size};
use crate::memory::{Anonymous, FIXED, memory_file, sealed_len};
use crate::{Completion, Disk, DiskError, Geometry, OpenError, Operation, Request, Transferred};

/// A volatile disk in this process's memory. Sparse: blocks that were never written take no memory,
/// in steps of a huge page (2 MiB) if the kernel has them, else of a page. Discard and Write Zeroes
/// give whole pages back. Everything completes in `submit`.
pub struct RamDisk {
    memory: Anonymous,
    geometry: Geometry,
}

impl RamDisk {
    /// Creates a disk of `bytes` zeros, a multiple of `block_size` (512 to 4096, a power of two).
    ///
    /// # Errors
    /// [`OpenError::BlockSize`], [`OpenError::Size`], [`OpenError::Memory`].
    pub fn new(bytes: u64, block_size: u32) -> Result<Self, OpenError> {
        let geometry =
            Geometry { block_size, blocks: whole_blocks(bytes, block_size)?, read_only: false };
        let memory = usize::try_from(bytes).map_err(|_| std::io::ErrorKind::OutOfMemory.into());
        let memory = memory.and_then(Anonymous::new).map(Anonymous::huge_pages);
        let memory = memory.map_err(|source| OpenError::Memory { bytes, source })?;
        Ok(Self { memory, geometry })
    }

    /// Creates a disk whose content lies in `file`, which [`ram_file`] made in this process or in a
    /// predecessor of it. The disk has the content that the predecessor left. Nobody else may use
    /// the file.
    ///
    /// # Errors
    /// The errors of [`RamDisk::new`], and [`OpenError::Memory`] if the file was not made by
    /// [`ram_file`].
    pub fn of(file: &OwnedFd, block_size: u32) -> Result<Self, OpenError> {
        let bytes = sealed_len(file).map_err(|source| OpenError::Memory { bytes: 0, source })?;
        let failed = |source| OpenError::Memory { bytes, source };
        let geometry =
            Geometry { block_size, blocks: whole_blocks(bytes, block_size)?, read_only: false };
        let len =
            usize::try_from(bytes).map_err(|_| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let memory = Anonymous::of(file, 0, len).map_err(failed)?;
        Ok(Self { memory, geometry })
    }

    #[inline]
    fn carry_out(
        &mut self,
        operation: Operation,
        spans: &[Span],
        extent: Extent,
    ) -> Result<(), DiskError> {
        // The memory is as large as the disk, so a range on the disk fits `usize`.
        let range = extent.start as usize..(extent.start + extent.len) as usize;
        match operation {
            Operation::Read => fill_spans(spans, &self.memory.bytes()[range])?,
            Operation::Write => drain_spans(spans, &mut self.memory.bytes_mut()[range])?,
            Operation::WriteZeroes | Operation::Discard => self.memory.zero(range),
            Operation::Flush => {}
        }
        Ok(())
    }
}

/// Creates a file for [`RamDisk::of`]: memory of `bytes` zeros that outlives this process as long
/// as a process holds the descriptor.
///
/// # Errors
/// If no descriptors are left, or under strict overcommit (`vm.overcommit_memory` = 2).
pub fn ram_file(bytes: u64) -> std::io::Result<OwnedFd> {
    memory_file(bytes, FIXED)
}

/// Returns the number of blocks of a disk in memory.
pub(crate) fn whole_blocks(bytes: u64, block_size: u32) -> Result<u64, OpenError> {
    if !is_block_size(block_size) {
        return Err(OpenError::BlockSize(block_size));
    }
    match bytes / u64::from(block_size) {
        0 => Err(OpenError::Size { bytes, block_size }),
        blocks if bytes.is_multiple_of(u64::from(block_size)) => Ok(blocks),
        _ => Err(OpenError::Size { bytes, block_size }),
    }
}

fn fill_spans(spans: &[Span], mut from: &[u8]) -> Result<(), Fault> {
    for span in spans {
        let (part, rest) = from.split_at(span.len());
        span.write(0, part)?;
        from = rest;
    }
    Ok(())
}

fn drain_spans(spans: &[Span], mut to: &mut [u8]) -> Result<(), Fault> {
    for span in spans {
        let (part, rest) = to.split_at_mut(span.len());
        span.read(0, part)?;
        to = rest;
    }
    Ok(())
}

#[cfg(test)]
impl RamDisk {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }
}

impl Disk for RamDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        let mut rest = requests.drain(..).peekable();
        while let Some(request) = rest.next() {
            if let Some(next) = rest.peek() {
                self.expect(next.operation, next.lba, next.blocks);
            }
            let result = check_request(&self.geometry, &request)
                .and_then(|extent| self.carry_out(request.operation, &request.spans, extent));
            completions.push(complete(request, result));
        }
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        let admitted = check_transfer(&self.geometry, operation, at, spans);
        Some(admitted.and_then(|extent| self.carry_out(operation, spans, extent)))
    }

    /// Overlaps the cache misses of the next request with the copy of this one.
    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        let write = match operation {
            Operation::Read => false,
            Operation::Write => true,
            _ => return,
        };
        let block = u64::from(self.geometry.block_size);
        let (start, len) = (lba.saturating_mul(block), u64::from(blocks) * block);
        // The range is not checked yet: blocks beyond the disk are not prefetched.
        let end = start.saturating_add(len).min(self.geometry.bytes());
        self.memory.prefetch(start.min(end) as usize..end as usize, write);
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}
}
