//! Bounds the work of a poll, so that functions that share a thread have fair turns.
//!
//! A poll starts a bounded number of I/O commands, of one queue after the other, and hands a
//! bounded number of bytes to disks that copy on this thread ([`Disk::copies`]). A request that
//! exceeds the rest of the turn goes in pieces, its rest in the next polls. Until waiting requests
//! have gone, no further command is fetched: commands stay in the guest's memory. Commands whose
//! data has many pieces count as several. All bounds are counts, so a turn is the same on every
//! machine and reads no clock. If the bytes of a turn run out, the next one begins with the
//! namespace after the last one that had some, so a long command delays no other namespace's.
//!
//! Disks that do not copy get all requests of a poll at once, as a batch, and decide themselves how
//! many of them their medium has at a time. A disk that copies for some reads only, as an overlay
//! does, is told what the turn has room for, and leaves the rest for the next polls
//! ([`Disk::allow`]). The admin queue moves little data.

use slipway_block::{Completion, Disk, DiskError, Operation, Request};
use slipway_pci::TurnLength;
use slipway_ram::{Span, SpanCursor};

/// The bounds of a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// I/O commands to start.
    pub commands: u32,
    /// Bytes for disks to copy.
    pub bytes: u64,
}

impl Quota {
    /// A quota without bounds.
    pub const WHOLE: Self = Self { commands: u32::MAX, bytes: u64::MAX };
}

impl From<TurnLength> for Quota {
    fn from(turn: TurnLength) -> Self {
        match turn {
            // Some 25 µs of copying.
            TurnLength::Long => Self { commands: 64, bytes: 256 << 10 },
            // Some 0.2 µs of copying, or a command that is too small to cut: a guest that sends one
            // command of 4 KiB after the other waits for less than one such command.
            TurnLength::Short => Self { commands: 1, bytes: LEAST },
        }
    }
}

/// Bytes of the largest request that is not worth cutting.
const SMALL: u64 = 4096;
/// The least bytes of a piece.
const LEAST: u64 = 2048;
/// Pieces of requests that zero or discard end at multiples of this many bytes: discarding a part
/// of a huge page would break the page up.
const ZEROED: u64 = 2 << 20;
/// Bytes that are zeroed or discarded in about the time in which one byte is copied.
const ZEROING: u64 = 32;
/// Entries of PRP lists and SGL segments that count as a command when they are walked.
const ENTRIES: u32 = 256;

/// Returns the number of commands that walking `entries` entries of lists counts as.
pub(crate) fn commands_of(entries: u32) -> u32 {
    entries / ENTRIES
}

/// A request that goes to its disk in pieces.
struct Split {
    whole: Request,
    /// The number of blocks that have gone to the disk.
    gone: u32,
    /// The place of the next piece in the spans.
    cursor: SpanCursor,
    /// `true` while the disk has a piece.
    outstanding: bool,
}

/// Hands as many requests to a disk as a turn has room for.
#[derive(Default)]
pub(crate) struct Feeder {
    /// `true` if the disk copies: for reads, for writes.
    copies: [bool; 2],
    /// `true` if the disk bounds its work on reads ([`Disk::bounds_reads`]).
    pub bounds_reads: bool,
    split: Option<Split>,
    batch: Vec<Request>,
    spare: Vec<Span>,
}

impl Feeder {
    pub fn new(disk: &dyn Disk) -> Self {
        let copies = [Operation::Read, Operation::Write].map(|operation| disk.copies(operation));
        Self { copies, bounds_reads: disk.bounds_reads(), ..Self::default() }
    }

    /// Returns whether a request has gone to the disk in part.
    pub fn is_splitting(&self) -> bool {
        self.split.is_some()
    }

    /// Returns the cost of a read or write of `bytes` bytes. Returns `None` if the bytes `left` of
    /// the turn do not suffice.
    #[inline]
    pub fn price(&self, operation: Operation, bytes: u64, left: u64) -> Option<u64> {
        let [reads, writes] = self.copies;
        let copies = if operation == Operation::Read { reads } else { writes };
        let cost = if copies { bytes } else { 0 };
        has_room(cost, left).then_some(cost)
    }

    /// Hands over the first of `requests`, as many as the bytes `left` of the turn suffice for, and
    /// the beginning of the next one. Removes them from `requests`, and returns their number.
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
            // `submit` must drain the vector; a disk that leaves a request behind would make us
            // submit it twice.
            requests.clear();
            return all;
        }
        self.feed_part((disk, block_size), requests, count, left, completions)
    }

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

    /// Hands over more pieces of the request that has begun, if any, as far as the bytes `left` of
    /// the turn suffice.
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

    /// Removes the end of a piece from `completions`, looking from index `before` on. Appends the
    /// end of the whole request after its last piece, or after one that failed.
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

    /// Cancels the rest of request `tag`. Returns `false` if the request has not begun, or the disk
    /// has a piece of it.
    pub fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let is_it = |split: &Split| split.whole.tag == tag && !split.outstanding;
        let found = self.split.as_ref().is_some_and(is_it);
        if found {
            self.end(Err(DiskError::Cancelled), completions);
        }
        found
    }

    fn end(&mut self, result: Result<(), DiskError>, completions: &mut Vec<Completion>) {
        if let Some(split) = self.split.take() {
            let Request { tag, spans, .. } = split.whole;
            completions.push(Completion { tag, result, spans });
        }
    }
}

/// Returns how many of `requests`, from the first on, the bytes `left` suffice for, and deducts
/// their cost.
#[inline]
fn fitting(
    requests: &[Request],
    block_size: u32,
    [reads, writes]: [bool; 2],
    left: &mut u64,
) -> usize {
    for (at, request) in requests.iter().enumerate() {
        let copies = if request.operation == Operation::Read { reads } else { writes };
        let cost = if copies { cost(request, block_size) } else { 0 };
        if !has_room(cost, *left) {
            return at;
        }
        *left = left.saturating_sub(cost);
    }
    requests.len()
}

/// Returns whether a request of this cost goes whole while `left` bytes of the turn are left. A
/// request of cost 0 always does.
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
    /// Returns the next piece, with its data in `spans`, which is empty. The piece has at least one
    /// block, and about as many bytes as are `left`.
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
