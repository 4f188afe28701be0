//! Streams through pipes, from ring to ring, byte for byte.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_ram::Span;
use slipway_telemetry::ManualClock;

use super::random::Random;
use crate::{
    BrokenFifo, Completion, Compression, Core, Executor, Fifo, Input, Job, Moved, Needs, Options,
    Output, Pipe, Rule, Simulated, Sink, Sizes, Source, Stretch, TransformError, Work, records,
};
use slipway_warp::record::Header;
use slipway_warp::{Cipher, Class, Opener, Sealer, Secret};

/// Writes as many of `bytes` as there is room for, and returns their number.
fn fill(fifo: &mut Fifo, bytes: &[u8]) -> usize {
    let room = fifo.writable().unwrap();
    let length = bytes.len().min(room.length());
    Output::Ring(Sink::memory(fifo), room).write(&bytes[..length]).unwrap();
    fifo.produce(length);
    length
}

fn drain(fifo: &mut Fifo, into: &mut Vec<u8>, most: usize) {
    let there = fifo.readable().unwrap().first(most);
    let at = into.len();
    into.resize(at + there.length(), 0);
    Input::Ring(Source::memory(fifo), there).read(&mut into[at..]).unwrap();
    fifo.consume(there.length());
}

/// A peer's ring with arbitrary indices.
struct Hostile {
    memory: Span,
    position: u64,
    length: u64,
}

impl Source for Hostile {
    fn memory(&self) -> &Span {
        &self.memory
    }
    fn readable(&mut self) -> Result<Stretch, BrokenFifo> {
        Stretch::new(self.position, self.length, self.memory.len() as u64).ok_or(BrokenFifo)
    }
    fn consume(&mut self, _: usize) {}
}

impl Sink for Hostile {
    fn memory(&self) -> &Span {
        &self.memory
    }
    fn writable(&mut self) -> Result<Stretch, BrokenFifo> {
        self.readable()
    }
    fn produce(&mut self, _: usize) {}
}

/// Runs one step of a pipe through an executor.
fn step(pipe: &mut Pipe, from: &mut Fifo, to: &mut Fifo, by: &mut impl Executor) {
    let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
    pipe.generate(1, from, to, by.room(), &mut jobs).unwrap();
    by.submit(&mut jobs, &mut ended);
    by.poll(&mut ended);
    assert!(jobs.is_empty());
    for completion in &ended {
        pipe.completed(completion, from, to).unwrap();
    }
}

/// Runs one step of a pipe that opens records: the next record's sizes are in its header.
fn step_open(pipe: &mut Pipe, from: &mut Fifo, to: &mut Fifo, by: &mut impl Executor) {
    if pipe.in_flight() == 0 {
        let there = from.readable().unwrap().first(64);
        let mut head = vec![0; there.length()];
        Input::Ring(Source::memory(from), there).read(&mut head).unwrap();
        let Some(header) = Header::parse(&head).unwrap() else { return };
        let sizes = Sizes::Whole { input: header.record(), output: header.payload };
        pipe.set_rule(Rule { sizes, needs: by.needs(), least: 1 });
        step_one(pipe, from, to, by);
    } else {
        step(pipe, from, to, by);
    }
}

fn step_one(pipe: &mut Pipe, from: &mut Fifo, to: &mut Fifo, by: &mut impl Executor) {
    let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
    pipe.generate(1, from, to, 1, &mut jobs).unwrap();
    by.submit(&mut jobs, &mut ended);
    for completion in &ended {
        pipe.completed(completion, from, to).unwrap();
    }
}

fn core(clock: &ManualClock) -> Core {
    Core::new(Class::I, Arc::new(clock.clone()))
}

#[test]
fn a_stream_is_copied_through_by_a_core_and_by_an_accelerator() {
    let clock = ManualClock::new();
    let mut random = Random::new(7);
    let (mut plain, mut accelerator) = (
        core(&clock),
        Simulated::new(core(&clock), Class::F, 1_000_000_000, 3, Arc::new(clock.clone())),
    );
    for needs in [Needs::default(), accelerator.needs()] {
        for work in [Work::Copy, Work::CopyChecked] {
            let bytes = random.bytes(20_000);
            let (mut from, mut to) = (Fifo::new(256), Fifo::new(64));
            let mut pipe = Pipe::new(work, Rule { sizes: Sizes::Same, needs, least: 1 });
            let (mut given, mut got) = (0, Vec::new());
            while got.len() < bytes.len() {
                given +=
                    fill(&mut from, &bytes[given..(given + random.below(100)).min(bytes.len())]);
                match needs.source {
                    true => step(&mut pipe, &mut from, &mut to, &mut accelerator),
                    false => step(&mut pipe, &mut from, &mut to, &mut plain),
                }
                drain(&mut to, &mut got, random.below(64));
                clock.advance(Duration::from_nanos(random.below(60) as u64));
            }
            assert!(got == bytes);
        }
    }
}

#[test]
fn a_stream_is_sealed_and_opened_through_three_rings() {
    let clock = ManualClock::new();
    let secret = Secret::derive(&[1; 32], &[]);
    let mut random = Random::new(8);
    for (round, compression) in
        [Compression::None, Compression::Lz4, Compression::Zstd].into_iter().enumerate()
    {
        let (mut left, mut right) = (core(&clock), core(&clock));
        let sealer = Sealer::new(Cipher::Aes128Gcm, &secret).with_limit(20);
        let key = left.add_sealer(sealer);
        let opening = right.add_opener(Opener::new(Cipher::Aes128Gcm, &secret));
        let options = Options { compression, checksum: round % 2 == 1 };
        let needs = Needs { source: round == 0, sink: round == 0 };
        let rule = records(300, 20, true, options, needs);
        let mut sealing = Pipe::new(Work::Seal(Some(key), options), rule);
        let mut back = Pipe::new(Work::Open(Some(opening)), rule);
        let (mut from, mut link, mut to) = (Fifo::new(1024), Fifo::new(512), Fifo::new(2048));
        let bytes = random.text(50_000);
        let (mut given, mut got) = (0, Vec::new());
        while got.len() < bytes.len() {
            given += fill(&mut from, &bytes[given..(given + random.below(700)).min(bytes.len())]);
            step(&mut sealing, &mut from, &mut link, &mut left);
            step_open(&mut back, &mut link, &mut to, &mut right);
            drain(&mut to, &mut got, random.below(700));
        }
        assert!(got == bytes);
    }
}

#[test]
fn an_index_out_of_range_ends_the_pipe_and_nothing_else() {
    let rule = Rule { sizes: Sizes::Same, needs: Needs::default(), least: 1 };
    let mut pipe = Pipe::new(Work::Copy, rule);
    let ring = |length| Hostile { memory: Span::heap(64), position: u64::MAX - 3, length };
    let mut jobs: VecDeque<Job> = VecDeque::new();
    for (from, to) in [(65, 64), (64, 65), (u64::MAX, 1), (1, u64::MAX)] {
        let made = pipe.generate(1, &mut ring(from), &mut ring(to), 8, &mut jobs);
        assert_eq!(made, Err(BrokenFifo));
    }
    assert!(jobs.is_empty() && pipe.in_flight() == 0);
    assert_eq!(pipe.generate(1, &mut ring(64), &mut ring(64), 8, &mut jobs), Ok(1));
}

#[test]
fn a_job_that_moved_less_than_it_was_lent_ends_the_pipe() {
    let rule = Rule { sizes: Sizes::Same, needs: Needs::default(), least: 1 };
    let mut pipe = Pipe::new(Work::Copy, rule);
    let ring = || Hostile { memory: Span::heap(64), position: 0, length: 64 };
    let mut jobs = VecDeque::new();
    pipe.generate(1, &mut ring(), &mut ring(), 1, &mut jobs).unwrap();
    let moved = Moved { consumed: 64, produced: 63, checksum: None };
    let job = jobs.pop_front().unwrap();
    let completion = Completion { job, result: Ok(moved), busy: Duration::ZERO };
    let ended = pipe.completed(&completion, &mut ring(), &mut ring());
    assert_eq!(ended, Err(TransformError::Short { done: 63, given: 64 }));
}
