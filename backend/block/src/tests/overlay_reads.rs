//! Reads of an overlay that are cut into many pieces: each call does a bounded part of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use super::*;
use crate::{Completion, OverlayDisk, RamDisk, Spent};

const SIZE: usize = 1 << 20;
const BLOCKS: u32 = 2048;
/// The most that a call may cost: the least work of a call, and one run of 512 bytes in pieces of 4
/// bytes beyond it.
const MOST: u64 = 70_000;

/// A base of zeros that answers when it is told to.
struct Slow {
    waiting: Vec<Request>,
    state: Arc<SlowState>,
}

#[derive(Default)]
struct SlowState {
    asked: AtomicUsize,
    answers: AtomicBool,
    fails: AtomicBool,
}

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        Geometry { block_size: 512, blocks: u64::from(BLOCKS), read_only: true }
    }

    fn submit(&mut self, requests: &mut Vec<Request>, _: &mut Vec<Completion>) {
        self.waiting.append(requests);
        self.state.asked.store(self.waiting.len(), Relaxed);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.state.answers.load(Relaxed) {
            return;
        }
        let result = if self.state.fails.load(Relaxed) { Err(DiskError::Io(5)) } else { Ok(()) };
        let end = |request| crate::check::complete(request, result);
        completions.extend(self.waiting.drain(..).map(end));
    }
}

/// Returns an overlay with every second block written, from the first on.
fn striped<D: Disk>(base: D) -> OverlayDisk<D> {
    let mut overlay = OverlayDisk::new(base, None).unwrap();
    for lba in (0..u64::from(BLOCKS)).step_by(2) {
        write(&mut overlay, lba, &[1 + lba as u8; 512]).unwrap();
    }
    overlay
}

fn slow() -> (OverlayDisk<Slow>, Arc<SlowState>) {
    let state = Arc::<SlowState>::default();
    (striped(Slow { waiting: Vec::new(), state: state.clone() }), state)
}

/// Returns a read of all blocks into `memory`, 4,095 pieces of which have 4 bytes.
fn read_all(tag: u64, memory: &Span) -> Request {
    let mut spans: Vec<Span> = (0..4095).map(|at| memory.slice(4 * at, 4)).collect();
    spans.push(memory.slice(4 * 4095, SIZE - 4 * 4095));
    Request { tag, ..request(Operation::Read, 0, BLOCKS, spans) }
}

fn bytes_of(memory: &Span) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn expected() -> Vec<u8> {
    let block = |lba: u32| vec![if lba.is_multiple_of(2) { 1 + lba as u8 } else { 0 }; 512];
    (0..BLOCKS).flat_map(block).collect()
}

#[test]
fn a_call_does_a_bounded_part_of_a_read() {
    let mut overlay = striped(RamDisk::new(SIZE as u64, 512).unwrap());
    let memory = Span::heap(SIZE);
    memory.write(0, &[0xff; SIZE]).unwrap();
    let mut ended = Vec::new();
    overlay.allow(1);
    overlay.submit(&mut vec![read_all(7, &memory)], &mut ended);
    let mut calls = 1;
    loop {
        let spent = overlay.spent();
        assert!(spent.bytes <= MOST, "{spent:?} in call {calls}");
        assert_eq!(spent.behind, ended.is_empty());
        if !spent.behind {
            break;
        }
        overlay.allow(1);
        overlay.poll(&mut ended);
        calls += 1;
    }
    // 2,048 runs and 4,096 pieces of memory cost 5 MiB.
    assert!(calls >= 5 * SIZE as u64 / MOST, "{calls} calls");
    assert_eq!((ended.len(), ended[0].tag, ended[0].result), (1, 7, Ok(())));
    assert_eq!(ended[0].spans.len(), 4096);
    assert!(bytes_of(&memory) == expected());
}

#[test]
fn nothing_is_read_in_a_call_without_room() {
    let mut overlay = striped(RamDisk::new(SIZE as u64, 512).unwrap());
    let mut ended = Vec::new();
    let spans = vec![Span::heap(1024)];
    overlay.allow(0);
    overlay.submit(&mut vec![request(Operation::Read, 0, 2, spans)], &mut ended);
    overlay.poll(&mut ended);
    assert_eq!((ended.len(), overlay.spent()), (0, Spent { bytes: 0, behind: true }));
    // Whatever else comes meanwhile is done.
    write(&mut overlay, 9, &[9; 512]).unwrap();
    overlay.allow(1);
    overlay.poll(&mut ended);
    assert_eq!((ended.len(), overlay.spent().behind), (1, false));
}

#[test]
fn a_contiguous_read_goes_in_one_call() {
    let mut overlay = OverlayDisk::new(RamDisk::new(SIZE as u64, 512).unwrap(), None).unwrap();
    write(&mut overlay, 0, &[1; 32 << 10]).unwrap();
    let mut ended = Vec::new();
    for (lba, blocks) in [(0, 32), (64, BLOCKS - 64)] {
        overlay.allow(1);
        let spans = vec![Span::heap(blocks as usize * 512)];
        overlay.submit(&mut vec![request(Operation::Read, lba, blocks, spans)], &mut ended);
        assert_eq!((ended.len(), overlay.spent().behind), (1, false), "{blocks} blocks");
        ended.clear();
    }
}

#[test]
fn the_base_has_a_bounded_number_of_requests() {
    let (mut overlay, state) = slow();
    let memory = [Span::heap(SIZE), Span::heap(SIZE)];
    let mut requests = vec![read_all(0, &memory[0]), read_all(1, &memory[1])];
    let mut ended = Vec::new();
    overlay.submit(&mut requests, &mut ended);
    assert_eq!((state.asked.load(Relaxed), ended.len()), (1024, 0));
    assert!(!overlay.spent().behind, "the base's descriptor wakes");
    overlay.poll(&mut ended);
    assert_eq!((state.asked.load(Relaxed), ended.len()), (1024, 0));
    state.answers.store(true, Relaxed);
    for _ in 0..4 {
        overlay.poll(&mut ended);
    }
    assert_eq!(ended.iter().map(|one| one.tag).collect::<Vec<_>>(), [0, 1]);
    assert!(ended.iter().all(|one| one.result == Ok(())));
}

#[test]
fn a_read_that_fails_in_part_ends_once() {
    let (mut overlay, state) = slow();
    let memory = Span::heap(SIZE);
    let mut ended = Vec::new();
    overlay.allow(1);
    let read = request(Operation::Read, 0, BLOCKS, vec![memory.clone()]);
    overlay.submit(&mut vec![read], &mut ended);
    assert!(overlay.spent().behind && state.asked.load(Relaxed) > 1);
    state.answers.store(true, Relaxed);
    state.fails.store(true, Relaxed);
    overlay.allow(0);
    overlay.poll(&mut ended);
    assert_eq!(ended.iter().map(|one| one.result).collect::<Vec<_>>(), [Err(DiskError::Io(5))]);
    assert!(!overlay.spent().behind);
    // The next one is whole.
    ended.clear();
    state.fails.store(false, Relaxed);
    overlay.allow(u64::MAX);
    overlay.submit(&mut vec![read_all(4, &memory)], &mut ended);
    overlay.poll(&mut ended);
    assert_eq!(ended.iter().map(|one| one.result).collect::<Vec<_>>(), [Ok(())]);
}
