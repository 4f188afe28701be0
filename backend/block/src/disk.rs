//! The contract between a device and a disk.

use std::os::fd::BorrowedFd;

use slipway_ram::Span;

/// The shape of a disk. Constant but for [`Disk::refresh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a logical block: a power of two, 512 to 4096.
    pub block_size: u32,
    /// Number of logical blocks; at least 1.
    pub blocks: u64,
    /// Writes are refused with [`DiskError::ReadOnly`].
    pub read_only: bool,
}

impl Geometry {
    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Whether `blocks` blocks from `lba` lie on the disk.
    pub fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba.checked_add(blocks).is_some_and(|end| end <= self.blocks)
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fill the spans from the blocks.
    Read,
    /// Write the spans to the blocks.
    Write,
    /// Everything acknowledged before this was submitted reaches stable storage. `lba`, `blocks`
    /// and `spans` are unused.
    Flush,
    /// The blocks read as zeros afterwards. No spans.
    WriteZeroes,
    /// The blocks' content is no longer needed; they read as zeros afterwards. No spans.
    Discard,
}

/// One operation on a disk.
#[derive(Debug)]
pub struct Request {
    /// The submitter's name for it, handed back with the completion. Unique among those in flight.
    pub tag: u64,
    /// What to do.
    pub operation: Operation,
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks.
    pub blocks: u32,
    /// The data's places in order, lent until the completion. Together exactly
    /// `blocks * block_size` bytes for reads and writes, empty otherwise. A span may begin and end
    /// anywhere, also within a block.
    pub spans: Vec<Span>,
    /// Force unit access: a write is on stable storage before it completes.
    pub durable: bool,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// How it ended.
    pub result: Result<(), DiskError>,
    /// The request's spans, so that their vector can be used again.
    pub spans: Vec<Span>,
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The blocks lie beyond the end.
    #[error("beyond the end of the disk")]
    OutOfRange,
    /// A write to a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// No space left for what was written.
    #[error("no space left")]
    NoSpace,
    /// Guest memory vanished or was refused while data moved.
    #[error("guest memory: {0}")]
    Memory(#[from] slipway_ram::Fault),
    /// The medium failed: an errno from the host, or 0 for a short read.
    #[error("input/output error {0}")]
    Io(i32),
    /// [`Disk::cancel`] gave it up.
    #[error("given up")]
    Cancelled,
    /// The disk cannot do this operation.
    #[error("operation not supported by this disk")]
    Unsupported,
}

/// A disk, owned by one device on one thread.
///
/// Duties of the caller: spans have the length the request says; no tag is used twice at once;
/// every submitted request is polled for until it has completed, also before the disk is dropped
/// (its completion is what gives guest memory back).
///
/// Duties of the implementer: every submitted request completes exactly once, in any order;
/// `submit` and `poll` never block on the medium; checks `lba` and `blocks` against the geometry
/// itself; keeps the spans until nothing reads or writes them any more; a completed durable write
/// or flush survives the host's crash as far as the medium can.
pub trait Disk: Send {
    /// The shape; constant until [`Disk::refresh`].
    fn geometry(&self) -> Geometry;

    /// Takes over the size that what is behind the disk has now, and gives the shape; block size
    /// and protection stay. The caller has no request in flight.
    fn refresh(&mut self) -> Geometry {
        self.geometry()
    }

    /// Takes all of `requests` (the vector is drained) and starts them. Whatever ends at once is
    /// appended to `completions`.
    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>);

    /// Carries out a read or a write at once and gives how it ended, for disks that copy in place and
    /// on which every write is durable or none is. None: nothing has happened, and it is to be
    /// submitted. The device is spared the request and its completion.
    ///
    /// `lba`, `blocks` and `spans` are as in a [`Request`]; the spans are given back with the return.
    fn transfer(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        spans: &[Span],
    ) -> Option<Result<(), DiskError>> {
        let _ = (operation, lba, blocks, spans);
        None
    }

    /// A read or write of these blocks follows soon; a disk may have the processor fetch them. A hint:
    /// they need not be on the disk.
    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        let _ = (operation, lba, blocks);
    }

    /// Appends what has ended since the last call. Cheap when nothing has.
    fn poll(&mut self, completions: &mut Vec<Completion>);

    /// Gives up the request `tag`, if it is there and that can still be done. Then this is true,
    /// and the request ends with [`DiskError::Cancelled`], here or in a later poll; a write may
    /// have been done in part. False: the request ends as if nobody had asked. Other completions
    /// may be appended too. A rare operation, which may take a system call.
    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let _ = (tag, completions);
        false
    }

    /// Lets go of what it keeps of the guest's memory from request to request. The caller has none in
    /// flight; a later one has it kept anew.
    fn release(&mut self) {}

    /// Whether requests of this kind take the time of the thread that submits them, as copies do, and
    /// not that of a medium: a device then hands large ones over in pieces, so that others on its
    /// thread have their turns. Constant.
    fn copies(&self, operation: Operation) -> bool {
        let _ = operation;
        self.wake_descriptor().is_none()
    }

    /// Becomes readable when a completion waits and nobody polls; None when everything completes
    /// in `submit`. The host registers it with the thread that sleeps; `poll` clears it.
    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl<D: Disk + ?Sized> Disk for Box<D> {
    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }

    fn refresh(&mut self) -> Geometry {
        (**self).refresh()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        (**self).submit(requests, completions);
    }

    fn transfer(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        spans: &[Span],
    ) -> Option<Result<(), DiskError>> {
        (**self).transfer(operation, lba, blocks, spans)
    }

    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        (**self).expect(operation, lba, blocks);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        (**self).poll(completions);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        (**self).cancel(tag, completions)
    }

    fn release(&mut self) {
        (**self).release();
    }

    fn copies(&self, operation: Operation) -> bool {
        (**self).copies(operation)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        (**self).wake_descriptor()
    }
}

impl<D: Disk + ?Sized> Disk for &mut D {
    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }

    fn refresh(&mut self) -> Geometry {
        (**self).refresh()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        (**self).submit(requests, completions);
    }

    fn transfer(
        &mut self,
        operation: Operation,
        lba: u64,
        blocks: u32,
        spans: &[Span],
    ) -> Option<Result<(), DiskError>> {
        (**self).transfer(operation, lba, blocks, spans)
    }

    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        (**self).expect(operation, lba, blocks);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        (**self).poll(completions);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        (**self).cancel(tag, completions)
    }

    fn release(&mut self) {
        (**self).release();
    }

    fn copies(&self, operation: Operation) -> bool {
        (**self).copies(operation)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        (**self).wake_descriptor()
    }
}
