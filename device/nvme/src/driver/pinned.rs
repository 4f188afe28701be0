//! A queue pair for a thread of its own.

use slipway_nvme_spec::command::{
    COMPLETION_ENTRY, CompletionEntry, SUBMISSION_ENTRY, SubmissionEntry,
};
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_ram::{Access, Fault, Memory, Span};
use zerocopy::IntoBytes;

use super::DriverError;

/// The host's side of a queue pair with its memory pinned: no lookup, lock or allocation per
/// command, and it may be moved to another thread. It is for load generators; [`super::QueuePair`]
/// is for all else.
///
/// The caller names commands (their IDs), keeps at most [`PinnedPair::room`] of them in flight, and
/// rings: [`PinnedPair::tail`] after [`PinnedPair::push`], [`PinnedPair::head`] after
/// [`PinnedPair::pop`], each once for as many entries as it likes.
pub struct PinnedPair {
    id: u16,
    entries: u32,
    submission: Span,
    completion: Span,
    tail: u32,
    head: u32,
    phase: bool,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The command's ID, as the controller says it: not to be trusted as an index.
    pub id: u16,
    /// The command's status.
    pub status: Status,
}

impl PinnedPair {
    /// Makes queue pair `id` of `entries` entries, with its zeroed queues at these addresses of
    /// `memory`.
    ///
    /// # Errors
    /// [`DriverError::Fault`]; [`DriverError::Memory`] where a queue is not contiguous.
    pub fn new(
        id: u16,
        entries: u32,
        (submission, completion): (u64, u64),
        memory: &Memory,
    ) -> Result<Self, DriverError> {
        let count = entries as usize;
        Ok(Self {
            id,
            entries,
            submission: pin(memory, submission, count * SUBMISSION_ENTRY)?,
            completion: pin(memory, completion, count * COMPLETION_ENTRY)?,
            tail: 0,
            head: 0,
            phase: true,
        })
    }

    /// Returns the queue pair's number.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the most commands that may be in flight.
    pub fn room(&self) -> u32 {
        self.entries - 1
    }

    /// Returns address and bytes of both queues.
    pub(super) fn places(&self) -> [(u64, usize); 2] {
        [&self.submission, &self.completion].map(|queue| (queue.iova(), queue.len()))
    }

    /// Writes `command` into the queue.
    ///
    /// # Errors
    /// The memory cannot be reached.
    #[inline]
    pub fn push(&mut self, command: &SubmissionEntry) -> Result<(), Fault> {
        self.submission.write(self.tail as usize * SUBMISSION_ENTRY, command.as_bytes())?;
        self.tail = if self.tail + 1 == self.entries { 0 } else { self.tail + 1 };
        Ok(())
    }

    /// Takes a completion off the queue.
    ///
    /// # Errors
    /// The memory cannot be reached.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<Ended>, Fault> {
        let at = self.head as usize * COMPLETION_ENTRY + CompletionEntry::PHASE_DWORD;
        // The acquire load pairs with the controller's release store of the same dword.
        let last = self.completion.load_u32(at)?;
        if (last >> 16 & 1 == 1) != self.phase {
            return Ok(None);
        }
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        Ok(Some(Ended { id: last as u16, status: Status((last >> 17) as u16) }))
    }

    /// Returns number and value of the doorbell that announces the pushed commands.
    #[inline]
    pub fn tail(&self) -> (usize, u32) {
        (tail_doorbell(self.id), self.tail)
    }

    /// Returns number and value of the doorbell that announces the completions taken.
    #[inline]
    pub fn head(&self) -> (usize, u32) {
        (head_doorbell(self.id), self.head)
    }
}

/// Pins `len` contiguous bytes for both directions.
fn pin(memory: &Memory, at: u64, len: usize) -> Result<Span, DriverError> {
    let mut spans = Vec::new();
    memory.pin(at, len, Access::Write, &mut spans)?;
    match spans.pop() {
        Some(span) if spans.is_empty() => Ok(span),
        _ => Err(DriverError::Memory),
    }
}
