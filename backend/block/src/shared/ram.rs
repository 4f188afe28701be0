//! A shared disk in memory: a memfd that is mapped once for all devices.
//!
//! The memfd grows and never shrinks, so a mapping of it stays valid for ever: memory that a disk
//! gives up is punched out of the memfd and reads as zeros. A larger disk has a new mapping;
//! devices that have not refreshed keep the old one.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{FallocateFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use slipway_ram::Span;

use super::Medium;
use crate::check::{Extent, check_request, check_transfer, complete};
use crate::memory::{memory_file, sealed_len};
use crate::ram::whole_blocks;
use crate::{Completion, Disk, DiskError, Geometry, OpenError, Operation, Request, Transferred};

/// The memory of a shared disk. Here and in [`SharedRam`] the file is declared, and so dropped,
/// before the mapping: the last reference, whose end frees the pages, is then the mapping's (see
/// [`slipway_ram::unmap`]).
pub(super) struct RamMedium {
    file: Arc<OwnedFd>,
    block_size: u32,
    /// The disk's size in blocks; the file is at least as large.
    blocks: AtomicU64,
    /// A mapping of all of the file. Locked only to change the size, and to open or refresh a disk.
    mapping: Mutex<Arc<Mapping>>,
}

impl RamMedium {
    /// Creates a medium in `file`, which a predecessor made, or in a new file.
    pub fn new(bytes: u64, block_size: u32, file: Option<OwnedFd>) -> Result<Self, OpenError> {
        let blocks = whole_blocks(bytes, block_size)?;
        let made = file.map_or_else(|| make(bytes), |file| adopt(file, bytes));
        let (file, mapping) = made.map_err(|source| OpenError::Memory { bytes, source })?;
        let (blocks, mapping) = (AtomicU64::new(blocks), Mutex::new(Arc::new(mapping)));
        Ok(Self { file: Arc::new(file), block_size, blocks, mapping })
    }

    fn mapping(&self) -> MutexGuard<'_, Arc<Mapping>> {
        // The value is changed in single assignments, so a panic leaves it whole.
        self.mapping.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let mut mapping = self.mapping();
        if bytes > mapping.len as u64 {
            rustix::fs::ftruncate(&self.file, bytes)?;
            *mapping = Arc::new(Mapping::new(&self.file, bytes)?);
        }
        Ok(())
    }
}

fn make(bytes: u64) -> io::Result<(OwnedFd, Mapping)> {
    let file = memory_file(bytes, SealFlags::SHRINK)?;
    let mapping = Mapping::new(&file, bytes)?;
    Ok((file, mapping))
}

/// Maps a predecessor's file, which may be longer than the disk.
fn adopt(file: OwnedFd, bytes: u64) -> io::Result<(OwnedFd, Mapping)> {
    let len = sealed_len(&file)?;
    if len < bytes {
        let text = "memory of a disk that was smaller";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let mapping = Mapping::new(&file, len)?;
    Ok((file, mapping))
}

impl Medium for RamMedium {
    fn geometry(&self) -> Geometry {
        let blocks = self.blocks.load(Ordering::Acquire);
        Geometry { block_size: self.block_size, blocks, read_only: false }
    }

    fn open(self: Arc<Self>, read_only: bool) -> Result<Box<dyn Disk>, OpenError> {
        let geometry = Geometry { read_only, ..self.geometry() };
        let mapping = Arc::clone(&self.mapping());
        let file = Arc::clone(&self.file);
        Ok(Box::new(SharedRam { medium: self, file, mapping, geometry }))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<(), OpenError> {
        let Some(bytes) = bytes else { return Ok(()) };
        let blocks = whole_blocks(bytes, self.block_size)?;
        self.grow(bytes).map_err(|source| OpenError::Memory { bytes, source })?;
        // Stored after the mapping: a thread that sees the size finds the memory.
        self.blocks.store(blocks, Ordering::Release);
        Ok(())
    }

    fn memory(&self) -> Option<&OwnedFd> {
        Some(&self.file)
    }

    fn trim(&self) -> Result<(), OpenError> {
        let (end, len) = (self.geometry().bytes(), self.mapping().len as u64);
        if end == len {
            return Ok(());
        }
        let cut = punch(&self.file, Extent { start: end, len: len - end });
        cut.map_err(|source| OpenError::Memory { bytes: end, source })
    }
}

/// Makes a range of the file zeros and gives its pages back.
fn punch(file: &OwnedFd, extent: Extent) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, mode, extent.start, extent.len)?)
}

/// One device's disk on the medium.
struct SharedRam {
    medium: Arc<RamMedium>,
    file: Arc<OwnedFd>,
    /// A mapping that is at least as large as the geometry.
    mapping: Arc<Mapping>,
    geometry: Geometry,
}

impl SharedRam {
    fn carry_out(
        &self,
        operation: Operation,
        spans: &[Span],
        extent: Extent,
    ) -> Result<(), DiskError> {
        match operation {
            Operation::Read | Operation::Write => self.copy(operation, spans, extent),
            Operation::WriteZeroes | Operation::Discard if extent.len > 0 => {
                let failed = |error: io::Error| DiskError::Io(error.raw_os_error().unwrap_or(0));
                punch(&self.file, extent).map_err(failed)
            }
            Operation::WriteZeroes | Operation::Discard | Operation::Flush => Ok(()),
        }
    }

    fn copy(&self, operation: Operation, spans: &[Span], extent: Extent) -> Result<(), DiskError> {
        // The memory is as large as the disk, so a range on the disk fits `usize`.
        let mut at = extent.start as usize;
        for span in spans {
            let place = self.mapping.place(at, span.len());
            if operation == Operation::Read {
                // SAFETY: `place` is valid for the span's length as long as the mapping, which
                // `self` keeps; it is memory of a shared file, which others change at will and to
                // which nobody has a reference; it does not overlap the span, which is a client's
                // memory or heap.
                unsafe { span.write_raw(0, place, span.len())? }
            } else {
                // SAFETY: `place` is valid for the span's length, as in the read above, and the
                // mapping is writable.
                unsafe { span.read_raw(0, place, span.len())? }
            }
            at += span.len();
        }
        Ok(())
    }
}

impl Disk for SharedRam {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn refresh(&mut self) -> Geometry {
        // Read the size first: a mapping taken after it is large enough, see `RamMedium::resize`.
        let now = self.medium.geometry();
        self.mapping = Arc::clone(&self.medium.mapping());
        self.geometry = Geometry { read_only: self.geometry.read_only, ..now };
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.drain(..) {
            let result = check_request(&self.geometry, &request)
                .and_then(|extent| self.carry_out(request.operation, &request.spans, extent));
            completions.push(complete(request, result));
        }
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        let admitted = check_transfer(&self.geometry, operation, at, spans);
        Some(admitted.and_then(|extent| self.carry_out(operation, spans, extent)))
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}
}

/// The file in this process's address space. No code may form a reference to its bytes.
struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: the bytes are accessed by raw copies only, which tolerate concurrent change.
unsafe impl Send for Mapping {}
// SAFETY: the bytes are accessed by raw copies only, which tolerate concurrent change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes of `file`, which must have that many.
    fn new(file: &OwnedFd, bytes: u64) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let any = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of ours.
        let base = unsafe { rustix::mm::mmap(any, len, prot, flags, file, 0)? }.cast();
        for advice in [Advice::LinuxDontDump, Advice::LinuxHugepage] {
            // SAFETY: the mapping just made; these kinds of advice change no byte. A kernel that
            // does not know one only forgoes an optimisation.
            let _ = unsafe { rustix::mm::madvise(base, len, advice) };
        }
        Ok(Self { base: base.cast(), len })
    }

    /// Returns the address of byte `at`.
    ///
    /// # Panics
    /// If `at..at + len` leaves the mapping: the request was admitted for a disk of its size.
    fn place(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "beyond the mapping");
        self.base.wrapping_add(at)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; the last user is gone.
        unsafe { slipway_ram::unmap(self.base, self.len) };
    }
}
