//! How a successor goes on from a journal.

use std::collections::BTreeSet;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;

use super::state;
use crate::engine::restart::is_pair;
use crate::events::Events;
use crate::home::Home;
use crate::journal::{Done, Stage, UsedSlot};
use crate::permit::Permit;
use crate::phase::Shutdown;

impl Home {
    /// Goes on where a predecessor with the same journal was killed. Returns `None` if there was no
    /// predecessor, and else the namespaces that have come, gone or changed their size since.
    /// `recovered` then has the commands to carry out again.
    ///
    /// # Errors
    /// [`StateError`] if the journal is of another version or another configuration; the caller
    /// resets the controller.
    pub fn recover(&mut self) -> Result<Option<BTreeSet<u32>>, StateError> {
        let Some(journal) = &mut self.engine.journal else { return Ok(None) };
        let Some((done, state)) = journal.last_snapshot() else { return Ok(None) };
        let found = journal.recover();
        let different = state::take_over(self, &state, true)?;
        if self.shutdown == Shutdown::Flushing {
            // The predecessor's flush may not have ended.
            self.shutdown = Shutdown::Draining;
        }
        self.settle_phase();
        let found = self.known(found);
        self.engine.resume_queues(&found);
        self.absorb();
        self.finish_posting(&found, done);
        self.recovered = self.not_ended(found, done);
        Ok(Some(different))
    }

    /// Drops what a predecessor with the same journal left, since its client is gone.
    pub fn abandon(&mut self) {
        let Some(journal) = &mut self.engine.journal else { return };
        for found in journal.recover() {
            journal.end(found.ticket);
        }
        self.checkpoint(None);
    }

    /// Keeps slots of queues that exist, and frees the others.
    fn known(&mut self, mut found: Vec<UsedSlot>) -> Vec<UsedSlot> {
        let may_post = self.may_post();
        found.retain(|one| {
            let there = may_post && self.engine.queues.submission(one.queue).is_some();
            let Some(journal) = &mut self.engine.journal else { return false };
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
            match &mut self.engine.journal {
                Some(journal) if alone || copied => journal.end(one.ticket),
                _ => kept.push(one),
            }
        }
        kept
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
            let posted =
                self.engine.queues.pair(queue).map_or(0, |(_, completion)| completion.written);
            let event = matches!(one.stage, Stage::Event { .. });
            if event {
                self.events.was_ended(one.entry.id.get(), status, result);
            }
            if place.is_none_or(|place| place >= posted) {
                self.engine.make_room(queue);
                self.engine.post(queue, one.entry.id.get(), one.ticket, status, result);
            }
            if event {
                self.checkpoint(None);
            }
            self.engine.conclude(one.ticket);
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
                self.engine.conclude(one.ticket);
                false
            }
            _ => true,
        });
        found
    }

    /// Carries out again the commands that were fetched and have not ended, unless lanes have got
    /// them. Returns the admin commands among them.
    pub fn restart(&mut self) -> Vec<(SubmissionEntry, Permit)> {
        let found = std::mem::take(&mut self.recovered);
        self.engine.restart(&found)
    }
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

impl Events {
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
