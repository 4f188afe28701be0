//! State that outlives the process: snapshots, and the ends of admin commands, which belong into
//! them.
//!
//! | module | what it does |
//! |---|---|
//! | `state` | the saved state as JSON, and the way back |
//! | `recover` | going on from a predecessor's journal |

mod recover;
pub(crate) mod state;

use slipway_nvme_spec::status::Status;

use crate::engine::complete::logged;
use crate::home::Home;
use crate::journal::{Done, LAYOUT, SlotNumber};
use crate::permit::Permit;

/// The version of everything that a journal holds. A controller goes on only with a journal of this
/// version.
pub const JOURNAL_VERSION: u32 = LAYOUT << 16 | state::VERSION;

impl Home {
    /// Writes a snapshot, if there is a journal; `done` is the admin command whose effect it
    /// contains, and the command's end.
    pub fn checkpoint(&mut self, done: Option<(SlotNumber, Done)>) {
        self.changed = false;
        let Some(journal) = &self.engine.journal else { return };
        if !journal.snapshot(done, &state::running(self)) {
            // The last snapshot would be wrong after a restart. No successor is better than a wrong
            // one.
            debug_assert!(false, "a snapshot has room for every state");
            self.engine.journal = None;
        }
    }

    /// Writes a snapshot if something has changed that the guest may see from now on.
    pub fn save_changes(&mut self) {
        if self.changed {
            self.checkpoint(None);
        }
    }

    /// Ends an admin command to namespace `nsid`, or to none if that is 0.
    pub fn end_admin(&mut self, permit: Permit, status: Status, result: u32, nsid: u32) {
        let status = match logged(&permit, status) {
            None => status,
            Some(mut error) => {
                error.nsid.set(nsid);
                self.health.log(error);
                status.more()
            }
        };
        self.checkpoint(Some((permit.slot_number, Done::Ended(status, result))));
        self.engine.complete(permit, status, result);
    }

    /// Ends the outstanding Asynchronous Event Request `id`. The caller has made sure that the
    /// completion queue has a free slot.
    pub fn end_event_request(&mut self, id: u16, status: Status, result: u32) {
        let engine = &mut self.engine;
        let slot_number = match (&mut engine.journal, engine.queues.pair(0)) {
            (Some(journal), Some((submission, completion))) => {
                let (epoch, place) = (submission.epoch, completion.written);
                journal.begin_event(epoch, id, place, (status, result))
            }
            _ => SlotNumber::NONE,
        };
        engine.post(0, id, slot_number, status, result);
        if self.engine.journal.is_some() {
            // The snapshot without the request is written before the slot is freed.
            self.checkpoint(None);
            self.engine.conclude(slot_number);
        }
    }

    /// Takes the engine's report over. Returns whether there was anything new.
    pub fn absorb(&mut self) -> bool {
        if self.engine.report.is_empty() {
            return false;
        }
        let mut report = std::mem::take(&mut self.engine.report);
        self.note_errors(&mut report);
        report.gone.drain(..).for_each(|queue| self.submission_gone(queue));
        for (permit, status) in report.ended.drain(..) {
            self.end_admin(permit, status, 0, 0);
        }
        report.resized.drain(..).for_each(|nsid| self.namespace_changed(nsid));
        report.clear();
        if self.engine.report.is_empty() {
            // Its memory is used again.
            self.engine.report = report;
        }
        true
    }

    /// Notes that submission queue `queue` is gone, and ends the command that deleted it.
    pub fn submission_gone(&mut self, queue: u16) {
        self.fleet.submission_gone(queue);
        if let Some(permit) = self.deletions.remove(&queue) {
            self.end_admin(permit, Status::SUCCESS, 0, 0);
        }
    }
}
