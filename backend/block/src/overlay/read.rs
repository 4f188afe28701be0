//! Reads of an overlay: each is cut into copies from the layer and requests to the base.
//!
//! A guest chooses how many pieces a read has: it may write every second block, and name its memory
//! four bytes at a time. So the work of a call is bounded by what the caller allows, counted in
//! bytes copied, in runs of blocks and in pieces of memory. A read stops where the bound is reached
//! and goes on from there in the next call; reads behind it wait. The requests that the base has at
//! a time are bounded, too: they are this process's memory.

use std::ops::Range;

use slipway_ram::{Span, SpanCursor};

use super::OverlayDisk;
use crate::check::complete;
use crate::{Completion, Disk, DiskError, Operation, Request, Spent};

/// The largest number of requests that the base has at a time.
const MOST_AT_BASE: usize = 1024;
/// The cost of a run of blocks, in bytes copied in about the time.
const RUN: u64 = 2048;
/// The cost of a piece of memory, in bytes copied in about the time.
const PIECE: u64 = 256;
/// The least work of a call that may work at all: some 5 µs, in which a short read ends.
const LEAST: u64 = 32 << 10;

/// The largest number of span vectors kept for later requests.
const SPARE: usize = 64;
/// The largest capacity of a vector that is kept, in spans. A megabyte in pages of 4 KiB that does
/// not begin with one has 257, for which a vector grows to 512.
const SPARE_SPANS: usize = 512;

/// The work that the caller allows, in bytes copied in about the time.
pub(super) struct Room {
    left: u64,
    spent: u64,
}

impl Room {
    /// The room of a disk whose caller sets no bound.
    pub const UNBOUNDED: Self = Self { left: u64::MAX, spent: 0 };

    pub fn allow(&mut self, bytes: u64) {
        self.left = if bytes == 0 { 0 } else { bytes.max(LEAST) };
    }

    fn charge(&mut self, cost: u64) {
        self.left = self.left.saturating_sub(cost);
        self.spent = self.spent.saturating_add(cost);
    }
}

/// A read that has begun.
pub(super) struct Read {
    request: Request,
    /// The blocks that were not looked at yet.
    rest: Range<u64>,
    /// The place of the rest in the request's spans.
    cursor: SpanCursor,
    /// The number of requests in flight at the base.
    left: usize,
    result: Result<(), DiskError>,
}

impl Read {
    /// Begins `request`, whose blocks lie on the disk.
    fn new(request: Request) -> Self {
        let rest = request.lba..request.lba + u64::from(request.blocks);
        Self { request, rest, cursor: SpanCursor::default(), left: 0, result: Ok(()) }
    }

    /// Returns whether nothing more is to be copied or asked for.
    fn is_cut(&self) -> bool {
        self.rest.is_empty() || self.result.is_err()
    }

    fn is_over(&self) -> bool {
        self.is_cut() && self.left == 0
    }
}

impl<D: Disk> OverlayDisk<D> {
    /// Starts a read whose blocks lie on the disk.
    pub(super) fn start_read(&mut self, request: Request, completions: &mut Vec<Completion>) {
        if self.has_waiting() || !self.has_room() {
            self.waiting.push_back(request);
            return;
        }
        let index = self.new_index();
        self.go_on(index, Read::new(request), completions);
    }

    /// Carries waiting reads on and hands requests to the base, as far as there is room.
    pub(super) fn work(&mut self, completions: &mut Vec<Completion>) {
        loop {
            self.cut_waiting(completions);
            if self.batch.is_empty() {
                return;
            }
            self.base.submit(&mut self.batch, &mut self.ended);
            // A base that answers at once makes room for further requests.
            self.collect(completions);
        }
    }

    fn cut_waiting(&mut self, completions: &mut Vec<Completion>) {
        while self.has_waiting() && self.has_room() {
            let paused = self.paused.take();
            let paused = paused.and_then(|index| Some((index, self.reads[index].take()?)));
            let next = paused.or_else(|| {
                let request = self.waiting.pop_front()?;
                Some((self.new_index(), Read::new(request)))
            });
            if let Some((index, read)) = next {
                self.go_on(index, read, completions);
            }
        }
    }

    /// Returns whether reads wait that are not cut to their end.
    pub(super) fn has_waiting(&self) -> bool {
        self.paused.is_some() || !self.waiting.is_empty()
    }

    fn has_room(&self) -> bool {
        self.room.left > 0 && self.at_base < MOST_AT_BASE
    }

    /// Returns the cost of reads since the last call. Reads that wait for the base to answer are
    /// announced by its wake descriptor.
    pub(super) fn take_spent(&mut self) -> Spent {
        let behind = self.has_waiting() && self.at_base < MOST_AT_BASE;
        Spent { bytes: std::mem::take(&mut self.room.spent), behind }
    }

    fn new_index(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.reads.push(None);
            self.reads.len() - 1
        })
    }

    /// Carries a read on, as far as there is room, and ends or keeps it.
    fn go_on(&mut self, index: usize, mut read: Read, completions: &mut Vec<Completion>) {
        self.cut(index, &mut read);
        if read.is_over() {
            self.free.push(index);
            completions.push(complete(read.request, read.result));
            return;
        }
        if !read.is_cut() {
            self.paused = Some(index);
        }
        self.reads[index] = Some(read);
    }

    /// Copies the blocks that are in the layer, and makes a request to the base for every run of
    /// blocks that is not.
    fn cut(&mut self, index: usize, read: &mut Read) {
        let block = u64::from(self.geometry.block_size);
        while !read.is_cut() && self.has_room() {
            let at = read.rest.start;
            let (own, mut next) = self.layer.run(at, read.rest.end);
            if own {
                next = next.min(at.saturating_add(self.room.left.div_ceil(block)));
            }
            let bytes = (next - at) * block;
            let mut part = self.spare.pop().unwrap_or_default();
            // The bytes of a request lie in memory, so their number fits `usize`.
            read.cursor.take(&read.request.spans, bytes as usize, &mut part);
            self.room.charge(RUN + PIECE * part.len() as u64 + if own { bytes } else { 0 });
            if own {
                read.result = self.layer.read(at * block, &part).map_err(DiskError::from);
                keep(&mut self.spare, part);
            } else {
                (read.left, self.at_base) = (read.left + 1, self.at_base + 1);
                self.batch.push(Request {
                    tag: index as u64,
                    operation: Operation::Read,
                    lba: at,
                    blocks: (next - at) as u32,
                    spans: part,
                    durable: false,
                });
            }
            read.rest.start = next;
        }
    }

    /// Processes the base's completions, and ends the reads that wait for no more of them.
    pub(super) fn collect(&mut self, completions: &mut Vec<Completion>) {
        for part in self.ended.drain(..) {
            keep(&mut self.spare, part.spans);
            let index = part.tag as usize;
            let Some(slot) = self.reads.get_mut(index) else { continue };
            let Some(read) = slot else { continue };
            (read.left, self.at_base) = (read.left - 1, self.at_base - 1);
            read.result = read.result.and(part.result);
            if read.is_over() {
                // It may have waited for room when a part of it failed.
                self.paused = self.paused.filter(|paused| *paused != index);
                self.free.push(index);
                completions.extend(slot.take().map(|read| complete(read.request, read.result)));
            }
        }
    }
}

/// Keeps a vector for a later request.
fn keep(spare: &mut Vec<Vec<Span>>, mut spans: Vec<Span>) {
    spans.clear();
    if spare.len() < SPARE && spans.capacity() <= SPARE_SPANS {
        spare.push(spans);
    }
}
