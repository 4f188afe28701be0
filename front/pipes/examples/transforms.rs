//! Measures each transform by itself, on one core: GB/s of payload, for pieces of 16 and 128 KiB.
//!
//!     cargo run --release -p slipway-warp --example transforms
//!
//! Also measures the scheduler: ns for a job of one stage (pick, done, queue again), by number of
//! tenants.
//!
//! Each piece comes from a ring of 4 MiB, as a socket's would, and goes to memory of the process,
//! or the other way round. Transforms take turns, ten rounds; the table has each one's median
//! round. Time is the thread's own CPU time, so other processes on the machine affect the figures
//! little.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use slipway_pipes::{Compression, Input, Options, Output, Stretch, Worker};
use slipway_ram::Span;
use slipway_warp::share::{Scheduler, TenantOptions};
use slipway_warp::{Cipher, Class, Opener, Sealer, Secret, record};

const RING: usize = 4 << 20;
const ROUNDS: usize = 10;
/// Time of one transform in one round.
const TURN: Duration = Duration::from_millis(25);

/// The number of pieces between two readings of the clock.
const BATCH: usize = 16;

/// Returns the CPU time of the calling thread.
fn cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// The names of the transforms in the table.
const TRANSFORMS: [&str; 10] = [
    "copy, ring to ring",
    "copy, ring to memory",
    "copy with CRC32C",
    "AES-128-GCM seal",
    "AES-128-GCM open",
    "AES-256-GCM seal",
    "AES-256-GCM open",
    "record in the open, CRC32C",
    "LZ4 (text)",
    "zstd 1 (text)",
];

struct Bench {
    worker: Worker,
    from: Span,
    to: Span,
    piece: usize,
    position: u64,
    buffer: Vec<u8>,
    secret: Secret,
}

impl Bench {
    fn new(piece: usize) -> Self {
        let (from, to) = (Span::heap(RING), Span::heap(RING));
        // Random words with some noise, so that the text compresses in part.
        let mut state = 1u64;
        let words: [&[u8]; 5] =
            [b"harbour ", b"slip ", b"the ", b"crane and cargo ", b"\x13\x9a\x02\xfe"];
        let mut text = Vec::with_capacity(RING + 32);
        while text.len() < RING {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            text.extend_from_slice(words[(state >> 33) as usize % 5]);
            text.push((state >> 56) as u8);
        }
        from.write(0, &text[..RING]).unwrap();
        to.write(0, &text[..RING]).unwrap();
        let secret = Secret::derive(&[9; 32], &[]);
        let buffer = vec![0; record::MAX_RECORD];
        Self { worker: Worker::new(), from, to, piece, position: 0, buffer, secret }
    }

    fn next(&mut self) -> Stretch {
        self.position += self.piece as u64;
        Stretch::new(self.position, self.piece as u64, RING as u64).unwrap()
    }

    /// Runs one turn and returns its GB/s.
    fn turn(&mut self, name: &str) -> f64 {
        let cipher = if name.contains("256") { Cipher::Aes256Gcm } else { Cipher::Aes128Gcm };
        let (mut bytes, mut spent) = (0u64, Duration::ZERO);
        let mut sealer = Sealer::new(cipher, &self.secret);
        let mut opener = Opener::new(cipher, &self.secret);
        while spent < TURN {
            // Opening needs fresh records each time; sealing them is not counted.
            let mut records = Vec::new();
            if name.ends_with("open") {
                for _ in 0..BATCH {
                    let length = self.seal(Some(&mut sealer), Options::default());
                    records.push(self.buffer[..length].to_vec());
                }
            }
            let began = cpu_time();
            for batch in 0..BATCH {
                match records.get_mut(batch) {
                    Some(record) => self.open(&mut opener, record),
                    None => self.once(name, &mut sealer),
                }
            }
            spent += cpu_time() - began;
            bytes += (BATCH * self.piece) as u64;
        }
        bytes as f64 / spent.as_secs_f64() / 1e9
    }

    fn open(&mut self, opener: &mut Opener, record: &mut [u8]) {
        let at = self.next();
        self.worker.open(Some(opener), record, &mut Output::Ring(&self.to, at)).unwrap();
    }

    fn seal(&mut self, sealer: Option<&mut Sealer>, options: Options) -> usize {
        let at = self.next();
        let (input, mut output) = (Input::Ring(&self.from, at), Output::Bytes(&mut self.buffer));
        self.worker.seal(sealer, options, &input, &mut output).unwrap()
    }

    fn copy(&mut self, to_ring: bool, checked: bool) {
        let at = self.next();
        let input = Input::Ring(&self.from, at);
        let mut output = match to_ring {
            true => Output::Ring(&self.to, at),
            false => Output::Bytes(&mut self.buffer),
        };
        let copied = match checked {
            true => self.worker.copy_checked(&input, &mut output).map(|(length, _)| length),
            false => self.worker.copy(&input, &mut output),
        };
        assert_eq!(copied, Ok(self.piece));
    }

    fn once(&mut self, name: &str, sealer: &mut Sealer) {
        let (compression, checksum) = (Compression::None, false);
        let options = match name {
            "copy, ring to ring" => return self.copy(true, false),
            "copy, ring to memory" => return self.copy(false, false),
            "copy with CRC32C" => return self.copy(false, true),
            "record in the open, CRC32C" => Options { compression, checksum: true },
            "LZ4 (text)" => Options { compression: Compression::Lz4, checksum },
            "zstd 1 (text)" => Options { compression: Compression::Zstd, checksum },
            _ => Options { compression, checksum },
        };
        let sealer = name.contains("seal").then_some(sealer);
        self.seal(sealer, options);
    }
}

/// Returns the ns for a job with `tenants` tenants that all have something to send.
fn schedule(tenants: usize) -> f64 {
    let mut scheduler = Scheduler::new();
    let core = scheduler.add_resource("core", 1);
    let copy = scheduler.add_executor("copy", Class::F, core, 10_000_000_000);
    for _ in 0..tenants {
        let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
        let chain = scheduler.open(tenant, &[copy]).unwrap();
        scheduler.push(chain, 16_384, chain).unwrap();
    }
    let (mut now, busy, mut jobs) = (Duration::ZERO, Duration::from_nanos(1638), 0u32);
    let began = cpu_time();
    while cpu_time() - began < TURN {
        for _ in 0..1000 {
            now += busy;
            let ticket = scheduler.next(core, now).unwrap();
            let chain = scheduler.done(ticket, 16_384, busy, now).unwrap();
            scheduler.push(chain, 16_384, chain).unwrap();
            jobs += 1;
        }
    }
    (cpu_time() - began).as_nanos() as f64 / f64::from(jobs)
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn main() {
    let mut benches = [16 * 1024, 128 * 1024].map(Bench::new);
    let mut rounds = vec![[Vec::new(), Vec::new()]; TRANSFORMS.len()];
    for _ in 0..ROUNDS {
        for (name, rounds) in TRANSFORMS.iter().zip(&mut rounds) {
            for (bench, rounds) in benches.iter_mut().zip(rounds) {
                rounds.push(bench.turn(name));
            }
        }
    }
    println!("{:<28} {:>14} {:>14}", "GB/s", "16 KiB", "128 KiB");
    for (name, [small, large]) in TRANSFORMS.iter().zip(rounds) {
        println!("{name:<28} {:>14.2} {:>14.2}", median(small), median(large));
    }
    println!("\n{:<28} {:>14}", "scheduler", "ns a job");
    for tenants in [1, 64, 4096] {
        let rounds = (0..ROUNDS).map(|_| schedule(tenants)).collect();
        println!("{:<28} {:>14.0}", format!("{tenants} tenants"), median(rounds));
    }
}
