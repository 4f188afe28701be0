//! Creates and deletes I/O queues (sections 5.3 to 5.6), and sets shadow doorbells (section 5.7).

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::prp::is_page_aligned;
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_ram::{Access, Fault};

use crate::cell::{Cell, ShadowPages};
use crate::engine::doorbells::note_followed;
use crate::fleet::{LaneQueueState, Question};
use crate::home::Home;
use crate::journal::{Journal, Side};
use crate::permit::Permit;
use crate::queue::{CompletionQueue, SubmissionQueue};

/// PC: the queue is physically contiguous (dword 11 of both creations).
const CONTIGUOUS: u32 = 1;
/// IEN: the completion queue interrupts (dword 11).
const INTERRUPTS: u32 = 1 << 1;

impl Home {
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
        if usize::from(vector) >= self.engine.interrupts.len() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.dnr());
        }
        let vector = (flags & INTERRUPTS != 0).then_some(vector);
        let doorbell = self.new_cell(head_doorbell(id), size)?;
        let queue = CompletionQueue::new(id, entry.prp1.get(), size, vector, doorbell);
        let engine = &mut self.engine;
        if let Some(journal) = &mut engine.journal {
            journal.open_completion(id);
        }
        note_followed(&engine.journal, engine.shadow, (id, Side::Head), &queue.doorbell);
        self.fleet.add_completion(engine, queue);
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
        let engine = &mut self.engine;
        if let Some(journal) = &mut engine.journal {
            queue.epoch = journal.open_submission(id);
        }
        note_followed(&engine.journal, engine.shadow, (id, Side::Tail), &queue.doorbell);
        self.fleet.add_submission(engine, queue);
        Ok(0)
    }

    /// Carries out Delete I/O Submission Queue (section 5.6): entries that were not fetched are
    /// dropped, and the command ends when the queue's commands in flight have ended.
    pub(super) fn delete_submission_queue(&mut self, entry: &SubmissionEntry, permit: Permit) {
        let id = entry.dword(10) as u16;
        let far = self.fleet.submission(id);
        let here = if id == 0 { None } else { self.engine.queues.submission(id) };
        let open = far == Some(LaneQueueState::Open) || here.is_some_and(|queue| !queue.deleting);
        if !open {
            let status = Status::INVALID_QUEUE_ID.dnr();
            return self.end_admin(permit, status, 0, entry.nsid.get());
        }
        self.deletions.insert(id, permit);
        match far {
            Some(_) => self.fleet.delete_submission(id),
            None => self.engine.begin_deletion(id),
        }
        self.absorb();
    }

    /// Carries out Delete I/O Completion Queue (section 5.5).
    pub(super) fn delete_completion_queue(&mut self, entry: &SubmissionEntry, permit: Permit) {
        let id = entry.dword(10) as u16;
        let queue = if id == 0 { None } else { self.engine.queues.completion(id) };
        let status = match (self.fleet.completion(id), queue) {
            (Some(LaneQueueState::Open), _) => return self.fleet.delete_completion(id, permit),
            (Some(LaneQueueState::Deleting), _) | (None, None) => Status::INVALID_QUEUE_ID.dnr(),
            (Some(LaneQueueState::InUse), _) => Status::INVALID_QUEUE_DELETION.dnr(),
            (None, Some(queue)) if queue.users > 0 => Status::INVALID_QUEUE_DELETION.dnr(),
            (None, Some(_)) => {
                self.engine.queues.remove_completion(id);
                Status::SUCCESS
            }
        };
        self.end_admin(permit, status, 0, entry.nsid.get());
    }

    /// Carries out Doorbell Buffer Config (section 5.7), where doorbells are trapped.
    pub(super) fn configure_doorbell_buffer(&mut self, entry: &SubmissionEntry, permit: Permit) {
        let pages = match self.shadow_pages(entry) {
            Ok(pages) => pages,
            Err(status) => return self.end_admin(permit, status, 0, entry.nsid.get()),
        };
        self.engine.follow(pages);
        self.absorb();
        if let Some(permit) = self.fleet.ask(permit, 0, &Question::Follow(pages)) {
            self.end_admin(permit, Status::SUCCESS, 0, 0);
        }
    }

    /// Returns the shadow pages that a Doorbell Buffer Config names.
    fn shadow_pages(&mut self, entry: &SubmissionEntry) -> Result<ShadowPages, Status> {
        if self.engine.doorbells.is_shared() {
            return Err(Status::INVALID_OPCODE.dnr());
        }
        let mut pages =
            ShadowPages { doorbells: entry.prp1.get(), events: entry.prp2.get(), number: 0 };
        let checked = self.check_buffer(pages.doorbells, Access::Read);
        let checked = checked.and_then(|()| self.check_buffer(pages.events, Access::Write));
        if checked.is_err() || pages.doorbells == pages.events {
            return Err(Status::INVALID_FIELD.dnr());
        }
        pages.number = self.engine.journal.as_mut().map_or(0, Journal::next_epoch);
        Ok(pages)
    }

    /// Checks a shadow page: it must be one whole memory page that can be reached directly. Each
    /// look at message-only memory would be a message per poll, which is worse than the register
    /// writes that a shadow page replaces.
    fn check_buffer(&self, at: u64, access: Access) -> Result<(), Fault> {
        let page = self.registers.page_size();
        if !is_page_aligned(at, page) {
            return Err(Fault::Denied { iova: at });
        }
        self.engine.memory.pin(at, page as usize, access, &mut Vec::new())
    }

    /// Returns the doorbell of a new queue with `size` entries.
    fn new_cell(&self, index: usize, size: u32) -> Result<Cell, Status> {
        let mut cell = Cell::new(&self.engine.doorbells, index);
        if let Some(pages) = self.engine.shadow {
            let followed = cell.follow(&self.engine.memory, pages);
            let behind = followed.and_then(|()| cell.keep_behind(&self.engine.memory, 0, size));
            behind.map_err(|_| Status::INTERNAL_ERROR)?;
        }
        Ok(cell)
    }

    fn has_submission(&mut self, id: u16) -> bool {
        self.fleet.submission(id).is_some() || self.engine.queues.submission(id).is_some()
    }

    fn has_completion(&mut self, id: u16) -> bool {
        self.fleet.completion(id).is_some() || self.engine.queues.completion(id).is_some()
    }

    /// Returns whether submission queues that complete in queue `id` may be made.
    fn takes_completions(&mut self, id: u16) -> bool {
        match self.fleet.completion(id) {
            Some(far) => far != LaneQueueState::Deleting,
            None => self.engine.queues.completion(id).is_some(),
        }
    }

    /// Returns whether an I/O queue may have this number, within the Number of Queues feature.
    fn is_queue_id(&self, id: u16) -> bool {
        (1..=self.features.queue_pairs).contains(&id)
    }

    /// Checks size and address of a ring, for both creations. Returns the number of entries.
    fn check_ring(&self, entry: &SubmissionEntry, entry_size: bool) -> Result<u32, Status> {
        let size = (entry.dword(10) >> 16) + 1;
        if size < 2 || size > u32::from(self.engine.limits.queue_entries) || !entry_size {
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
