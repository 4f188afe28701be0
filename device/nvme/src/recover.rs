//! The controller's use of its journal, and how a successor goes on from it.

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;
use slipway_ram::Memory;

use crate::cell::{Cell, ShadowPages};
use crate::controller::Controller;
use crate::journal::{Done, Found, Journal, Side, Stage, Ticket};
use crate::lifecycle::Shutdown;
use crate::serve::{Exclusive, lone_half};
use crate::state;

impl Controller {
    /// Goes on where a predecessor with the same journal, doorbell cells and configuration was
    /// killed; false when there was none. Namespaces may have come, gone or changed their size since:
    /// the guest is told of that. To be called on a fresh controller, when nothing of the
    /// predecessor can reach the disks or the guest's memory any more, and the guest's memory is
    /// mapped. Commands in flight are carried out again by the next polls, or by those of lanes.
    ///
    /// # Errors
    /// [`StateError`]: the journal is of another version or another configuration. The controller
    /// is then as after a reset.
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
            // Whether the flush has ended is not known.
            self.shutdown = Shutdown::Draining;
        }
        let found = self.known(found);
        self.resume_queues(&found);
        self.finish_posting(&found, done);
        let found = self.not_ended(found, done);
        match self.limits.lanes {
            1 => self.restart(&found),
            _ => {
                // Lanes are made before anything else is done, or there are none.
                self.recovered = Some(Recovered(found));
                self.mailbox().post(Self::go_on_recovered);
            }
        }
        // After what the predecessor reported: this it may not have.
        different.into_iter().for_each(|nsid| self.namespace_changed(nsid));
        for queue in self.queues.completions_mut() {
            // The guest may have been told or not; once more does no harm.
            queue.fresh = queue.fresh.max(1);
        }
        self.checkpoint(None);
        self.signal_all();
        self.update_pin();
        Ok(true)
    }

    /// Forgets what a predecessor with the same journal left: its client is gone.
    pub fn abandon(&mut self) {
        let Some(journal) = &mut self.journal else { return };
        for found in journal.recover() {
            journal.end(found.ticket);
        }
        self.checkpoint(None);
    }

    /// Slots of queues that are there; the others are freed.
    fn known(&mut self, mut found: Vec<Found>) -> Vec<Found> {
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
        // In the order in which they were fetched.
        found.sort_by_key(|one| (one.queue, one.number));
        self.without_unfetched(found)
    }

    /// Frees the slots of second halves whose first has none, of pairs that were being fetched; and one
    /// of two slots for a command, which was being copied.
    fn without_unfetched(&mut self, found: Vec<Found>) -> Vec<Found> {
        let mut kept: Vec<Found> = Vec::with_capacity(found.len());
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

    /// Sets every queue's indexes by what the journal counted.
    fn resume_queues(&mut self, found: &[Found]) {
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
            // A slot that was filled and not counted yet.
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

    /// Takes steps 5 to 7 for what was at step 4 or later, in the order of the entries' places.
    fn finish_posting(&mut self, found: &[Found], done: Option<((u32, u64), Done)>) {
        let ended = |one: &Found| match (one.stage, done) {
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
        // What has no place yet comes after what has.
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

    /// What was fetched and has not ended; the slot of a command is freed that is part of the state.
    fn not_ended(&mut self, mut found: Vec<Found>, done: Option<((u32, u64), Done)>) -> Vec<Found> {
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

    /// Carries out again what was fetched and has not ended, unless lanes did that already.
    pub(crate) fn go_on_recovered(&mut self) {
        if let Some(Recovered(found)) = self.recovered.take() {
            self.restart(&found);
        }
    }

    /// Carries out again these commands, which have not ended.
    pub(crate) fn restart(&mut self, found: &[Found]) {
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

    fn restart_one(&mut self, one: &Found) {
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

    /// Carries out again a fused pair of which nobody was told anything: the whole of it, or its write
    /// when the comparison has held.
    fn restart_pair(&mut self, first: &Found, second: &Found) {
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

    /// Makes a command the one at hand, fetched and not ended. False: its queue is no more.
    fn take_up(&mut self, one: &Found) -> bool {
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

    /// A guest that changes its doorbells behind our back may have left no room where there was
    /// some: then its own unread entries are overwritten, and nothing else.
    fn make_room(&mut self, queue: u16) {
        if let Some((_, completion)) = self.queues.pair(queue)
            && completion.free() == 0
        {
            completion.head = completion.tail;
        }
    }

    /// The command at hand was fetched.
    pub(crate) fn note_fetch(
        &mut self,
        queue: u16,
        entry: &slipway_nvme_spec::command::SubmissionEntry,
    ) {
        self.ticket = match (&mut self.journal, self.queues.submission(queue)) {
            // It counts itself already.
            (Some(journal), Some(submission)) => {
                journal.begin(queue, submission.epoch, submission.taken - 1, entry)
            }
            _ => Ticket::NONE,
        };
    }

    /// The two commands of a fused pair were fetched; gives their slots.
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

    /// The second half of a fused pair is to be carried out (success), or ends with `status`.
    pub(crate) fn decide(&self, ticket: Ticket, status: Status) {
        if let Some(journal) = &self.journal {
            journal.decide(ticket, status);
        }
    }

    /// The command at hand needs its slot no more.
    pub(crate) fn conclude(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.end(std::mem::replace(&mut self.ticket, Ticket::NONE));
        }
    }

    /// Ends the outstanding Asynchronous Event Request `id`, for which there is a free slot of the
    /// completion queue. The command at hand stays at hand.
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
            // Without the request, before its slot goes.
            self.checkpoint(None);
            self.conclude();
        }
        self.ticket = at_hand;
    }

    /// Writes a snapshot, if there is a journal; `done` says how the command at hand ended.
    pub(crate) fn checkpoint(&mut self, done: Option<Done>) {
        self.changed = false;
        // A lane changes nothing that belongs into a snapshot.
        if self.link.is_some() {
            return;
        }
        let Some(journal) = &self.journal else { return };
        let done = done.map(|done| (self.ticket, done));
        if !journal.snapshot(done, &state::running(self)) {
            // Nothing of before would be true after a restart: better no successor than a wrong one.
            debug_assert!(false, "a snapshot has room for every state");
            self.journal = None;
        }
    }

    /// Writes a snapshot when something changed that the guest may see from now on.
    pub(crate) fn settle(&mut self) {
        if self.changed {
            self.checkpoint(None);
        }
    }
}

/// Commands that a predecessor had fetched and not ended.
pub(crate) struct Recovered(pub Vec<Found>);

/// A shadow doorbell was seen to change for the first time: from here on a successor may believe it.
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

/// A queue's doorbell looks at `pages` from now on.
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

/// Has a queue's doorbell look at `pages` as it did before, or from now on. Whether they are gone.
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

/// Whether these are slots of one command.
fn is_same(one: &Found, other: &Found) -> bool {
    let ended = |one: &Found| matches!(one.stage, Stage::Completing { .. } | Stage::Event { .. });
    (one.queue, one.number) == (other.queue, other.number) && !ended(one) && !ended(other)
}

fn is_done(one: &Found, (epoch, number): (u32, u64)) -> bool {
    one.queue == 0 && (one.epoch, one.number) == (epoch, number)
}

/// Whether `second` is the second half of the fused pair that `first` begins, and `first` has not ended.
fn is_pair(first: &Found, second: &Found) -> bool {
    first.stage == Stage::Fetched
        && matches!(second.stage, Stage::Paired | Stage::Decided(_))
        && (first.queue, first.number + 1) == (second.queue, second.number)
}

impl crate::events::Events {
    /// Request `id` ended before a restart, by a report of the event that `dword` says if it was a
    /// success.
    fn was_ended(&mut self, id: u16, status: Status, dword: u32) {
        self.abort(id);
        if status.is_success() {
            // It may have been raised after the last snapshot, and then it is not waiting here.
            self.waiting.retain(|event| event.dword() != dword);
            self.mask(Event::from_dword(dword).kind);
        }
    }
}
