//! Measures the time that pinned memory saves for a file's requests. A disk without and one with
//! pinning take turns with random reads into random places of a memory of 64 MiB, on one thread
//! that polls.
//!
//! usage: pinned PATH [ROUNDS] [MILLISECONDS]
//!
//! PATH is only read: a file with O_DIRECT or a block device, whose speed is part of both figures.
//! Prints nanoseconds per request, the median of the rounds, and the median, minimum and maximum of
//! the ratio of the second to the first in the same round.

use std::error::Error;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use slipway_block::{Disk, FileDisk, FileOptions, Operation, Request, SharedDisk};
use slipway_ram::Span;

const MEMORY: usize = 64 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: pinned PATH [ROUNDS] [MILLISECONDS]")?;
    let rounds: usize = arguments.next().map_or(Ok(15), |text| text.parse())?;
    let turn = Duration::from_millis(arguments.next().map_or(Ok(60), |text| text.parse())?);
    let options = FileOptions { read_only: true, block_size: 4096, ..FileOptions::default() };
    if !FileDisk::open(Path::new(&path), &options)?.is_direct() {
        return Err(format!("{path} has no O_DIRECT").into());
    }
    let disk = |pin| {
        SharedDisk::file(Path::new(&path), &FileOptions { pin, ..options.clone() })?.open(true)
    };
    let mut disks = [disk(false)?, disk(true)?];
    let memory = memory()?;
    println!("{:>7} {:>5}  {:>10} {:>10}  pinned as a part", "bytes", "depth", "without", "pinned");
    for (bytes, depth) in [(4096, 1), (4096, 32), (131_072, 1), (131_072, 32)] {
        let mut took = [Vec::new(), Vec::new()];
        for _ in 0..=rounds {
            for (disk, took) in disks.iter_mut().zip(&mut took) {
                took.push(run(disk, &memory, bytes, depth, turn)?);
            }
        }
        // The first round is the warm-up, in which memory is pinned.
        let parts = (1..=rounds).map(|at| took[1][at] / took[0][at]).collect();
        let [without, with] = took.map(|took| median(took[1..].to_vec()).0);
        let (part, least, most) = median(parts);
        println!(
            "{bytes:>7} {depth:>5}  {without:>7.0} ns {with:>7.0} ns  {part:.3} ({least:.3} to \
             {most:.3})"
        );
    }
    Ok(())
}

/// Makes memory as a guest has it, with all pages in use.
fn memory() -> Result<Span> {
    let file = rustix::fs::memfd_create("memory", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&file, MEMORY as u64)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
    let memory = Span::file(file.as_fd(), 0, MEMORY)?;
    for at in (0..MEMORY).step_by(4096) {
        memory.write(at, &[1])?;
    }
    Ok(memory)
}

/// Keeps `depth` reads in flight for one turn; returns nanoseconds per request.
fn run(
    disk: &mut dyn Disk,
    memory: &Span,
    bytes: usize,
    depth: u64,
    turn: Duration,
) -> Result<f64> {
    let shape = disk.geometry();
    let (places, blocks) = (shape.bytes() / bytes as u64, bytes as u32 / shape.block_size);
    if places == 0 {
        return Err("too small".into());
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut requests, mut ended) = (Vec::new(), Vec::new());
    let (mut submitted, mut done) = (0, 0);
    let begun = Instant::now();
    loop {
        let over = begun.elapsed() >= turn;
        while !over && submitted < done + depth {
            // Xorshift.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let at = (state >> 32) as usize % (MEMORY / bytes) * bytes;
            requests.push(Request {
                tag: submitted,
                operation: Operation::Read,
                lba: state % places * u64::from(blocks),
                blocks,
                spans: vec![memory.slice(at, bytes)],
                durable: false,
            });
            submitted += 1;
        }
        disk.submit(&mut requests, &mut ended);
        disk.poll(&mut ended);
        for one in ended.drain(..) {
            one.result?;
            done += 1;
        }
        if over && done == submitted {
            return Ok(begun.elapsed().as_nanos() as f64 / done as f64);
        }
    }
}

/// Returns the median, the minimum and the maximum.
fn median(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    (values[values.len() / 2], values[0], values[values.len() - 1])
}
