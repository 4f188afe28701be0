//! The ends of requests and commands.
//!
//! A disk ends a request ([`IoEngine::drive_disks`]). The last request of a command leads to the
//! command's next step (`steps`) or to its end ([`IoEngine::end`]): data that the host is to have
//! is copied back, an error is logged, and the completion is posted ([`IoEngine::complete`]). Here
//! are also the commands that end early: by Abort, or with their queue or namespace.
//!
//! The verbs: a request or a command *ends* when its work is done, a command is *completed* when
//! the guest is to learn of that, an entry is *posted* in the completion queue, and the command's
//! slot in the journal is *concluded*. A command that is *abandoned* is concluded without an entry.

use slipway_block::Completion;
use slipway_nvme_spec::command::{CompletionEntry, SubmissionEntry};
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::Span;

use super::IoEngine;
use super::inflight::{Command, CommandKind};
use super::io::disk_status;
use crate::journal::SlotNumber;
use crate::namespace::Done;
use crate::permit::{Owner, Permit};
use crate::prp::write_runs;

/// The largest capacity of a vector of spans that is kept for another command.
const SPARE_CAPACITY: usize = 512;

/// The subject of an error, for the Error Information log.
#[derive(Clone, Copy)]
struct Subject {
    nsid: u32,
    lba: u64,
}

impl IoEngine {
    /// Lets every disk work, within the rest of the turn's bytes for disks that copy, and ends
    /// requests. If the bytes run out, the next turn begins with the namespace after the last one
    /// that had some. Returns whether a request has ended, or more work waits.
    pub fn drive_disks(&mut self) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        let mut left = std::mem::take(&mut self.bytes_left);
        let mut last = None;
        for (place, namespace) in self.namespaces.driven().enumerate() {
            let before = left;
            match &mut self.tracer {
                None => namespace.drive(&mut left, &mut completions),
                Some(tracer) => tracer.drive(namespace, &mut left, &mut completions),
            }
            if left == 0 && before > 0 {
                last = Some(place);
            }
        }
        if let Some(place) = last {
            self.namespaces.begin_after(place);
        }
        self.behind = left == 0 && self.namespaces.driven().any(|one| one.has_waiting());
        let busy = self.behind || !completions.is_empty();
        for completion in completions.drain(..) {
            self.end_request(completion);
        }
        self.completions = completions;
        // After the ends of requests, since a command's next step may follow from one.
        if self.namespaces.is_changing() {
            self.complete_changes();
        }
        busy
    }

    /// Ends a request of a disk. A command whose last request this was goes on, or ends.
    fn end_request(&mut self, completion: Completion) {
        self.recycle(completion.spans);
        let Some(kind) = self.inflight.kind(completion.tag) else { return };
        let status = disk_status(completion.result, kind);
        if let Some(command) = self.inflight.end_part(completion.tag, status) {
            if let Some(tracer) = &mut self.tracer {
                tracer.completed(completion.tag, command.owner.is_guest());
            }
            self.step_or_end(command);
        }
    }

    /// Takes the next step of a command that has several, and ends any other one.
    fn step_or_end(&mut self, mut command: Command) {
        if let Some(work) = command.work.take() {
            return self.after_step(command, work);
        }
        self.end(command, 0);
    }

    /// Ends a command whose work is done; `result` is dword 0 of its completion.
    pub(super) fn end(&mut self, mut command: Command, result: u32) {
        if command.owner.is_guest()
            && command.status.is_success()
            && command.kind == CommandKind::Read
        {
            command.status = self.copy_back(&command);
        }
        let permit = match command.owner {
            Owner::Guest(permit) => permit,
            Owner::Nobody(slot_number) => return self.conclude(slot_number),
        };
        self.counters.count(command.kind.moved(), command.status, command.bytes);
        if permit.queue == 0 {
            self.report.ended.push((permit, command.status));
            return;
        }
        let subject = Subject { nsid: command.nsid, lba: command.lba };
        let status = self.log_error(&permit, command.status, subject);
        self.complete(permit, status, result);
    }

    /// Ends a command that was never in flight.
    #[inline]
    pub(super) fn end_at_once(&mut self, permit: Permit, entry: &SubmissionEntry, status: Status) {
        let subject = Subject { nsid: entry.nsid.get(), lba: lba_of(entry) };
        let status = self.log_error(&permit, status, subject);
        self.complete(permit, status, 0);
    }

    /// Copies the data of a Read of message-only memory there from its bounce buffer.
    fn copy_back(&self, command: &Command) -> Status {
        let Some(bounce) = &command.bounce else { return Status::SUCCESS };
        let mut data = vec![0; bounce.buffer.len()];
        let copied = bounce.buffer.read(0, &mut data).map_err(|_| Status::INTERNAL_ERROR);
        let written = copied.and_then(|()| write_runs(&self.memory, &bounce.runs, &data));
        written.err().unwrap_or(Status::SUCCESS)
    }

    /// Ends a command with `status`, which is logged already, and dword 0 `result`.
    pub fn complete(&mut self, permit: Permit, status: Status, result: u32) {
        let Permit { queue, id, slot_number } = permit;
        if let Some((submission, completion)) = self.queues.pair(queue) {
            submission.in_flight -= 1;
            completion.reserved -= 1;
            let drained = submission.in_flight == 0 && submission.deleting;
            self.post(queue, id, slot_number, status, result);
            self.conclude(slot_number);
            if drained {
                self.finish_deletion(queue);
            }
        } else {
            self.conclude(slot_number);
        }
    }

    /// Gives a command up: no completion queue entry is written for it.
    pub fn abandon(&mut self, permit: Permit) {
        if let Some((submission, completion)) = self.queues.pair(permit.queue) {
            submission.in_flight -= 1;
            completion.reserved -= 1;
        }
        self.conclude(permit.slot_number);
    }

    /// Frees a command's slot in the journal.
    pub fn conclude(&mut self, slot_number: SlotNumber) {
        if let Some(journal) = &mut self.journal {
            journal.end(slot_number);
        }
    }

    /// Records the decision on the second half of a fused pair: with success it is carried out,
    /// with another `status` it ends.
    pub(super) fn decide(&self, slot_number: SlotNumber, status: Status) {
        if let Some(journal) = &self.journal {
            journal.decide(slot_number, status);
        }
    }

    /// Writes a completion queue entry for command `id` of `queue`. The completion queue must have
    /// a free slot.
    pub fn post(
        &mut self,
        queue: u16,
        id: u16,
        slot_number: SlotNumber,
        status: Status,
        result: u32,
    ) {
        if !self.may_post() {
            return;
        }
        let Some((submission, completion)) = self.queues.pair(queue) else { return };
        let mut entry = CompletionEntry {
            result: result.into(),
            head: (submission.head as u16).into(),
            queue: queue.into(),
            id: id.into(),
            ..CompletionEntry::default()
        };
        entry.set_status(status, false);
        if let Some(journal) = &self.journal {
            journal.completing(slot_number, completion.written, status, result);
        }
        let posted = completion.post(&self.memory, entry);
        if let Some(journal) = &self.journal {
            journal.set_posted(completion.id, completion.written);
        }
        if posted.is_err() {
            self.fail();
        }
    }

    /// Deletes submission queue `id` as soon as none of its commands is in flight, and reports that
    /// it is gone (section 5.6).
    pub fn begin_deletion(&mut self, id: u16) {
        let Some(queue) = self.queues.submission(id) else { return };
        queue.deleting = true;
        if queue.in_flight == 0 {
            self.finish_deletion(id);
        }
    }

    /// Removes a submission queue whose last command has ended.
    fn finish_deletion(&mut self, queue: u16) {
        if self.queues.remove_submission(queue).is_none() {
            return;
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.closed(queue);
        }
        self.report.gone.push(queue);
    }

    /// Aborts command `id` of I/O queue `queue`, and returns whether it was or will be aborted. It
    /// ends before the Abort if the disk gives its request back at once. A command with several
    /// requests, such as Dataset Management of many ranges, is left to end by itself.
    pub fn abort(&mut self, queue: u16, id: u16) -> bool {
        let Some((tag, command)) = self.inflight.find(queue, id) else { return false };
        let (nsid, single) = (command.nsid, command.parts == 1);
        let mut stops = false;
        if command.work.as_ref().is_some_and(|work| work.stops()) {
            // The command ends with this status instead of taking its next step.
            command.status = Status::ABORT_REQUESTED;
            stops = true;
        }
        let mut ended = Vec::new();
        if single && let Some(namespace) = self.namespaces.get_mut(nsid) {
            stops |= namespace.cancel(tag, &mut ended);
        }
        ended.into_iter().for_each(|completion| self.end_request(completion));
        stops
    }

    /// Takes a namespace away, with `lanes` lanes that have it too. Commands in flight end as the
    /// disk ends them; then the disk is dropped and `done` is called.
    ///
    /// # Errors
    /// `done`, uncalled, if there is no such namespace.
    pub fn detach(&mut self, nsid: u32, done: Done, lanes: usize) -> Result<(), Done> {
        let Some(namespace) = self.namespaces.detach(nsid) else { return Err(done) };
        self.namespaces.leave(namespace, done, lanes);
        Ok(())
    }

    /// Completes changes of namespaces whose requests have ended.
    #[cold]
    pub fn complete_changes(&mut self) {
        let resized = self.namespaces.complete_changes();
        self.report.resized.extend(resized);
    }

    /// Reports a failed command, and sets "more" in its status. Success and Abort Requested are not
    /// logged.
    #[inline]
    fn log_error(&mut self, permit: &Permit, status: Status, subject: Subject) -> Status {
        match logged(permit, status) {
            None => status,
            Some(mut error) => {
                error.lba.set(subject.lba);
                error.nsid.set(subject.nsid);
                self.report.log(error);
                status.more()
            }
        }
    }

    /// Keeps a vector of spans for the next command, whose data is most likely in the same mapping.
    /// The spans stay until then, or until the controller is quiesced. Bounce buffers are dropped,
    /// and so are the vectors of lists that are longer than a megabyte in pages of 4 KiB takes.
    pub(crate) fn recycle(&mut self, mut spans: Vec<Span>) {
        if spans.iter().any(Span::is_heap) {
            spans.clear();
        }
        let most = self.limits.in_flight as usize;
        let common = (1..=SPARE_CAPACITY).contains(&spans.capacity());
        if common && self.spare_spans.len() < most {
            self.spare_spans.push(spans);
        }
    }
}

/// Returns the entry of the Error Information log for a command that ended with `status`, or `None`
/// if such an end is not logged.
#[inline]
pub(crate) fn logged(permit: &Permit, status: Status) -> Option<ErrorEntry> {
    let silent = status.is_success() || status.code() == Status::ABORT_REQUESTED.code();
    (!silent).then(|| ErrorEntry::new(permit.queue, permit.id, status.more()))
}

/// Returns the first LBA of a command that has one, and else 0.
fn lba_of(entry: &SubmissionEntry) -> u64 {
    match NvmOpcode(entry.opcode) {
        NvmOpcode::Read
        | NvmOpcode::Write
        | NvmOpcode::WriteZeroes
        | NvmOpcode::Compare
        | NvmOpcode::Verify
        | NvmOpcode::Copy => entry.starting_lba(),
        _ => 0,
    }
}
