//! Commands of the NVM command set (section 6).
//!
//! Each command decides on the private copy of its entry. It either ends at once, with a status, or
//! leaves requests with its namespaces and a command in flight.
//!
//! A new command has its opcode in `slipway_nvme_spec::opcode::NvmOpcode`, its arm in
//! `IoEngine::execute_io`, and its code here, or in `steps` if it takes one request after the
//! other. It has its place also in what looks at all commands:
//! - `CommandKind` (`inflight`): how it counts in the SMART / Health log, and whether an error of
//!   the disk is one of reading;
//! - `transferred` (`fetch`): the bytes that a limit counts;
//! - `lba_of` (`complete`): its first block, for the Error Information log;
//! - `OpcodeClass` (`trace`), if `slipway snoop` is to show it apart from others;
//! - `effects` (`admin::logs`), and in `admin::identify` its bit of ONCS (`nvm_commands`), if any;
//! - `IO` in `fuzz`; of the tests `io` or `steps`, `bad_commands`, and `admin` for the two logs.
//!
//! If no `Operation` of disks does its work, it needs a new one: see the head of
//! `backend/block/src/disk.rs`.
//!
//! A command that was fetched is carried out again after a kill (`journal`): twice must do no harm.
//! `docs/disks.md` names the commands of the controller, and `docs/measurements/suites.md` the
//! tests of others that need what it lacks.

use slipway_block::{DiskError, Operation, Request};
use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::{DatasetRange, MAX_DATASET_RANGES, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::{Access, Fault, Span};
use zerocopy::{FromZeros, IntoBytes};

use super::IoEngine;
use super::fetch::Outcome;
use super::inflight::{Bounce, Command, CommandKind, Slot};
use crate::permit::{Owner, Permit};

/// Makes the checks that all I/O commands have in common (section 4.2): PRPs or an SGL. The two
/// types of SGL differ in the metadata pointer, which has no meaning here: no format has metadata.
/// Fused commands do not get here.
fn check_flags(entry: &SubmissionEntry) -> Result<(), Status> {
    if entry.data_pointer_type() == 3 {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(())
}

/// Returns the status for a disk's error (section 4.6.1.2). Linux turns Capacity Exceeded into
/// ENOSPC and media errors into EIO.
pub(super) fn disk_status(result: Result<(), DiskError>, kind: CommandKind) -> Status {
    match result {
        Ok(()) => Status::SUCCESS,
        Err(DiskError::OutOfRange) => Status::LBA_OUT_OF_RANGE.dnr(),
        Err(DiskError::ReadOnly) => Status::WRITE_PROTECTED.dnr(),
        Err(DiskError::NoSpace) => Status::CAPACITY_EXCEEDED.dnr(),
        Err(DiskError::Memory(_)) => Status::DATA_TRANSFER_ERROR,
        Err(DiskError::Cancelled) => Status::ABORT_REQUESTED,
        Err(DiskError::Unsupported) => Status::INVALID_OPCODE.dnr(),
        Err(DiskError::Io(_)) if kind.reads() => Status::UNRECOVERED_READ_ERROR,
        Err(DiskError::Io(_)) => Status::WRITE_FAULT,
    }
}

impl IoEngine {
    /// Starts an I/O command.
    #[inline]
    pub(super) fn execute_io(&mut self, entry: &SubmissionEntry) -> Outcome {
        let started = check_flags(entry).and_then(|()| match NvmOpcode(entry.opcode) {
            NvmOpcode::Read => self.transfer(entry, CommandKind::Read),
            NvmOpcode::Write => self.transfer(entry, CommandKind::Write),
            NvmOpcode::Flush => self.flush(entry),
            NvmOpcode::WriteZeroes => self.write_zeroes(entry).map(Outcome::Begun),
            NvmOpcode::DatasetManagement => self.dataset_management(entry),
            NvmOpcode::Compare => self.compare(entry).map(Outcome::Begun),
            NvmOpcode::Verify => self.verify(entry).map(Outcome::Begun),
            NvmOpcode::Copy => self.copy(entry).map(Outcome::Begun),
            _ => Err(Status::INVALID_OPCODE.dnr()),
        });
        started.into()
    }

    /// Starts a Read (section 6.9) or a Write (section 6.15). Limited Retry and hints are ignored.
    fn transfer(&mut self, entry: &SubmissionEntry, kind: CommandKind) -> Result<Outcome, Status> {
        let bytes = self.find(entry, kind)?;
        let bounce = self.lend(kind, bytes as usize)?;
        if bounce.is_none()
            && let Some(status) = self.transfer_at_once(entry, kind, bytes)
        {
            return Ok(Outcome::Ended(status));
        }
        let (command, request) = self.describe(entry, kind, bounce);
        Ok(Outcome::Begun(self.begin(Command { bytes, ..command }, request)))
    }

    /// Carries out a Read or Write whose memory is pinned, if its disk does so in place, and
    /// returns its status: the command then never was in flight. Returns `None` if the command must
    /// become a request.
    #[inline]
    fn transfer_at_once(
        &mut self,
        entry: &SubmissionEntry,
        kind: CommandKind,
        bytes: u64,
    ) -> Option<Status> {
        let namespace = self.namespaces.get_mut(entry.nsid.get())?;
        let begun = self.tracer.as_ref().map(|tracer| tracer.stamp());
        let blocks = (entry.starting_lba(), entry.block_count());
        let left = &mut self.bytes_left;
        let result = namespace.transfer(kind.operation(), blocks, &self.spans, left)?;
        if let (Some(tracer), Some(begun)) = (&mut self.tracer, begun) {
            tracer.transferred(begun);
        }
        let status = disk_status(result, kind);
        self.counters.count(kind.moved(), status, bytes);
        Some(status)
    }

    /// Tells the disk of a Read or Write that is carried out after the current command.
    #[inline]
    pub(super) fn expect(&self, entry: &SubmissionEntry) {
        let operation = match NvmOpcode(entry.opcode) {
            NvmOpcode::Read => Operation::Read,
            NvmOpcode::Write => Operation::Write,
            _ => return,
        };
        if let Some(namespace) = self.namespaces.get(entry.nsid.get()) {
            namespace.disk.expect(operation, entry.starting_lba(), entry.block_count());
        }
    }

    /// Checks a Read or Write and pins its memory. The returned request has no tag yet.
    pub(super) fn prepare(
        &mut self,
        entry: &SubmissionEntry,
        kind: CommandKind,
    ) -> Result<(Command, Request), Status> {
        let bytes = self.find(entry, kind)?;
        let bounce = self.lend(kind, bytes as usize)?;
        let (command, request) = self.describe(entry, kind, bounce);
        Ok((Command { bytes, ..command }, request))
    }

    /// Checks a Read or Write and finds its memory. Returns the number of its bytes.
    #[inline]
    fn find(&mut self, entry: &SubmissionEntry, kind: CommandKind) -> Result<u64, Status> {
        let (lba, blocks) = (entry.starting_lba(), entry.block_count());
        let block_size =
            self.check_blocks(entry.nsid.get(), lba, blocks, kind == CommandKind::Write)?;
        let bytes = u64::from(blocks) * u64::from(block_size);
        if bytes > u64::from(self.limits.transfer) {
            return Err(Status::INVALID_FIELD.dnr());
        }
        self.walker.find(&self.memory, self.page_size, entry, bytes as usize)?;
        Ok(bytes)
    }

    /// Returns the command and the request of a Read or Write. The request takes the current spans.
    fn describe(
        &mut self,
        entry: &SubmissionEntry,
        kind: CommandKind,
        bounce: Option<Box<Bounce>>,
    ) -> (Command, Request) {
        let (lba, blocks) = (entry.starting_lba(), entry.block_count());
        let durable = kind == CommandKind::Write && self.is_durable(entry);
        let next = self.spare_spans.pop().unwrap_or_default();
        let spans = std::mem::replace(&mut self.spans, next);
        let bounced = bounce.as_ref().map_or(0, |bounce| bounce.runs.len());
        let pieces = spans.len().max(bounced) as u32;
        let command = Command { bounce, pieces, ..command(entry, kind) };
        (command, Request { tag: 0, operation: kind.operation(), lba, blocks, spans, durable })
    }

    /// Pins the places that the walker found as the current spans, or makes a bounce buffer if some
    /// of them are message-only or are being zeroed. The bounce buffer then has a write's data.
    #[inline]
    fn lend(&mut self, kind: CommandKind, bytes: usize) -> Result<Option<Box<Bounce>>, Status> {
        let access = if kind == CommandKind::Read { Access::Write } else { Access::Read };
        let runs = self.walker.runs.iter().map(|run| (run.address, run.len));
        match self.view.pin(runs, access, &mut self.spans) {
            Ok(()) => Ok(None),
            // By the time that the disk has filled the buffer, the memory is zeroed.
            Err(Fault::Remote { .. } | Fault::Busy { .. }) => self.bounce(kind, bytes).map(Some),
            Err(_) => Err(Status::DATA_TRANSFER_ERROR),
        }
    }

    #[cold]
    fn bounce(&mut self, kind: CommandKind, bytes: usize) -> Result<Box<Bounce>, Status> {
        let buffer = Span::heap(bytes);
        if kind == CommandKind::Write {
            let mut data = vec![0; bytes];
            self.walker.read(&self.memory, &mut data)?;
            buffer.write(0, &data).map_err(|_| Status::INTERNAL_ERROR)?;
        }
        self.spans.clear();
        self.spans.push(buffer.clone());
        Ok(Box::new(Bounce { buffer, runs: self.walker.runs.clone() }))
    }

    /// Starts a Flush (section 6.8), of one namespace or of all (VWC reports that).
    fn flush(&mut self, entry: &SubmissionEntry) -> Result<Outcome, Status> {
        let nsid = entry.nsid.get();
        if nsid != NSID_ALL {
            self.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        }
        let command = command(entry, CommandKind::Other);
        Ok(match self.flush_as(nsid, command) {
            Some(slot) => Outcome::Begun(slot),
            None => Outcome::Ended(Status::SUCCESS),
        })
    }

    /// Flushes every namespace, and then reports the end of the admin command with `permit`, if
    /// any. Gives the permit back if there is nothing to flush.
    pub fn flush_all(&mut self, permit: Option<Permit>) -> Option<Permit> {
        let command = Command::new(CommandKind::Other, NSID_ALL, 0);
        let Some(slot) = self.flush_as(NSID_ALL, command) else { return permit };
        self.inflight.own(slot, permit.map_or(Owner::CONTROLLER, Owner::Guest));
        None
    }

    /// Flushes namespace `nsid`, or every namespace, for `command`, which ends when all are
    /// flushed. Returns `None` if there is no namespace.
    fn flush_as(&mut self, nsid: u32, command: Command) -> Option<Slot> {
        let chosen = |one: u32| nsid == NSID_ALL || one == nsid;
        let parts = self.namespaces.iter().filter(|one| chosen(one.nsid)).count() as u32;
        if parts == 0 {
            return None;
        }
        let slot = self.inflight.insert(Command { parts, ..command });
        let namespaces = self.namespaces.iter_mut().filter(|one| chosen(one.nsid));
        for (part, namespace) in namespaces.enumerate() {
            let tag = slot.tag(part as u32);
            namespace.requests.push(plain(tag, Operation::Flush, 0, 0, false));
        }
        Some(slot)
    }

    /// Starts a Write Zeroes (section 6.17). No data moves, so MDTS does not limit it.
    fn write_zeroes(&mut self, entry: &SubmissionEntry) -> Result<Slot, Status> {
        let (lba, blocks) = (entry.starting_lba(), entry.block_count());
        let block_size = self.check_blocks(entry.nsid.get(), lba, blocks, true)?;
        // Discarded blocks read as zeros (DLFEAT), so Deallocate may use the cheaper operation.
        let operation =
            if entry.deallocate() { Operation::Discard } else { Operation::WriteZeroes };
        let bytes = u64::from(blocks) * u64::from(block_size);
        let command = Command { bytes, ..command(entry, CommandKind::Other) };
        let durable = self.is_durable(entry);
        Ok(self.begin(command, plain(0, operation, lba, blocks, durable)))
    }

    /// Starts a Dataset Management (section 6.7): Deallocate is carried out, the other attributes
    /// are hints.
    fn dataset_management(&mut self, entry: &SubmissionEntry) -> Result<Outcome, Status> {
        const DEALLOCATE: u32 = 1 << 2;
        let nsid = entry.nsid.get();
        let namespace = self.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        if entry.dword(11) & DEALLOCATE == 0 {
            return Ok(Outcome::Ended(Status::SUCCESS));
        }
        if namespace.geometry.read_only {
            return Err(Status::WRITE_PROTECTED.dnr());
        }
        let geometry = namespace.geometry;
        let mut ranges = [DatasetRange::new_zeroed(); MAX_DATASET_RANGES];
        let ranges = &mut ranges[..(entry.dword(10) & 0xff) as usize + 1];
        self.walker.find(&self.memory, self.page_size, entry, size_of_val(ranges))?;
        self.walker.read(&self.memory, ranges.as_mut_bytes())?;
        let inside =
            |range: &DatasetRange| geometry.holds(range.lba.get(), u64::from(range.blocks.get()));
        if !ranges.iter().all(inside) {
            return Err(Status::LBA_OUT_OF_RANGE.dnr());
        }
        let ranges = join(ranges);
        if ranges.is_empty() {
            return Ok(Outcome::Ended(Status::SUCCESS));
        }
        let blocks: u64 = ranges.iter().map(|range| u64::from(range.blocks.get())).sum();
        let bytes = blocks * u64::from(geometry.block_size);
        let parts = ranges.len() as u32;
        let started = Command { parts, bytes, ..command(entry, CommandKind::Other) };
        let slot = self.inflight.insert(started);
        for (part, range) in ranges.iter().enumerate() {
            let (lba, blocks) = (range.lba.get(), range.blocks.get());
            let tag = slot.tag(part as u32);
            self.request(nsid, plain(tag, Operation::Discard, lba, blocks, false));
        }
        Ok(Outcome::Begun(slot))
    }

    /// Checks namespace and blocks. Returns the block size in bytes.
    pub(super) fn check_blocks(
        &self,
        nsid: u32,
        lba: u64,
        blocks: u32,
        write: bool,
    ) -> Result<u32, Status> {
        let namespace = self.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        if !namespace.geometry.holds(lba, u64::from(blocks)) {
            return Err(Status::LBA_OUT_OF_RANGE.dnr());
        }
        if write && namespace.geometry.read_only {
            return Err(Status::WRITE_PROTECTED.dnr());
        }
        Ok(namespace.geometry.block_size)
    }

    /// Returns whether a write must be durable: by Force Unit Access, or without a volatile write
    /// cache (section 5.21.1.6).
    pub(super) fn is_durable(&self, entry: &SubmissionEntry) -> bool {
        entry.force_unit_access() || !self.tuning.write_cache
    }

    /// Keeps a command of one request, and leaves the request with its namespace.
    pub(super) fn begin(&mut self, command: Command, request: Request) -> Slot {
        let nsid = command.nsid;
        let slot = self.inflight.insert(command);
        self.request(nsid, Request { tag: slot.tag(0), ..request });
        slot
    }

    /// Leaves `request` with its namespace, whose existence the caller has checked.
    pub(super) fn request(&mut self, nsid: u32, request: Request) {
        if let Some(namespace) = self.namespaces.working(nsid) {
            namespace.requests.push(request);
        }
    }
}

/// Returns the command of `entry`, with nothing done.
pub(super) fn command(entry: &SubmissionEntry, kind: CommandKind) -> Command {
    Command::new(kind, entry.nsid.get(), entry.starting_lba())
}

/// Sorts ranges, which lie on the disk, and joins them so that none is empty and no two overlap: a
/// command then names each block at most once, however often its host named the block.
fn join(ranges: &mut [DatasetRange]) -> &[DatasetRange] {
    let end = |range: &DatasetRange| range.lba.get() + u64::from(range.blocks.get());
    ranges.sort_unstable_by_key(|range| range.lba.get());
    let mut kept = 0;
    let mut covered = 0;
    for at in 0..ranges.len() {
        let (from, to) = (ranges[at].lba.get().max(covered), end(&ranges[at]));
        if from >= to {
            continue;
        }
        let touches = kept > 0 && from == covered;
        let joined = touches.then(|| to - ranges[kept - 1].lba.get());
        match joined.and_then(|blocks| u32::try_from(blocks).ok()) {
            Some(blocks) => ranges[kept - 1].blocks = blocks.into(),
            None => {
                ranges[kept].lba = from.into();
                // At most as long as the range whose rest this is.
                ranges[kept].blocks = ((to - from) as u32).into();
                kept += 1;
            }
        }
        covered = to;
    }
    &ranges[..kept]
}

/// Returns a request without data.
fn plain(tag: u64, operation: Operation, lba: u64, blocks: u32, durable: bool) -> Request {
    Request { tag, operation, lba, blocks, spans: Vec::new(), durable }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(ranges: &[(u64, u32)]) -> Vec<(u64, u32)> {
        let range = |(lba, blocks): &(u64, u32)| DatasetRange {
            lba: (*lba).into(),
            blocks: (*blocks).into(),
            ..DatasetRange::default()
        };
        let mut ranges: Vec<_> = ranges.iter().map(range).collect();
        join(&mut ranges).iter().map(|range| (range.lba.get(), range.blocks.get())).collect()
    }

    #[test]
    fn ranges_are_sorted_joined_and_never_overlap() {
        assert_eq!(joined(&[]), []);
        assert_eq!(joined(&[(5, 0), (0, 0)]), []);
        assert_eq!(joined(&[(0, 100); 256]), [(0, 100)]);
        assert_eq!(joined(&[(8, 4), (0, 8), (20, 1)]), [(0, 12), (20, 1)]);
        assert_eq!(joined(&[(0, 10), (2, 3), (5, 10)]), [(0, 15)]);
        // The joined range is longer than a range can be, so a second range continues it.
        let most = u32::MAX;
        assert_eq!(joined(&[(0, most), (1, most)]), [(0, most), (u64::from(most), 1)]);
    }
}
