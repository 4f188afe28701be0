//! How a successor goes on from a journal.

use std::collections::BTreeSet;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;

use super::state::{self, Origin};
use crate::engine::restart::is_pair;
use crate::events::Events;
use crate::home::Home;
use crate::journal::{Done, LastAdmin, Stage, UsedSlot};
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
        let Some((last, state)) = journal.last_snapshot() else { return Ok(None) };
        let found = journal.recover();
        let different = state::take_over(self, &state, Origin::Journal)?;
        if self.shutdown == Shutdown::Flushing {
            // The predecessor's flush may not have ended.
            self.shutdown = Shutdown::Draining;
        }
        self.apply_phase();
        let found = self.free_orphans(found);
        self.engine.resume_queues(&found);
        self.absorb();
        self.finish_posting(&found, last);
        self.recovered = self.not_ended(found, last);
        Ok(Some(different))
    }

    /// Drops what a predecessor with the same journal left, since its client is gone.
    pub fn abandon(&mut self) {
        let Some(journal) = &mut self.engine.journal else { return };
        for found in journal.recover() {
            journal.end(found.slot_number);
        }
        self.checkpoint(None);
    }

    /// Frees the slots whose queue is gone, whose pair was not fetched, or which are copies.
    /// Returns the others, in the order in which their commands were fetched.
    fn free_orphans(&mut self, mut found: Vec<UsedSlot>) -> Vec<UsedSlot> {
        let may_post = self.may_post();
        found.retain(|one| {
            let there = may_post && self.engine.queues.submission(one.queue).is_some();
            let Some(journal) = &mut self.engine.journal else { return false };
            let same = there && journal.taken(one.queue).1 == one.epoch;
            if !same {
                journal.end(one.slot_number);
            }
            same
        });
        found.sort_by_key(|one| (one.queue, one.number));
        self.free_unfetched(found)
    }

    /// Frees the slot of a second half of a fused pair if there is none of the first half: the pair
    /// had not been fetched yet. Frees one of two slots of the same command: the predecessor was
    /// killed while it copied one to the other. Returns the other slots.
    fn free_unfetched(&mut self, found: Vec<UsedSlot>) -> Vec<UsedSlot> {
        let mut kept: Vec<UsedSlot> = Vec::with_capacity(found.len());
        for one in found {
            let has_first = kept.last().is_some_and(|first| is_pair(first, &one));
            let alone = one.stage == Stage::Paired && !has_first;
            let copied = kept.last().is_some_and(|other| is_same(other, &one));
            match &mut self.engine.journal {
                Some(journal) if alone || copied => journal.end(one.slot_number),
                _ => kept.push(one),
            }
        }
        kept
    }

    /// Takes steps 5 to 7 for commands at step 4 or later, in the order of their places.
    fn finish_posting(&mut self, found: &[UsedSlot], last: Option<LastAdmin>) {
        let ended = |one: &UsedSlot| match one.stage {
            Stage::Completing { place, status, result }
            | Stage::Event { place, status, result } => Some((Some(place), status, result)),
            Stage::Fetched => {
                let (status, result) = last.filter(|last| last.is(one))?.done.ended()?;
                Some((None, status, result))
            }
            Stage::Paired | Stage::Decided(_) => None,
        };
        let mut all: Vec<_> = found.iter().filter_map(|one| Some((one, ended(one)?))).collect();
        // A completion that has no place in its queue yet is posted after those that have one.
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
                self.engine.post(queue, one.entry.id.get(), one.slot_number, status, result);
            }
            if event {
                self.checkpoint(None);
            }
            self.engine.conclude(one.slot_number);
        }
    }

    /// Returns the commands that were fetched and have not ended. Frees the slot of a command whose
    /// effect is part of the state.
    fn not_ended(&mut self, mut found: Vec<UsedSlot>, last: Option<LastAdmin>) -> Vec<UsedSlot> {
        found.retain(|one| {
            let done = last.filter(|last| last.is(one)).map(|last| last.done);
            match (one.stage, done) {
                (Stage::Completing { .. } | Stage::Event { .. }, _) => false,
                (_, Some(Done::Ended(..))) => false,
                (_, Some(Done::Kept)) => {
                    self.engine.conclude(one.slot_number);
                    false
                }
                (_, None) => true,
            }
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
