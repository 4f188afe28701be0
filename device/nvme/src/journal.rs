//! What outlives the process: enough to go on after a kill at any instruction.
//!
//! A controller with a journal ([`Parts::journal`](crate::Parts::journal)) keeps in memory that
//! outlives it ([`Lasting`]), besides the doorbell cells, which its host keeps there too:
//! - a *snapshot* of everything that admin commands and registers change (the saved state), written
//!   whenever one of them has changed it and before the guest can see that;
//! - for each queue how many entries were taken off it and how many were written to it;
//! - for each command in flight a *slot* with a copy of its entry, since the guest may use the
//!   entry's place again before the command ends.
//!
//! Nothing is written in two places at once: every store is release-ordered, the reader sees a
//! prefix of them, and each prefix has one meaning. For a command:
//! 1. its slot is filled: entry, number, and last the word that makes it `FETCHED`;
//! 2. its queue's count of taken entries rises. A slot without the count is the count's last step,
//!    which the successor takes: it is counted, and the entry is not fetched again;
//! 3. the command is carried out. A successor carries out again whatever is `FETCHED`: reads, writes
//!    and flushes may be done twice as long as the guest was not told of their end;
//! 4. its slot becomes `COMPLETING`, with status and the place of its completion queue entry. From
//!    here on it is never carried out again: the guest may know of its end, and use its buffer;
//! 5. the completion queue entry is written. A successor that finds `COMPLETING` and not step 6
//!    writes it again: the same bytes, to a place that the guest either has not looked at yet, or
//!    will not look at before the queue has gone round;
//! 6. the queue's count of written entries rises; 7. the slot is free.
//!
//! A fused Compare and Write is more than its two commands: either nothing of it has happened, and it
//! is carried out again whole, or its comparison has held, and never again is anything compared, for
//! what would be found may be its own write. Its second half's slot says which:
//! - steps 1 and 2 are one for both: the second slot is filled first, as `PAIRED`, then the first one,
//!   as `FETCHED`, and then both are counted at once. A `PAIRED` slot without its first is of a pair
//!   that was not fetched: it is freed, and both entries are fetched again;
//! - as long as nothing is decided the successor carries out the pair again, from its comparison on:
//!   the write has not begun, and nobody was told of an end;
//! - before the first half's step 4, and before the write may touch the disk, the second slot becomes
//!   `DECIDED`, with a status. Success: the comparison held, so the first half ends with success and
//!   the write, which may have been done, is all that is carried out again. Another: the second half
//!   ends with it once the first has ended; if that is `FETCHED` still, nobody was told of anything,
//!   and the pair begins anew.
//!
//! What is carried out again must not be seen twice: a write of elsewhere that was done, compared with
//! by a pair, and done again over the pair's write would undo it. So a pair is fetched when nothing
//! else of the controller's I/O queues is in flight, and nothing else is before it has ended
//! (`Controller::exclusive`): no journal has a pair beside another command that has not ended.
//!
//! An admin command changes the snapshot as well: between 3 and 4 a snapshot is written that has the
//! change *and* the command's number and status, so it is carried out exactly once. An asynchronous
//! event is posted with a slot of its own, since its request's is long gone.
//!
//! A controller with lanes has one journal, of which each thread writes its own part: the home all but
//! the slots of lanes, a lane its slots and the counts of the queues that it serves. No word has two
//! writers: the home stores to a queue's record before it gives the queue away, and again when the
//! lane has given it up. Which lane a command was on means nothing to a successor, which may have
//! another number of them: its home takes steps 1, 2 and 5 to 7 for all queues before there is any
//! lane, and then gives each queue with its commands to whoever serves it now. A slot that is another
//! part's is copied first and freed then; of two slots for one command one is freed. A snapshot is
//! the home's: of a lane's queue it has what never changes. So what a snapshot cannot know is with
//! the queue's counts: what its shadow doorbells held when they were named, and whether the guest has
//! changed them since, under the number of that Doorbell Buffer Config.
//!
//! Every queue has an epoch, new whenever one is made: slots of another epoch are of a queue that is
//! no more. The queues' own memory is the guest's and is believed no more than before.
//!
//! Cost: without a journal a branch per step; with one about forty stores to lines of our own per
//! command, no system call, no lock.

use std::ops::Range;
use std::sync::atomic::Ordering;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::status::Status;
use slipway_ram::{Lasting, Snapshots};
use zerocopy::{FromBytes, IntoBytes};

use crate::Limits;

/// First word of a journal, with the layout's version in its lowest byte.
const MAGIC: u64 = 0x534c_4950_4e56_4d00 | LAYOUT as u64;
const LAYOUT: u32 = 3;

/// Version of all that a journal holds. A controller goes on with a journal of this version only.
pub const JOURNAL_VERSION: u32 = LAYOUT << 16 | crate::state::VERSION;
/// Words before the queues.
const HEAD_WORDS: usize = 8;
/// Words of a lane's own head: a cache line, of which one word is used.
const LANE_WORDS: usize = 8;
/// Most threads whose slots there may be.
const MOST_PARTS: usize = 64;
/// Words of a queue's record: a cache line.
const QUEUE_WORDS: usize = 8;
/// Words of a slot: the entry's cache line and another one.
const SLOT_WORDS: usize = 16;
/// Bytes for the two snapshots.
const SNAPSHOT_BYTES: usize = 2 << 20;
/// Admin commands that may be in flight beside what [`Limits::in_flight`] bounds.
const ADMIN_SLOTS: usize = 4096 + 64;

/// Words of the head.
const HEAD_MAGIC: usize = 0;
const HEAD_EPOCH: usize = 1;
/// The home's slots that were ever used.
const HEAD_USED: usize = 2;
/// Words of a queue's record.
const TAKEN_EPOCH: usize = 0;
const TAKEN: usize = 1;
const POSTED_EPOCH: usize = 2;
const POSTED: usize = 3;
/// Of the doorbell of either side: what its shadow entry held at first, below the number of the
/// pages; and that number once the guest has changed it.
const FOLLOWED: [usize; 2] = [4, 6];
const MOVED: [usize; 2] = [5, 7];
/// Words of a slot after the entry's eight.
const NUMBER: usize = 8;
const PLACE: usize = 9;
const RESULT: usize = 10;
const STATE: usize = 11;

/// Values of the lowest byte of a slot's state; above it: queue (16 bits), epoch (32 bits).
const FREE: u64 = 0;
const FETCHED: u64 = 1;
const COMPLETING: u64 = 2;
const EVENT: u64 = 3;
const PAIRED: u64 = 4;
const DECIDED: u64 = 5;

/// A command's slot, if there is a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u32);

impl Ticket {
    /// Of no command.
    pub const NONE: Self = Self(u32::MAX);
}

/// Which of a queue number's doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// That of the submission queue.
    Tail,
    /// That of the completion queue.
    Head,
}

/// How a command ended, as a snapshot remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// With this status and result.
    Ended(Status, u32),
    /// It is part of the snapshot (an outstanding Asynchronous Event Request).
    Kept,
}

/// A slot that is in use.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub ticket: Ticket,
    /// Its submission queue, and that queue's epoch.
    pub queue: u16,
    pub epoch: u32,
    /// Its number in the queue, from 0.
    pub number: u64,
    pub entry: SubmissionEntry,
    pub stage: Stage,
}

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Fetched,
    /// The second half of a fused pair, of which nothing is decided.
    Paired,
    /// The second half of a fused pair, whose comparison has held (success), or which ends with this.
    Decided(Status),
    /// Its completion is entry `place` of its completion queue, counted from 0.
    Completing {
        place: u64,
        status: Status,
        result: u32,
    },
    /// As `Completing`, for an outstanding Asynchronous Event Request: `result` says which event.
    Event {
        place: u64,
        status: Status,
        result: u32,
    },
}

/// See the module's head.
pub(crate) struct Journal {
    head: Lasting,
    queues: Lasting,
    /// Of all threads.
    slots: Lasting,
    /// None: it is a lane's part.
    snapshots: Option<Snapshots>,
    /// The heads of lanes.
    lanes: Lasting,
    /// What each thread has of the slots.
    ranges: Vec<Range<u32>>,
    /// Which of them is this one's: 0 is the home's.
    own: usize,
    free: Vec<u32>,
    /// The first of its own slots that was never used.
    used: u32,
    epoch: u32,
}

/// Bytes of memory that the journal of a controller with these limits takes. Most of it is never
/// touched.
pub fn journal_len(limits: &Limits) -> usize {
    let queues = (usize::from(limits.queue_pairs) + 1) * QUEUE_WORDS;
    let lanes = usize::from(limits.lanes) - 1;
    let slots = slots(limits) + lanes * limits.in_flight as usize;
    8 * (HEAD_WORDS + queues + MOST_PARTS * LANE_WORDS + slots * SLOT_WORDS) + SNAPSHOT_BYTES
}

/// The home's.
fn slots(limits: &Limits) -> usize {
    limits.in_flight as usize + ADMIN_SLOTS
}

/// What each thread has of the slots, as many as `all` is enough for.
fn ranges(all: usize, limits: &Limits) -> Option<Vec<Range<u32>>> {
    let (home, lane) = (slots(limits), limits.in_flight as usize);
    let lanes = all.checked_sub(home)? / lane;
    let start = |lanes: usize| (home + lanes * lane) as u32;
    let lanes = (0..lanes.min(MOST_PARTS - 1)).map(|at| start(at)..start(at + 1));
    Some(std::iter::once(0..home as u32).chain(lanes).collect())
}

impl Journal {
    /// In `memory`, which is fresh or a predecessor's. None: too short, or of another layout.
    pub fn new(memory: &Lasting, limits: &Limits) -> Option<Self> {
        let (head, rest) = memory.split(8 * HEAD_WORDS)?;
        let (queues, rest) = rest.split(8 * (usize::from(limits.queue_pairs) + 1) * QUEUE_WORDS)?;
        let (lanes, rest) = rest.split(8 * MOST_PARTS * LANE_WORDS)?;
        let (snapshots, slots) = rest.split(SNAPSHOT_BYTES)?;
        let ranges = ranges(slots.len() / (8 * SLOT_WORDS), limits)?;
        let word = |at: usize| head.words()[at].load(Ordering::Acquire);
        if word(HEAD_MAGIC) != 0 && word(HEAD_MAGIC) != MAGIC {
            return None;
        }
        let epoch = word(HEAD_EPOCH) as u32;
        let snapshots = Some(Snapshots::new(&snapshots)?);
        let free = Vec::with_capacity(ranges[0].len());
        let (own, used) = (0, 0);
        let mut journal =
            Self { head, queues, slots, snapshots, lanes, ranges, own, free, used, epoch };
        for part in 0..journal.ranges.len() {
            journal.used_of(part)?;
        }
        journal.used = journal.used_of(0)?;
        store(&journal.head, HEAD_MAGIC, MAGIC);
        Some(journal)
    }

    /// The part of lane `lane`, from 1, as it is. None: there is none.
    pub fn part(&self, lane: usize) -> Option<Self> {
        let used = self.used_of(lane)?;
        let range = self.ranges.get(lane)?.clone();
        let mut free = Vec::with_capacity(range.len());
        free.extend((range.start..used).rev().filter(|slot| self.found(Ticket(*slot)).is_none()));
        Some(Self {
            head: self.head.clone(),
            queues: self.queues.clone(),
            slots: self.slots.clone(),
            snapshots: None,
            lanes: self.lanes.clone(),
            ranges: self.ranges.clone(),
            own: lane,
            free,
            used,
            epoch: 0,
        })
    }

    /// Threads that there are slots for, the home's own included.
    pub fn parts(&self) -> usize {
        self.ranges.len()
    }

    /// Whether it is a slot of this thread.
    pub fn owns(&self, ticket: Ticket) -> bool {
        self.ranges[self.own].contains(&ticket.0)
    }

    /// The first slot of a part that was never used: a successor looks at no others. None: it cannot
    /// be.
    fn used_of(&self, part: usize) -> Option<u32> {
        let range = self.ranges.get(part)?;
        let count = match part {
            0 => load(&self.head, HEAD_USED),
            lane => load(&self.lanes, lane * LANE_WORDS),
        };
        let used = range.start.checked_add(u32::try_from(count).ok()?)?;
        (used <= range.end).then_some(used)
    }

    /// An epoch that no queue had before.
    pub fn next_epoch(&mut self) -> u32 {
        self.epoch = self.epoch.wrapping_add(1);
        store(&self.head, HEAD_EPOCH, self.epoch.into());
        self.epoch
    }

    /// A submission queue `queue` is made; gives its epoch.
    pub fn open_submission(&mut self, queue: u16) -> u32 {
        let epoch = self.next_epoch();
        self.store_queue(queue, MOVED[Side::Tail as usize], 0);
        self.store_queue(queue, TAKEN, 0);
        self.store_queue(queue, TAKEN_EPOCH, epoch.into());
        epoch
    }

    /// A completion queue `queue` is made.
    pub fn open_completion(&mut self, queue: u16) {
        let epoch = self.next_epoch();
        self.store_queue(queue, MOVED[Side::Head as usize], 0);
        self.store_queue(queue, POSTED, 0);
        self.store_queue(queue, POSTED_EPOCH, epoch.into());
    }

    /// Entries taken off submission queue `queue`, and its epoch.
    pub fn taken(&self, queue: u16) -> (u64, u32) {
        (self.load_queue(queue, TAKEN), self.load_queue(queue, TAKEN_EPOCH) as u32)
    }

    /// Entries written to completion queue `queue`.
    pub fn posted(&self, queue: u16) -> u64 {
        self.load_queue(queue, POSTED)
    }

    /// The shadow entry of a doorbell is looked at from now on, in the pages of this number; it holds
    /// `seen`.
    pub fn follow(&self, queue: u16, side: Side, pages: u32, seen: u32) {
        let word = u64::from(pages) << 32 | u64::from(seen);
        self.store_queue(queue, FOLLOWED[side as usize], word);
    }

    /// The guest has changed it.
    pub fn moved(&self, queue: u16, side: Side, pages: u32) {
        self.store_queue(queue, MOVED[side as usize], pages.into());
    }

    /// What the shadow entry held at first, and whether the guest has changed it; None: it is not
    /// looked at yet.
    pub fn followed(&self, queue: u16, side: Side, pages: u32) -> Option<(u32, bool)> {
        let word = self.load_queue(queue, FOLLOWED[side as usize]);
        let moved = self.load_queue(queue, MOVED[side as usize]) == u64::from(pages);
        ((word >> 32) as u32 == pages).then_some((word as u32, moved))
    }

    /// Entry `number` of `queue` was fetched (steps 1 and 2).
    pub fn begin(
        &mut self,
        queue: u16,
        epoch: u32,
        number: u64,
        entry: &SubmissionEntry,
    ) -> Ticket {
        let ticket = self.fill(number, entry);
        self.set_state(ticket, FETCHED, queue, epoch);
        self.set_taken(queue, number + 1);
        ticket
    }

    /// Entries `number` and the next of `queue` were fetched, a fused pair (steps 1 and 2 of both).
    pub fn begin_pair(
        &mut self,
        queue: u16,
        epoch: u32,
        number: u64,
        [first, second]: [&SubmissionEntry; 2],
    ) -> [Ticket; 2] {
        let paired = self.fill(number + 1, second);
        self.set_state(paired, PAIRED, queue, epoch);
        let ticket = self.fill(number, first);
        self.set_state(ticket, FETCHED, queue, epoch);
        self.set_taken(queue, number + 2);
        [ticket, paired]
    }

    /// The second half of a fused pair is to be carried out (success), or ends with `status`.
    pub fn decide(&self, ticket: Ticket, status: Status) {
        let Some(state) = self.state(ticket) else { return };
        // One store, should it have been decided before: then with an error, and nobody was told.
        self.store_slot(ticket, RESULT, u64::from(status.0) << 32);
        self.store_slot(ticket, STATE, state & !0xff | DECIDED);
    }

    pub fn set_taken(&self, queue: u16, count: u64) {
        self.store_queue(queue, TAKEN, count);
    }

    /// The command's end will be entry `place` of its completion queue (step 4).
    pub fn completing(&self, ticket: Ticket, place: u64, status: Status, result: u32) {
        let Some(state) = self.state(ticket) else { return };
        self.store_end(ticket, place, status, result);
        let state = if state & 0xff == EVENT { state } else { state & !0xff | COMPLETING };
        self.store_slot(ticket, STATE, state);
    }

    fn store_end(&self, ticket: Ticket, place: u64, status: Status, result: u32) {
        self.store_slot(ticket, PLACE, place);
        self.store_slot(ticket, RESULT, u64::from(status.0) << 32 | u64::from(result));
    }

    /// A slot for the end of the outstanding Asynchronous Event Request `id`, as entry `place` of the
    /// admin completion queue. It begins at step 4.
    pub fn begin_event(
        &mut self,
        epoch: u32,
        id: u16,
        place: u64,
        (status, result): (Status, u32),
    ) -> Ticket {
        let ticket = self.fill(0, &SubmissionEntry { id: id.into(), ..SubmissionEntry::default() });
        self.store_end(ticket, place, status, result);
        self.set_state(ticket, EVENT, 0, epoch);
        ticket
    }

    /// Completion queue `queue` has `count` entries now (step 6).
    pub fn set_posted(&self, queue: u16, count: u64) {
        self.store_queue(queue, POSTED, count);
    }

    /// The slot is free (step 7).
    pub fn end(&mut self, ticket: Ticket) {
        if ticket != Ticket::NONE {
            self.store_slot(ticket, STATE, FREE);
            if self.owns(ticket) {
                self.free.push(ticket.0);
            }
        }
    }

    /// Copies the slot of a command that has not ended, of another thread, to one of its own.
    pub fn adopt(&mut self, found: &Found) -> Ticket {
        let ticket = self.fill(found.number, &found.entry);
        let stage = match found.stage {
            Stage::Decided(status) => {
                self.store_slot(ticket, RESULT, u64::from(status.0) << 32);
                DECIDED
            }
            Stage::Paired => PAIRED,
            Stage::Fetched | Stage::Completing { .. } | Stage::Event { .. } => FETCHED,
        };
        self.set_state(ticket, stage, found.queue, found.epoch);
        ticket
    }

    /// Writes a snapshot; `done` is the command that it has the effect of. False: it is too long,
    /// and a successor would go on from an older one.
    #[must_use]
    pub fn snapshot(&self, done: Option<(Ticket, Done)>, state: &[u8]) -> bool {
        let mut words = [0u64; 3];
        if let Some((ticket, done)) = done
            && let Some(found) = self.found(ticket)
        {
            words[0] = 1 | u64::from(found.epoch) << 32;
            words[1] = found.number;
            words[2] = match done {
                Done::Ended(status, result) => u64::from(status.0) << 32 | u64::from(result),
                Done::Kept => u64::MAX,
            };
        }
        let mut bytes = Vec::with_capacity(24 + state.len());
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend_from_slice(state);
        point();
        let stored = self.snapshots.as_ref().is_none_or(|snapshots| snapshots.store(&bytes));
        point();
        stored
    }

    /// The last snapshot: the admin command (epoch and number) that it has the effect of, and the
    /// state.
    #[allow(clippy::type_complexity)]
    pub fn last_snapshot(&self) -> Option<(Option<((u32, u64), Done)>, Vec<u8>)> {
        let bytes = self.snapshots.as_ref()?.load()?;
        let (words, state) = bytes.split_at_checked(24)?;
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&words[8 * at..8 * at + 8]);
            u64::from_le_bytes(bytes)
        };
        let done = match word(2) {
            u64::MAX => Done::Kept,
            value => Done::Ended(Status((value >> 32) as u16), value as u32),
        };
        let command = ((word(0) >> 32) as u32, word(1));
        Some(((word(0) & 1 == 1).then_some((command, done)), state.to_vec()))
    }

    /// Every slot in use, of all threads. Those of its own that are not are free from here on.
    pub fn recover(&mut self) -> Vec<Found> {
        let mut all = Vec::new();
        self.free.clear();
        for part in 0..self.ranges.len() {
            let (start, used) = (self.ranges[part].start, self.used_of(part).unwrap_or(0));
            for slot in (start..used).rev() {
                match self.found(Ticket(slot)) {
                    Some(found) => all.push(found),
                    None if part == self.own => self.free.push(slot),
                    None => {}
                }
            }
        }
        all
    }

    /// Frees every slot of its own: no command is under way any more.
    pub fn end_own(&mut self) {
        for found in self.recover() {
            if self.owns(found.ticket) {
                self.end(found.ticket);
            }
        }
    }

    fn found(&self, ticket: Ticket) -> Option<Found> {
        let state = self.state(ticket)?;
        let place = self.load_slot(ticket, PLACE);
        let result = self.load_slot(ticket, RESULT);
        let (status, result) = (Status((result >> 32) as u16), result as u32);
        let stage = match state & 0xff {
            FETCHED => Stage::Fetched,
            COMPLETING => Stage::Completing { place, status, result },
            EVENT => Stage::Event { place, status, result },
            PAIRED => Stage::Paired,
            DECIDED => Stage::Decided(status),
            _ => return None,
        };
        let mut bytes = [0u8; 64];
        for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&self.load_slot(ticket, at).to_ne_bytes());
        }
        let entry = SubmissionEntry::read_from_bytes(&bytes).ok()?;
        let (queue, epoch) = ((state >> 8) as u16, (state >> 32) as u32);
        Some(Found { ticket, queue, epoch, number: self.load_slot(ticket, NUMBER), entry, stage })
    }

    /// Takes a slot and fills in what does not make it count yet.
    fn fill(&mut self, number: u64, entry: &SubmissionEntry) -> Ticket {
        let Some(ticket) = self.allocate() else { return Ticket::NONE };
        let bytes = entry.as_bytes();
        for (at, chunk) in bytes.chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.store_slot(ticket, at, u64::from_ne_bytes(word));
        }
        self.store_slot(ticket, NUMBER, number);
        ticket
    }

    fn allocate(&mut self) -> Option<Ticket> {
        if let Some(slot) = self.free.pop() {
            return Some(Ticket(slot));
        }
        let (slot, range) = (self.used, &self.ranges[self.own]);
        if slot >= range.end {
            debug_assert!(false, "there are as many slots as commands");
            return None;
        }
        self.used += 1;
        let count = u64::from(self.used - range.start);
        match self.own {
            0 => store(&self.head, HEAD_USED, count),
            lane => store(&self.lanes, lane * LANE_WORDS, count),
        }
        Some(Ticket(slot))
    }

    fn set_state(&self, ticket: Ticket, stage: u64, queue: u16, epoch: u32) {
        let state = stage | u64::from(queue) << 8 | u64::from(epoch) << 32;
        self.store_slot(ticket, STATE, state);
    }

    fn state(&self, ticket: Ticket) -> Option<u64> {
        (ticket != Ticket::NONE).then(|| self.load_slot(ticket, STATE))
    }

    fn store_slot(&self, ticket: Ticket, word: usize, value: u64) {
        if ticket != Ticket::NONE {
            store(&self.slots, ticket.0 as usize * SLOT_WORDS + word, value);
        }
    }

    fn load_slot(&self, ticket: Ticket, word: usize) -> u64 {
        load(&self.slots, ticket.0 as usize * SLOT_WORDS + word)
    }

    fn store_queue(&self, queue: u16, word: usize, value: u64) {
        store(&self.queues, usize::from(queue) * QUEUE_WORDS + word, value);
    }

    fn load_queue(&self, queue: u16, word: usize) -> u64 {
        load(&self.queues, usize::from(queue) * QUEUE_WORDS + word)
    }
}

/// Every store to a journal is this one; in tests the process may end on either side of it.
fn store(memory: &Lasting, word: usize, value: u64) {
    point();
    if let Some(word) = memory.words().get(word) {
        word.store(value, Ordering::Release);
    }
    point();
}

fn load(memory: &Lasting, word: usize) -> u64 {
    memory.words().get(word).map_or(0, |word| word.load(Ordering::Acquire))
}

#[cfg(not(test))]
#[inline(always)]
fn point() {}

#[cfg(test)]
pub(crate) use testing::point;

#[cfg(test)]
pub(crate) mod testing {
    use std::cell::Cell;

    thread_local!(static LEFT: Cell<Option<u64>> = const { Cell::new(None) });

    /// What a test's "kill" unwinds with.
    pub struct Killed;

    /// Kills after `points` more points; None: never.
    pub fn kill_after(points: Option<u64>) {
        LEFT.set(points);
    }

    pub fn point() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                std::panic::resume_unwind(Box::new(Killed));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
