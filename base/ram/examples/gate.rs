//! Measures accesses to late memory, all of it clean, against the same accesses to other memory:
//! while the pool may still zero some of it (`late`), and when all of it was given (`given`).
//!
//! ```text
//! cargo run -p slipway-ram --example gate
//! ```
//!
//! Prints nanoseconds for one access, the median of rounds that take turns.
#![allow(clippy::unwrap_used)] // a measurement

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{MemfdFlags, SealFlags};
use slipway_ram::{Access, DmaMap, LateMemory, Memory, Permissions, Region, View};

const LEN: usize = 64 << 20;
const COUNT: u64 = 200_000;
const ROUNDS: usize = 31;

fn file() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("gate", flags).unwrap();
    rustix::fs::ftruncate(&file, LEN as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file
}

fn memory(region: Region) -> (DmaMap, Memory) {
    let mut map = DmaMap::new();
    map.add(0, region).unwrap();
    let memory = map.memory();
    // Every page is there.
    memory.write(0, &vec![1; LEN]).unwrap();
    (map, memory)
}

/// Nanoseconds for one of `COUNT` accesses at addresses that jump by whole pages.
fn time(mut access: impl FnMut(u64)) -> f64 {
    let began = Instant::now();
    for number in 0..COUNT {
        access((number * 4096 * 37) % (LEN as u64 - (1 << 17)));
    }
    began.elapsed().as_nanos() as f64 / COUNT as f64
}

/// Reads 4 KiB as a disk's request does, pins 128 KiB without touching it, and writes a word.
fn round(memory: &Memory) -> [f64; 3] {
    let (mut view, mut spans) = (View::new(memory.clone()), Vec::new());
    let mut bytes = [0; 4096];
    let block = time(|at| {
        view.pin([(at, 4096)].into_iter(), Access::Read, &mut spans).unwrap();
        spans[0].read(0, &mut bytes).unwrap();
    });
    let pin = time(|at| {
        view.pin([(at, 128 << 10)].into_iter(), Access::Read, &mut spans).unwrap();
    });
    let word = time(|at| memory.store_u32(at, 7).unwrap());
    [block, pin, word]
}

fn main() {
    let (_plain, plain) = {
        let file = file();
        let region = Region::mapped(file.as_fd(), 0, LEN as u64, Permissions::READ_WRITE);
        memory(region.unwrap())
    };
    let memories = ["late", "given"].map(|name| {
        let late = Arc::new(LateMemory::new(file()).unwrap());
        let bin = slipway_peer::Bin::new();
        let region = Region::late(&late, 0, LEN as u64, Permissions::READ_WRITE, &bin).unwrap();
        if name == "given" {
            late.take_all().unwrap();
        }
        memory(region)
    });
    let [(_late, late), (_given, given)] = memories;
    let mut all: [Vec<[f64; 3]>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (memory, times) in [&plain, &late, &given].into_iter().zip(&mut all) {
            times.push(round(memory));
        }
    }
    println!("{:>8} {:>12} {:>14} {:>10}", "memory", "4 KiB block", "pin of 128 KiB", "word");
    for (name, rounds) in ["other", "late", "given"].iter().zip(all) {
        let median = |part: usize| {
            let mut times: Vec<f64> = rounds.iter().map(|times| times[part]).collect();
            times.sort_by(f64::total_cmp);
            times[ROUNDS / 2]
        };
        println!("{name:>8} {:>12.1} {:>14.1} {:>10.1}", median(0), median(1), median(2));
    }
}
