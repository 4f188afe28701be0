//! The contract between a device and a disk.
//!
//! A new error of requests is a variant of `DiskError`. `disk_status` of `device/nvme`
//! (`engine::io`) gives it an NVMe status (`spec/nvme-spec`, `status`), which decides what the
//! guest's programs see: `tests/io.rs` there has a row for each. A new operation is a variant of
//! `Operation`: each disk refuses or carries it out, `model` and the fuzz target `block-disks`
//! check it, and a command of the controller asks for it (the head of `engine::io`). `turn` of
//! `device/nvme` says what its work costs, and `decorate::trace` here counts it.

use std::ops::DerefMut;
use std::os::fd::BorrowedFd;

use slipway_ram::Span;

/// The identity of an overlay's base: equal for the same unchanged base, otherwise without meaning.
pub type BaseIdentity = [u64; 4];

/// The outcome of a request that was carried out at once; `None` if nothing has happened.
pub type Transferred = Option<Result<(), DiskError>>;

/// The shape of a disk. Constant except for [`Disk::refresh`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes in a logical block: a power of two, 512 to 4096.
    pub block_size: u32,
    /// Number of logical blocks; at least 1.
    pub blocks: u64,
    /// Makes the disk refuse writes with [`DiskError::ReadOnly`].
    pub read_only: bool,
}

impl Geometry {
    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Returns whether `blocks` blocks from `lba` lie on the disk.
    pub fn holds(&self, lba: u64, blocks: u64) -> bool {
        lba.checked_add(blocks).is_some_and(|end| end <= self.blocks)
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Fills the spans from the blocks.
    Read,
    /// Writes the spans to the blocks.
    Write,
    /// Moves everything acknowledged before this was submitted to stable storage. `lba`, `blocks`
    /// and `spans` are unused.
    Flush,
    /// Makes the blocks read as zeros. No spans.
    WriteZeroes,
    /// Drops the blocks' content, which is no longer needed; they read as zeros afterwards. No
    /// spans.
    Discard,
}

/// The cost of a disk's work on reads; see [`Disk::spent`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// The bytes that could have been copied in the time.
    pub bytes: u64,
    /// `true` if requests wait for the next `poll` and no wake descriptor announces it.
    pub behind: bool,
}

/// One operation on a disk.
#[derive(Debug)]
pub struct Request {
    /// The submitter's name for the request, handed back with the completion. Unique among the
    /// requests in flight.
    pub tag: u64,
    /// The kind of the request.
    pub operation: Operation,
    /// First logical block.
    pub lba: u64,
    /// Number of logical blocks.
    pub blocks: u32,
    /// The data's spans in order, lent until the completion. Together they have exactly
    /// `blocks * block_size` bytes for reads and writes; there are none otherwise. A span may begin
    /// and end anywhere, also within a block.
    pub spans: Vec<Span>,
    /// Force unit access: a write is on stable storage before it completes.
    pub durable: bool,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's tag.
    pub tag: u64,
    /// The outcome.
    pub result: Result<(), DiskError>,
    /// The request's spans, so that their vector can be used again.
    pub spans: Vec<Span>,
}

/// The reason why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The blocks lie beyond the end.
    #[error("beyond the end of the disk")]
    OutOfRange,
    /// The request would write to a read-only disk.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The medium has no space left for the data.
    #[error("no space left")]
    NoSpace,
    /// Guest memory was unmapped or refused while data moved.
    #[error("guest memory: {0}")]
    Memory(#[from] slipway_ram::Fault),
    /// The medium failed: an errno from the host, or 0 for a short read.
    #[error("input/output error {0}")]
    Io(i32),
    /// [`Disk::cancel`] cancelled the request.
    #[error("given up")]
    Cancelled,
    /// The disk cannot do this operation.
    #[error("operation not supported by this disk")]
    Unsupported,
}

/// A disk, owned by one device on one thread.
///
/// Duties of the caller: spans have the length that the request says; no two requests in flight
/// have the same tag; every submitted request is polled for until it has completed, also before the
/// disk is dropped (the completion gives guest memory back).
///
/// Duties of the implementer: every submitted request completes exactly once, in any order;
/// `submit` and `poll` never block on the medium; the disk checks `lba` and `blocks` against the
/// geometry itself; it keeps the spans until nothing reads or writes them any more; a completed
/// durable write or flush survives the host's crash as far as the medium can.
pub trait Disk: Send {
    /// Returns the shape, which is constant until [`Disk::refresh`].
    fn geometry(&self) -> Geometry;

    /// Takes over the present size of the medium, and returns the new shape; block size and write
    /// protection stay. The caller has no request in flight.
    fn refresh(&mut self) -> Geometry {
        self.geometry()
    }

    /// Takes all of `requests` (the vector is drained) and starts them. Appends those that end at
    /// once to `completions`.
    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>);

    /// Carries out a read or a write at once and returns its outcome, which spares the device the
    /// request and its completion. Only for disks that copy in place and on which every write is
    /// durable or none is. Returns `None` if nothing has happened; the caller then submits a
    /// request.
    ///
    /// The logical block address and the number of blocks in `at`, and `spans`, are as in a
    /// [`Request`]; the disk uses the spans only during the call.
    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        let _ = (operation, at, spans);
        None
    }

    /// Announces a read or write of these blocks, which a disk may prefetch into the processor's
    /// caches. A hint: the blocks need not be on the disk.
    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        let _ = (operation, lba, blocks);
    }

    /// Appends the requests that have ended since the last call. Cheap if none has.
    fn poll(&mut self, completions: &mut Vec<Completion>);

    /// Cancels the request `tag` if it is in flight and can still be cancelled. Returns `true` if
    /// so: the request ends with [`DiskError::Cancelled`], here or in a later poll, and a write may
    /// have been done in part. Returns `false` if the request ends as if the call had not been
    /// made. Other completions may be appended too. A rare operation, which may take a system call.
    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let _ = (tag, completions);
        false
    }

    /// Releases the guest memory that the disk keeps pinned from request to request. The caller has
    /// no request in flight; a later request pins memory anew.
    fn release(&mut self) {}

    /// Returns whether requests of this kind take the time of the submitting thread, as copies do,
    /// and not that of a medium. A device then submits large requests in pieces, so that other
    /// devices on its thread have their turns. Constant.
    fn copies(&self, operation: Operation) -> bool {
        let _ = operation;
        self.wake_descriptor().is_none()
    }

    /// Returns whether [`Disk::allow`] and [`Disk::spent`] have a meaning for the disk. A device
    /// need not call them otherwise. Constant.
    fn bounds_reads(&self) -> bool {
        false
    }

    /// Bounds the work of `submit` and `poll` on reads that the disk may leave for a later call,
    /// until the next `allow`: about as much as copying `bytes` bytes takes, and nothing if it is
    /// 0. A disk that is never told works without a bound.
    fn allow(&mut self, bytes: u64) {
        let _ = bytes;
    }

    /// Returns what the work that [`Disk::allow`] bounds has cost since the last call.
    fn spent(&mut self) -> Spent {
        Spent::default()
    }

    /// Returns a descriptor that is readable while a completion waits, for a thread that sleeps
    /// instead of polling. Returns `None` if everything completes in `submit`. The host registers
    /// the descriptor with the thread's event loop; `poll` clears it.
    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// A pointer to a disk is a disk.
impl<P> Disk for P
where
    P: DerefMut + Send,
    P::Target: Disk,
{
    fn geometry(&self) -> Geometry {
        (**self).geometry()
    }

    fn refresh(&mut self) -> Geometry {
        (**self).refresh()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        (**self).submit(requests, completions);
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        (**self).transfer(operation, at, spans)
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

    fn bounds_reads(&self) -> bool {
        (**self).bounds_reads()
    }

    fn allow(&mut self, bytes: u64) {
        (**self).allow(bytes);
    }

    fn spent(&mut self) -> Spent {
        (**self).spent()
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        (**self).wake_descriptor()
    }
}
