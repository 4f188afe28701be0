//! Queues: rings in guest memory with an index that a doorbell cell moves.
//!
//! Ownership (section 4.1): in a submission queue the entries `head..tail` are the controller's to
//! read, the others are the host's. In a completion queue the entries `tail..head` (cyclic) are the
//! controller's to write, the others are the host's. A doorbell moves the host's index. A value
//! that would give away entries that are not the host's is refused.

use std::time::Duration;

use slipway_nvme_spec::command::{
    COMPLETION_ENTRY, CompletionEntry, FUSE_FIRST, FUSE_SECOND, SUBMISSION_ENTRY, SubmissionEntry,
};
use slipway_ram::{Access, Fault, Memory, Window};
use zerocopy::IntoBytes;

use crate::cell::{BadDoorbell, Cell, ShadowPages, distance};

/// A submission queue (section 4.1.1).
pub(crate) struct SubmissionQueue {
    pub id: u16,
    /// The completion queue that the queue's commands complete in.
    pub completion: u16,
    pub base: u64,
    /// The number of entries, 2 to 4096.
    pub size: u32,
    /// The next entry to fetch.
    pub head: u32,
    /// The first entry that the host has not submitted.
    pub tail: u32,
    /// Commands fetched and not completed, Asynchronous Event Requests left out.
    pub in_flight: u32,
    /// `true` if the queue is deleted as soon as `in_flight` falls to 0.
    pub deleting: bool,
    /// The number of entries taken off since the queue was made.
    pub taken: u64,
    /// The queue's epoch in the journal.
    pub epoch: u32,
    pub doorbell: Cell,
    ring: Window,
}

impl SubmissionQueue {
    pub fn new(id: u16, completion: u16, base: u64, size: u32, doorbell: Cell) -> Self {
        Self {
            id,
            completion,
            base,
            size,
            head: 0,
            tail: 0,
            in_flight: 0,
            deleting: false,
            taken: 0,
            epoch: 0,
            doorbell,
            ring: Window::new(base, size as usize * SUBMISSION_ENTRY, Access::Read),
        }
    }

    /// Returns the number of entries to fetch.
    pub fn waiting(&self) -> u32 {
        distance(self.head, self.tail, self.size)
    }

    /// Returns whether the doorbell's register has changed since the last look. Prefetches the next
    /// entry, which the host writes before it rings.
    #[inline]
    pub fn is_rung(&self) -> bool {
        self.ring.prefetch(self.head as usize * SUBMISSION_ENTRY);
        self.doorbell.is_rung()
    }

    /// Looks at the tail doorbell.
    ///
    /// # Errors
    /// If the value is beyond the queue, or passes the head (more entries than were free); or if
    /// the shadow page cannot be reached.
    pub fn observe(&mut self, memory: &Memory) -> Result<(), BadDoorbell> {
        // The host writes the entry before the doorbell. Both cache lines come from the host's
        // processor, and the prefetch makes them come at the same time.
        self.ring.prefetch(self.head as usize * SUBMISSION_ENTRY);
        let Some(tail) = self.doorbell.changed(memory)? else { return Ok(()) };
        if tail >= self.size {
            return Err(BadDoorbell::Value);
        }
        let added = distance(self.tail, tail, self.size);
        if self.waiting() + added >= self.size {
            return Err(BadDoorbell::Value);
        }
        self.tail = tail;
        self.doorbell.keep_behind(memory, self.tail, self.size)?;
        Ok(())
    }

    /// Copies up to `most` waiting entries that lie side by side into `entries`, and replaces its
    /// contents. The entries count as in flight.
    pub fn fetch(
        &mut self,
        memory: &Memory,
        most: u32,
        entries: &mut Vec<SubmissionEntry>,
    ) -> Result<(), Fault> {
        let count = most.min(self.waiting()).min(self.size - self.head);
        entries.resize(count as usize, SubmissionEntry::default());
        let from = self.head as usize * SUBMISSION_ENTRY;
        self.ring.read(memory, from, entries.as_mut_slice().as_mut_bytes())?;
        self.in_flight += count;
        Ok(())
    }

    /// Makes the fetched entries end with a whole fused pair (section 4.11): if the last entry is a
    /// first half, fetches its second half as well, or gives the first half back if there is no
    /// `room`. A first half without a second stays.
    pub fn keep_pairs(
        &mut self,
        memory: &Memory,
        room: u32,
        entries: &mut Vec<SubmissionEntry>,
    ) -> Result<(), Fault> {
        let count = entries.len() as u32;
        let half = entries.last().is_some_and(|last| last.fuse() == FUSE_FIRST);
        if !half || self.id == 0 || count >= self.waiting() {
            return Ok(());
        }
        if room > count {
            let mut second = SubmissionEntry::default();
            let at = (self.head + count) % self.size;
            let from = at as usize * SUBMISSION_ENTRY;
            self.ring.read(memory, from, second.as_mut_bytes())?;
            entries.push(second);
            self.in_flight += 1;
        } else {
            entries.pop();
            self.in_flight -= 1;
        }
        Ok(())
    }

    /// If the fetched entries contain a fused pair, keeps only the pair if it is first and may
    /// start now, and else only the entries before it. Returns whether there is a pair.
    pub fn part_pairs(&mut self, may_start: bool, entries: &mut Vec<SubmissionEntry>) -> bool {
        let pair =
            |two: &[SubmissionEntry]| two[0].fuse() == FUSE_FIRST && two[1].fuse() == FUSE_SECOND;
        let Some(at) = entries.windows(2).position(pair) else { return false };
        let kept = if at == 0 && may_start { 2 } else { at };
        self.in_flight -= (entries.len() - kept) as u32;
        entries.truncate(kept);
        true
    }

    /// Takes one fetched entry off the ring. The next completion tells the host.
    pub fn advance(&mut self) {
        self.taken += 1;
        self.head += 1;
        if self.head == self.size {
            self.head = 0;
        }
    }
}

impl SubmissionQueue {
    /// Goes on after `taken` entries, in a queue of this epoch. Doorbells that were rung since
    /// count as new.
    pub fn resume(&mut self, memory: &Memory, taken: u64, epoch: u32) {
        (self.taken, self.epoch) = (taken, epoch);
        self.head = (taken % u64::from(self.size)) as u32;
        self.tail = self.head;
        self.doorbell.resume(self.head);
        if self.doorbell.is_still() {
            // The register may not be looked at any more, so the tail is read here.
            let tail = self.doorbell.current(memory);
            self.tail = if tail < self.size { tail } else { self.head };
        }
    }
}

/// A completion queue (section 4.1.2).
pub(crate) struct CompletionQueue {
    pub id: u16,
    pub base: u64,
    /// The number of entries, 2 to 4096.
    pub size: u32,
    /// The next entry that the host will take.
    pub head: u32,
    /// The next entry to write.
    pub tail: u32,
    /// The number of entries written since the queue was made.
    pub written: u64,
    /// P of the next entry; inverts with every pass (section 4.6).
    pub phase: bool,
    /// Slots promised to commands in flight.
    pub reserved: u32,
    /// The interrupt vector. `None` if interrupts are disabled (IEN).
    pub vector: Option<u16>,
    /// Entries written since the last interrupt.
    pub fresh: u32,
    /// `true` if one of these entries is of a failed command, which the host shall hear of at once.
    pub urgent: bool,
    /// The time since which the interrupt for these entries is held back.
    pub held_since: Option<Duration>,
    /// The number of submission queues that complete here.
    pub users: u32,
    pub doorbell: Cell,
    ring: Window,
}

impl CompletionQueue {
    pub fn new(id: u16, base: u64, size: u32, vector: Option<u16>, doorbell: Cell) -> Self {
        Self {
            id,
            base,
            size,
            head: 0,
            tail: 0,
            written: 0,
            phase: true,
            reserved: 0,
            vector,
            fresh: 0,
            urgent: false,
            held_since: None,
            users: 0,
            doorbell,
            ring: Window::new(base, size as usize * COMPLETION_ENTRY, Access::Write),
        }
    }

    /// Returns the number of entries written and not yet taken by the host.
    pub fn posted(&self) -> u32 {
        distance(self.head, self.tail, self.size)
    }

    /// Returns the number of slots that are neither filled nor promised.
    pub fn free(&self) -> u32 {
        (self.size - 1).saturating_sub(self.posted() + self.reserved)
    }

    /// Goes on after `written` entries. The doorbell's cell says what the host took; with an
    /// invalid value, all entries count as taken.
    pub fn resume(&mut self, memory: &Memory, written: u64) {
        let size = u64::from(self.size);
        self.written = written;
        self.tail = (written % size) as u32;
        self.phase = (written / size).is_multiple_of(2);
        let head = self.doorbell.current(memory);
        self.head = if head < self.size { head } else { self.tail };
        self.doorbell.resume(head);
    }

    /// Looks at the head doorbell.
    ///
    /// # Errors
    /// If the value is beyond the queue, or passes the tail (entries that were never written); or
    /// if the shadow page cannot be reached.
    pub fn observe(&mut self, memory: &Memory) -> Result<(), BadDoorbell> {
        let Some(head) = self.doorbell.changed(memory)? else { return Ok(()) };
        if head >= self.size || distance(self.head, head, self.size) > self.posted() {
            return Err(BadDoorbell::Value);
        }
        self.head = head;
        self.doorbell.keep_behind(memory, self.head, self.size)?;
        Ok(())
    }

    /// Writes an entry and sets its phase tag. The dword with the phase tag is stored last, with
    /// release ordering: a host that sees the tag sees the entry (section 4.6).
    ///
    /// The caller has made sure that a slot is free.
    #[inline]
    pub fn post(&mut self, memory: &Memory, mut entry: CompletionEntry) -> Result<(), Fault> {
        debug_assert!(self.posted() < self.size - 1, "a slot was reserved");
        let failed = !entry.status().is_success();
        entry.set_status(entry.status(), self.phase);
        let at = self.tail as usize * COMPLETION_ENTRY;
        // The entry is passed in registers: a copy in memory would wait for its halves to be
        // stored, and these for earlier stores to cache lines that the host has.
        self.ring.publish(memory, at, entry.bits())?;
        self.written += 1;
        self.tail += 1;
        if self.tail == self.size {
            self.tail = 0;
            self.phase = !self.phase;
        }
        self.fresh += 1;
        self.urgent |= failed;
        Ok(())
    }
}

/// All queues of a controller, by number; the admin queues are number 0.
#[derive(Default)]
pub(crate) struct Queues {
    submission: Vec<Option<SubmissionQueue>>,
    completion: Vec<Option<CompletionQueue>>,
}

impl Queues {
    /// Returns one past the highest submission queue number in use.
    pub fn submission_bound(&self) -> u16 {
        self.submission.len() as u16
    }

    pub fn submission(&mut self, id: u16) -> Option<&mut SubmissionQueue> {
        self.submission.get_mut(usize::from(id))?.as_mut()
    }

    pub fn completion(&mut self, id: u16) -> Option<&mut CompletionQueue> {
        self.completion.get_mut(usize::from(id))?.as_mut()
    }

    pub fn submissions(&self) -> impl Iterator<Item = &SubmissionQueue> {
        self.submission.iter().flatten()
    }

    pub fn submissions_mut(&mut self) -> impl Iterator<Item = &mut SubmissionQueue> {
        self.submission.iter_mut().flatten()
    }

    pub fn completions(&self) -> impl Iterator<Item = &CompletionQueue> {
        self.completion.iter().flatten()
    }

    pub fn completions_mut(&mut self) -> impl Iterator<Item = &mut CompletionQueue> {
        self.completion.iter_mut().flatten()
    }

    /// Releases the queues' memory until it is used again.
    pub fn release_memory(&mut self) {
        self.submission.iter_mut().flatten().for_each(|queue| queue.ring.release());
        self.completion.iter_mut().flatten().for_each(|queue| queue.ring.release());
    }

    /// Returns a submission queue together with its completion queue.
    pub fn pair(&mut self, id: u16) -> Option<(&mut SubmissionQueue, &mut CompletionQueue)> {
        let submission = self.submission.get_mut(usize::from(id))?.as_mut()?;
        let completion = self.completion.get_mut(usize::from(submission.completion))?.as_mut()?;
        Some((submission, completion))
    }

    /// Returns whether the interrupt for commands of submission queue `id` is held back.
    pub fn is_held(&self, id: u16) -> bool {
        let submission = self.submission.get(usize::from(id)).and_then(Option::as_ref);
        let completion = submission
            .and_then(|queue| self.completion.get(usize::from(queue.completion))?.as_ref());
        completion.is_some_and(|queue| queue.fresh > 0)
    }

    /// Returns all submission queues and all completion queues.
    pub fn into_parts(self) -> (Vec<SubmissionQueue>, Vec<CompletionQueue>) {
        let submission = self.submission.into_iter().flatten();
        (submission.collect(), self.completion.into_iter().flatten().collect())
    }

    /// Returns whether there is any I/O queue.
    pub fn has_io(&self) -> bool {
        self.submission.iter().skip(1).any(Option::is_some)
            || self.completion.iter().skip(1).any(Option::is_some)
    }

    /// Adds a queue. Its number must be free, and its completion queue must exist.
    pub fn add_submission(&mut self, queue: SubmissionQueue) {
        if let Some(completion) = self.completion(queue.completion) {
            completion.users += 1;
        }
        let id = usize::from(queue.id);
        put(&mut self.submission, id, queue);
    }

    pub fn add_completion(&mut self, queue: CompletionQueue) {
        let id = usize::from(queue.id);
        put(&mut self.completion, id, queue);
    }

    pub fn remove_submission(&mut self, id: u16) -> Option<SubmissionQueue> {
        let queue = take(&mut self.submission, id)?;
        if let Some(completion) = self.completion(queue.completion) {
            completion.users -= 1;
        }
        Some(queue)
    }

    pub fn remove_completion(&mut self, id: u16) -> Option<CompletionQueue> {
        take(&mut self.completion, id)
    }

    pub fn clear(&mut self) {
        self.submission.clear();
        self.completion.clear();
    }

    /// Makes every queue look at shadow doorbells from now on.
    pub fn follow(&mut self, memory: &Memory, pages: ShadowPages) -> Result<(), Fault> {
        for queue in self.submission.iter_mut().flatten() {
            queue.doorbell.follow(memory, pages)?;
            queue.doorbell.keep_behind(memory, queue.tail, queue.size)?;
        }
        for queue in self.completion.iter_mut().flatten() {
            queue.doorbell.follow(memory, pages)?;
            queue.doorbell.keep_behind(memory, queue.head, queue.size)?;
        }
        Ok(())
    }

    /// Asks for a register write at the next change of every doorbell that would make work: new
    /// entries of any queue, and room in a completion queue while commands wait. Changes of other
    /// heads need no register write.
    pub fn publish(&mut self, memory: &Memory, admin_waits: bool) -> Result<(), Fault> {
        for at in 0..self.submission.len() {
            let Some(queue) = &mut self.submission[at] else { continue };
            queue.doorbell.publish(memory, queue.tail)?;
            let waits = queue.waiting() > 0 || at == 0 && admin_waits;
            let completion = self.completion.get_mut(usize::from(queue.completion));
            if let Some(completion) = completion.and_then(Option::as_mut)
                && waits
            {
                completion.doorbell.publish(memory, completion.head)?;
            }
        }
        Ok(())
    }
}

fn put<T>(queues: &mut Vec<Option<T>>, id: usize, queue: T) {
    if queues.len() <= id {
        queues.resize_with(id + 1, || None);
    }
    queues[id] = Some(queue);
}

/// Takes a queue out, and drops empty places at the end so that loops stay short.
fn take<T>(queues: &mut Vec<Option<T>>, id: u16) -> Option<T> {
    let queue = queues.get_mut(usize::from(id))?.take();
    while queues.last().is_some_and(Option::is_none) {
        queues.pop();
    }
    queue
}
