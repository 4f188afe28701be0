//! One request of a file's disk, as a sequence of steps for the kernel.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use io_uring::{cqueue, opcode, squeue, types};
use slipway_ram::{Fault, Span};

use super::thin::Begun;
use crate::aligned::Aligned;
use crate::uring::{Next, UringRequest, refused, uring_fd};
use crate::vectors::{IoVectors, copy_in, copy_out, gather};
use crate::{DiskError, Geometry, Operation, Request};

/// Bytes of a bounce buffer; a longer request goes through the buffer in pieces.
const BOUNCE: usize = 256 << 10;
/// The largest number of bounce buffers kept for later requests.
const KEPT_BOUNCES: usize = 16;

/// The file that jobs work on, and the state that they share.
pub(super) struct Target {
    pub fd: Arc<OwnedFd>,
    /// The alignment that O_DIRECT requires, or `None` if the page cache is used.
    pub direct: Option<Alignment>,
    /// The file turned out not to support `FALLOC_FL_ZERO_RANGE`.
    pub lacks_zero_range: bool,
    pub lacks_punch_hole: bool,
    pub bounces: Vec<Aligned>,
    /// Zeros to write if the file supports neither way to zero a range.
    pub zeros: Option<Aligned>,
    /// The error of a failed flush that was not reported to the other disks yet.
    pub lost: Option<DiskError>,
}

impl Target {
    pub fn new(fd: Arc<OwnedFd>, direct: Option<Alignment>) -> Self {
        Self {
            fd,
            direct,
            lacks_zero_range: false,
            lacks_punch_hole: false,
            bounces: Vec::new(),
            zeros: None,
            lost: None,
        }
    }
}

/// The alignment that O_DIRECT requires, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alignment {
    /// The alignment of addresses.
    pub memory: usize,
    /// The alignment of file offsets and of every piece's length.
    pub offset: u64,
}

/// The step of a job that the kernel carries out.
#[derive(Debug)]
pub(super) enum FileStep {
    /// Moves data between the file and the spans.
    Move,
    /// Moves this many bytes between the file and a bounce buffer.
    Bounce(Aligned, usize),
    /// fallocate(2) with `FALLOC_FL_PUNCH_HOLE`.
    Punch,
    /// fallocate(2) with `FALLOC_FL_ZERO_RANGE`.
    ZeroRange,
    /// Writes zeros.
    WriteZeros,
    /// fdatasync(2).
    Sync,
}

/// A request and its progress.
pub(super) struct FileJob {
    request: Request,
    start: u64,
    len: u64,
    /// Bytes that are done in this step.
    done: u64,
    /// The ring's number for the registered memory that all of its spans lie in.
    pinned: Option<u16>,
    step: FileStep,
    /// The change of what the file holds, if the file keeps a reserve.
    begun: Option<Begun>,
}

impl FileJob {
    /// Creates a job for `request`, which was admitted for a disk of this geometry.
    pub fn new(
        request: Request,
        pinned: Option<u16>,
        geometry: &Geometry,
        target: &Target,
    ) -> Self {
        let block = u64::from(geometry.block_size);
        let (start, len) = (request.lba.wrapping_mul(block), u64::from(request.blocks) * block);
        let step = match request.operation {
            Operation::Read | Operation::Write => FileStep::Move,
            Operation::Flush => FileStep::Sync,
            Operation::WriteZeroes | Operation::Discard => FileStep::WriteZeros,
        };
        let mut job = Self { request, start, len, done: 0, pinned, step, begun: None };
        job.choose(target);
        job
    }

    /// Makes the job one of a file that keeps a reserve, if `begun` is given. Blocks that read as
    /// zeros are holes of such a file.
    pub fn in_thin(mut self, begun: Option<Begun>) -> Self {
        let zeroes = matches!(self.request.operation, Operation::WriteZeroes | Operation::Discard);
        if begun.is_some() && zeroes {
            self.step = FileStep::Punch;
        }
        self.begun = begun;
        self
    }

    /// Chooses the best of the methods that the file supports, for an operation with several.
    fn choose(&mut self, target: &Target) {
        match self.request.operation {
            Operation::Read | Operation::Write => {
                let fits = |limits: Alignment| self.request.spans.iter().all(|s| limits.fits(s));
                if target.direct.is_some_and(|limits| !fits(limits)) {
                    self.step = FileStep::Bounce(Aligned::empty(), 0);
                }
            }
            Operation::Discard if !target.lacks_punch_hole => self.step = FileStep::Punch,
            // Zeros are a write: the blocks stay allocated, so that writing them again cannot run
            // out of space. A hole is punched only if the file cannot zero a range.
            Operation::WriteZeroes | Operation::Discard if !target.lacks_zero_range => {
                self.step = FileStep::ZeroRange;
            }
            Operation::WriteZeroes if !target.lacks_punch_hole => self.step = FileStep::Punch,
            Operation::WriteZeroes | Operation::Discard => self.step = FileStep::WriteZeros,
            Operation::Flush => {}
        }
    }

    fn transfer(&self, fd: types::Fd, vectors: &IoVectors) -> squeue::Entry {
        let vectors = vectors.as_slice();
        let offset = self.start + self.done;
        let read = self.request.operation == Operation::Read;
        let flags = if self.request.durable { libc::RWF_DSYNC } else { 0 };
        // A single vector spares the kernel a vector array.
        if let [one] = vectors
            && let Ok(len) = u32::try_from(one.iov_len)
        {
            let at = one.iov_base.cast::<u8>();
            // Bounce buffers and zeros are not registered.
            let pinned = self.pinned.filter(|_| matches!(self.step, FileStep::Move));
            return match (read, pinned) {
                (true, None) => opcode::Read::new(fd, at, len).offset(offset).build(),
                (true, Some(number)) => {
                    opcode::ReadFixed::new(fd, at, len, number).offset(offset).build()
                }
                (false, None) => {
                    opcode::Write::new(fd, at, len).offset(offset).rw_flags(flags).build()
                }
                (false, Some(number)) => opcode::WriteFixed::new(fd, at, len, number)
                    .offset(offset)
                    .rw_flags(flags)
                    .build(),
            };
        }
        let (at, count) = (vectors.as_ptr(), vectors.len() as u32);
        match read {
            true => opcode::Readv::new(fd, at, count).offset(offset).build(),
            false => opcode::Writev::new(fd, at, count).offset(offset).rw_flags(flags).build(),
        }
    }

    fn fallocate(&self, fd: types::Fd, mode: i32) -> squeue::Entry {
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        opcode::Fallocate::new(fd, self.len).offset(self.start).mode(mode).build()
    }

    fn gather_zeros(&self, target: &mut Target, vectors: &mut IoVectors) {
        let zeros = target.zeros.get_or_insert_with(|| Aligned::zeroed(BOUNCE));
        vectors.repeat(zeros.bytes_mut(), self.len - self.done);
    }

    /// Prepares the bounce buffer for the next piece, with its data if the request is a write.
    fn fill_bounce(&mut self, target: &mut Target, vectors: &mut IoVectors) -> Result<(), Fault> {
        let FileStep::Bounce(buffer, len) = &mut self.step else { return Ok(()) };
        if buffer.bytes().is_empty() {
            *buffer = target.bounces.pop().unwrap_or_else(|| Aligned::zeroed(BOUNCE));
        }
        *len = (self.len - self.done).min(BOUNCE as u64) as usize;
        let part = &mut buffer.bytes_mut()[..*len];
        vectors.push((part.as_mut_ptr(), part.len()));
        if self.request.operation == Operation::Read {
            return Ok(());
        }
        copy_in(&self.request.spans, self.done, part)
    }

    /// Copies data that was read into the bounce buffer to the spans.
    fn drain_bounce(&self, moved: usize) -> Result<(), Fault> {
        let FileStep::Bounce(buffer, len) = &self.step else { return Ok(()) };
        copy_out(&self.request.spans, self.done, &buffer.bytes()[..moved.min(*len)])
    }

    fn moved(&mut self, moved: u64, target: &Target) -> Next {
        let read = self.request.operation == Operation::Read;
        if read && let Err(fault) = self.drain_bounce(moved as usize) {
            return Next::Done(Err(fault.into()));
        }
        self.done += moved;
        if self.done >= self.len {
            return if matches!(self.step, FileStep::WriteZeros) {
                self.zeroed()
            } else {
                Next::Done(Ok(()))
            };
        }
        // Direct I/O stops within a block only at the end of the file.
        let ragged = target.direct.is_some_and(|limits| !self.done.is_multiple_of(limits.offset));
        match (moved == 0 || ragged, read) {
            (false, _) => Next::Again,
            (true, true) => Next::Done(Err(DiskError::Io(0))),
            (true, false) => Next::Done(Err(DiskError::Io(libc::EIO))),
        }
    }

    /// Ends the job after its range was zeroed; a durable request syncs first.
    fn zeroed(&mut self) -> Next {
        if !self.request.durable {
            return Next::Done(Ok(()));
        }
        self.step = FileStep::Sync;
        Next::Again
    }

    fn failed(&mut self, errno: i32, target: &mut Target) -> Next {
        match (errno, &self.step) {
            (libc::EINTR | libc::EAGAIN, _) => return Next::Again,
            // Zeros that are written would take space.
            (libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV, FileStep::Punch)
                if self.begun.is_some() =>
            {
                return Next::Done(Err(DiskError::Unsupported));
            }
            (libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV, FileStep::Punch) => {
                target.lacks_punch_hole = true;
            }
            (
                libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV,
                FileStep::ZeroRange,
            ) => {
                target.lacks_zero_range = true;
            }
            // Whatever the kernel has against the registered memory: retry without it.
            (libc::EFAULT | libc::EINVAL | libc::EOPNOTSUPP, FileStep::Move)
                if self.pinned.take().is_some() =>
            {
                return Next::Again;
            }
            // The file system requires more alignment than it reported.
            (libc::EINVAL, FileStep::Move) if target.direct.is_some() => {
                self.step = FileStep::Bounce(Aligned::empty(), 0);
                return Next::Again;
            }
            _ => return Next::Done(Err(refused(errno, &self.request))),
        }
        self.choose(target);
        Next::Again
    }
}

impl UringRequest for FileJob {
    type Target = Target;
    type Entry = squeue::Entry;
    type Answer = cqueue::Entry;

    fn request(&self) -> &Request {
        &self.request
    }

    fn entry(
        &mut self,
        target: &mut Target,
        vectors: &mut IoVectors,
    ) -> Result<squeue::Entry, DiskError> {
        let fd = uring_fd(&target.fd);
        vectors.clear();
        match self.step {
            FileStep::Sync => {
                return Ok(opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build());
            }
            FileStep::Punch => return Ok(self.fallocate(fd, libc::FALLOC_FL_PUNCH_HOLE)),
            FileStep::ZeroRange => return Ok(self.fallocate(fd, libc::FALLOC_FL_ZERO_RANGE)),
            FileStep::Move => {
                gather(&self.request.spans, self.done, u64::MAX, vectors);
            }
            FileStep::WriteZeros => self.gather_zeros(target, vectors),
            FileStep::Bounce(..) => self.fill_bounce(target, vectors)?,
        }
        Ok(self.transfer(fd, vectors))
    }

    fn advance(&mut self, result: i32, target: &mut Target) -> Next {
        match u64::try_from(result) {
            Err(_) => self.failed(result.wrapping_neg(), target),
            Ok(moved) => match self.step {
                FileStep::Move | FileStep::Bounce(..) | FileStep::WriteZeros => {
                    self.moved(moved, target)
                }
                FileStep::Punch | FileStep::ZeroRange => self.zeroed(),
                FileStep::Sync => Next::Done(Ok(())),
            },
        }
    }

    fn into_request(self, result: Result<(), DiskError>, target: &mut Target) -> Request {
        if let (Err(error), FileStep::Sync) = (result, &self.step)
            && error != DiskError::Cancelled
        {
            target.lost = Some(error);
        }
        if let (Ok(()), Some(begun)) = (result, &self.begun) {
            begun.succeed();
        }
        if let FileStep::Bounce(buffer, _) = self.step {
            keep(target, buffer);
        }
        self.request
    }
}

impl Alignment {
    fn fits(self, span: &Span) -> bool {
        let (address, len) = span.io_vector();
        address.addr().is_multiple_of(self.memory) && (len as u64).is_multiple_of(self.offset)
    }
}

fn keep(target: &mut Target, buffer: Aligned) {
    if !buffer.bytes().is_empty() && target.bounces.len() < KEPT_BOUNCES {
        target.bounces.push(buffer);
    }
}
