//! The controller's use of its journal, and how a successor goes on from the journal.

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;
use slipway_ram::Memory;

use crate::cell::{Cell, ShadowPages};
use crate::controller::Controller;
use crate::journal::{Done, Journal, Side, Stage, Ticket, UsedSlot};
use crate::lifecycle::Shutdown;
use crate::serve::{Exclusive, lone_half};
use crate::state;

impl Controller {
    /// Goes on where a predecessor with the same journal, doorbell cells and configuration was
    /// killed. Returns `false` if there was no predecessor. Namespaces may have come, gone or
    /// changed their size since; the guest is told of that. To be called on a fresh controller,
    /// once nothing of the predecessor can reach the disks or the guest's memory any more, and the
    /// guest's memory is mapped. The next polls, or those of lanes, carry out commands in flight
    /// again.
    ///
    /// # Errors
    /// [`StateError`] if the journal is of another version or another configuration. The controller
    /// is then in its state after a reset.
    pub fn recover(&mut self) -> Result<bool, StateError> {
        let Some(journal) = &mut self.journal else { return Ok(false) };
        let Some((done, state)) = journal.last_snapshot() else { return Ok(false) };
        let found = journal.recover();
        let different = match state::take_over(self, &state, true) {
            Ok(different) => different,
            Err(error) => {
                slipway_pci::Function::reset(self);
                return Err(error);
            }
        };
        if self.shutdown == Shutdown::Flushing {
            // The predecessor's flush may not have ended.
            self.shutdown = Shutdown::Draining;
        }
        let found = self.known(found);
        self.resume_queues(&found);
        self.finish_posting(&found, done);
        let found = self.not_ended(found, done);
        match self.limits.lanes {
            1 => self.restart(&found),
            _ => {
                // Lanes, if any, are made before the next poll runs this job.
                self.recovered = Some(Recovered(found));
                self.mailbox().post(Self::go_on_recovered);
            }
        }
        // The predecessor may not have reported these changes, so they are reported after its own.
        different.into_iter().for_each(|nsid| self.namespace_changed(nsid));
        for queue in self.queues.completions_mut() {
            // The guest may not have been interrupted for these entries; one interrupt more does no
            // harm.
            queue.fresh = queue.fresh.max(1);
        }
        self.checkpoint(None);
        self.signal_all();
        self.update_pin();
        Ok(true)
    }

    /// Drops what a predecessor with the same journal left, since its client is gone.
    pub fn abandon(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        for found in journal.recover() {
            journal.end(found.ticket);
        }
        self.checkpoint(None);
    }

    /// Keeps slots of queues that exist, and frees the others.
    fn known(&mut self, mut found: Vec<UsedSlot>) -> Vec<UsedSlot> {
        let may_post = self.may_post();
        found.retain(|one| {
            let there = may_post && self.queues.submission(one.queue).is_some();
            let Some(journal) = &mut self.journal else { return false };
            let same = there && journal.taken(one.queue).1 == one.epoch;
            if !same {
                journal.end(one.ticket);
            }
            same
        });
        // Sorts the slots into the order in which their commands were fetched.
        found.sort_by_key(|one| (one.queue, one.number));
        self.without_unfetched(found)
    }

    /// Frees the slots of second halves without a first half, whose pairs were not fetched yet. Of
    /// two slots for one command, which was being copied, frees one.
    fn without_unfetched(&mut self, found: Vec<UsedSlot>) -> Vec<UsedSlot> {
        let mut kept: Vec<UsedSlot> = Vec::with_capacity(found.len());
        for one in found {
            let has_first = kept.last().is_some_and(|first| is_pair(first, &one));
            let alone = one.stage == Stage::Paired && !has_first;
            let copied = kept.last().is_some_and(|other| is_same(other, &one));
            match &mut self.journal {
                Some(journal) if alone || copied => journal.end(one.ticket),
                _ => kept.push(one),
            }
        }
        kept
    }

    /// Sets every queue's indexes from the journal's counts.
    fn resume_queues(&mut self, found: &[UsedSlot]) {
        let Some(journal) = &self.journal else { return };
        let mut lost = false;
        for queue in self.queues.completions_mut() {
            let at = (queue.id, Side::Head);
            lost |= resume_shadow(journal, self.shadow, at, &mut queue.doorbell, &self.memory);
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
            lost |= resume_shadow(journal, self.shadow, at, &mut queue.doorbell, &self.memory);
            queue.resume(&self.memory, taken, epoch);
        }
        if lost {
            self.fail();
        }
    }

    /// Takes steps 5 to 7 for commands at step 4 or later, in the order of their places.
    fn finish_posting(&mut self, found: &[UsedSlot], done: Option<((u32, u64), Done)>) {
        let ended = |one: &UsedSlot| match (one.stage, done) {
            (Stage::Completing { place, status, result }, _) => Some((Some(place), status, result)),
            (Stage::Event { place, status, result }, _) => Some((Some(place), status, result)),
            (Stage::Fetched, Some((command, Done::Ended(status, result))))
                if is_done(one, command) =>
            {
                Some((None, status, result))
            }
            (Stage::Fetched | Stage::Paired | Stage::Decided(_), _) => None,
        };
        let mut all: Vec<_> = found.iter().filter_map(|one| Some((one, ended(one)?))).collect();
        // Ends without a place come after those with a place.
        all.sort_by_key(|(_, (place, ..))| place.unwrap_or(u64::MAX));
        for (one, (place, status, result)) in all {
            let queue = one.queue;
            let posted = self.queues.pair(queue).map_or(0, |(_, completion)| completion.written);
            let event = matches!(one.stage, Stage::Event { .. });
            if event {
                self.events.was_ended(one.entry.id.get(), status, result);
            }
            self.ticket = one.ticket;
            if place.is_none_or(|place| place >= posted) {
                self.make_room(queue);
                self.post(queue, one.entry.id.get(), status, result);
            }
            if event {
                self.checkpoint(None);
            }
            self.conclude();
        }
    }

    /// Returns the commands that were fetched and have not ended. Frees the slot of a command whose
    /// effect is part of the state.
    fn not_ended(
        &mut self,
        mut found: Vec<UsedSlot>,
        done: Option<((u32, u64), Done)>,
    ) -> Vec<UsedSlot> {
        found.retain(|one| match (one.stage, done) {
            (Stage::Completing { .. } | Stage::Event { .. }, _) => false,
            (_, Some((command, Done::Ended(..)))) if is_done(one, command) => false,
            (_, Some((command, Done::Kept))) if is_done(one, command) => {
                self.ticket = one.ticket;
                self.conclude();
                false
            }
            _ => true,
        });
        found
    }

    /// Carries out again the commands that were fetched and have not ended, unless lanes have got
    /// them.
    pub(crate) fn go_on_recovered(&mut self) {
        if let Some(Recovered(found)) = self.recovered.take() {
            self.restart(&found);
        }
    }

    /// Carries out these commands again, which have not ended.
    pub(crate) fn restart(&mut self, found: &[UsedSlot]) {
        // Admin commands last: one that deletes a queue waits for the queue's commands.
        let (admin, io): (Vec<_>, Vec<_>) = found.iter().partition(|one| one.queue == 0);
        let mut io = io.into_iter().peekable();
        while let Some(one) = io.next() {
            match io.next_if(|next| is_pair(one, next)) {
                Some(second) => self.restart_pair(one, second),
                None => self.restart_one(one),
            }
        }
        admin.into_iter().for_each(|one| self.restart_one(one));
    }

    fn restart_one(&mut self, one: &UsedSlot) {
        if !self.take_up(one) {
            return;
        }
        match one.stage {
            // The comparison has held; nothing is fetched until the write is done.
            Stage::Decided(status) if status.is_success() => {
                self.exclusive = Some(Exclusive { queue: one.queue, runs: true });
                self.execute(one.queue, &one.entry);
            }
            Stage::Decided(status) => self.conclude_with(one.queue, &one.entry, status),
            _ if one.queue != 0 && one.entry.fuse() != 0 => {
                self.conclude_with(one.queue, &one.entry, lone_half(&one.entry));
            }
            _ => self.execute(one.queue, &one.entry),
        }
    }

    /// Carries out again a fused pair of whose end the guest was told nothing: the whole pair, or
    /// only its write if the comparison has held.
    fn restart_pair(&mut self, first: &UsedSlot, second: &UsedSlot) {
        if !self.take_up(first) {
            return self.restart_one(second);
        }
        if second.stage == Stage::Decided(Status::SUCCESS) {
            self.conclude_with(first.queue, &first.entry, Status::SUCCESS);
            return self.restart_one(second);
        }
        self.take_up(second);
        self.ticket = first.ticket;
        self.exclusive = Some(Exclusive { queue: first.queue, runs: true });
        let tickets = [first.ticket, second.ticket];
        self.carry_out_pair(first.queue, [&first.entry, &second.entry], tickets, 0);
    }

    /// Makes a command that was fetched and has not ended the current command. Returns `false`, and
    /// frees the slot, if its queue no longer exists.
    fn take_up(&mut self, one: &UsedSlot) -> bool {
        self.ticket = one.ticket;
        let same = self.queues.submission(one.queue).is_some_and(|queue| queue.epoch == one.epoch);
        if !same || !self.may_post() {
            self.conclude();
            return false;
        }
        self.make_room(one.queue);
        if let Some((submission, completion)) = self.queues.pair(one.queue) {
            submission.in_flight += 1;
            completion.reserved += 1;
        }
        true
    }

    /// Makes room in the completion queue of submission queue `queue`, if it is full. A guest that
    /// changes its doorbells behind our back may have taken the room away: then only its own unread
    /// entries are overwritten.
    fn make_room(&mut self, queue: u16) {
        if let Some((_, completion)) = self.queues.pair(queue)
            && completion.free() == 0
        {
            completion.head = completion.tail;
        }
    }

    /// Notes that the current command was fetched.
    pub(crate) fn note_fetch(
        &mut self,
        queue: u16,
        entry: &slipway_nvme_spec::command::SubmissionEntry,
    ) {
        self.ticket = match (&mut self.journal, self.queues.submission(queue)) {
            // `taken` counts the command already.
            (Some(journal), Some(submission)) => {
                journal.begin(queue, submission.epoch, submission.taken - 1, entry)
            }
            _ => Ticket::NONE,
        };
    }

    /// Notes that the two commands of a fused pair were fetched, and returns their slots.
    pub(crate) fn note_pair(
        &mut self,
        queue: u16,
        pair: [&slipway_nvme_spec::command::SubmissionEntry; 2],
    ) -> [Ticket; 2] {
        match (&mut self.journal, self.queues.submission(queue)) {
            (Some(journal), Some(submission)) => {
                journal.begin_pair(queue, submission.epoch, submission.taken - 2, pair)
            }
            _ => [Ticket::NONE; 2],
        }
    }

    /// Records the decision on the second half of a fused pair: with success it is carried out,
    /// with another `status` it ends.
    pub(crate) fn decide(&self, ticket: Ticket, status: Status) {
        if let Some(journal) = &self.journal {
            journal.decide(ticket, status);
        }
    }

    /// Frees the current command's slot.
    pub(crate) fn conclude(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.end(std::mem::replace(&mut self.ticket, Ticket::NONE));
        }
    }

    /// Ends the outstanding Asynchronous Event Request `id`. The caller has made sure that the
    /// completion queue has a free slot. The current command stays the same.
    pub(crate) fn end_event_request(&mut self, id: u16, status: Status, result: u32) {
        let at_hand = self.ticket;
        if let (Some(journal), Some((submission, completion))) =
            (&mut self.journal, self.queues.pair(0))
        {
            let (epoch, place) = (submission.epoch, completion.written);
            self.ticket = journal.begin_event(epoch, id, place, (status, result));
        }
        self.post(0, id, status, result);
        if self.journal.is_some() {
            // The snapshot without the request is written before the slot is freed.
            self.checkpoint(None);
            self.conclude();
        }
        self.ticket = at_hand;
    }

    /// Writes a snapshot, if there is a journal; `done` says how the current command ended.
    pub(crate) fn checkpoint(&mut self, done: Option<Done>) {
        self.changed = false;
        // A lane changes nothing that belongs into a snapshot.
        if self.link.is_some() {
            return;
        }
        let Some(journal) = &self.journal else { return };
        let done = done.map(|done| (self.ticket, done));
        if !journal.snapshot(done, &state::running(self)) {
            // The last snapshot would be wrong after a restart. No successor is better than a wrong
            // one.
            debug_assert!(false, "a snapshot has room for every state");
            self.journal = None;
        }
    }

    /// Writes a snapshot if something has changed that the guest may see from now on.
    pub(crate) fn settle(&mut self) {
        if self.changed {
            self.checkpoint(None);
        }
    }
}

/// Commands that a predecessor had fetched and that have not ended.
pub(crate) struct Recovered(pub Vec<UsedSlot>);

/// Records the first change of a shadow doorbell: from now on a successor may trust its value.
#[cold]
pub(crate) fn note_moved(
    journal: &Option<Journal>,
    pages: Option<ShadowPages>,
    queue: u16,
    side: Side,
) {
    if let (Some(journal), Some(pages)) = (journal, pages) {
        journal.moved(queue, side, pages.number);
    }
}

/// Records that a queue's doorbell looks at `pages` from now on.
pub(crate) fn note_followed(
    journal: &Journal,
    pages: Option<ShadowPages>,
    (queue, side): (u16, Side),
    cell: &Cell,
) {
    if let (Some(pages), Some((seen, _))) = (pages, cell.shadow_seen()) {
        journal.follow(queue, side, pages.number, seen);
    }
}

/// Makes a queue's doorbell look at `pages`, in its recorded state if there is one. Returns whether
/// the pages cannot be reached.
fn resume_shadow(
    journal: &Journal,
    pages: Option<ShadowPages>,
    (queue, side): (u16, Side),
    cell: &mut Cell,
    memory: &Memory,
) -> bool {
    let Some(pages) = pages else { return false };
    if let Some((seen, moved)) = journal.followed(queue, side, pages.number) {
        cell.resume_shadow(pages, seen, moved);
        return false;
    }
    let lost = cell.follow(memory, pages).is_err();
    note_followed(journal, Some(pages), (queue, side), cell);
    lost
}

/// Returns whether these are slots of one command.
fn is_same(one: &UsedSlot, other: &UsedSlot) -> bool {
    let ended =
        |one: &UsedSlot| matches!(one.stage, Stage::Completing { .. } | Stage::Event { .. });
    (one.queue, one.number) == (other.queue, other.number) && !ended(one) && !ended(other)
}

fn is_done(one: &UsedSlot, (epoch, number): (u32, u64)) -> bool {
    one.queue == 0 && (one.epoch, one.number) == (epoch, number)
}

/// Returns whether `second` is the second half of a fused pair whose first half is `first`, which
/// has not ended.
fn is_pair(first: &UsedSlot, second: &UsedSlot) -> bool {
    first.stage == Stage::Fetched
        && matches!(second.stage, Stage::Paired | Stage::Decided(_))
        && (first.queue, first.number + 1) == (second.queue, second.number)
}

impl crate::events::Events {
    /// Removes request `id`, which ended before a restart. With a success it reported the event
    /// with dword 0 `dword`.
    fn was_ended(&mut self, id: u16, status: Status, dword: u32) {
        self.abort(id);
        if status.is_success() {
            // The event may have been raised after the last snapshot, and is then not waiting here.
            self.waiting.retain(|event| event.dword() != dword);
            self.mask(Event::from_dword(dword).kind);
        }
    }
}
