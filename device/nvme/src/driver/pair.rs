//! The host's side of a queue pair, by copies of entries to and from guest memory. Unlike
//! [`PinnedPair`], it names the commands itself.

use slipway_nvme_spec::command::{
    COMPLETION_ENTRY, CompletionEntry, SUBMISSION_ENTRY, SubmissionEntry,
};
use slipway_nvme_spec::registers::{head_doorbell, tail_doorbell};
use slipway_ram::Memory;
use zerocopy::{FromZeros, IntoBytes};

use super::{Arena, DriverError, PinnedPair, RegisterAccess, RingDoorbells};

/// A submission queue with a completion queue of the same number and size.
///
/// The controller is not trusted to complete each command once: a completion of a command that is
/// not in flight is an error, and frees no ID.
pub struct QueuePair {
    id: u16,
    entries: u32,
    /// The address of the submission queue.
    pub submission: u64,
    /// The address of the completion queue.
    pub completion: u64,
    /// The index of the next entry of the submission queue.
    tail: u32,
    /// The index of the next entry of the completion queue.
    head: u32,
    /// The value of the phase tag by which the next completion is new.
    phase: bool,
    /// Command IDs that are free.
    free: Vec<u16>,
    /// By command ID: `true` if the command is in flight.
    flies: Vec<bool>,
}

impl QueuePair {
    /// Makes queues with `entries` (2 to 4096) entries in memory of `arena`. `entries - 1` commands
    /// can be in flight.
    ///
    /// # Errors
    /// [`DriverError::Memory`] if `arena` has no room for the queues.
    pub fn new(id: u16, entries: u16, arena: &mut Arena) -> Result<Self, DriverError> {
        Ok(Self {
            id,
            entries: entries.into(),
            submission: arena.allocate(usize::from(entries) * SUBMISSION_ENTRY)?,
            completion: arena.allocate(usize::from(entries) * COMPLETION_ENTRY)?,
            tail: 0,
            head: 0,
            phase: true,
            free: (0..entries - 1).rev().collect(),
            flies: vec![false; usize::from(entries - 1)],
        })
    }

    /// Turns a pair that has not been used into one with its memory pinned.
    pub(super) fn pin(self, memory: &Memory) -> Result<PinnedPair, DriverError> {
        let places = (self.submission, self.completion);
        PinnedPair::new(self.id, self.entries, places, memory)
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.entries as usize - 1 - self.free.len()
    }

    /// Writes `command` into the submission queue with a free ID, and returns the ID. Does not ring
    /// the doorbell.
    ///
    /// # Errors
    /// [`DriverError::Queue`] if the queue is full; [`DriverError::Fault`] if its memory cannot be
    /// reached.
    pub fn push(
        &mut self,
        memory: &Memory,
        mut command: SubmissionEntry,
    ) -> Result<u16, DriverError> {
        let id = *self.free.last().ok_or(DriverError::Queue(self.id))?;
        command.id.set(id);
        let at = self.submission + u64::from(self.tail) * SUBMISSION_ENTRY as u64;
        memory.write(at, command.as_bytes())?;
        self.free.pop();
        self.flies[usize::from(id)] = true;
        self.tail = (self.tail + 1) % self.entries;
        Ok(id)
    }

    /// Rings the tail doorbell for the pushed commands.
    ///
    /// # Errors
    /// [`DriverError::Access`].
    pub fn ring_tail(&self, registers: &mut impl RegisterAccess) -> Result<(), DriverError> {
        Ok(registers.ring(tail_doorbell(self.id), self.tail)?)
    }

    /// Takes a completion off the completion queue. Returns `None` if there is no new one. Does not
    /// ring the doorbell.
    ///
    /// # Errors
    /// [`DriverError::Fault`] if the queue's memory cannot be reached;
    /// [`DriverError::Completion`] if the command is not in flight, and then the completion is
    /// taken off.
    pub fn pop(&mut self, memory: &Memory) -> Result<Option<CompletionEntry>, DriverError> {
        let at = self.completion + u64::from(self.head) * COMPLETION_ENTRY as u64;
        // The acquire load pairs with the controller's release store of the same dword.
        let last = memory.load_u32(at + CompletionEntry::PHASE_DWORD as u64)?;
        if (last >> 16 & 1 == 1) != self.phase {
            return Ok(None);
        }
        let mut entry = CompletionEntry::new_zeroed();
        memory.read(at, entry.as_mut_bytes())?;
        self.head += 1;
        if self.head == self.entries {
            self.head = 0;
            self.phase = !self.phase;
        }
        let id = entry.id.get();
        match self.flies.get_mut(usize::from(id)) {
            Some(flies) if *flies => *flies = false,
            _ => return Err(DriverError::Completion { queue: self.id, id }),
        }
        self.free.push(id);
        Ok(Some(entry))
    }

    /// Rings the head doorbell for the completions taken.
    ///
    /// # Errors
    /// [`DriverError::Access`].
    pub fn ring_head(&self, registers: &mut impl RegisterAccess) -> Result<(), DriverError> {
        Ok(registers.ring(head_doorbell(self.id), self.head)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_of_a_command_that_is_not_in_flight_is_an_error() {
        let memory = Memory::heap(1 << 20);
        let mut arena = Arena::new(memory.clone(), 0, 1 << 20);
        let mut pair = QueuePair::new(1, 8, &mut arena).unwrap();
        let id = pair.push(&memory, SubmissionEntry::default()).unwrap();
        let completion = pair.completion;
        let complete = |at: u64, id: u16| {
            let mut entry = CompletionEntry::new_zeroed();
            entry.id.set(id);
            // The phase tag of the first round.
            entry.status.set(1);
            memory.write(completion + at * COMPLETION_ENTRY as u64, entry.as_bytes()).unwrap();
        };
        for (at, id) in [id, id, id + 1, 7, u16::MAX].into_iter().enumerate() {
            complete(at as u64, id);
        }
        assert_eq!(pair.pop(&memory).unwrap().unwrap().id.get(), id);
        for bad in [id, id + 1, 7, u16::MAX] {
            let refused = pair.pop(&memory);
            let is_it =
                matches!(refused, Err(DriverError::Completion { queue: 1, id }) if id == bad);
            assert!(is_it, "{refused:?}");
        }
        assert!(pair.pop(&memory).unwrap().is_none());
        assert_eq!(pair.in_flight(), 0);
    }
}
