//! The work of a poll: fetch, execute, drive the disks, complete, interrupt.
//!
//! Over 500 lines: the steps of a poll in their order. To be cut into engines.

use std::slice::Iter;

use slipway_block::Completion;
use slipway_nvme_spec::command::{CompletionEntry, FUSE_FIRST, FUSE_SECOND, SubmissionEntry};
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::Span;

use crate::cell::BadDoorbell;
use crate::controller::Controller;
use crate::inflight::{Command, CommandKind};
use crate::io::{Outcome, disk_status};
use crate::journal::{Done, Side, Ticket};
use crate::namespace::Namespaces;
use crate::prp::write_runs;
use crate::recover::note_moved;

/// Most commands that one queue may start per poll, so that queues get fair turns, and so that the
/// host takes the completions of one burst while the next is carried out. It is large enough that a
/// poll's own cost per command is small. The host's Arbitration Burst (section 4.13) and the rest
/// of the turn may be less.
const BURST: u32 = 16;
/// Most bytes that I/O commands in flight may read or change, which bounds bounce buffers.
const MOST_BYTES: u64 = 96 << 20;

/// The subject of an error, for the Error Information log.
#[derive(Clone, Copy)]
struct Subject {
    nsid: u32,
    lba: u64,
}

/// A fused pair on a controller with a journal. No other command of an I/O queue may be in flight
/// beside it.
#[derive(Clone, Copy)]
pub(crate) struct Exclusive {
    /// The pair's submission queue.
    pub queue: u16,
    /// `true` if the pair was fetched; `false` while it waits for all else to end.
    pub runs: bool,
}

impl Controller {
    /// Looks at each submission queue once, until the turn is used up. Begins where the last turn
    /// ended, or else with the next queue. Returns whether a command was started.
    pub(crate) fn fetch_all(&mut self) -> bool {
        let mut busy = self.observe_completion_doorbells();
        let bound = self.queues.submission_bound();
        if bound == 0 {
            return busy;
        }
        if self.behind {
            return busy | self.fetch(0);
        }
        self.commands_left = self.quota.commands;
        let mut first = if self.turn + 1 < bound { self.turn + 1 } else { 0 };
        if self.limiter.is_on() {
            let held = self.limiter.begin(self.clock.now());
            first = held.filter(|queue| *queue < bound).unwrap_or(first);
        }
        if let Some(exclusive) = self.exclusive {
            busy |= self.fetch_exclusive(exclusive);
            if self.exclusive.is_some() || self.commands_left == 0 || !self.is_running() {
                return busy;
            }
        }
        self.turn = first;
        for step in 0..bound {
            let at = first + step;
            let at = if at < bound { at } else { at - bound };
            busy |= self.fetch(at);
            // Nothing is fetched beside a fused pair, or before a pair that waits for all else to
            // end.
            if self.commands_left == 0 || self.exclusive.is_some() {
                self.turn = at;
                break;
            }
            if !self.is_running() {
                break;
            }
        }
        busy
    }

    /// Fetches from the admin queue and, if no I/O command is in flight, the fused pair that waited
    /// in its queue. After a pair has run, every queue has its turn.
    #[cold]
    fn fetch_exclusive(&mut self, Exclusive { queue, runs }: Exclusive) -> bool {
        let busy = self.fetch(0);
        if !self.inflight.is_empty() || !self.is_running() {
            return busy;
        }
        self.exclusive = None;
        busy | (!runs && self.fetch(queue))
    }

    fn observe_completion_doorbells(&mut self) -> bool {
        let mut bad = None;
        for queue in self.queues.completions_mut() {
            let still = queue.doorbell.is_still();
            bad = queue.observe(&self.memory).err().or(bad);
            if still && !queue.doorbell.is_still() {
                note_moved(&self.journal, self.shadow, queue.id, Side::Head);
            }
        }
        let wrong = bad.is_some();
        if let Some(bad) = bad {
            self.bad_doorbell(bad);
        }
        wrong
    }

    /// Looks at queue `id` and starts waiting commands of it. Returns whether there was anything.
    #[inline]
    fn fetch(&mut self, id: u16) -> bool {
        let Some(submission) = self.queues.submission(id) else { return false };
        let before = submission.tail;
        let still = submission.doorbell.is_still();
        let observed = submission.observe(&self.memory);
        if still && !submission.doorbell.is_still() {
            note_moved(&self.journal, self.shadow, id, Side::Tail);
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.observed(submission, before);
        }
        let waits = submission.waiting() > 0;
        let wrong = observed.is_err();
        if let Err(bad) = observed {
            self.bad_doorbell(bad);
        }
        // An order for a lane comes before the commands that the guest rang for after it was told.
        if waits && self.has_orders() {
            return true;
        }
        wrong | (waits && self.fetch_waiting(id))
    }

    /// Starts waiting commands of queue `id`: at most a burst, and at most as many as have a place
    /// in the completion queue. Returns whether there were any.
    fn fetch_waiting(&mut self, id: u16) -> bool {
        let room = self.room(id);
        let Some((submission, completion)) = self.queues.pair(id) else { return false };
        let burst = self.features.burst().map_or(BURST, |burst| burst.min(BURST));
        let limited = id != 0 && self.limiter.is_on();
        let most = match submission.deleting {
            Some(_) => 0,
            // The cost of a command is known only when the command has been fetched.
            None if limited && self.limiter.is_open() => 1,
            None if limited => 0,
            None if id != 0 => burst.min(self.commands_left),
            None => burst,
        };
        if limited && most == 0 {
            self.limiter.hold(id);
        }
        let most = most.min(room).min(completion.free());
        let mut entries = std::mem::take(&mut self.entries);
        let fetched = match most.min(submission.waiting()) {
            0 => {
                entries.clear();
                Ok(())
            }
            most => {
                let room = room.min(completion.free());
                // `false` if there is never room for the two commands of a fused pair.
                let pairs = completion.size > 2 && self.limits.in_flight > 1;
                let fetched = submission.fetch(&self.memory, most, &mut entries);
                fetched.and_then(|()| match pairs {
                    true => submission.keep_pairs(&self.memory, room, &mut entries),
                    false => Ok(()),
                })
            }
        };
        let alone = self.inflight.is_empty();
        if self.journal.is_some() && id != 0 && submission.part_pairs(alone, &mut entries) {
            let runs = alone && entries.first().is_some_and(|entry| entry.fuse() == FUSE_FIRST);
            self.exclusive = Some(Exclusive { queue: id, runs });
        }
        completion.reserved += if fetched.is_ok() { entries.len() as u32 } else { 0 };
        if fetched.is_err() {
            self.fail();
            entries.clear();
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.fetched();
        }
        if limited {
            entries
                .iter()
                .for_each(|entry| self.limiter.start(transferred(&self.namespaces, entry)));
        }
        let mut rest = entries.iter();
        while let Some(entry) = rest.next() {
            if let Some(next) = rest.as_slice().first()
                && id != 0
            {
                self.expect(next);
            }
            match entry.fuse() {
                0 => self.start(id, entry),
                _ => self.start_fused(id, entry, &mut rest),
            }
        }
        let busy = !entries.is_empty();
        if id != 0 {
            self.commands_left = self.commands_left.saturating_sub(entries.len() as u32);
        }
        self.entries = entries;
        busy
    }

    /// Returns how many more commands queue `id` may start. Each command could move as much as a
    /// transfer may. The admin queue moves little, and must not wait for data.
    fn room(&self, id: u16) -> u32 {
        let requests = self.limits.in_flight.saturating_sub(self.inflight.requests());
        if id == 0 {
            return requests;
        }
        let bytes = MOST_BYTES.saturating_sub(self.inflight.bytes());
        // The transfer size is a power of two.
        let transfers = bytes >> self.limits.transfer.trailing_zeros();
        requests.min(u32::try_from(transfers).unwrap_or(u32::MAX))
    }

    /// Starts a fused pair, whose second command directly follows the first (section 4.11).
    fn start_fused(
        &mut self,
        queue: u16,
        first: &SubmissionEntry,
        rest: &mut Iter<'_, SubmissionEntry>,
    ) {
        let second = rest.as_slice().first().filter(|second| second.fuse() == FUSE_SECOND);
        match (first.fuse(), second) {
            // No admin command may be fused: it ends with Invalid Field.
            _ if queue == 0 => self.start(queue, first),
            (FUSE_FIRST, Some(second)) => {
                rest.next();
                self.start_pair(queue, [first, second]);
            }
            _ => self.start_with(queue, first, |_| lone_half(first).into()),
        }
    }

    fn start_pair(&mut self, queue: u16, pair: [&SubmissionEntry; 2]) {
        if !self.is_running() {
            return;
        }
        let mut head = 0;
        if let Some(submission) = self.queues.submission(queue) {
            head = submission.head;
            submission.advance();
            submission.advance();
        }
        let tickets = self.note_pair(queue, pair);
        self.carry_out_pair(queue, pair, tickets, head);
    }

    /// Carries out a fused pair that was fetched. `head` is the index of its first entry.
    pub(crate) fn carry_out_pair(
        &mut self,
        queue: u16,
        [first, second]: [&SubmissionEntry; 2],
        tickets: [Ticket; 2],
        head: u32,
    ) {
        let [mut status, mut other] = [None; 2];
        self.ticket = tickets[0];
        self.carry_out(queue, first, head, |controller| {
            [status, other] = controller.compare_and_write(queue, first, (second, tickets[1]));
            if let Some(ended) = other {
                controller.decide(tickets[1], ended);
            }
            // Pairs wait for their turn, and are not traced.
            controller.inflight.latest = None;
            status.map_or(Outcome::Pending, Outcome::from)
        });
        self.ticket = tickets[1];
        self.carry_out(queue, second, head, |_| other.map_or(Outcome::Pending, Outcome::from));
    }

    fn start(&mut self, queue: u16, entry: &SubmissionEntry) {
        self.start_with(queue, entry, |controller| match queue {
            0 => controller.execute_admin(entry),
            _ => controller.execute_io(queue, entry),
        });
    }

    #[inline]
    fn start_with(
        &mut self,
        queue: u16,
        entry: &SubmissionEntry,
        execute: impl FnOnce(&mut Self) -> Outcome,
    ) {
        // A fatal error, or an earlier command of the batch, may have stopped the controller.
        if !self.is_running() {
            return;
        }
        let mut head = 0;
        if let Some(submission) = self.queues.submission(queue) {
            head = submission.head;
            submission.advance();
        }
        self.note_fetch(queue, entry);
        self.carry_out(queue, entry, head, execute);
    }

    /// Carries out again the current command, which a predecessor had fetched.
    pub(crate) fn execute(&mut self, queue: u16, entry: &SubmissionEntry) {
        self.carry_out(queue, entry, 0, |controller| match queue {
            0 => controller.execute_admin(entry),
            _ => controller.execute_io(queue, entry),
        });
    }

    /// Ends the current command, which a predecessor had fetched.
    pub(crate) fn conclude_with(&mut self, queue: u16, entry: &SubmissionEntry, status: Status) {
        self.carry_out(queue, entry, 0, |_| status.into());
    }

    #[inline]
    fn carry_out(
        &mut self,
        queue: u16,
        entry: &SubmissionEntry,
        head: u32,
        execute: impl FnOnce(&mut Self) -> Outcome,
    ) {
        let outcome = match queue > 0 && self.tracer.is_some() {
            true => self.execute_traced(queue, entry, head, execute),
            false => execute(self),
        };
        if let Outcome::Done(status, result) = outcome {
            let subject = Subject { nsid: entry.nsid.get(), lba: lba_of(queue, entry) };
            self.complete(queue, entry.id.get(), status, result, subject);
        }
    }

    #[cold]
    fn execute_traced(
        &mut self,
        queue: u16,
        entry: &SubmissionEntry,
        head: u32,
        execute: impl FnOnce(&mut Self) -> Outcome,
    ) -> Outcome {
        self.inflight.latest = None;
        let outcome = execute(self);
        if let Some(tracer) = &mut self.tracer {
            tracer.started(queue, head, entry.opcode, self.inflight.latest);
        }
        outcome
    }

    /// Lets every disk work, within the rest of the turn's bytes for disks that copy, and ends
    /// requests. Returns whether a request has ended, or more work waits.
    pub(crate) fn drive_disks(&mut self) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        let mut left = std::mem::take(&mut self.bytes_left);
        for namespace in self.namespaces.driven() {
            match &mut self.tracer {
                None => namespace.drive(&mut left, &mut completions),
                Some(tracer) => tracer.drive(namespace, &mut left, &mut completions),
            }
        }
        self.behind = left == 0 && self.namespaces.driven().any(|one| one.has_waiting());
        let busy = self.behind || !completions.is_empty();
        for completion in completions.drain(..) {
            self.end_request(completion);
        }
        self.completions = completions;
        // After the ends of requests, since a command's next step may follow from one.
        if self.namespaces.is_changing() {
            self.settle_namespaces();
        }
        busy
    }

    pub(crate) fn end_request(&mut self, completion: Completion) {
        self.recycle(completion.spans);
        let Some(kind) = self.inflight.kind(completion.tag) else { return };
        let status = disk_status(completion.result, kind);
        if let Some(command) = self.inflight.end_part(completion.tag, status) {
            if let Some(tracer) = &mut self.tracer {
                tracer.completed(completion.tag, command.queue.is_some());
            }
            self.finish(command);
        }
    }

    fn finish(&mut self, mut command: Command) {
        if let Some(work) = command.work.take() {
            return self.after_step(command, work);
        }
        self.end(command, 0);
    }

    /// Ends a command whose work is done; `result` is dword 0 of its completion.
    pub(crate) fn end(&mut self, mut command: Command, result: u32) {
        self.ticket = command.ticket;
        let Some(queue) = command.queue else { return self.conclude() };
        if command.status.is_success() && command.kind == CommandKind::Read {
            command.status = self.copy_back(&command);
        }
        self.health.count(command.kind, command.status, command.bytes);
        let subject = Subject { nsid: command.nsid, lba: command.lba };
        self.complete(queue, command.id, command.status, result, subject);
    }

    /// Copies the data of a Read of message-only memory there from its bounce buffer.
    fn copy_back(&self, command: &Command) -> Status {
        let Some(bounce) = &command.bounce else { return Status::SUCCESS };
        let mut data = vec![0; bounce.buffer.len()];
        let copied = bounce.buffer.read(0, &mut data).map_err(|_| Status::INTERNAL_ERROR);
        let written = copied.and_then(|()| write_runs(&self.memory, &bounce.runs, &data));
        written.err().unwrap_or(Status::SUCCESS)
    }

    /// Ends the current command, which has a slot of the completion queue reserved.
    fn complete(&mut self, queue: u16, id: u16, status: Status, result: u32, subject: Subject) {
        let status = self.log_error(queue, id, status, subject);
        if queue == 0 {
            self.checkpoint(Some(Done::Ended(status, result)));
        }
        let Some((submission, completion)) = self.queues.pair(queue) else { return };
        submission.in_flight -= 1;
        completion.reserved -= 1;
        let drained = submission.in_flight == 0 && submission.deleting.is_some();
        self.post(queue, id, status, result);
        self.conclude();
        if drained {
            self.finish_deletion(queue);
        }
    }

    /// Writes a completion queue entry for the current command, of queue `queue`. The completion
    /// queue must have a free slot.
    pub(crate) fn post(&mut self, queue: u16, id: u16, status: Status, result: u32) {
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
            journal.completing(self.ticket, completion.written, status, result);
        }
        let posted = completion.post(&self.memory, entry);
        if let Some(journal) = &self.journal {
            journal.set_posted(completion.id, completion.written);
        }
        if posted.is_err() {
            self.fail();
        }
    }

    /// Removes a submission queue whose last command has ended, and ends the command that deletes
    /// it (section 5.6).
    pub(crate) fn finish_deletion(&mut self, queue: u16) {
        let Some(removed) = self.queues.remove_submission(queue) else { return };
        if let Some(tracer) = &mut self.tracer {
            tracer.closed(queue);
        }
        if self.tell_home(move |home| home.far_submission_gone(queue)).is_ok() {
            return;
        }
        if let Some((id, ticket)) = removed.deleting {
            self.ticket = ticket;
            self.end_admin(id, Status::SUCCESS, 0);
        }
    }

    /// Ends an admin command that waited, which is the current command.
    pub(crate) fn end_admin(&mut self, id: u16, status: Status, result: u32) {
        self.complete(0, id, status, result, Subject { nsid: 0, lba: 0 });
    }

    /// Reports events for which there are requests, as far as the admin completion queue has free
    /// slots. Outstanding requests have no slot reserved, since they may wait for ever.
    pub(crate) fn deliver_events(&mut self) -> bool {
        let mut busy = false;
        while self.events.is_ready() && self.admin_slot_free() {
            let Some((id, event)) = self.events.take() else { break };
            self.end_event_request(id, Status::SUCCESS, event.dword());
            busy = true;
        }
        busy
    }

    fn admin_slot_free(&mut self) -> bool {
        self.queues.completion(0).is_some_and(|queue| queue.free() > 0)
    }

    /// Handles a doorbell error: an event for an invalid value, a fatal error for unreachable
    /// memory.
    pub(crate) fn bad_doorbell(&mut self, bad: BadDoorbell) {
        match bad {
            BadDoorbell::Value => self.invalid_doorbell(Event::INVALID_DOORBELL_VALUE),
            BadDoorbell::Memory => self.fail(),
        }
    }

    /// Reports a write of an invalid doorbell or value: an event and a log entry, nothing else
    /// (section 5.2.1).
    pub(crate) fn invalid_doorbell(&mut self, event: Event) {
        let lane = self.report(|outbox| {
            if !outbox.events.contains(&event) {
                outbox.events.push(event);
            }
        });
        if lane || self.events.waiting.contains(&event) {
            return;
        }
        self.events.raise(event);
        self.health.log(ErrorEntry::new(0, ErrorEntry::NO_COMMAND, Status::SUCCESS));
    }

    /// Logs a failed command in the Error Information log, and sets "more" in its status. Success
    /// and Abort Requested are not logged.
    fn log_error(&mut self, queue: u16, id: u16, status: Status, subject: Subject) -> Status {
        if status.is_success() || status.code() == Status::ABORT_REQUESTED.code() {
            return status;
        }
        let status = status.more();
        let mut error = ErrorEntry::new(queue, id, status);
        error.lba.set(subject.lba);
        error.nsid.set(subject.nsid);
        if !self.report(|outbox| outbox.errors.push_back(error)) {
            self.health.log(error);
        }
        status
    }

    /// Keeps a vector of spans for the next command, whose data is most likely in the same mapping.
    /// The spans stay until then, or until the controller is quiesced. Bounce buffers are dropped.
    pub(crate) fn recycle(&mut self, mut spans: Vec<Span>) {
        if spans.iter().any(Span::is_heap) {
            spans.clear();
        }
        let most = self.limits.in_flight as usize;
        if spans.capacity() > 0 && self.spare_spans.len() < most {
            self.spare_spans.push(spans);
        }
    }
}

/// Returns how many bytes an I/O command reads, writes or compares. The bytes of a Copy are counted
/// later.
fn transferred(namespaces: &Namespaces, entry: &SubmissionEntry) -> u64 {
    match NvmOpcode(entry.opcode) {
        NvmOpcode::Read | NvmOpcode::Write | NvmOpcode::Compare | NvmOpcode::Verify => {
            let namespace = namespaces.get(entry.nsid.get());
            let block_size = namespace.map_or(0, |namespace| namespace.geometry.block_size);
            u64::from(entry.block_count()) * u64::from(block_size)
        }
        _ => 0,
    }
}

/// Returns the status of a command that claims to be half of a fused pair and is not.
pub(crate) fn lone_half(entry: &SubmissionEntry) -> Status {
    match entry.fuse() {
        FUSE_FIRST | FUSE_SECOND => Status::FUSED_MISSING.dnr(),
        _ => Status::INVALID_FIELD.dnr(),
    }
}

/// Returns the first LBA of a command that has one, and else 0.
fn lba_of(queue: u16, entry: &SubmissionEntry) -> u64 {
    match NvmOpcode(entry.opcode) {
        NvmOpcode::Read
        | NvmOpcode::Write
        | NvmOpcode::WriteZeroes
        | NvmOpcode::Compare
        | NvmOpcode::Verify
        | NvmOpcode::Copy
            if queue != 0 =>
        {
            entry.starting_lba()
        }
        _ => 0,
    }
}
