//! The start of commands: which queue is next, how much of it is fetched, and what holds it back.
//!
//! [`IoEngine::fetch_all`] goes round the I/O submission queues within the bounds of a turn. The
//! entries of one queue are copied (`copy_in`), the journal notes them (`take`), and each is
//! carried out ([`IoEngine::execute`]). A fused pair waits until no other command is in flight
//! ([`Exclusive`]).

use std::slice::Iter;

use slipway_nvme_spec::command::{FUSE_FIRST, FUSE_SECOND, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_ram::Fault;

use super::IoEngine;
use super::inflight::Slot;
use crate::journal::SlotNumber;
use crate::namespace::Namespaces;
use crate::permit::{Owner, Permit};
use crate::sgl::MOST_DESCRIPTORS;
use crate::turn::commands_of;

/// Most commands that one queue may start per poll, so that queues get fair turns, and so that the
/// host takes the completions of one burst while the next is carried out. It is large enough that a
/// poll's own cost per command is small. The host's Arbitration Burst (section 4.13) and the rest
/// of the turn may be less.
const BURST: u32 = 16;
/// Most bytes that I/O commands in flight may read or change, which bounds bounce buffers.
const MOST_BYTES: u64 = 96 << 20;
/// Most pieces of memory that the data of I/O commands in flight may lie in: those of 96 commands
/// with the longest lists, some 16 MiB of spans. Data of [`MOST_BYTES`] in pages of 4 KiB has a
/// sixteenth of it.
const MOST_PIECES: u64 = 96 * MOST_DESCRIPTORS as u64;

/// A fused pair on a controller with a journal. No other command of an I/O queue may be in flight
/// beside it.
#[derive(Clone, Copy)]
pub(crate) struct Exclusive {
    /// The pair's submission queue.
    pub queue: u16,
    /// `true` if the pair was fetched; `false` while it waits for all else to end.
    pub runs: bool,
}

/// The state of a command after it was started.
pub(super) enum Outcome {
    /// The command ended with this status.
    Ended(Status),
    /// The command ends later.
    Begun(Slot),
}

impl From<Result<Outcome, Status>> for Outcome {
    fn from(started: Result<Self, Status>) -> Self {
        started.unwrap_or_else(Self::Ended)
    }
}

impl IoEngine {
    /// Looks at each I/O submission queue once, until the turn is used up. Begins where the last
    /// turn ended, or else with the next queue. Returns whether a command was started.
    ///
    /// Nothing more is fetched once `is_called` returns `true`: the caller has something to do that
    /// comes before the commands that the guest rings for from now on.
    pub fn fetch_all(&mut self, is_called: impl Fn() -> bool) -> bool {
        let bound = self.queues.submission_bound();
        if self.behind || bound <= 1 {
            return false;
        }
        self.commands_left = self.quota.commands;
        let mut first = self.turn % (bound - 1) + 1;
        if self.limiter.is_on() {
            let held = self.limiter.begin(self.clock.now());
            first = held.filter(|queue| *queue < bound).unwrap_or(first);
        }
        let mut busy = false;
        if let Some(exclusive) = self.exclusive {
            busy |= self.fetch_exclusive(exclusive, &is_called);
            if self.exclusive.is_some() || self.commands_left == 0 || !self.is_running() {
                return busy;
            }
        }
        self.turn = first;
        for step in 0..bound - 1 {
            let at = first + step;
            let at = if at < bound { at } else { at - bound + 1 };
            busy |= self.fetch(at, &is_called);
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

    /// Fetches the fused pair that waited in its queue, if no command is in flight. After a pair
    /// has run, every queue has its turn.
    #[cold]
    fn fetch_exclusive(&mut self, pair: Exclusive, is_called: &impl Fn() -> bool) -> bool {
        if !self.inflight.is_empty() {
            return false;
        }
        self.exclusive = None;
        !pair.runs && self.fetch(pair.queue, is_called)
    }

    /// Fetches the next admin command, if one waits that can be completed.
    pub fn fetch_admin(&mut self) -> Option<(SubmissionEntry, Permit)> {
        self.look_at_tail(0)?;
        let room = self.room(0);
        let (submission, completion) = self.queues.pair(0)?;
        if room.min(completion.free()).min(submission.waiting()) == 0 {
            return None;
        }
        let mut entries = std::mem::take(&mut self.entries);
        let fetched = submission.fetch(&self.memory, 1, &mut entries);
        let entry = entries.first().copied();
        self.entries = entries;
        if fetched.is_err() {
            self.fail();
            return None;
        }
        completion.reserved += 1;
        let entry = entry?;
        let (_, permit) = self.take(0, &entry)?;
        Some((entry, permit))
    }

    /// Looks at queue `id` and starts waiting commands of it. Returns whether there was anything.
    #[inline]
    fn fetch(&mut self, id: u16, is_called: &impl Fn() -> bool) -> bool {
        let Some(looked) = self.look_at_tail(id) else { return false };
        if looked.has_entries && is_called() {
            return true;
        }
        looked.was_invalid | (looked.has_entries && self.fetch_waiting(id))
    }

    /// Starts waiting commands of queue `id`. Returns whether there were any.
    fn fetch_waiting(&mut self, id: u16) -> bool {
        let limited = self.limiter.is_on();
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        if self.copy_in(id, limited, &mut entries).is_err() {
            self.fail();
            entries.clear();
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.fetched();
        }
        if limited {
            for entry in &entries {
                self.limiter.start(transferred(&self.namespaces, entry));
            }
        }
        self.start_all(id, &entries);
        let busy = !entries.is_empty();
        let walked = commands_of(self.walker.take_walked());
        let started = (entries.len() as u32).saturating_add(walked);
        self.commands_left = self.commands_left.saturating_sub(started);
        self.entries = entries;
        busy
    }

    /// Copies the next entries of queue `id` into `entries`, which is empty: at most a burst, and
    /// at most as many as have a place in the completion queue, which is reserved.
    #[inline]
    fn copy_in(
        &mut self,
        id: u16,
        limited: bool,
        entries: &mut Vec<SubmissionEntry>,
    ) -> Result<(), Fault> {
        let room = self.room(id);
        let Some((submission, completion)) = self.queues.pair(id) else { return Ok(()) };
        let burst = self.tuning.burst.map_or(BURST, |burst| burst.min(BURST));
        let most = match limited {
            _ if submission.deleting => 0,
            // The cost of a command is known only when the command has been fetched.
            true if self.limiter.is_open() => 1,
            true => 0,
            false => burst.min(self.commands_left),
        };
        if limited && most == 0 {
            self.limiter.hold(id);
        }
        let room = room.min(completion.free());
        let most = most.min(room).min(submission.waiting());
        if most == 0 {
            return Ok(());
        }
        submission.fetch(&self.memory, most, entries)?;
        // `false` if there is never room for the two commands of a fused pair.
        let pairs = completion.size > 2 && self.limits.in_flight > 1;
        if pairs {
            submission.keep_pairs(&self.memory, room, entries)?;
        }
        let alone = self.inflight.is_empty();
        if self.journal.is_some() && submission.part_pairs(alone, entries) {
            let runs = alone && entries.first().is_some_and(|entry| entry.fuse() == FUSE_FIRST);
            self.exclusive = Some(Exclusive { queue: id, runs });
        }
        completion.reserved += entries.len() as u32;
        Ok(())
    }

    /// Starts the fetched commands of queue `id`.
    #[inline]
    fn start_all(&mut self, id: u16, entries: &[SubmissionEntry]) {
        let mut rest = entries.iter();
        while let Some(entry) = rest.next() {
            if let Some(next) = rest.as_slice().first() {
                self.expect(next);
            }
            match entry.fuse() {
                0 => self.start(id, entry),
                _ => self.start_fused(id, entry, &mut rest),
            }
        }
    }

    /// Returns how many more commands queue `id` may start. Each command could move as much as a
    /// transfer may, in as many pieces as a list may have. The admin queue moves little, and must
    /// not wait for data.
    fn room(&self, id: u16) -> u32 {
        let requests = self.limits.in_flight.saturating_sub(self.inflight.requests());
        if id == 0 {
            return requests;
        }
        let bytes = MOST_BYTES.saturating_sub(self.inflight.bytes());
        // The transfer size is a power of two.
        let transfers = bytes >> self.limits.transfer.trailing_zeros();
        let pieces = MOST_PIECES.saturating_sub(self.inflight.pieces());
        let commands = transfers.min(pieces / u64::from(MOST_DESCRIPTORS));
        requests.min(u32::try_from(commands).unwrap_or(u32::MAX))
    }

    /// Takes the fetched entry at the head of `queue` off the ring. Returns the entry's index, and
    /// the command's permit. Returns `None` if the queue is gone.
    fn take(&mut self, queue: u16, entry: &SubmissionEntry) -> Option<(u32, Permit)> {
        let submission = self.queues.submission(queue)?;
        let head = submission.head;
        submission.advance();
        let slot_number = match &mut self.journal {
            // `taken` counts the command already.
            Some(journal) => journal.begin(queue, submission.epoch, submission.taken - 1, entry),
            None => SlotNumber::NONE,
        };
        Some((head, Permit { queue, id: entry.id.get(), slot_number }))
    }

    #[inline]
    fn start(&mut self, queue: u16, entry: &SubmissionEntry) {
        // A fatal error, or an earlier command of the batch, may have stopped the engine.
        if self.is_running()
            && let Some((head, permit)) = self.take(queue, entry)
        {
            self.execute(entry, permit, head);
        }
    }

    /// Carries out an I/O command. `head` is the index of its entry.
    #[inline]
    pub(super) fn execute(&mut self, entry: &SubmissionEntry, permit: Permit, head: u32) {
        let outcome = match self.tracer {
            Some(_) => self.execute_traced(permit.queue, entry, head),
            None => self.execute_io(entry),
        };
        match outcome {
            Outcome::Begun(slot) => self.inflight.own(slot, Owner::Guest(permit)),
            Outcome::Ended(status) => self.end_at_once(permit, entry, status),
        }
    }

    #[cold]
    fn execute_traced(&mut self, queue: u16, entry: &SubmissionEntry, head: u32) -> Outcome {
        let outcome = self.execute_io(entry);
        if let Some(tracer) = &mut self.tracer {
            let slot = match &outcome {
                Outcome::Begun(slot) => Some(slot.index()),
                Outcome::Ended(_) => None,
            };
            tracer.started(queue, head, entry.opcode, slot);
        }
        outcome
    }

    /// Starts a command that claims to be half of a fused pair, whose second command directly
    /// follows the first (section 4.11).
    fn start_fused(
        &mut self,
        queue: u16,
        first: &SubmissionEntry,
        rest: &mut Iter<'_, SubmissionEntry>,
    ) {
        if !self.is_running() {
            return;
        }
        let second = rest.as_slice().first().filter(|second| second.fuse() == FUSE_SECOND);
        match second {
            Some(second) if first.fuse() == FUSE_FIRST => {
                rest.next();
                self.start_pair(queue, [first, second]);
            }
            _ => {
                if let Some((_, permit)) = self.take(queue, first) {
                    self.end_at_once(permit, first, lone_half(first));
                }
            }
        }
    }

    fn start_pair(&mut self, queue: u16, pair: [&SubmissionEntry; 2]) {
        let Some(submission) = self.queues.submission(queue) else { return };
        submission.advance();
        submission.advance();
        let slot_numbers = match &mut self.journal {
            Some(journal) => {
                journal.begin_pair(queue, submission.epoch, submission.taken - 2, pair)
            }
            None => [SlotNumber::NONE; 2],
        };
        let permit =
            |at: usize| Permit { queue, id: pair[at].id.get(), slot_number: slot_numbers[at] };
        self.execute_pair(pair, [permit(0), permit(1)]);
    }

    /// Carries out a fused pair. Pairs wait for their turn, and are not traced.
    pub(super) fn execute_pair(
        &mut self,
        [first, second]: [&SubmissionEntry; 2],
        [permit, other]: [Permit; 2],
    ) {
        match self.compare_and_write(first, second) {
            Ok(slot) => self.inflight.own_pair(slot, permit, other),
            Err([status, of_second]) => {
                self.decide(other.slot_number, of_second);
                self.end_at_once(permit, first, status);
                self.end_at_once(other, second, of_second);
            }
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
