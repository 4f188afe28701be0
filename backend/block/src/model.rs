//! A model of a disk in plain bytes, against which any disk is compared.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use slipway_ram::{Access, Memory, Span};

use crate::{Completion, Disk, DiskError, Operation, Request};

/// Bytes of guest memory from which a batch's spans are taken.
const ARENA: usize = 1 << 20;
/// The largest number of blocks in a request.
const MOST_BLOCKS: u64 = 40;
/// The longest time that a disk may take: only a lost wake-up or completion takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Choices that steer a run: a fuzzer's input, or pseudo-random bytes. Reads as zeros after its
/// end.
pub(crate) struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        let bytes = [self.byte(), self.byte(), self.byte()];
        u64::from_le_bytes([bytes[0], bytes[1], bytes[2], 0, 0, 0, 0, 0]) % end.max(1)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns pseudo-random bytes, the same for the same seed.
#[cfg(any(test, feature = "fuzz"))]
#[allow(dead_code, reason = "fuzz targets bring their own bytes")]
pub(crate) fn noise(mut seed: u64, len: usize) -> Vec<u8> {
    let mut next = || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Waits until `count` requests have completed, sleeping on the disk's descriptor.
///
/// # Panics
/// If they do not complete in time, or more than `count` complete.
pub(crate) fn await_completions(disk: &mut dyn Disk, count: usize, ended: &mut Vec<Completion>) {
    let deadline = std::time::Instant::now() + PATIENCE;
    disk.poll(ended);
    while ended.len() < count {
        assert!(std::time::Instant::now() < deadline, "{} of {count} completed", ended.len());
        let fd = disk.wake_descriptor().expect("what does not complete at once has a descriptor");
        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
        disk.poll(ended);
    }
    assert_eq!(ended.len(), count, "each request completes once");
}

/// Carries out one request and returns its outcome.
pub(crate) fn one(disk: &mut dyn Disk, request: Request) -> Result<(), DiskError> {
    let mut ended = Vec::new();
    let tag = request.tag;
    disk.submit(&mut vec![request], &mut ended);
    await_completions(disk, 1, &mut ended);
    assert_eq!(ended[0].tag, tag);
    ended[0].result
}

struct Expected {
    request: (Operation, std::ops::Range<usize>),
    /// Guest addresses of the data, in order.
    places: Vec<(u64, usize)>,
}

/// A disk and its expected content.
pub(crate) struct Model<'d> {
    disk: &'d mut dyn Disk,
    bytes: Vec<u8>,
    memory: Memory,
    ended: Vec<Completion>,
    /// Spans begin and end at multiples of this many bytes.
    grain: u64,
}

impl<'d> Model<'d> {
    /// Creates the model of a disk that holds `bytes`.
    pub fn new(disk: &'d mut dyn Disk, bytes: Vec<u8>, grain: u64) -> Self {
        assert_eq!(disk.geometry().bytes(), bytes.len() as u64);
        Self { disk, bytes, memory: Memory::heap(ARENA), ended: Vec::new(), grain }
    }

    /// Runs batches until the choices are used up, then compares the whole disk.
    pub fn run(mut self, choices: &mut Choices<'_>) {
        while !choices.is_empty() {
            self.batch(choices);
        }
        self.compare();
    }

    /// Runs up to 16 requests at once, on disjoint blocks, since a disk may reorder them.
    fn batch(&mut self, choices: &mut Choices<'_>) {
        let geometry = self.disk.geometry();
        let block = geometry.block_size as usize;
        let count = 1 + choices.byte() as usize % 16;
        let mut requests = Vec::new();
        let mut expected = Vec::new();
        let mut arena = 0;
        self.ended.clear();
        let mut lba = choices.below(geometry.blocks);
        for tag in 0..count as u64 {
            let blocks = (1 + choices.below(MOST_BLOCKS)).min(geometry.blocks - lba);
            let kind = choices.byte();
            let operation = operation(kind);
            let range = lba as usize * block..(lba + blocks) as usize * block;
            let moves = matches!(operation, Operation::Read | Operation::Write);
            let len = if moves { range.len() } else { 0 };
            if arena + 2 * len as u64 + 4096 > ARENA as u64 || blocks == 0 {
                break;
            }
            let (spans, places) = self.scatter(&mut arena, len, choices);
            if operation == Operation::Write {
                self.fill(&places, choices);
            }
            let (at_once, durable) = (kind & 0x40 != 0, kind & 0x80 != 0);
            let request = Request { tag, operation, lba, blocks: blocks as u32, spans, durable };
            match at_once {
                true => requests.extend(self.transfer(request)),
                false => requests.push(request),
            }
            expected.push(Expected { request: (operation, range), places });
            lba = (lba + blocks + choices.below(8)).min(geometry.blocks);
        }
        let count = requests.len() + self.ended.len();
        self.disk.submit(&mut requests, &mut self.ended);
        assert!(requests.is_empty(), "submit drains its vector");
        await_completions(self.disk, count, &mut self.ended);
        self.check(&expected);
    }

    /// Carries out a read or write at once if the disk can; returns any other request.
    fn transfer(&mut self, request: Request) -> Option<Request> {
        let Request { tag, operation, lba, blocks, .. } = request;
        if !matches!(operation, Operation::Read | Operation::Write) {
            return Some(request);
        }
        self.disk.expect(operation, lba, blocks);
        match self.disk.transfer(operation, (lba, blocks), &request.spans) {
            Some(result) => self.ended.push(Completion { tag, result, spans: request.spans }),
            None => return Some(request),
        }
        None
    }

    /// Returns spans of `len` bytes in all, cut and placed as `choices` say.
    fn scatter(
        &self,
        arena: &mut u64,
        len: usize,
        choices: &mut Choices<'_>,
    ) -> (Vec<Span>, Vec<(u64, usize)>) {
        let (mut spans, mut places, mut left) = (Vec::new(), Vec::new(), len as u64);
        *arena = arena.next_multiple_of(self.grain);
        // `batch` left this much room, half of it for gaps.
        let end = *arena + 2 * left;
        while left > 0 {
            let gap = choices.below(16) * self.grain;
            if *arena + gap + left <= end {
                *arena += gap;
            }
            let part = (1 + choices.below(20_000)).next_multiple_of(self.grain).min(left);
            let mut pinned = Vec::new();
            self.memory.pin(*arena, part as usize, Access::Write, &mut pinned).unwrap_or_default();
            spans.append(&mut pinned);
            places.push((*arena, part as usize));
            *arena += part;
            left -= part;
        }
        (spans, places)
    }

    fn fill(&self, places: &[(u64, usize)], choices: &mut Choices<'_>) {
        let mut value = choices.byte();
        for &(at, len) in places {
            let data: Vec<u8> = (0..len)
                .map(|_| {
                    value = value.wrapping_mul(5).wrapping_add(77);
                    value
                })
                .collect();
            assert_eq!(self.memory.write(at, &data), Ok(()));
        }
    }

    fn check(&mut self, expected: &[Expected]) {
        let mut seen = vec![false; expected.len()];
        for completion in &self.ended {
            assert_eq!(completion.result, Ok(()));
            let index = completion.tag as usize;
            assert!(!std::mem::replace(&mut seen[index], true), "a tag completed twice");
            let Expected { request: (operation, range), places } = &expected[index];
            let data = self.gather(places);
            match operation {
                Operation::Read => assert!(data == self.bytes[range.clone()], "read of {range:?}"),
                Operation::Write => self.bytes[range.clone()].copy_from_slice(&data),
                Operation::WriteZeroes | Operation::Discard => self.bytes[range.clone()].fill(0),
                Operation::Flush => {}
            }
        }
    }

    fn gather(&self, places: &[(u64, usize)]) -> Vec<u8> {
        let mut data = Vec::new();
        for &(at, len) in places {
            let mut part = vec![0; len];
            assert_eq!(self.memory.read(at, &mut part), Ok(()));
            data.extend(part);
        }
        data
    }

    fn compare(&mut self) {
        let geometry = self.disk.geometry();
        let span = Span::heap(self.bytes.len());
        let request = Request {
            tag: 0,
            operation: Operation::Read,
            lba: 0,
            blocks: geometry.blocks as u32,
            spans: vec![span.clone()],
            durable: false,
        };
        assert_eq!(one(self.disk, request), Ok(()));
        let mut found = vec![0; self.bytes.len()];
        assert_eq!(span.read(0, &mut found), Ok(()));
        assert!(found == self.bytes, "the disk holds what was written");
    }
}

fn operation(choice: u8) -> Operation {
    match choice % 8 {
        0..=2 => Operation::Read,
        3 | 4 => Operation::Write,
        5 => Operation::WriteZeroes,
        6 => Operation::Discard,
        _ => Operation::Flush,
    }
}
