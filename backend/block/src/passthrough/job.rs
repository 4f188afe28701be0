//! One request as a sequence of the drive's commands.

use std::sync::Arc;

use io_uring::{cqueue, squeue};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::Fault;

use super::command::Command;
use super::common::Common;
use super::device::Device;
use crate::aligned::Aligned;
use crate::uring::{Next, UringRequest, refused};
use crate::vectors::{IoVectors, copy_in, copy_out, gather};
use crate::{DiskError, Operation, Request};

/// Force Unit Access, in dword 12 (section 6.9).
const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Deallocate of Write Zeroes, in dword 12 (section 6.17).
const DEALLOCATE: u32 = 1 << 25;
/// The largest number of blocks in a command (NLB is 16 bits, 0's based).
const MOST_BLOCKS: u64 = 1 << 16;
/// The largest number of retries of a command, as Linux's driver has it for its own.
const RETRIES: u8 = 5;
/// Bytes of a staging buffer: for zeros, or for data that has too many vectors.
const BUFFER: usize = 128 << 10;

/// The namespace that jobs work on, and the state that they share.
pub(super) struct Target {
    pub common: Arc<Common>,
    /// The largest command in bytes, as far as known.
    most_bytes: u64,
    /// The drive has Write Zeroes, as far as known.
    zeroes: bool,
    /// Zeros to write if the drive has no Write Zeroes.
    zeros: Option<Aligned>,
    /// The error of a failed flush that was not reported to the other disks yet.
    pub lost: Option<DiskError>,
}

impl Target {
    pub fn new(common: Arc<Common>) -> Self {
        let (most_bytes, zeroes) = (common.device.most_bytes, common.device.zeroes);
        Self { common, most_bytes, zeroes, zeros: None, lost: None }
    }

    fn device(&self) -> &Device {
        &self.common.device
    }
}

/// The step of a job that the drive carries out.
enum DriveStep {
    /// Moves data between the drive and the spans.
    Move,
    /// Moves data between the drive and a staging buffer: one block has more vectors than a call
    /// takes.
    Bounce(Aligned),
    /// Zeroes blocks with Write Zeroes.
    Zero,
    /// Writes zeros.
    WriteZeros,
    Flush,
}

/// A request and its progress.
pub(super) struct PassthroughJob {
    request: Request,
    start: u64,
    len: u64,
    /// Bytes that are done.
    done: u64,
    /// Bytes of the command that the drive has.
    piece: u64,
    /// The largest command in bytes after the kernel refused a larger one; `u64::MAX` before. The
    /// target takes the limit over only after such a command has succeeded: the kernel may have
    /// refused the larger one for another reason than its size.
    most_bytes: u64,
    /// The number of retries of the current command.
    retries: u8,
    step: DriveStep,
}

impl PassthroughJob {
    /// Creates a job for `request`, which was admitted for the disk.
    pub fn new(request: Request, target: &Target) -> Self {
        let block = u64::from(target.device().geometry.block_size);
        let (start, len) = match request.operation {
            Operation::Flush => (0, 0),
            _ => (request.lba.wrapping_mul(block), u64::from(request.blocks) * block),
        };
        let step = match request.operation {
            Operation::Read | Operation::Write => DriveStep::Move,
            Operation::Flush => DriveStep::Flush,
            Operation::WriteZeroes | Operation::Discard if target.zeroes => DriveStep::Zero,
            Operation::WriteZeroes | Operation::Discard => DriveStep::WriteZeros,
        };
        Self { request, start, len, done: 0, piece: 0, most_bytes: u64::MAX, retries: 0, step }
    }

    /// Returns the command for the next `piece` bytes.
    fn command(&self, opcode: NvmOpcode, device: &Device) -> Command {
        let lba_size = u64::from(device.lba_size);
        let (lba, blocks) = ((self.start + self.done) / lba_size, self.piece / lba_size);
        let mut command = Command::of_blocks(opcode.0, device.nsid, lba, blocks as u32);
        if self.request.durable && opcode != NvmOpcode::Read {
            command.cdw10[2] |= FORCE_UNIT_ACCESS;
        }
        command
    }

    fn moves(&self) -> bool {
        matches!(self.step, DriveStep::Move | DriveStep::Bounce(_))
    }

    /// Appends the vectors of the next bytes of data: at most `most` bytes, and whole blocks of the
    /// drive. Returns the number of bytes.
    fn lend(&mut self, most: u64, lba_size: u64, vectors: &mut IoVectors) -> Result<u64, Fault> {
        let spans = &self.request.spans;
        if matches!(self.step, DriveStep::Move) {
            let found = gather(spans, self.done, most, vectors);
            let whole = found / lba_size * lba_size;
            if whole < found {
                // The vectors that one call takes end within a block: leave that block to the next
                // command.
                vectors.clear();
                gather(spans, self.done, whole, vectors);
            }
            if whole > 0 {
                return Ok(whole);
            }
            self.step = DriveStep::Bounce(Aligned::zeroed(BUFFER));
        }
        let DriveStep::Bounce(buffer) = &mut self.step else { return Ok(0) };
        let piece = most.min(BUFFER as u64);
        let part = &mut buffer.bytes_mut()[..piece as usize];
        vectors.push((part.as_mut_ptr(), part.len()));
        if self.request.operation == Operation::Write {
            copy_in(spans, self.done, part)?;
        }
        Ok(piece)
    }

    /// Copies data that was read into the staging buffer to the spans.
    fn drain(&self) -> Result<(), Fault> {
        match &self.step {
            DriveStep::Bounce(buffer) if self.request.operation == Operation::Read => {
                let part = &buffer.bytes()[..self.piece as usize];
                copy_out(&self.request.spans, self.done, part)
            }
            _ => Ok(()),
        }
    }

    /// Halves the size of commands after the kernel refused one. Returns whether the refused
    /// command was larger than the smallest one.
    fn halve(&mut self, target: &Target) -> bool {
        let least = u64::from(target.device().lba_size.max(4096));
        self.most_bytes = (self.piece / 2 / least * least).max(least);
        self.piece > least
    }

    fn failed(&mut self, errno: i32, target: &mut Target) -> Next {
        match errno {
            libc::EAGAIN => Next::Again,
            // The driver cancelled the command, as it resets the drive. Nobody else retries it.
            libc::EINTR => self.retry(DiskError::Io(libc::EIO)),
            libc::EINVAL if self.moves() && self.halve(target) => Next::Again,
            errno => Next::Done(Err(refused(errno, &self.request))),
        }
    }

    /// Retries the command, or ends the request with `error` after too many retries. Linux does not
    /// retry commands from user space, and without a retry the guest would take a drive's reset for
    /// a fault of the medium.
    fn retry(&mut self, error: DiskError) -> Next {
        if self.retries == RETRIES {
            return Next::Done(Err(error));
        }
        self.retries += 1;
        Next::Again
    }

    /// Handles a command that the drive ended with an error.
    fn ended_badly(&mut self, status: Status, target: &mut Target) -> Next {
        let code = status.code();
        let unknown = [Status::INVALID_OPCODE, Status::INVALID_FIELD].map(Status::code);
        if matches!(self.step, DriveStep::Zero) && unknown.contains(&code) {
            // Some drives report Write Zeroes and lack it, or lack the bits that are set.
            target.zeroes = false;
            self.step = DriveStep::WriteZeros;
            return Next::Again;
        }
        let known = [
            (Status::LBA_OUT_OF_RANGE, DiskError::OutOfRange),
            (Status::CAPACITY_EXCEEDED, DiskError::NoSpace),
            (Status::WRITE_PROTECTED, DiskError::ReadOnly),
        ];
        match known.into_iter().find(|(status, _)| status.code() == code) {
            Some((_, error)) => Next::Done(Err(error)),
            None if status.do_not_retry() => Next::Done(Err(DiskError::Io(libc::EIO))),
            None => self.retry(DiskError::Io(libc::EIO)),
        }
    }
}

impl UringRequest for PassthroughJob {
    type Target = Target;
    type Entry = squeue::Entry128;
    type Answer = cqueue::Entry32;

    fn request(&self) -> &Request {
        &self.request
    }

    fn entry(
        &mut self,
        target: &mut Target,
        vectors: &mut IoVectors,
    ) -> Result<squeue::Entry128, DiskError> {
        vectors.clear();
        let lba_size = u64::from(target.device().lba_size);
        let left = self.len - self.done;
        let most = left.min(target.most_bytes.min(self.most_bytes)).min(MOST_BLOCKS * lba_size);
        let command = match &self.step {
            DriveStep::Flush => Command::of_blocks(NvmOpcode::Flush.0, target.device().nsid, 0, 1),
            DriveStep::Zero => {
                self.piece = left.min(MOST_BLOCKS * lba_size);
                let mut command = self.command(NvmOpcode::WriteZeroes, target.device());
                let discards = self.request.operation == Operation::Discard;
                if discards && target.device().deallocates {
                    command.cdw10[2] |= DEALLOCATE;
                }
                command
            }
            DriveStep::WriteZeros => {
                let zeros = target.zeros.get_or_insert_with(|| Aligned::zeroed(BUFFER));
                self.piece = vectors.repeat(zeros.bytes_mut(), most);
                self.command(NvmOpcode::Write, target.device())
            }
            DriveStep::Move | DriveStep::Bounce(_) => {
                self.piece = self.lend(most, lba_size, vectors)?;
                let read = self.request.operation == Operation::Read;
                let opcode = if read { NvmOpcode::Read } else { NvmOpcode::Write };
                self.command(opcode, target.device())
            }
        };
        Ok(command.entry(&target.device().file, vectors))
    }

    fn advance(&mut self, result: i32, target: &mut Target) -> Next {
        match result {
            ..0 => self.failed(result.wrapping_neg(), target),
            1.. => self.ended_badly(Status(result as u16), target),
            0 => {
                if let Err(fault) = self.drain() {
                    return Next::Done(Err(fault.into()));
                }
                self.done += self.piece;
                self.retries = 0;
                target.most_bytes = target.most_bytes.min(self.most_bytes);
                match self.done >= self.len {
                    true => Next::Done(Ok(())),
                    false => Next::Again,
                }
            }
        }
    }

    fn into_request(self, result: Result<(), DiskError>, target: &mut Target) -> Request {
        if let (Err(error), DriveStep::Flush) = (result, self.step)
            && error != DiskError::Cancelled
        {
            target.lost = Some(error);
        }
        self.request
    }
}

#[cfg(test)]
mod tests {
    use slipway_ram::Span;

    use super::*;
    use crate::users::Users;

    fn target() -> Target {
        let device = Device::nowhere();
        let users = Users::new(device.geometry.blocks);
        Target::new(Arc::new(Common { device, witness: None, users }))
    }

    fn job(operation: Operation, blocks: u32, target: &Target) -> PassthroughJob {
        let moves = matches!(operation, Operation::Read | Operation::Write);
        let spans = if moves { vec![Span::heap(blocks as usize * 512)] } else { Vec::new() };
        PassthroughJob::new(
            Request { tag: 1, operation, lba: 5, blocks, durable: false, spans },
            target,
        )
    }

    /// Runs a job's command with the drive giving the same answer each time. Returns the outcome
    /// and the number of tries.
    fn ends(operation: Operation, answer: i32) -> (Result<(), DiskError>, u32) {
        let mut target = target();
        let mut job = job(operation, 8, &target);
        for tries in 1..100 {
            job.entry(&mut target, &mut IoVectors::default()).unwrap();
            if let Next::Done(result) = job.advance(answer, &mut target) {
                return (result, tries);
            }
        }
        panic!("{operation:?} and {answer} for ever");
    }

    #[test]
    fn what_the_drive_did_not_do_is_tried_a_few_times() {
        let (eio, most) = (Err(DiskError::Io(libc::EIO)), u32::from(RETRIES) + 1);
        let status = |status: Status| i32::from(status.0);
        let tried = [-libc::EINTR, status(Status::ABORTED_QUEUE_DELETED), 0x371, 0x281, 0xffff];
        for (answer, tries) in tried.into_iter().zip([most, most, most, most, 1]) {
            assert_eq!(ends(Operation::Write, answer), (eio, tries), "{answer:#x}");
        }
        let refused = [
            (status(Status::UNRECOVERED_READ_ERROR.dnr()), DiskError::Io(libc::EIO)),
            (status(Status::LBA_OUT_OF_RANGE), DiskError::OutOfRange),
            (status(Status::CAPACITY_EXCEEDED.dnr()), DiskError::NoSpace),
            (status(Status::WRITE_PROTECTED), DiskError::ReadOnly),
            (-libc::ENODEV, DiskError::Io(libc::ENODEV)),
        ];
        for (answer, error) in refused {
            assert_eq!(ends(Operation::Read, answer), (Err(error), 1), "{answer:#x}");
        }
    }

    #[test]
    fn each_command_of_a_request_has_tries_of_its_own() {
        let mut target = target();
        let mut job = job(Operation::Write, 48, &target);
        for answer in [-libc::EINTR; 5].into_iter().chain([0]).cycle().take(17) {
            job.entry(&mut target, &mut IoVectors::default()).unwrap();
            assert!(matches!(job.advance(answer, &mut target), Next::Again));
        }
        assert!(matches!(job.advance(0, &mut target), Next::Done(Ok(()))));
        assert_eq!((job.done, job.piece), (48 * 512, 8192));
    }

    #[test]
    fn a_command_that_is_too_large_goes_in_halves() {
        // A command of 8 blocks (4096 bytes) is not halved.
        assert_eq!(ends(Operation::Read, -libc::EINVAL), (Err(DiskError::Io(libc::EINVAL)), 1));
        let mut target = target();
        let mut job = job(Operation::Read, 48, &target);
        job.entry(&mut target, &mut IoVectors::default()).unwrap();
        assert!(matches!(job.advance(-libc::EINVAL, &mut target), Next::Again));
        job.entry(&mut target, &mut IoVectors::default()).unwrap();
        assert_eq!((job.piece, target.most_bytes), (4096, 8192));
        // Other requests use the whole size until a command of half the size has succeeded.
        assert!(matches!(job.advance(0, &mut target), Next::Again));
        assert_eq!((job.done, target.most_bytes), (4096, 4096));
    }

    #[test]
    fn a_flush_that_was_cancelled_has_lost_nothing() {
        let mut target = target();
        for (result, lost) in [
            (Ok(()), None),
            (Err(DiskError::Cancelled), None),
            (Err(DiskError::Io(libc::EIO)), Some(DiskError::Io(libc::EIO))),
        ] {
            job(Operation::Flush, 0, &target).into_request(result, &mut target);
            assert_eq!(target.lost, lost);
        }
    }

    #[test]
    fn a_drive_without_write_zeroes_gets_zeros_written() {
        let mut target = target();
        let mut job = job(Operation::WriteZeroes, 40, &target);
        job.entry(&mut target, &mut IoVectors::default()).unwrap();
        assert_eq!(job.piece, 40 * 512);
        let unknown = i32::from(Status::INVALID_OPCODE.dnr().0);
        assert!(matches!(job.advance(unknown, &mut target), Next::Again));
        let mut vectors = IoVectors::default();
        job.entry(&mut target, &mut vectors).unwrap();
        assert_eq!((vectors.as_slice()[0].iov_len, target.zeroes), (8192, false));
    }
}
