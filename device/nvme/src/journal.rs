//! The journal: memory that outlives the process, so that a successor can go on after a kill at any
//! instruction.
//!
//! A controller with a journal ([`Parts::journal`](crate::Parts::journal)) keeps the following in
//! memory that outlives the process ([`Lasting`]); its host keeps the doorbell cells there, too:
//! - a *snapshot* of everything that admin commands and registers change (the saved state), written
//!   whenever one of them has changed it and before the guest can see the change;
//! - for each queue, how many entries were taken off it and how many were written to it;
//! - for each command in flight, a *slot* with a copy of its entry, since the guest may reuse the
//!   entry's place in the ring before the command ends.
//!
//! No store changes two words at once: every store is release-ordered, the reader sees a prefix of
//! the stores, and each prefix has one meaning. The steps of a command:
//! 1. Its slot is filled: the entry, the number, and last the word that makes the slot `FETCHED`.
//! 2. Its queue's count of taken entries rises. If a successor finds the slot but not the risen
//!    count, it raises the count itself and does not fetch the entry again.
//! 3. The command is carried out. A successor carries out every `FETCHED` command again: reads,
//!    writes and flushes may be done twice as long as the guest was not told of their end.
//! 4. Its slot becomes `COMPLETING`, with the status and the place of the completion queue entry.
//!    From here on the command is never carried out again: the guest may know of its end and reuse
//!    its buffer.
//! 5. The completion queue entry is written. A successor that finds step 4 done and step 6 not done
//!    writes the entry again: the same bytes, to a place that the guest either has not looked at
//!    yet, or will not look at before the queue has gone round.
//! 6. The queue's count of written entries rises.
//! 7. The slot is freed.
//!
//! A fused Compare and Write needs more than the steps of its two commands. Either nothing of the
//! pair has happened, and the whole pair is carried out again; or its comparison has held, and
//! nothing is compared again, since the comparison might find the pair's own write. The slot of the
//! second half tells the two cases apart:
//! - Steps 1 and 2 are taken for both halves together: the second slot is filled first, as
//!   `PAIRED`, then the first slot, as `FETCHED`, and then both entries are counted at once. A
//!   `PAIRED` slot without its first half belongs to a pair that was not fetched: the slot is
//!   freed, and both entries are fetched again.
//! - As long as nothing is decided, the successor carries out the pair again, from its comparison
//!   on: the write has not begun, and the guest was told of no end.
//! - Before the first half's step 4, and before the write may touch the disk, the second slot
//!   becomes `DECIDED`, with a status. Success: the comparison held, so the first half ends with
//!   success, and only the write, which may have been done, is carried out again. An error: the
//!   second half ends with that status once the first half has ended. If the first half is still
//!   `FETCHED`, the guest was told of nothing, and the pair begins anew.
//!
//! Repeating a command must not be visible. Suppose that a write from elsewhere was done, that a
//! pair compared with its data, and that the write was then repeated over the pair's write: that
//! would undo the pair. So a pair is fetched only when nothing else of the controller's I/O queues
//! is in flight, and nothing else is fetched before the pair has ended (`IoEngine::exclusive`).
//! No journal has a pair beside another command that has not ended.
//!
//! An admin command changes the snapshot as well. Between steps 3 and 4 a snapshot is written that
//! has both the change and the command's number and status, so the command is carried out exactly
//! once. An asynchronous event is posted with a slot of its own, since the slot of its request was
//! freed long before.
//!
//! A controller with lanes has one journal, and each thread writes its own part of it: a lane
//! writes its slots and the counts of the queues that it serves, the home writes everything else.
//! No word has two writers: the home stores to a queue's record before it gives the queue away, and
//! again after the lane has given the queue up. The lane that a command was on means nothing to a
//! successor, which may have another number of lanes. The successor's home takes steps 1, 2 and 5
//! to 7 for all queues before there is any lane, and then gives each queue with its commands to the
//! thread that serves the queue now. A slot in another thread's part is copied first and freed
//! afterwards; of two slots for one command, one is freed. The home writes the snapshot; of a
//! lane's queue the snapshot has only what never changes. What a snapshot cannot know lies beside
//! the queue's counts: what the queue's shadow doorbells held when Doorbell Buffer Config named
//! them, and whether the guest has changed them since, under the number of that command.
//!
//! Every queue has an epoch, which is new whenever a queue is made: a slot of another epoch belongs
//! to a queue that no longer exists. The queues' own memory is the guest's, and is trusted no more
//! than without a journal.
//!
//! Cost: without a journal, a branch per step. With a journal, about forty stores per command to
//! cache lines that only the controller uses, no system call and no lock.
//!
//! Over 500 lines: the order of stores across all parts of the journal is read in one place.

use std::ops::Range;
use std::sync::atomic::Ordering;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::status::Status;
use slipway_ram::{Lasting, Snapshots};
use zerocopy::{FromBytes, IntoBytes};

use crate::cell::{Cell, ShadowPages};
use crate::parts::Limits;

/// The first word of a journal. Its lowest byte is the version of the layout.
const MAGIC: u64 = 0x534c_4950_4e56_4d00 | LAYOUT as u64;
pub(crate) const LAYOUT: u32 = 3;

/// The number of words before the queues.
const HEAD_WORDS: usize = 8;
/// The number of words of a lane's head: a cache line, of which one word is used.
const LANE_WORDS: usize = 8;
/// The most threads that may have slots.
const MOST_PARTS: usize = 64;
/// The number of words of a queue's record: a cache line.
const QUEUE_WORDS: usize = 8;
/// The number of words of a slot: the cache line of the entry and another one.
const SLOT_WORDS: usize = 16;
/// Bytes for the two snapshots.
const SNAPSHOT_BYTES: usize = 2 << 20;
/// Slots for admin commands that may be in flight beside the commands that [`Limits::in_flight`]
/// bounds.
const ADMIN_SLOTS: usize = 4096 + 64;

/// Indexes of the head's words.
const HEAD_MAGIC: usize = 0;
const HEAD_EPOCH: usize = 1;
/// The number of the home's slots that were ever used.
const HEAD_USED: usize = 2;
/// Indexes of the words of a queue's record.
const TAKEN_EPOCH: usize = 0;
const TAKEN: usize = 1;
const POSTED_EPOCH: usize = 2;
const POSTED: usize = 3;
/// Words for the tail and the head doorbell: `FOLLOWED` has the number of the shadow pages (high
/// half) and what the shadow entry held at first (low half); `MOVED` has the number of the pages
/// once the guest has changed the entry.
const FOLLOWED: [usize; 2] = [4, 6];
const MOVED: [usize; 2] = [5, 7];
/// Indexes of the words of a slot that follow the entry's eight.
const NUMBER: usize = 8;
const PLACE: usize = 9;
const RESULT: usize = 10;
const STATE: usize = 11;

/// Values of the lowest byte of a slot's state. Above it lie the queue (16 bits) and the epoch (32
/// bits).
const FREE: u64 = 0;
const FETCHED: u64 = 1;
const COMPLETING: u64 = 2;
const EVENT: u64 = 3;
const PAIRED: u64 = 4;
const DECIDED: u64 = 5;

/// The number of a command's slot; [`SlotNumber::NONE`] without a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotNumber(u32);

impl SlotNumber {
    /// The number that stands for no slot.
    pub const NONE: Self = Self(u32::MAX);
}

/// One of the two doorbells of a queue number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The doorbell of the submission queue.
    Tail,
    /// The doorbell of the completion queue.
    Head,
}

/// The end of a command as a snapshot remembers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    /// The command ended with this status and result.
    Ended(Status, u32),
    /// The command is part of the snapshot: an outstanding Asynchronous Event Request.
    Kept,
}

impl Done {
    /// Returns the command's status and result, or `None` if it is outstanding.
    pub fn ended(self) -> Option<(Status, u32)> {
        match self {
            Self::Ended(status, result) => Some((status, result)),
            Self::Kept => None,
        }
    }
}

/// The last admin command whose effect a snapshot contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastAdmin {
    /// The epoch of the admin queue.
    pub epoch: u32,
    /// The command's number in the queue, from 0.
    pub number: u64,
    /// The command's end.
    pub done: Done,
}

impl LastAdmin {
    /// Returns whether `slot` is the command's.
    pub fn is(&self, slot: &UsedSlot) -> bool {
        slot.queue == 0 && (slot.epoch, slot.number) == (self.epoch, self.number)
    }
}

/// A slot that is in use.
#[derive(Clone, Debug)]
pub(crate) struct UsedSlot {
    pub slot_number: SlotNumber,
    /// The submission queue, and that queue's epoch.
    pub queue: u16,
    pub epoch: u32,
    /// The command's number in the queue, from 0.
    pub number: u64,
    pub entry: SubmissionEntry,
    pub stage: Stage,
}

/// How far a command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Fetched,
    /// The second half of a fused pair, as long as nothing is decided.
    Paired,
    /// The second half of a fused pair. With success its comparison has held; with an error the
    /// half ends with that status.
    Decided(Status),
    /// The command's completion is entry `place` of its completion queue, counted from 0.
    Completing {
        place: u64,
        status: Status,
        result: u32,
    },
    /// The end of an outstanding Asynchronous Event Request, with the fields of `Completing`;
    /// `result` says which event.
    Event {
        place: u64,
        status: Status,
        result: u32,
    },
}

/// A controller's journal, or a lane's part of one. The module's head has the protocol.
pub(crate) struct Journal {
    head: Lasting,
    queues: Lasting,
    /// The slots of all threads.
    slots: Lasting,
    /// The snapshots. `None` in a lane's part.
    snapshots: Option<Snapshots>,
    /// The heads of lanes.
    lanes: Lasting,
    /// The slots of each thread.
    ranges: Vec<Range<u32>>,
    /// The index of this thread in `ranges`: 0 is the home.
    own: usize,
    free: Vec<u32>,
    /// The first of this thread's slots that was never used.
    used: u32,
    epoch: u32,
}

/// Returns how many bytes of memory the journal of a controller with these limits takes. Most of it
/// is never touched.
pub fn journal_len(limits: &Limits) -> usize {
    let queues = (usize::from(limits.queue_pairs) + 1) * QUEUE_WORDS;
    let lanes = usize::from(limits.lanes) - 1;
    let slots = slots(limits) + lanes * limits.in_flight as usize;
    8 * (HEAD_WORDS + queues + MOST_PARTS * LANE_WORDS + slots * SLOT_WORDS) + SNAPSHOT_BYTES
}

/// Returns the number of the home's slots.
fn slots(limits: &Limits) -> usize {
    limits.in_flight as usize + ADMIN_SLOTS
}

/// Divides `all` slots among the home and as many lanes as they are enough for. Returns `None` if
/// they are too few for the home.
fn ranges(all: usize, limits: &Limits) -> Option<Vec<Range<u32>>> {
    let (home, lane) = (slots(limits), limits.in_flight as usize);
    let lanes = all.checked_sub(home)? / lane;
    let start = |lanes: usize| (home + lanes * lane) as u32;
    let lanes = (0..lanes.min(MOST_PARTS - 1)).map(|at| start(at)..start(at + 1));
    Some(std::iter::once(0..home as u32).chain(lanes).collect())
}

impl Journal {
    /// Opens the journal in `memory`, which is zeroed or a predecessor's. Returns `None` if the
    /// memory is too short or of another layout.
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

    /// Returns the part of lane `lane`, counted from 1, in its present state. Returns `None` if the
    /// journal has no such part.
    pub fn part(&self, lane: usize) -> Option<Self> {
        let used = self.used_of(lane)?;
        let range = self.ranges.get(lane)?.clone();
        let mut free = Vec::with_capacity(range.len());
        free.extend(
            (range.start..used).rev().filter(|slot| self.found(SlotNumber(*slot)).is_none()),
        );
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

    /// Returns the number of threads that there are slots for, the home included.
    pub fn parts(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether the slot belongs to this thread.
    pub fn owns(&self, slot_number: SlotNumber) -> bool {
        self.ranges[self.own].contains(&slot_number.0)
    }

    /// Returns the first slot of a part that was never used: a successor looks only at the slots
    /// before it. Returns `None` if there is no such part, or if the stored count is out of range.
    fn used_of(&self, part: usize) -> Option<u32> {
        let range = self.ranges.get(part)?;
        let count = match part {
            0 => load(&self.head, HEAD_USED),
            lane => load(&self.lanes, lane * LANE_WORDS),
        };
        let used = range.start.checked_add(u32::try_from(count).ok()?)?;
        (used <= range.end).then_some(used)
    }

    /// Returns an epoch that no queue had before.
    pub fn next_epoch(&mut self) -> u32 {
        self.epoch = self.epoch.wrapping_add(1);
        store(&self.head, HEAD_EPOCH, self.epoch.into());
        self.epoch
    }

    /// Records that submission queue `queue` is made, and returns its epoch.
    pub fn open_submission(&mut self, queue: u16) -> u32 {
        let epoch = self.next_epoch();
        self.store_queue(queue, MOVED[Side::Tail as usize], 0);
        self.store_queue(queue, TAKEN, 0);
        self.store_queue(queue, TAKEN_EPOCH, epoch.into());
        epoch
    }

    /// Records that completion queue `queue` is made.
    pub fn open_completion(&mut self, queue: u16) {
        let epoch = self.next_epoch();
        self.store_queue(queue, MOVED[Side::Head as usize], 0);
        self.store_queue(queue, POSTED, 0);
        self.store_queue(queue, POSTED_EPOCH, epoch.into());
    }

    /// Returns how many entries were taken off submission queue `queue`, and its epoch.
    pub fn taken(&self, queue: u16) -> (u64, u32) {
        (self.load_queue(queue, TAKEN), self.load_queue(queue, TAKEN_EPOCH) as u32)
    }

    /// Returns how many entries were written to completion queue `queue`.
    pub fn posted(&self, queue: u16) -> u64 {
        self.load_queue(queue, POSTED)
    }

    /// Records that a doorbell's shadow entry, in the pages with number `pages`, is looked at from
    /// now on, and that it holds `seen`.
    pub fn follow(&self, queue: u16, side: Side, pages: u32, seen: u32) {
        let word = u64::from(pages) << 32 | u64::from(seen);
        self.store_queue(queue, FOLLOWED[side as usize], word);
    }

    /// Records that the guest has changed a doorbell's shadow entry in the pages with number
    /// `pages`.
    pub fn moved(&self, queue: u16, side: Side, pages: u32) {
        self.store_queue(queue, MOVED[side as usize], pages.into());
    }

    /// Records what a queue's doorbell has seen in the shadow pages `pages`, which are new.
    pub fn adopt_shadow(
        &self,
        (queue, side): (u16, Side),
        pages: Option<ShadowPages>,
        cell: &Cell,
    ) {
        let (Some(pages), Some((seen, moved))) = (pages, cell.shadow_seen()) else { return };
        self.follow(queue, side, pages.number, seen);
        if moved {
            self.moved(queue, side, pages.number);
        }
    }

    /// Returns what the shadow entry of a doorbell held at first, and whether the guest has changed
    /// it since. Returns `None` if the entry in these pages is not looked at yet.
    pub fn followed(&self, queue: u16, side: Side, pages: u32) -> Option<(u32, bool)> {
        let word = self.load_queue(queue, FOLLOWED[side as usize]);
        let moved = self.load_queue(queue, MOVED[side as usize]) == u64::from(pages);
        ((word >> 32) as u32 == pages).then_some((word as u32, moved))
    }

    /// Records that entry `number` of `queue` was fetched (steps 1 and 2).
    pub fn begin(
        &mut self,
        queue: u16,
        epoch: u32,
        number: u64,
        entry: &SubmissionEntry,
    ) -> SlotNumber {
        let slot_number = self.fill(number, entry);
        self.set_state(slot_number, FETCHED, queue, epoch);
        self.set_taken(queue, number + 1);
        slot_number
    }

    /// Records that entries `number` and `number + 1` of `queue` were fetched, a fused pair (steps
    /// 1 and 2 of both).
    pub fn begin_pair(
        &mut self,
        queue: u16,
        epoch: u32,
        number: u64,
        [first, second]: [&SubmissionEntry; 2],
    ) -> [SlotNumber; 2] {
        let paired = self.fill(number + 1, second);
        self.set_state(paired, PAIRED, queue, epoch);
        let slot_number = self.fill(number, first);
        self.set_state(slot_number, FETCHED, queue, epoch);
        self.set_taken(queue, number + 2);
        [slot_number, paired]
    }

    /// Records the decision on the second half of a fused pair: with success it is carried out,
    /// with another `status` it ends.
    pub fn decide(&self, slot_number: SlotNumber, status: Status) {
        let Some(state) = self.state(slot_number) else { return };
        // One store. If there was a decision before, it was an error and the guest was not told.
        self.store_slot(slot_number, RESULT, u64::from(status.0) << 32);
        self.store_slot(slot_number, STATE, state & !0xff | DECIDED);
    }

    pub fn set_taken(&self, queue: u16, count: u64) {
        self.store_queue(queue, TAKEN, count);
    }

    /// Records that the command's completion will be entry `place` of its completion queue (step
    /// 4).
    pub fn completing(&self, slot_number: SlotNumber, place: u64, status: Status, result: u32) {
        let Some(state) = self.state(slot_number) else { return };
        self.store_end(slot_number, place, status, result);
        let state = if state & 0xff == EVENT { state } else { state & !0xff | COMPLETING };
        self.store_slot(slot_number, STATE, state);
    }

    fn store_end(&self, slot_number: SlotNumber, place: u64, status: Status, result: u32) {
        self.store_slot(slot_number, PLACE, place);
        self.store_slot(slot_number, RESULT, u64::from(status.0) << 32 | u64::from(result));
    }

    /// Fills a slot for the end of the outstanding Asynchronous Event Request `id`, which will be
    /// entry `place` of the admin completion queue. The slot begins at step 4.
    pub fn begin_event(
        &mut self,
        epoch: u32,
        id: u16,
        place: u64,
        (status, result): (Status, u32),
    ) -> SlotNumber {
        let slot_number =
            self.fill(0, &SubmissionEntry { id: id.into(), ..SubmissionEntry::default() });
        self.store_end(slot_number, place, status, result);
        self.set_state(slot_number, EVENT, 0, epoch);
        slot_number
    }

    /// Records that `count` entries were written to completion queue `queue` (step 6).
    pub fn set_posted(&self, queue: u16, count: u64) {
        self.store_queue(queue, POSTED, count);
    }

    /// Frees the slot (step 7).
    pub fn end(&mut self, slot_number: SlotNumber) {
        if slot_number != SlotNumber::NONE {
            self.store_slot(slot_number, STATE, FREE);
            if self.owns(slot_number) {
                self.free.push(slot_number.0);
            }
        }
    }

    /// Copies another thread's slot, of a command that has not ended, to a slot of this thread.
    pub fn adopt(&mut self, found: &UsedSlot) -> SlotNumber {
        let slot_number = self.fill(found.number, &found.entry);
        let stage = match found.stage {
            Stage::Decided(status) => {
                self.store_slot(slot_number, RESULT, u64::from(status.0) << 32);
                DECIDED
            }
            Stage::Paired => PAIRED,
            Stage::Fetched | Stage::Completing { .. } | Stage::Event { .. } => FETCHED,
        };
        self.set_state(slot_number, stage, found.queue, found.epoch);
        slot_number
    }

    /// Writes a snapshot; `done` is the command whose effect the snapshot contains. Returns `false`
    /// if the snapshot is too long: a successor would then go on from an older one.
    #[must_use]
    pub fn snapshot(&self, done: Option<(SlotNumber, Done)>, state: &[u8]) -> bool {
        let mut words = [0u64; 3];
        if let Some((slot_number, done)) = done
            && let Some(found) = self.found(slot_number)
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

    /// Returns the last snapshot: the admin command whose effect it contains, if there is one, and
    /// the state.
    pub fn last_snapshot(&self) -> Option<(Option<LastAdmin>, Vec<u8>)> {
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
        let last = LastAdmin { epoch: (word(0) >> 32) as u32, number: word(1), done };
        Some(((word(0) & 1 == 1).then_some(last), state.to_vec()))
    }

    /// Returns every slot in use, of all threads, and makes the unused slots of this thread free.
    pub fn recover(&mut self) -> Vec<UsedSlot> {
        let mut all = Vec::new();
        self.free.clear();
        for part in 0..self.ranges.len() {
            let (start, used) = (self.ranges[part].start, self.used_of(part).unwrap_or(0));
            for slot in (start..used).rev() {
                match self.found(SlotNumber(slot)) {
                    Some(found) => all.push(found),
                    None if part == self.own => self.free.push(slot),
                    None => {}
                }
            }
        }
        all
    }

    /// Frees every slot of this thread. The caller has made sure that no command is in flight.
    pub fn end_own(&mut self) {
        for found in self.recover() {
            if self.owns(found.slot_number) {
                self.end(found.slot_number);
            }
        }
    }

    fn found(&self, slot_number: SlotNumber) -> Option<UsedSlot> {
        let state = self.state(slot_number)?;
        let place = self.load_slot(slot_number, PLACE);
        let result = self.load_slot(slot_number, RESULT);
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
            chunk.copy_from_slice(&self.load_slot(slot_number, at).to_ne_bytes());
        }
        let entry = SubmissionEntry::read_from_bytes(&bytes).ok()?;
        let (queue, epoch) = ((state >> 8) as u16, (state >> 32) as u32);
        Some(UsedSlot {
            slot_number,
            queue,
            epoch,
            number: self.load_slot(slot_number, NUMBER),
            entry,
            stage,
        })
    }

    /// Takes a free slot and fills in everything but its state word, so that the slot does not
    /// count yet.
    fn fill(&mut self, number: u64, entry: &SubmissionEntry) -> SlotNumber {
        let Some(slot_number) = self.allocate() else { return SlotNumber::NONE };
        let bytes = entry.as_bytes();
        for (at, chunk) in bytes.chunks_exact(8).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(chunk);
            self.store_slot(slot_number, at, u64::from_ne_bytes(word));
        }
        self.store_slot(slot_number, NUMBER, number);
        slot_number
    }

    fn allocate(&mut self) -> Option<SlotNumber> {
        if let Some(slot) = self.free.pop() {
            return Some(SlotNumber(slot));
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
        Some(SlotNumber(slot))
    }

    fn set_state(&self, slot_number: SlotNumber, stage: u64, queue: u16, epoch: u32) {
        let state = stage | u64::from(queue) << 8 | u64::from(epoch) << 32;
        self.store_slot(slot_number, STATE, state);
    }

    fn state(&self, slot_number: SlotNumber) -> Option<u64> {
        (slot_number != SlotNumber::NONE).then(|| self.load_slot(slot_number, STATE))
    }

    fn store_slot(&self, slot_number: SlotNumber, word: usize, value: u64) {
        if slot_number != SlotNumber::NONE {
            store(&self.slots, slot_number.0 as usize * SLOT_WORDS + word, value);
        }
    }

    fn load_slot(&self, slot_number: SlotNumber, word: usize) -> u64 {
        load(&self.slots, slot_number.0 as usize * SLOT_WORDS + word)
    }

    fn store_queue(&self, queue: u16, word: usize, value: u64) {
        store(&self.queues, usize::from(queue) * QUEUE_WORDS + word, value);
    }

    fn load_queue(&self, queue: u16, word: usize) -> u64 {
        load(&self.queues, usize::from(queue) * QUEUE_WORDS + word)
    }
}

/// Stores a word. Every store to a journal's words is made here, so that tests can end the process
/// on either side of it.
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

    /// The payload with which a test's "kill" unwinds.
    pub struct Killed;

    /// Kills after `points` more points; never if `points` is `None`.
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
