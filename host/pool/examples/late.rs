//! Measures memory of the pool against new memory, with this program again as the sandbox:
//!
//! ```text
//! cargo run -p slipway-pool --example late [MiB]
//! ```
//!
//! For some sizes up to the given one (512), and for each source of memory in turn: the time from
//! the request to memory that may be touched (`ready`), and the time to write to each page of it
//! (`touch`), in milliseconds, the median of five. The sources: new pages of the kernel; the pool,
//! recycled, with and without zeroing ahead.
#![allow(clippy::unwrap_used, unsafe_code)] // a measurement; it maps memory as a VMM does

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};
use slipway_keeper::Keeper;
use slipway_pool::{Pool, SLOTS, Settings, Shelves};
use slipway_pool_wire::{HandOver, Lease, Page, Range, Request};

const ROUNDS: usize = 5;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    match &words[1..] {
        [role, path, bytes] if role == "sandbox" => sandbox(path, bytes.parse().unwrap()),
        [most] => measure(most.parse().unwrap()),
        _ => measure(512),
    }
}

/// Takes memory, of the pool or (with `-`) of the kernel, touches each page, and prints the times
/// and the number of pages that were not zero.
fn sandbox(path: &str, bytes: u64) {
    let len = usize::try_from(bytes).unwrap();
    let map = |file: &std::os::fd::OwnedFd| {
        let (any, prot) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, file, 0).unwrap().cast::<u8>() }
    };
    let began = Instant::now();
    let (base, _kept) = if path == "-" {
        let file = rustix::fs::memfd_create("new", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        (map(&file), None)
    } else {
        let lease = Lease::ask(Path::new(path), Request { bytes, page: Page::Base }).unwrap();
        let hand_over = HandOver::begin(lease.connection).unwrap();
        let base = map(&lease.file);
        let range = Range { address: base.addr() as u64, len: bytes, offset: 0 };
        (base, Some(hand_over.finish(&[range]).unwrap()))
    };
    let ready = began.elapsed();
    let began = Instant::now();
    let mut stale = 0;
    for at in (0..len).step_by(4096) {
        // SAFETY: within the mapping, which nobody else uses.
        unsafe {
            let byte = base.add(at);
            stale += u32::from(byte.read_volatile() != 0);
            byte.write_volatile(0xaa);
        }
    }
    println!("{} {} {stale}", ready.as_nanos(), began.elapsed().as_nanos());
}

/// Runs a sandbox and returns its times in milliseconds.
fn run(path: &str, bytes: u64) -> [f64; 2] {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["sandbox", path, &bytes.to_string()]).stdout(Stdio::piped());
    let mut child = output.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.wait().unwrap();
    let words: Vec<u64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert_eq!(words[2], 0, "stale pages");
    [words[0] as f64 / 1e6, words[1] as f64 / 1e6]
}

/// A pool with a keeper of its own.
fn pool(directory: &Path, name: &str, limit: u64, ahead: bool) -> Pool {
    let path = directory.join(format!("{name}-keeper"));
    let keepers = path.clone();
    std::thread::spawn(move || slipway_keeper::serve(&keepers));
    let keeper = (0..10_000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        Keeper::connect(&path).ok()
    });
    let keeper = keeper.unwrap();
    keeper.take(Duration::from_secs(1)).unwrap();
    let shelves = Some(Shelves::new(Arc::new(keeper), 0..SLOTS));
    Pool::new(Settings { limit, ahead, shelves, ..Settings::default() }).unwrap()
}

/// Waits until a pool has its memory back.
fn back(pool: &Pool) {
    while pool.stats().lent > 0 || pool.stats().free_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn measure(most: u64) {
    let directory = tempfile::tempdir().unwrap();
    println!("{:>8} {:>12} {:>12} {:>12}", "MiB", "memory", "ready (ms)", "touch (ms)");
    let sizes = (0..).map(|step| 128 << step).take_while(|size| *size <= most);
    for mib in sizes {
        let bytes = mib << 20;
        // A new pool for each size: it holds memory of one size at a time.
        let name = |name: &str| format!("{name}-{mib}");
        let ahead = pool(directory.path(), &name("ahead"), bytes, true);
        let lazy = pool(directory.path(), &name("lazy"), bytes, false);
        let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
        let paths = ["-".to_owned(), path(&name("ahead-pool")), path(&name("lazy-pool"))];
        let _servers = [ahead.listen(Path::new(&paths[1])), lazy.listen(Path::new(&paths[2]))];
        let mut times: [Vec<[f64; 2]>; 3] = Default::default();
        for round in 0..=ROUNDS {
            for (path, times) in paths.iter().zip(&mut times) {
                let took = run(path, bytes);
                // The first round makes what later ones recycle.
                if round > 0 {
                    times.push(took);
                }
                [&ahead, &lazy].into_iter().filter(|pool| pool.stats().lent > 0).for_each(back);
            }
        }
        for (name, times) in ["new", "pool, ahead", "pool"].iter().zip(times) {
            let median = |part: usize| {
                let mut all: Vec<f64> = times.iter().map(|times| times[part]).collect();
                all.sort_by(f64::total_cmp);
                all[ROUNDS / 2]
            };
            println!("{mib:>8} {name:>12} {:>12.3} {:>12.1}", median(0), median(1));
        }
    }
}
