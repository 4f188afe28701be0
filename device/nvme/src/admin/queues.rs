//! Creates and deletes I/O queues (sections 5.3 to 5.6), and sets shadow doorbells (section 5.7).

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::prp::is_page_aligned;
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_ram::{Access, Fault};

use crate::cell::{Cell, ShadowPages};
use crate::controller::Controller;
use crate::io::Outcome;
use crate::journal::{Journal, Side, Ticket};
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::recover::note_followed;

/// PC: the queue is physically contiguous (dword 11 of both creations).
const CONTIGUOUS: u32 = 1;
/// IEN: the completion queue interrupts (dword 11).
const INTERRUPTS: u32 = 1 << 1;

impl Controller {
    /// Carries out Create I/O Completion Queue (section 5.3).
    pub(super) fn create_completion_queue(
        &mut self,
        entry: &SubmissionEntry,
    ) -> Result<u32, Status> {
        let (id, flags) = (entry.dword(10) as u16, entry.dword(11));
        if !self.is_queue_id(id) || self.has_completion(id) {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        let shift = self.registers.configuration.completion_entry_shift();
        let size = self.check_ring(entry, shift == 4)?;
        let vector = (flags >> 16) as u16;
        if usize::from(vector) >= self.interrupts.len() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.dnr());
        }
        let vector = (flags & INTERRUPTS != 0).then_some(vector);
        let doorbell = self.new_cell(head_doorbell(id), size)?;
        let queue = CompletionQueue::new(id, entry.prp1.get(), size, vector, doorbell);
        if let Some(journal) = &mut self.journal {
            journal.open_completion(id);
            note_followed(journal, self.shadow, (id, Side::Head), &queue.doorbell);
        }
        self.add_completion(queue);
        Ok(0)
    }

    /// Carries out Create I/O Submission Queue (section 5.4). Priorities have no effect with round
    /// robin.
    pub(super) fn create_submission_queue(
        &mut self,
        entry: &SubmissionEntry,
    ) -> Result<u32, Status> {
        let (id, completion) = (entry.dword(10) as u16, (entry.dword(11) >> 16) as u16);
        if !self.is_queue_id(id) || self.has_submission(id) {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        if !self.is_queue_id(completion) {
            return Err(Status::INVALID_QUEUE_ID.dnr());
        }
        if !self.takes_completions(completion) {
            return Err(Status::COMPLETION_QUEUE_INVALID.dnr());
        }
        let shift = self.registers.configuration.submission_entry_shift();
        let size = self.check_ring(entry, shift == 6)?;
        let doorbell = self.new_cell(tail_doorbell(id), size)?;
        let mut queue = SubmissionQueue::new(id, completion, entry.prp1.get(), size, doorbell);
        if let Some(journal) = &mut self.journal {
            queue.epoch = journal.open_submission(id);
            note_followed(journal, self.shadow, (id, Side::Tail), &queue.doorbell);
        }
        self.add_submission(queue);
        Ok(0)
    }

    /// Carries out Delete I/O Submission Queue (section 5.6): entries that were not fetched are
    /// dropped, and the command ends when the queue's commands in flight have ended.
    pub(super) fn delete_submission_queue(&mut self, entry: &SubmissionEntry) -> Outcome {
        let id = entry.dword(10) as u16;
        if let Some(far) = self.delete_far_submission(id, entry.id.get()) {
            return far;
        }
        let queue = if id == 0 { None } else { self.queues.submission(id) };
        if queue.is_none_or(|queue| queue.deleting.is_some()) {
            return Status::INVALID_QUEUE_ID.dnr().into();
        }
        self.begin_deletion(id, (entry.id.get(), self.ticket));
        Outcome::Pending
    }

    /// Deletes a submission queue as soon as none of its commands is in flight; `command` asked for
    /// it.
    pub(crate) fn begin_deletion(&mut self, id: u16, command: (u16, Ticket)) {
        let Some(queue) = self.queues.submission(id) else { return };
        queue.deleting = Some(command);
        if queue.in_flight == 0 {
            self.finish_deletion(id);
        }
    }

    /// Carries out Delete I/O Completion Queue (section 5.5).
    pub(super) fn delete_completion_queue(&mut self, entry: &SubmissionEntry) -> Outcome {
        let id = entry.dword(10) as u16;
        if let Some(far) = self.delete_far_completion(id, entry.id.get()) {
            return far;
        }
        let queue = if id == 0 { None } else { self.queues.completion(id) };
        match queue {
            None => Status::INVALID_QUEUE_ID.dnr().into(),
            Some(queue) if queue.users > 0 => Status::INVALID_QUEUE_DELETION.dnr().into(),
            Some(_) => {
                self.queues.remove_completion(id);
                Status::SUCCESS.into()
            }
        }
    }

    /// Carries out Doorbell Buffer Config (section 5.7), where doorbells are trapped.
    pub(super) fn configure_doorbell_buffer(&mut self, entry: &SubmissionEntry) -> Outcome {
        if self.doorbells.is_shared() {
            return Status::INVALID_OPCODE.dnr().into();
        }
        let mut pages =
            ShadowPages { doorbells: entry.prp1.get(), events: entry.prp2.get(), number: 0 };
        let checked = self.check_buffer(pages.doorbells, Access::Read);
        let checked = checked.and_then(|()| self.check_buffer(pages.events, Access::Write));
        if checked.is_err() || pages.doorbells == pages.events {
            return Status::INVALID_FIELD.dnr().into();
        }
        pages.number = self.journal.as_mut().map_or(0, Journal::next_epoch);
        self.follow(pages);
        let far = self.follow_far(entry.id.get(), pages);
        far.unwrap_or_else(|| Status::SUCCESS.into())
    }

    /// Looks at shadow doorbells from now on.
    pub(crate) fn follow(&mut self, pages: ShadowPages) {
        self.shadow = Some(pages);
        if self.queues.follow(&self.memory, pages).is_err() {
            // The pages could be reached a moment ago.
            self.fail();
        }
        let Some(journal) = &self.journal else { return };
        for queue in self.queues.submissions() {
            note_followed(journal, self.shadow, (queue.id, Side::Tail), &queue.doorbell);
        }
        for queue in self.queues.completions() {
            note_followed(journal, self.shadow, (queue.id, Side::Head), &queue.doorbell);
        }
    }

    /// Checks a shadow page: it must be one whole memory page that can be reached directly. Each
    /// look at message-only memory would be a message per poll, which is worse than the register
    /// writes that a shadow page replaces.
    fn check_buffer(&self, at: u64, access: Access) -> Result<(), Fault> {
        let page = self.registers.page_size();
        if !is_page_aligned(at, page) {
            return Err(Fault::Denied { iova: at });
        }
        self.memory.pin(at, page as usize, access, &mut Vec::new())
    }

    /// Returns the doorbell of a new queue with `size` entries.
    fn new_cell(&self, index: usize, size: u32) -> Result<Cell, Status> {
        let mut cell = Cell::new(&self.doorbells, index);
        if let Some(pages) = self.shadow {
            let followed = cell.follow(&self.memory, pages);
            let behind = followed.and_then(|()| cell.keep_behind(&self.memory, 0, size));
            behind.map_err(|_| Status::INTERNAL_ERROR)?;
        }
        Ok(cell)
    }

    /// Returns whether an I/O queue may have this number, within the Number of Queues feature.
    fn is_queue_id(&self, id: u16) -> bool {
        (1..=self.features.queue_pairs()).contains(&id)
    }

    /// Checks size and address of a ring, for both creations. Returns the number of entries.
    fn check_ring(&self, entry: &SubmissionEntry, entry_size: bool) -> Result<u32, Status> {
        let size = (entry.dword(10) >> 16) + 1;
        if size < 2 || size > u32::from(self.limits.queue_entries) || !entry_size {
            return Err(Status::INVALID_QUEUE_SIZE.dnr());
        }
        if entry.dword(11) & CONTIGUOUS == 0 {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if !is_page_aligned(entry.prp1.get(), self.registers.page_size()) {
            return Err(Status::PRP_OFFSET_INVALID.dnr());
        }
        Ok(size)
    }
}
