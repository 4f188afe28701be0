//! The bounds of a *turn*, the work of one poll of the controller, so that functions that share a
//! thread are served fairly.
//!
//! A turn has two bounds ([`Quota`]): the number of I/O commands that it starts, of one queue after
//! the other, and the number of bytes that it hands to disks which copy on this thread
//! ([`Disk::copies`]). Both are counts, so a turn is the same on every machine and reads no clock.
//!
//! - A request with more bytes than the turn has left is split into pieces ([`Feeder`]): the
//!   remaining pieces go to the disk in later turns. No command is fetched until all requests have
//!   gone to their disks: commands stay in the guest's memory.
//! - A command with a long PRP list or SGL counts as several commands ([`commands_of`]).
//! - If a turn runs out of bytes, the next turn begins with the namespace after the last one that
//!   was served. So a long command delays no other namespace's commands.
//!
//! A disk that does not copy gets all requests of a poll as one batch, and decides itself how many
//! of them its medium works on at a time. A disk that copies for some reads only, as an overlay
//! does, is told the bytes that the turn has left, and leaves further reads for later polls
//! ([`Disk::allow`]). The admin queue is not bounded here, since its commands move little data.

use slipway_block::{Completion, Disk, DiskError, Operation, Request};
use slipway_pci::TurnLength;
use slipway_ram::{Span, SpanCursor};

/// The bounds of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// The most I/O commands that the poll may start.
    pub commands: u32,
    /// The most bytes that disks may copy in the poll.
    pub bytes: u64,
}

impl Quota {
    /// No bounds.
    pub const WHOLE: Self = Self { commands: u32::MAX, bytes: u64::MAX };
}

impl From<TurnLength> for Quota {
    fn from(turn: TurnLength) -> Self {
        match turn {
            // Some 25 µs of copying.
            TurnLength::Long => Self { commands: 64, bytes: 256 << 10 },
            // Some 0.2 µs of copying, or one request that is too small to split. A guest that sends
            // one command of 4 KiB after the other then waits less than one such command takes.
            TurnLength::Short => Self { commands: 1, bytes: LEAST },
        }
    }
}

/// The size in bytes up to which a request is never split.
const SMALL: u64 = 4096;
/// The smallest size of a piece in bytes, unless a request's last piece is smaller.
const LEAST: u64 = 2048;
/// The alignment in bytes of the ends of pieces of requests that zero or discard: a piece that
/// discarded a part of a huge page would split the page.
const ZEROED: u64 = 2 << 20;
/// The number of bytes that are zeroed or discarded in about the time of copying one byte.
const ZEROING: u64 = 32;
/// The number of entries of PRP lists and SGL segments whose walk counts as one command.
const ENTRIES: u32 = 256;

/// Returns the number of commands as which the walk of `entries` list entries counts.
pub(crate) fn commands_of(entries: u32) -> u32 {
    entries / ENTRIES
}

/// A request that is handed to its disk in pieces, one after the other.
struct Split {
    whole: Request,
    /// The number of blocks in the pieces that were handed to the disk so far.
    gone: u32,
    /// The position of the next piece in the request's spans.
    cursor: SpanCursor,
    /// `true` from the hand-over of a piece until its completion.
    outstanding: bool,
}

/// Hands requests to one disk, within the bounds of turns.
#[derive(Default)]
pub(crate) struct Feeder {
    /// `true` if the disk copies on this thread ([`Disk::copies`]). The first element is for reads,
    /// the second for all other operations.
    copies: [bool; 2],
    /// `true` if the disk bounds its work on reads ([`Disk::bounds_reads`]).
    pub bounds_reads: bool,
    /// The request that is handed over in pieces.
    split: Option<Split>,
    /// Room for requests on their way to the disk; empty between calls.
    batch: Vec<Request>,
    /// An empty vector, for the spans of the next piece.
    spare: Vec<Span>,
}

impl Feeder {
    /// Makes the feeder of `disk`, without a request.
    pub fn new(disk: &dyn Disk) -> Self {
        let copies = [Operation::Read, Operation::Write].map(|operation| disk.copies(operation));
        Self { copies, bounds_reads: disk.bounds_reads(), ..Self::default() }
    }

    /// Returns whether a request was handed to the disk in part.
    pub fn is_splitting(&self) -> bool {
        self.split.is_some()
    }

    /// Returns the cost in bytes of a read or write of `bytes` bytes. Returns `None` if the turn,
    /// with `left` bytes left, has no room for all of it.
    #[inline]
    pub fn price(&self, operation: Operation, bytes: u64, left: u64) -> Option<u64> {
        let cost = if copies_for(self.copies, operation) { bytes } else { 0 };
        has_room(cost, left).then_some(cost)
    }

    /// Hands the disk as many of `requests`, from the first on, as the turn has room for, and then
    /// the first pieces of the next one. Removes them from `requests`, and returns their number.
    /// `left` is the number of bytes that the turn has left, from which their cost is deducted.
    #[inline]
    pub fn feed(
        &mut self,
        (disk, block_size): (&mut dyn Disk, u32),
        requests: &mut Vec<Request>,
        left: &mut u64,
        completions: &mut Vec<Completion>,
    ) -> usize {
        let all = requests.len();
        let count = match self.copies {
            [false, false] => all,
            copies => fitting(requests, block_size, copies, left),
        };
        if count == all {
            disk.submit(requests, completions);
            // `submit` has drained the vector. A request that a faulty disk leaves behind would be
            // submitted twice.
            requests.clear();
            return all;
        }
        self.feed_part((disk, block_size), requests, count, left, completions)
    }

    /// Hands over the first `count` requests, for which the turn has room, and then pieces of the
    /// next one, if bytes are left.
    #[cold]
    fn feed_part(
        &mut self,
        (disk, block_size): (&mut dyn Disk, u32),
        requests: &mut Vec<Request>,
        count: usize,
        left: &mut u64,
        completions: &mut Vec<Completion>,
    ) -> usize {
        if count > 0 {
            self.batch.extend(requests.drain(..count));
            disk.submit(&mut self.batch, completions);
            self.batch.clear();
        }
        if *left == 0 {
            return count;
        }
        let whole = requests.remove(0);
        let cursor = SpanCursor::default();
        self.split = Some(Split { whole, gone: 0, cursor, outstanding: false });
        self.go_on((disk, block_size), left, completions);
        count + 1
    }

    /// Hands over further pieces of the request that is split, if there is one, until the turn has
    /// no bytes left or the disk does not complete a piece at once.
    #[cold]
    pub fn go_on(
        &mut self,
        (disk, block_size): (&mut dyn Disk, u32),
        left: &mut u64,
        completions: &mut Vec<Completion>,
    ) {
        while *left > 0
            && let Some(split) = self.split.as_mut().filter(|split| !split.outstanding)
        {
            let piece = split.piece(block_size, left, std::mem::take(&mut self.spare));
            let before = completions.len();
            self.batch.push(piece);
            disk.submit(&mut self.batch, completions);
            self.batch.clear();
            self.take_piece(before, completions);
        }
    }

    /// Removes the completion of a piece from `completions`, from index `before` on. If the piece
    /// was the last one or has failed, appends the completion of the whole request.
    pub fn take_piece(&mut self, before: usize, completions: &mut Vec<Completion>) {
        let Some(split) = &mut self.split else { return };
        let tag = split.whole.tag;
        let Some(at) = completions[before..].iter().position(|one| one.tag == tag) else { return };
        let mut piece = completions.remove(before + at);
        piece.spans.clear();
        self.spare = piece.spans;
        split.outstanding = false;
        if piece.result.is_err() || split.gone == split.whole.blocks {
            self.end(piece.result, completions);
        }
    }

    /// Cancels the request `tag` if it is split and the disk has no piece of it at the moment.
    /// Returns whether it was cancelled; its completion is then in `completions`.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let is_it = |split: &Split| split.whole.tag == tag && !split.outstanding;
        let found = self.split.as_ref().is_some_and(is_it);
        if found {
            self.end(Err(DiskError::Cancelled), completions);
        }
        found
    }

    /// Appends the completion of the request that is split, with its own spans.
    fn end(&mut self, result: Result<(), DiskError>, completions: &mut Vec<Completion>) {
        if let Some(split) = self.split.take() {
            let Request { tag, spans, .. } = split.whole;
            completions.push(Completion { tag, result, spans });
        }
    }
}

/// Returns how many of `requests`, from the first on, a turn with `left` bytes has room for, and
/// deducts their cost from `left`.
#[inline]
fn fitting(requests: &[Request], block_size: u32, copies: [bool; 2], left: &mut u64) -> usize {
    for (at, request) in requests.iter().enumerate() {
        let copied = copies_for(copies, request.operation);
        let cost = if copied { cost(request, block_size) } else { 0 };
        if !has_room(cost, *left) {
            return at;
        }
        *left = left.saturating_sub(cost);
    }
    requests.len()
}

/// Returns whether a disk copies on this thread for an operation, given [`Feeder::copies`].
#[inline]
fn copies_for([reads, others]: [bool; 2], operation: Operation) -> bool {
    if operation == Operation::Read { reads } else { others }
}

/// Returns whether a turn with `left` bytes has room for a whole request of this cost. It always
/// has for a request of cost 0.
#[inline]
fn has_room(cost: u64, left: u64) -> bool {
    cost <= left || (cost <= SMALL && left > 0)
}

/// Returns the cost of a request, in bytes copied.
#[inline]
fn cost(request: &Request, block_size: u32) -> u64 {
    let bytes = u64::from(request.blocks) * u64::from(block_size);
    match request.operation {
        Operation::Read | Operation::Write => bytes,
        Operation::WriteZeroes | Operation::Discard => bytes / ZEROING,
        Operation::Flush => 0,
    }
}

impl Split {
    /// Returns the next piece, and deducts its cost from `left`. The piece has at least one block,
    /// and about `left` bytes if it moves data. `spans` is an empty vector for the piece's spans.
    fn piece(&mut self, block_size: u32, left: &mut u64, mut spans: Vec<Span>) -> Request {
        let block = u64::from(block_size);
        let (whole, rest) = (&self.whole, self.whole.blocks - self.gone);
        let lba = whole.lba + u64::from(self.gone);
        let moves = matches!(whole.operation, Operation::Read | Operation::Write);
        let bytes = match moves {
            true => (*left).max(LEAST),
            false => ZEROED - lba.wrapping_mul(block) % ZEROED,
        };
        let blocks = u32::try_from(bytes / block).unwrap_or(u32::MAX).clamp(1, rest);
        if moves {
            // The bytes of a request lie in memory, so their number fits `usize`.
            let len = (u64::from(blocks) * block) as usize;
            self.cursor.take(&whole.spans, len, &mut spans);
        }
        let piece = Request { blocks, lba, spans, ..*whole };
        *left = left.saturating_sub(cost(&piece, block_size).max(1));
        self.gone += blocks;
        self.outstanding = true;
        piece
    }
}
