//! How fast two threads, each on a processor of its own, move bytes through a Cross-FIFO, beside
//! the floor: a copy in and a copy out on one thread.
//!
//! `cargo run --release -p slipway-ring --example streams [-- SECONDS]`
#![allow(clippy::unwrap_used)] // a program to measure with

#[path = "../tests/party/mod.rs"]
mod party;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use party::Party;
use rustix::thread::{CpuSet, sched_setaffinity};

const STREAMS: u32 = 4096;

impl Party {
    fn write(&self, number: u32, bytes: &[u8], most: usize) -> usize {
        self.stream(number).write(bytes, most, self.regions(), || ()).unwrap()
    }

    fn write_all(&self, number: u32, mut bytes: &[u8], most: usize) {
        while !bytes.is_empty() {
            bytes = &bytes[self.write(number, bytes, most)..];
        }
    }

    fn read(&self, number: u32, into: &mut [u8]) -> usize {
        self.stream(number).read(into, || ()).unwrap()
    }
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    let _ = sched_setaffinity(None, &set);
}

/// Bytes per second with messages of `size` over `streams` streams in turn.
fn bandwidth(time: Duration, size: usize, streams: u32, most: usize) -> f64 {
    let (here, there) = Party::both(STREAMS);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            let message = vec![7; size];
            let mut number = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut rest = &message[..];
                while !rest.is_empty() && !stop.load(Ordering::Relaxed) {
                    rest = &rest[here.write(number, rest, most)..];
                }
                number = (number + 1) % streams;
            }
        });
        pin(1);
        let mut buffer = vec![0; 128 << 10];
        let (start, mut bytes, mut number) = (Instant::now(), 0, 0);
        while start.elapsed() < time {
            for _ in 0..64 {
                bytes += there.read(number, &mut buffer);
                number = (number + 1) % streams;
            }
        }
        let rate = bytes as f64 / start.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        rate
    })
}

/// Nanoseconds from a message of 64 bytes to its answer, in the middle of all.
fn latency(count: usize) -> f64 {
    let (here, there) = Party::both(STREAMS);
    let get = |party: &Party| {
        let (mut message, mut got) = ([0; 64], 0);
        while got < 64 {
            got += party.read(0, &mut message[got..]);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            pin(0);
            for _ in 0..count {
                get(&there);
                there.write_all(0, &[1; 64], 4096);
            }
        });
        pin(1);
        let mut times: Vec<_> = (0..count)
            .map(|_| {
                let start = Instant::now();
                here.write_all(0, &[1; 64], 4096);
                get(&here);
                start.elapsed().as_nanos() as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[count / 2]
    })
}

/// Bytes per second of a copy in and a copy out through `most` bytes on one thread.
fn floor(time: Duration, most: usize) -> f64 {
    pin(1);
    let (message, mut fifo, mut buffer) =
        (vec![7u8; 128 << 10], vec![0u8; most], vec![0u8; 128 << 10]);
    let (start, mut bytes) = (Instant::now(), 0);
    while start.elapsed() < time {
        for piece in fifo.chunks_mut(128 << 10) {
            let len = piece.len();
            piece.copy_from_slice(&message[..len]);
            buffer[..len].copy_from_slice(piece);
            std::hint::black_box(&mut buffer);
            bytes += len;
        }
    }
    bytes as f64 / start.elapsed().as_secs_f64()
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(0.5);
    let time = Duration::from_secs_f64(seconds);
    println!("64 bytes and back: {:.0} ns", latency(200_000));
    let small = bandwidth(time, 64, 1, 64 << 10) / 64.0 / 1e6;
    println!("64 bytes: {small:.1} M messages/s");
    for most in [64 << 10, 256 << 10, 512 << 10, 4 << 20] {
        let (rate, floor) = (bandwidth(time, 128 << 10, 1, most), floor(time, most));
        let (rate, floor) = (rate * 8e-9, floor * 8e-9);
        println!(
            "128 KiB, FIFO of {:4} KiB: {rate:.0} Gbit/s; on one thread {floor:.0}",
            most >> 10
        );
    }
    for streams in [1, 16, 256, 4096] {
        let rate = bandwidth(time, 4096, streams, 16 << 10) * 8e-9;
        println!("4 KiB over {streams} streams: {rate:.1} Gbit/s");
    }
}
