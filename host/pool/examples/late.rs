//! Measures memory of the pool against new memory, with this program again as the sandbox:
//!
//! ```text
//! cargo run --release -p slipway-pool --example late [MiB [4|2048]]
//! ```
//!
//! For pages of 4 KiB and of 2 MiB, or only those of the given size in KiB, for some sizes of
//! memory up to the given one (512), and for each source of memory in turn: the time from the
//! request to memory that may be touched (`ready`), and the time to write to each 4 KiB of it
//! (`touch`), in milliseconds, the median of five. The sources: new pages of the kernel; the pool,
//! recycled, with and without zeroing ahead. Sizes for which the host has not memory enough for all
//! three have the last one only.
//!
//! Pages of 2 MiB need `sysctl vm.nr_hugepages` or `vm.nr_overcommit_hugepages` of three times the
//! size; without them they are left out.
#![allow(clippy::unwrap_used, unsafe_code)] // a measurement; it maps memory as a VMM does

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use slipway_keeper::Keeper;
use slipway_pool::{Pool, SLOTS, Settings, Shelves};
use slipway_pool_wire::{HandOver, Lease, Page, Range, Request};

/// New memory of the kernel, in the place of a pool's path.
const NEW: &str = "-";
const ROUNDS: usize = 5;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    match &words[1..] {
        [role, path, bytes, page] if role == "sandbox" => {
            let page = if page == "huge" { Page::Huge } else { Page::Base };
            sandbox(path, Request { bytes: bytes.parse().unwrap(), page });
        }
        [most, kib] => {
            let page = if kib == "4" { Page::Base } else { Page::Huge };
            measure(most.parse().unwrap(), &[page]);
        }
        [most] => measure(most.parse().unwrap(), &[Page::Base, Page::Huge]),
        _ => measure(512, &[Page::Base, Page::Huge]),
    }
}

/// Makes new memory of the kernel.
fn new_memory(request: Request) -> std::os::fd::OwnedFd {
    let mut flags = MemfdFlags::CLOEXEC;
    if request.page == Page::Huge {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let file = rustix::fs::memfd_create("new", flags).unwrap();
    rustix::fs::ftruncate(&file, request.bytes).unwrap();
    file
}

/// Takes memory of the pool or of the kernel, touches each 4 KiB, and prints the times and the
/// number of pages that were not zero.
fn sandbox(path: &str, request: Request) {
    let bytes = request.bytes;
    let len = usize::try_from(bytes).unwrap();
    let map = |file: &std::os::fd::OwnedFd| {
        let (any, prot) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, file, 0).unwrap().cast::<u8>() }
    };
    let began = Instant::now();
    let (base, _kept) = if path == NEW {
        (map(&new_memory(request)), None)
    } else {
        let lease = Lease::ask(Path::new(path), request).unwrap();
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
fn run(path: &str, Request { bytes, page }: Request) -> [f64; 2] {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let page = if page == Page::Huge { "huge" } else { "base" };
    let output = command.args(["sandbox", path, &bytes.to_string(), page]).stdout(Stdio::piped());
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
    let shelves = Some(Shelves::new(Arc::new(keeper), 0..4 * SLOTS));
    Pool::new(Settings { limit, ahead, shelves, ..Settings::default() }).unwrap()
}

/// Waits until a pool has its memory back.
fn back(pool: &Pool) {
    while pool.stats().lent > 0 || pool.stats().free_bytes == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn measure(most: u64, pages: &[Page]) {
    println!(
        "{:>6} {:>8} {:>12} {:>12} {:>12}",
        "pages", "MiB", "memory", "ready (ms)", "touch (ms)"
    );
    for &page in pages {
        for mib in (0..).map(|step| 128 << step).take_while(|size| *size <= most) {
            let request = Request { bytes: mib << 20, page };
            let Some(sources) = sources(request) else { break };
            compare(request, sources);
        }
    }
}

/// Returns the sources that the host has memory for: all, or the last one. While the pool zeroes
/// ahead, it makes as much again.
fn sources(request: Request) -> Option<&'static [&'static str]> {
    let free = match request.page {
        Page::Base => figure("/proc/meminfo", "MemAvailable:") << 10,
        Page::Huge => huge_pages() << 21,
    };
    let all = &["new", "pool, ahead", "pool"];
    let fits =
        |part: &'static [&'static str]| (free > request.bytes * part.len() as u64).then_some(part);
    fits(all).or_else(|| fits(&all[2..]))
}

/// Returns the number of huge pages that are free, or that the kernel may make of free memory.
fn huge_pages() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/nr_overcommit_hugepages").unwrap();
    let more = figure("/proc/meminfo", "MemAvailable:") >> 11;
    figure("/proc/meminfo", "HugePages_Free:") + more.min(limit.trim().parse().unwrap())
}

fn figure(path: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn compare(request: Request, sources: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_string_lossy().into_owned();
    // New pools for each size: they hold memory of one size at a time.
    let pools = sources.iter().filter(|source| **source != "new").map(|source| {
        let pool = pool(directory.path(), source, request.bytes, source.contains("ahead"));
        let server = pool.listen(Path::new(&path(source))).unwrap();
        (pool, server)
    });
    let pools: Vec<_> = pools.collect();
    let mut times = vec![Vec::new(); sources.len()];
    for round in 0..=ROUNDS {
        for (source, times) in sources.iter().zip(&mut times) {
            let path = if *source == "new" { NEW.to_owned() } else { path(source) };
            let took = run(&path, request);
            // The first round makes what later ones recycle.
            if round > 0 {
                times.push(took);
            }
            pools.iter().filter(|(pool, _)| pool.stats().lent > 0).for_each(|(pool, _)| back(pool));
        }
    }
    let (mib, page) =
        (request.bytes >> 20, if request.page == Page::Huge { "2 MiB" } else { "4 KiB" });
    for (source, times) in sources.iter().zip(times) {
        let median = |part: usize| {
            let mut all: Vec<f64> = times.iter().map(|times: &[f64; 2]| times[part]).collect();
            all.sort_by(f64::total_cmp);
            all[ROUNDS / 2]
        };
        println!("{page:>6} {mib:>8} {source:>12} {:>12.3} {:>12.1}", median(0), median(1));
    }
}
