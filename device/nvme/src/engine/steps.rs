//! Commands of several steps: Compare, Verify, Copy, and Compare and Write as a fused pair.
//!
//! The data of these commands passes through a buffer of the controller, at most [`STEP`] bytes at
//! a time. A step is one request to the disk, and the next step is chosen when that request has
//! ended. So a command of 65,536 blocks takes many polls, and other commands proceed between them.
//! Buffers are reused (`spares`): in the steady state no command allocates.

use slipway_block::{Operation, Request};
use slipway_nvme_spec::command::{CopyRange, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::{Memory, Span};
use zerocopy::{FromZeros, IntoBytes};

use super::inflight::{Command, CommandKind, CopyStep, FusedWrite, NextStep, Slot, WorkArea};
use super::io::command;
use super::{IoEngine, Role};
use crate::prp::Run;

/// Most bytes of a step.
const STEP: u32 = 1 << 20;
/// MSRC: most source ranges of a Copy, less one.
pub(crate) const COPY_RANGES: u8 = 127;
/// MSSRL: most blocks of a source range.
pub(crate) const COPY_RANGE_BLOCKS: u16 = u16::MAX;
/// MCL: most blocks of a Copy.
pub(crate) const COPY_BLOCKS: u32 = 1 << 17;

impl IoEngine {
    /// Starts a Compare (section 6.6).
    pub(super) fn compare(&mut self, entry: &SubmissionEntry) -> Result<Slot, Status> {
        let (command, request) = self.compare_parts(entry)?;
        Ok(self.begin(command, request))
    }

    fn compare_parts(&mut self, entry: &SubmissionEntry) -> Result<(Command, Request), Status> {
        let (lba, blocks) = (entry.starting_lba(), entry.block_count());
        let block_size = self.check_blocks(entry.nsid.get(), lba, blocks, false)?;
        let bytes = blocks as usize * block_size as usize;
        if bytes > self.limits.transfer as usize {
            return Err(Status::INVALID_FIELD.dnr());
        }
        self.walker.find(&self.memory, self.page_size, entry, bytes)?;
        let mut work = self.spares.take(NextStep::Compare, bytes);
        work.runs.clone_from(&self.walker.runs);
        let request = self.read(lba, blocks, &work.buffer, block_size);
        let (bytes, pieces) = (bytes as u64, work.runs.len() as u32);
        let compare = command(entry, CommandKind::Compare);
        Ok((Command { bytes, pieces, work: Some(work), ..compare }, request))
    }

    /// Starts a Verify (section 6.16). No data moves, so MDTS does not limit it.
    pub(super) fn verify(&mut self, entry: &SubmissionEntry) -> Result<Slot, Status> {
        let (lba, blocks) = (entry.starting_lba(), entry.block_count());
        let block_size = self.check_blocks(entry.nsid.get(), lba, blocks, false)?;
        let step = blocks.min(self.step_blocks(block_size));
        let next = NextStep::Verify {
            next: lba + u64::from(step),
            left: blocks - step,
            bytes: u64::from(blocks) * u64::from(block_size),
        };
        let work = self.spares.take(next, (step * block_size) as usize);
        let request = self.read(lba, step, &work.buffer, block_size);
        let bytes = u64::from(step * block_size);
        let verify = command(entry, CommandKind::Scan);
        Ok(self.begin(Command { bytes, work: Some(work), ..verify }, request))
    }

    /// Starts a Copy (NVM Command Set Specification 1.0, section 3.2.2; brought into 1.4 by TP
    /// 4065), with source ranges of format 0. Ranges are copied in their order, each in pieces from
    /// its start.
    pub(super) fn copy(&mut self, entry: &SubmissionEntry) -> Result<Slot, Status> {
        let (to, cdw12) = (entry.starting_lba(), entry.dword(12));
        let nsid = entry.nsid.get();
        let namespace = self.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        let geometry = namespace.geometry;
        if geometry.read_only {
            return Err(Status::WRITE_PROTECTED.dnr());
        }
        let (count, format) = ((cdw12 & 0xff) as usize + 1, cdw12 >> 8 & 0xf);
        if format != 0 {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if count > usize::from(COPY_RANGES) + 1 {
            return Err(Status::COPY_SIZE_EXCEEDED.dnr());
        }
        let mut ranges = [(0, 0); COPY_RANGES as usize + 1];
        let ranges = &mut ranges[..count];
        self.copy_ranges(entry, ranges)?;
        let blocks: u32 = ranges.iter().map(|(_, blocks)| blocks).sum();
        let inside = |(lba, blocks): &(u64, u32)| geometry.holds(*lba, u64::from(*blocks));
        if blocks > COPY_BLOCKS {
            return Err(Status::COPY_SIZE_EXCEEDED.dnr());
        }
        if !ranges.iter().all(inside) || !geometry.holds(to, blocks.into()) {
            return Err(Status::LBA_OUT_OF_RANGE.dnr());
        }
        let block_size = geometry.block_size;
        // Each block is read and written.
        self.limiter.move_bytes(2 * u64::from(blocks) * u64::from(block_size));
        let longest = ranges.iter().map(|(_, blocks)| *blocks).max().unwrap_or(1);
        let most = longest.min(self.step_blocks(block_size));
        let durable = self.is_durable(entry);
        let step = CopyStep { most, range: 0, done: 0, to, writing: false, durable };
        let kind = step.kind();
        let mut work = self.spares.take(NextStep::Copy(step), (most * block_size) as usize);
        work.ranges.extend_from_slice(ranges);
        let bytes = u64::from(most * block_size);
        // There is at least one range, of at least one block.
        let request = self.piece(&work, block_size).ok_or(Status::INTERNAL_ERROR)?;
        Ok(self.begin(Command { bytes, work: Some(work), ..command(entry, kind) }, request))
    }

    /// Reads the source ranges of a Copy once: first block and number of blocks of each.
    fn copy_ranges(
        &mut self,
        entry: &SubmissionEntry,
        into: &mut [(u64, u32)],
    ) -> Result<(), Status> {
        let mut ranges = [CopyRange::new_zeroed(); COPY_RANGES as usize + 1];
        let ranges = &mut ranges[..into.len()];
        self.walker.find(&self.memory, self.page_size, entry, size_of_val(ranges))?;
        self.walker.read(&self.memory, ranges.as_mut_bytes())?;
        for (range, into) in ranges.iter().zip(into) {
            if range.block_count() > COPY_RANGE_BLOCKS.into() {
                return Err(Status::COPY_SIZE_EXCEEDED.dnr());
            }
            *into = (range.lba.get(), range.block_count());
        }
        Ok(())
    }

    /// Starts a Compare and Write as a fused operation (section 6.2): the write is done if the
    /// blocks hold the host's data, and no other command of this controller comes between.
    ///
    /// # Errors
    /// The status of each of the two commands, if they end at once.
    pub(super) fn compare_and_write(
        &mut self,
        first: &SubmissionEntry,
        second: &SubmissionEntry,
    ) -> Result<Slot, [Status; 2]> {
        let failed = Status::FUSED_FAILED.dnr();
        let same = NvmOpcode(first.opcode) == NvmOpcode::Compare
            && NvmOpcode(second.opcode) == NvmOpcode::Write
            && first.nsid == second.nsid
            && first.starting_lba() == second.starting_lba()
            && first.block_count() == second.block_count();
        // Other lanes' commands would come between as well.
        let lanes = self.role != Role::Single;
        let shared = lanes || self.namespaces.get(first.nsid.get()).is_some_and(|one| one.shared);
        if !same || shared || first.data_pointer_type() == 3 || second.data_pointer_type() == 3 {
            return Err([Status::INVALID_FIELD.dnr(), failed]);
        }
        let (mut compare, request) =
            self.compare_parts(first).map_err(|status| [status, failed])?;
        let (command, write) = match self.prepare(second, CommandKind::Write) {
            Ok(parts) => parts,
            Err(status) => {
                self.recycle(request.spans);
                compare.work.into_iter().for_each(|work| self.spares.put(work));
                return Err([failed, status]);
            }
        };
        // The write waits with all of its pieces until the compare has ended.
        compare.pieces += command.pieces;
        if let Some(work) = &mut compare.work {
            work.write = Some(FusedWrite { command, request: write });
        }
        let nsid = compare.nsid;
        let slot = self.inflight.insert(compare);
        if let Some(namespace) = self.namespaces.get_mut(nsid) {
            namespace.alone.start(Request { tag: slot.tag(0), ..request });
        }
        Ok(slot)
    }

    /// Returns the most blocks of a step.
    fn step_blocks(&self, block_size: u32) -> u32 {
        STEP.min(self.limits.transfer) / block_size
    }

    /// Keeps `command`, which has its owner, and gives its next request to its namespace.
    fn take_step(&mut self, command: Command, request: Request) {
        let nsid = command.nsid;
        let tag = self.inflight.resume(command);
        self.request(nsid, Request { tag, ..request });
    }

    /// Takes a command's next step after one has ended with the command's status, or ends the
    /// command. A command whose end is not to be reported takes no further step.
    pub(super) fn after_step(&mut self, mut command: Command, mut work: Box<WorkArea>) {
        let goes_on = command.status.is_success() && command.owner.is_guest();
        match &mut work.step {
            NextStep::Compare => self.end_compare(command, work, goes_on),
            NextStep::FusedWrite => {
                self.end_pair(command.nsid);
                self.spares.put(work);
                self.end(command, 0);
            }
            NextStep::Verify { next, left, .. } if goes_on && *left > 0 => {
                let block_size = self.block_size(command.nsid);
                let (lba, step) = (*next, (*left).min(self.step_blocks(block_size)));
                (*next, *left) = (*next + u64::from(step), *left - step);
                let request = self.read(lba, step, &work.buffer, block_size);
                command.work = Some(work);
                self.take_step(command, request);
            }
            NextStep::Verify { bytes, .. } => {
                command.bytes = *bytes;
                self.spares.put(work);
                self.end(command, 0);
            }
            NextStep::Copy(copy) => {
                let range = copy.range as u32;
                if goes_on {
                    copy.advance(&work.ranges);
                    let block_size = self.block_size(command.nsid);
                    return self.next_piece(command, work, block_size);
                }
                self.spares.put(work);
                // Dword 0 is the first range that was not copied whole.
                self.end(command, range);
            }
        }
    }

    /// Ends a Compare whose blocks are in the buffer, and compares them first if it `goes_on`. Then
    /// runs or ends the other half of a fused pair.
    fn end_compare(&mut self, mut command: Command, work: Box<WorkArea>, goes_on: bool) {
        if goes_on {
            command.status = compare(&self.memory, &work.runs, &work.buffer);
        }
        let (status, reported) = (command.status, command.owner.is_guest());
        if let Some(write) = &work.write {
            // The decision is stored before the guest is told of an end, and before the write.
            self.decide(write.command.owner.slot_number(), second_status(status));
        }
        self.end(command, 0);
        self.after_compare(status, reported, work);
    }

    /// Takes the next step of a Copy, or ends it.
    fn next_piece(&mut self, mut command: Command, work: Box<WorkArea>, block_size: u32) {
        let NextStep::Copy(copy) = &work.step else { return };
        let kind = copy.kind();
        match self.piece(&work, block_size) {
            Some(request) => {
                (command.kind, command.work) = (kind, Some(work));
                self.take_step(command, request);
            }
            None => {
                self.spares.put(work);
                // The data of a Copy neither comes from the host nor goes to it.
                self.end(Command { kind: CommandKind::Other, ..command }, 0);
            }
        }
    }

    /// Returns the request for the present step of a Copy, without its tag. Returns `None` after
    /// the last piece.
    fn piece(&mut self, work: &WorkArea, block_size: u32) -> Option<Request> {
        let NextStep::Copy(copy) = &work.step else { return None };
        let (lba, piece) = copy.piece(&work.ranges)?;
        let mut request = self.read(lba, piece, &work.buffer, block_size);
        if copy.writing {
            request.operation = Operation::Write;
            (request.lba, request.durable) = (copy.to, copy.durable);
        }
        Some(request)
    }

    /// Runs the second half of a fused pair, or ends it as well, after the first half has ended.
    /// The Compare ended with `status`; its end was `reported` unless its queue is gone.
    fn after_compare(&mut self, status: Status, reported: bool, mut work: Box<WorkArea>) {
        let Some(FusedWrite { mut command, request }) = work.write.take() else {
            return self.spares.put(work);
        };
        if !reported {
            command.owner.orphan();
        }
        let nsid = command.nsid;
        if !status.is_success() || !reported {
            self.end_pair(nsid);
            self.spares.put(work);
            self.recycle(request.spans);
            return self.end(Command { status: second_status(status), ..command }, 0);
        }
        work.step = NextStep::FusedWrite;
        command.pieces += work.runs.len() as u32;
        command.work = Some(work);
        let tag = self.inflight.resume(command);
        if let Some(namespace) = self.namespaces.working(nsid) {
            namespace.alone.then(Request { tag, ..request });
        }
    }

    fn end_pair(&mut self, nsid: u32) {
        if let Some(namespace) = self.namespaces.working(nsid) {
            namespace.alone.end();
        }
    }

    /// Returns the block size of a namespace. The command's start has checked that the namespace
    /// exists.
    fn block_size(&mut self, nsid: u32) -> u32 {
        self.namespaces.working(nsid).map_or(512, |namespace| namespace.geometry.block_size)
    }

    /// Returns a read of `blocks` blocks into the start of `buffer`, without its tag.
    fn read(&mut self, lba: u64, blocks: u32, buffer: &Span, block_size: u32) -> Request {
        let mut spans = self.spare_spans.pop().unwrap_or_default();
        spans.clear();
        spans.push(buffer.slice(0, (blocks * block_size) as usize));
        Request { tag: 0, operation: Operation::Read, lba, blocks, spans, durable: false }
    }
}

/// Returns the status of the second half of a fused pair after the first has ended with `first`.
/// With success the second half runs.
fn second_status(first: Status) -> Status {
    if first.is_success() { first } else { Status::FUSED_FAILED.dnr() }
}

/// Compares the host's data at `runs` with the data in `buffer`. Each byte is read once.
fn compare(memory: &Memory, runs: &[Run], buffer: &Span) -> Status {
    let (mut ours, mut theirs) = ([0; 4096], [0; 4096]);
    let mut at = 0;
    for run in runs {
        let mut done = 0;
        while done < run.len {
            let len = (run.len - done).min(ours.len());
            let (ours, theirs) = (&mut ours[..len], &mut theirs[..len]);
            let address = run.address.wrapping_add(done as u64);
            if memory.read(address, theirs).is_err() {
                return Status::DATA_TRANSFER_ERROR;
            }
            if buffer.read(at, ours).is_err() {
                return Status::INTERNAL_ERROR;
            }
            if ours != theirs {
                return Status::COMPARE_FAILURE.dnr();
            }
            (done, at) = (done + len, at + len);
        }
    }
    Status::SUCCESS
}
