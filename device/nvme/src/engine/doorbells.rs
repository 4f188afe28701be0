//! Doorbells of an engine's queues: registers, and shadow pages in guest memory (sections 3.1 and
//! 5.7). `cell` has the protocol of one doorbell; here are the queues that look at theirs, and the
//! errors of doorbells.

use slipway_nvme_spec::event::Event;
use slipway_ram::{Fault, Memory};

use super::IoEngine;
use crate::cell::{BadDoorbell, Cell, ShadowPages};
use crate::journal::{Journal, Side};
use crate::queue::CompletionQueue;

/// The result of a look at a tail doorbell.
#[derive(Clone, Copy)]
pub(super) struct Looked {
    /// `true` if entries wait to be fetched.
    pub has_entries: bool,
    /// `true` if the doorbell was invalid, which has been reported.
    pub was_invalid: bool,
}

impl IoEngine {
    /// Writes doorbell register `index` (section 3.1, SQyTDBL and CQyHDBL), and lets its queue look
    /// at it: an invalid value is reported at once, even if a valid one follows before the poll.
    /// Returns whether this engine has such a queue.
    pub fn ring(&mut self, index: usize, value: u32) -> bool {
        let Ok(queue) = u16::try_from(index / 2) else { return false };
        let is_tail = index.is_multiple_of(2);
        let exists = match is_tail {
            true => self.queues.submission(queue).is_some(),
            false => self.queues.completion(queue).is_some(),
        };
        if !exists {
            return false;
        }
        self.doorbells.store(index, value);
        if is_tail {
            self.look_at_tail(queue);
        } else {
            self.look_at_head(queue);
        }
        true
    }

    /// Looks at the tail doorbell of queue `id`. Returns `None` if there is no such queue.
    #[inline]
    pub(super) fn look_at_tail(&mut self, id: u16) -> Option<Looked> {
        let submission = self.queues.submission(id)?;
        let before = submission.tail;
        let still = submission.doorbell.is_still();
        let observed = submission.observe(&self.memory);
        if still && !submission.doorbell.is_still() {
            note_moved(&self.journal, self.shadow, id, Side::Tail);
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.observed(submission, before);
        }
        let looked =
            Looked { has_entries: submission.waiting() > 0, was_invalid: observed.is_err() };
        if let Err(bad) = observed {
            self.bad_doorbell(bad);
        }
        Some(looked)
    }

    /// Looks at the head doorbell of completion queue `id`.
    fn look_at_head(&mut self, id: u16) {
        let Some(queue) = self.queues.completion(id) else { return };
        if let Err(bad) = observe_head(queue, &self.memory, &self.journal, self.shadow) {
            self.bad_doorbell(bad);
        }
    }

    /// Looks at the head doorbells of all completion queues. Returns whether one was invalid.
    pub fn observe_heads(&mut self) -> bool {
        // One error stands for all: further invalid values are the same event, and the shadow
        // entries of all queues are in one page.
        let mut bad = None;
        for queue in self.queues.completions_mut() {
            let observed = observe_head(queue, &self.memory, &self.journal, self.shadow);
            bad = observed.err().or(bad);
        }
        let was_invalid = bad.is_some();
        if let Some(bad) = bad {
            self.bad_doorbell(bad);
        }
        was_invalid
    }

    /// Handles a doorbell error: an event for an invalid value, a fatal error for unreachable
    /// memory.
    pub fn bad_doorbell(&mut self, bad: BadDoorbell) {
        match bad {
            BadDoorbell::Value => self.report.raise(Event::INVALID_DOORBELL_VALUE),
            BadDoorbell::Memory => self.fail(),
        }
    }

    /// Looks at shadow doorbells in `pages` from now on (section 5.7).
    pub fn follow(&mut self, pages: ShadowPages) {
        self.shadow = Some(pages);
        if self.queues.follow(&self.memory, pages).is_err() {
            // The pages could be reached a moment ago.
            self.fail();
        }
        for queue in self.queues.submissions() {
            note_followed(&self.journal, self.shadow, (queue.id, Side::Tail), &queue.doorbell);
        }
        for queue in self.queues.completions() {
            note_followed(&self.journal, self.shadow, (queue.id, Side::Head), &queue.doorbell);
        }
    }
}

/// Looks at the head doorbell of a completion queue.
#[inline]
fn observe_head(
    queue: &mut CompletionQueue,
    memory: &Memory,
    journal: &Option<Journal>,
    pages: Option<ShadowPages>,
) -> Result<(), BadDoorbell> {
    let still = queue.doorbell.is_still();
    let observed = queue.observe(memory);
    if still && !queue.doorbell.is_still() {
        note_moved(journal, pages, queue.id, Side::Head);
    }
    observed
}

/// Records the first change of a shadow doorbell: from now on a successor may trust its value.
#[cold]
fn note_moved(journal: &Option<Journal>, pages: Option<ShadowPages>, queue: u16, side: Side) {
    if let (Some(journal), Some(pages)) = (journal, pages) {
        journal.moved(queue, side, pages.number);
    }
}

/// Records that a queue's doorbell looks at `pages` from now on.
pub(crate) fn note_followed(
    journal: &Option<Journal>,
    pages: Option<ShadowPages>,
    (queue, side): (u16, Side),
    cell: &Cell,
) {
    if let (Some(journal), Some(pages), Some((seen, _))) = (journal, pages, cell.shadow_seen()) {
        journal.follow(queue, side, pages.number, seen);
    }
}

/// Makes a queue's doorbell look at `pages`, in its recorded state if there is one.
///
/// # Errors
/// The pages cannot be reached. The doorbell's register counts then.
pub(super) fn resume_shadow(
    journal: &Option<Journal>,
    pages: Option<ShadowPages>,
    (queue, side): (u16, Side),
    cell: &mut Cell,
    memory: &Memory,
) -> Result<(), Fault> {
    let Some(pages) = pages else { return Ok(()) };
    let followed = journal.as_ref().and_then(|one| one.followed(queue, side, pages.number));
    if let Some((seen, moved)) = followed {
        cell.resume_shadow(pages, seen, moved);
        return Ok(());
    }
    cell.follow(memory, pages)?;
    note_followed(journal, Some(pages), (queue, side), cell);
    Ok(())
}
