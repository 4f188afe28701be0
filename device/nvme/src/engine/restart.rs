//! Commands that a predecessor had fetched, and the places of its queues.

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::status::Status;

use super::IoEngine;
use super::doorbells::resume_shadow;
use super::fetch::{Exclusive, lone_half};
use crate::journal::{Side, Stage, UsedSlot};
use crate::permit::Permit;

impl IoEngine {
    /// Sets every queue's indexes from the journal's counts and from the slots in use.
    pub fn resume_queues(&mut self, found: &[UsedSlot]) {
        let Some(journal) = &self.journal else { return };
        let mut lost = false;
        for queue in self.queues.completions_mut() {
            let at = (queue.id, Side::Head);
            let resumed =
                resume_shadow(&self.journal, self.shadow, at, &mut queue.doorbell, &self.memory);
            lost |= resumed.is_err();
            queue.resume(&self.memory, journal.posted(queue.id));
        }
        for queue in self.queues.submissions_mut() {
            let (mut taken, epoch) = journal.taken(queue.id);
            let own = found.iter().filter(|one| one.queue == queue.id);
            let fetched = own.filter(|one| !matches!(one.stage, Stage::Event { .. }));
            // The last slot may have been filled without its command being counted.
            if let Some(last) = fetched.map(|one| one.number + 1).max()
                && last > taken
            {
                journal.set_taken(queue.id, last);
                taken = last;
            }
            let at = (queue.id, Side::Tail);
            let resumed =
                resume_shadow(&self.journal, self.shadow, at, &mut queue.doorbell, &self.memory);
            lost |= resumed.is_err();
            queue.resume(&self.memory, taken, epoch);
        }
        if lost {
            self.fail();
        }
    }

    /// Records queues in the journal that another controller has served so far. Nothing is in
    /// flight.
    pub fn record_queues(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        if let Some(pages) = &mut self.shadow {
            pages.number = journal.next_epoch();
        }
        for queue in self.queues.completions_mut() {
            journal.open_completion(queue.id);
            // As many as the indexes tell apart: those of two passes.
            let passes = u64::from(!queue.phase);
            queue.written = u64::from(queue.tail) + passes * u64::from(queue.size);
            journal.set_posted(queue.id, queue.written);
            journal.adopt_shadow((queue.id, Side::Head), self.shadow, &queue.doorbell);
        }
        for queue in self.queues.submissions_mut() {
            queue.epoch = journal.open_submission(queue.id);
            queue.taken = queue.head.into();
            journal.set_taken(queue.id, queue.taken);
            journal.adopt_shadow((queue.id, Side::Tail), self.shadow, &queue.doorbell);
        }
    }

    /// Carries out these commands again, which have not ended. Returns the admin commands among
    /// them, which come last: one that deletes a queue waits for the queue's commands.
    pub fn restart(&mut self, found: &[UsedSlot]) -> Vec<(SubmissionEntry, Permit)> {
        let (admin, io): (Vec<_>, Vec<_>) = found.iter().partition(|one| one.queue == 0);
        let mut io = io.into_iter().peekable();
        while let Some(one) = io.next() {
            match io.next_if(|next| is_pair(one, next)) {
                Some(second) => self.restart_pair(one, second),
                None => self.restart_one(one),
            }
        }
        let taken_up = admin.into_iter().filter_map(|one| Some((one.entry, self.take_up(one)?)));
        taken_up.collect()
    }

    fn restart_one(&mut self, one: &UsedSlot) {
        let Some(permit) = self.take_up(one) else { return };
        match one.stage {
            // The comparison has held; nothing is fetched until the write is done.
            Stage::Decided(status) if status.is_success() => {
                self.exclusive = Some(Exclusive { queue: one.queue, runs: true });
                self.execute(&one.entry, permit, 0);
            }
            Stage::Decided(status) => self.end_at_once(permit, &one.entry, status),
            _ if one.entry.fuse() != 0 => {
                self.end_at_once(permit, &one.entry, lone_half(&one.entry));
            }
            _ => self.execute(&one.entry, permit, 0),
        }
    }

    /// Carries out again a fused pair of whose end the guest was told nothing: the whole pair, or
    /// only its write if the comparison has held.
    fn restart_pair(&mut self, first: &UsedSlot, second: &UsedSlot) {
        let Some(permit) = self.take_up(first) else { return self.restart_one(second) };
        if second.stage == Stage::Decided(Status::SUCCESS) {
            self.end_at_once(permit, &first.entry, Status::SUCCESS);
            return self.restart_one(second);
        }
        let Some(other) = self.take_up(second) else { return self.abandon(permit) };
        self.exclusive = Some(Exclusive { queue: first.queue, runs: true });
        self.execute_pair([&first.entry, &second.entry], [permit, other]);
    }

    /// Returns the permit of a command that was fetched and has not ended. Returns `None`, and
    /// frees the slot, if its queue no longer exists.
    fn take_up(&mut self, one: &UsedSlot) -> Option<Permit> {
        let same = self.queues.submission(one.queue).is_some_and(|queue| queue.epoch == one.epoch);
        if !same || !self.may_post() {
            self.conclude(one.slot_number);
            return None;
        }
        self.make_room(one.queue);
        if let Some((submission, completion)) = self.queues.pair(one.queue) {
            submission.in_flight += 1;
            completion.reserved += 1;
        }
        Some(Permit { queue: one.queue, id: one.entry.id.get(), slot_number: one.slot_number })
    }

    /// Makes room in the completion queue of submission queue `queue`, if it is full. A guest that
    /// changes its doorbells behind our back may have taken the room away: then only its own unread
    /// entries are overwritten.
    pub fn make_room(&mut self, queue: u16) {
        if let Some((_, completion)) = self.queues.pair(queue)
            && completion.free() == 0
        {
            completion.head = completion.tail;
        }
    }
}

/// Returns whether `second` is the second half of a fused pair whose first half is `first`, which
/// has not ended.
pub(crate) fn is_pair(first: &UsedSlot, second: &UsedSlot) -> bool {
    first.stage == Stage::Fetched
        && matches!(second.stage, Stage::Paired | Stage::Decided(_))
        && (first.queue, first.number + 1) == (second.queue, second.number)
}
