//! How much a poll does: functions that share a thread have fair turns.
//!
//! A poll starts so many I/O commands, of one queue after the other, and hands so many bytes to disks
//! that copy them on this thread ([`Disk::copies`]). A request that is larger than what is left goes
//! in pieces, its rest in the next polls, and until what waits has gone no further command is fetched:
//! it stays in the guest's memory. Both are counts, so a turn is the same on every machine and costs
//! no look at a clock.
//!
//! What is not bounded by this: disks that do not copy get all requests of a poll at once, as a batch;
//! how many of them their medium has at a time is their concern. The admin queue moves little.

use slipway_block::{Completion, Disk, DiskError, Operation, Request};
use slipway_pci::Turn;
use slipway_ram::Span;

/// What a poll may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    /// I/O commands to start.
    pub commands: u32,
    /// Bytes for disks to copy.
    pub bytes: u64,
}

impl Quota {
    /// All that there is.
    pub const WHOLE: Self = Self { commands: u32::MAX, bytes: u64::MAX };
}

impl From<Turn> for Quota {
    fn from(turn: Turn) -> Self {
        match turn {
            // Some 25 µs of copying.
            Turn::Long => Self { commands: 64, bytes: 256 << 10 },
            // Some 0.2 µs of copying, or a command that is not worth cutting: who sends one command after
            // the other, of 4 KiB, waits for less than one.
            Turn::Short => Self { commands: 1, bytes: LEAST },
        }
    }
}

/// What is not worth cutting, in bytes.
const SMALL: u64 = 4096;
/// Bytes of a piece of what is cut, at least.
const LEAST: u64 = 2048;
/// Pieces of what is zeroed or given back end at multiples of this, in bytes: a huge page that is
/// given back in parts would be taken apart.
const ZEROED: u64 = 2 << 20;
/// Bytes that are zeroed or given back in the time in which one is copied, about.
const ZEROING: u64 = 32;

/// A request that goes to its disk in pieces.
struct Split {
    whole: Request,
    /// Blocks that have gone.
    gone: u32,
    /// The disk has a piece.
    outstanding: bool,
}

/// Hands requests to a disk, as many as a turn has room for.
#[derive(Default)]
pub(crate) struct Feeder {
    /// Whether the disk copies what it reads, and what it writes.
    copies: [bool; 2],
    split: Option<Split>,
    batch: Vec<Request>,
    spare: Vec<Span>,
}

impl Feeder {
    pub fn new(disk: &dyn Disk) -> Self {
        let copies = [Operation::Read, Operation::Write].map(|operation| disk.copies(operation));
        Self { copies, ..Self::default() }
    }

    /// Whether a request has begun and is not through.
    pub fn is_splitting(&self) -> bool {
        self.split.is_some()
    }

    /// What a read or write of `bytes` bytes takes off a turn; None when it is more than is `left`.
    #[inline]
    pub fn price(&self, operation: Operation, bytes: u64, left: u64) -> Option<u64> {
        let [reads, writes] = self.copies;
        let copies = if operation == Operation::Read { reads } else { writes };
        let cost = if copies { bytes } else { 0 };
        has_room(cost, left).then_some(cost)
    }

    /// Hands over the first of `requests`, as many as fit what is `left` of the turn, and the
    /// beginning of one that does not. Gives how many have begun, which are taken out.
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
            // The contract drains the vector; a disk that leaves a request behind would make us
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
        self.split = Some(Split { whole, gone: 0, outstanding: false });
        self.go_on((disk, block_size), left, completions);
        count + 1
    }

    /// Hands over more of the request that has begun, if one has, as far as there is something
    /// `left` of the turn.
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
            self.settle(before, completions);
        }
    }

    /// Takes the end of a piece out of what is in `completions` from `before` on; with the last, or
    /// one that failed, the request's own end is there instead.
    pub fn settle(&mut self, before: usize, completions: &mut Vec<Completion>) {
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

    /// Gives up the rest of request `tag`. Whether it was one that had begun, and of which the disk
    /// has no piece.
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

/// How many of `requests`, from the first on, fit what is `left`, which they are taken off.
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

/// Whether a request of such a cost goes whole while so much is `left` of the turn. One of no cost
/// does.
#[inline]
fn has_room(cost: u64, left: u64) -> bool {
    cost <= left || (cost <= SMALL && left > 0)
}

/// What a request takes off a turn, in bytes copied.
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
    /// The next piece, in `spans`, which is empty: at least a block, and about as much as is `left`.
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
            let (from, len) = (u64::from(self.gone) * block, u64::from(blocks) * block);
            cut(&whole.spans, from as usize, len as usize, &mut spans);
        }
        let piece = Request { blocks, lba, spans, ..*whole };
        *left = left.saturating_sub(cost(&piece, block_size).max(1));
        self.gone += blocks;
        self.outstanding = true;
        piece
    }
}

/// Appends the `len` bytes of `spans` from byte `skip` on to `into`.
fn cut(spans: &[Span], mut skip: usize, mut len: usize, into: &mut Vec<Span>) {
    for span in spans {
        if len == 0 {
            return;
        }
        if skip >= span.len() {
            skip -= span.len();
            continue;
        }
        let part = (span.len() - skip).min(len);
        into.push(span.slice(skip, part));
        (skip, len) = (0, len - part);
    }
}
