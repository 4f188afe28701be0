//! The load itself: threads that keep commands in flight.
//!
//! A [`Lane`] is a queue pair with its commands, a `Flow` a lane while it runs, and `Flow::step`
//! one poll of it: it takes completions and writes as many commands anew, at the next of the
//! `Places`. [`run`] has a thread for each lane (`drive`). [`run_beside`] has one thread for the
//! lanes of two clients. A `Window` is the time that counts.

mod beside;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_nvme::driver::PinnedPair;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_telemetry::{Clock, Histogram, stamp_clock};

pub use self::beside::{Part, run_beside};
use super::bell::Bell;
use super::cpus::{self, Cpus};
use crate::{Measured, Pattern, Waiting, Workload};

/// A target that completes nothing for this time has failed: longer than a busy machine stands
/// still.
const PATIENCE_NS: u64 = 60_000_000_000;
/// Polls without a completion between two looks at the clock.
const POLLS: u32 = 1 << 14;

/// The sequence of places on the disk.
#[derive(Clone)]
struct Places {
    pattern: Pattern,
    /// Logical blocks of each command.
    blocks: u64,
    /// The number of commands that fit the disk.
    slots: u64,
    state: u64,
    next: u64,
}

impl Places {
    fn new(pattern: Pattern, blocks: u64, disk: u64, thread: u64) -> Result<Self> {
        let slots = disk / blocks;
        if slots == 0 {
            bail!("the disk is smaller than one command's block");
        }
        // Sequential threads begin in different places, as fio's do with offset_increment.
        let next = slots / Workload::MOST_THREADS as u64 * thread;
        Ok(Self { pattern, blocks, slots, state: 0x9e37_79b9_7f4a_7c15 ^ (thread + 1), next })
    }

    /// Returns a pseudo-random number of 32 bits (xorshift64*, Vigna 2016): the upper half, which
    /// is the better one.
    #[inline]
    fn random(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    }

    /// Sets the place and direction of the next `command`.
    #[inline]
    fn aim(&mut self, command: &mut SubmissionEntry) {
        let slot = if self.pattern.is_random() {
            // Scales 32 random bits to the slots without a division.
            (self.random() * self.slots) >> 32
        } else {
            let slot = self.next;
            self.next = if slot + 1 == self.slots { 0 } else { slot + 1 };
            slot
        };
        let lba = slot * self.blocks;
        command.cdw10[0].set(lba as u32);
        command.cdw10[1].set((lba >> 32) as u32);
        let read = match self.pattern {
            Pattern::RandRead | Pattern::Read => true,
            Pattern::RandWrite | Pattern::Write => false,
            Pattern::RandRw => self.random() & 1 == 0,
        };
        command.opcode = if read { NvmOpcode::Read.0 } else { NvmOpcode::Write.0 };
    }
}

/// One thread's queue pair with prepared commands, as many as shall be in flight.
pub struct Lane {
    /// The queue pair.
    pub pair: PinnedPair,
    /// The way in which the thread rings the pair's doorbells.
    pub bell: Bell,
    /// The commands, each with its index as its ID and with a buffer of its own. Their places on
    /// the disk and their directions are set when they are written.
    pub commands: Vec<SubmissionEntry>,
}

/// The properties of the controller under load.
pub struct Taker<'a> {
    /// The processors of the target and of the load's threads.
    pub cpus: &'a Cpus,
    /// Logical blocks of the disk.
    pub blocks: u64,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// The target's process. `None` if it is no process of this machine.
    pub pid: Option<u32>,
}

/// Runs the load on `lanes`, each from a thread of its own, for `warm_up` and then for `time`,
/// which is measured. The lanes are returned with nothing in flight.
///
/// # Errors
/// The disk is smaller than a command, a thread cannot run on its processor, a command fails, or
/// the target completes nothing for a minute.
pub fn run(
    lanes: Vec<Lane>,
    taker: &Taker<'_>,
    workload: &Workload,
    warm_up: Duration,
    time: Duration,
) -> Result<(Vec<Lane>, Measured)> {
    let per_command = u64::from(workload.block_size / taker.block_size).max(1);
    let clock = stamp_clock();
    let (start, stop) = (Barrier::new(lanes.len() + 1), AtomicBool::new(false));
    let (warm_up_ns, time_ns) = (warm_up.as_nanos() as u64, time.as_nanos() as u64);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, lane) in lanes.into_iter().enumerate() {
            let places = Places::new(workload.pattern, per_command, taker.blocks, number as u64)?;
            let cpu = taker.cpus.client[number % taker.cpus.client.len()];
            let (clock, start, stop) = (clock.clone(), &start, &stop);
            let thread = std::thread::Builder::new().name(format!("load-{number}"));
            threads.push(thread.spawn_scoped(scope, move || {
                let pinned = cpus::pin(&[cpu]);
                start.wait();
                let waiting = Waiting::begin();
                let ended =
                    pinned.and_then(|()| drive(lane, places, &*clock, stop, (warm_up_ns, time_ns)));
                if ended.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                ended.map(|(lane, latency, elapsed_ns)| {
                    let waited_ns = waiting.scaled_to(elapsed_ns);
                    Ended { lane, latency, elapsed_ns, waited_ns }
                })
            })?);
        }
        start.wait();
        let cpu = || taker.pid.and_then(cpus::cpu_ns);
        std::thread::sleep(warm_up);
        let before = (cpu(), clock.nanos());
        std::thread::sleep(time);
        let after = (cpu(), clock.nanos());
        let (lanes, mut measured) = join(threads)?;
        measured.bytes = measured.latency.count() * u64::from(workload.block_size);
        measured.target_cpu_ns = scaled(before, after, measured.elapsed_ns);
        measured.waited_ns = measured.waited_ns.filter(|_| taker.cpus.are_enough(lanes.len()));
        Ok((lanes, measured))
    })
}

/// Returns the CPU time between two looks, each with the time of the look, scaled to `elapsed_ns`:
/// the thread that looks wakes a little late. Returns `None` if it could not be read.
fn scaled(before: (Option<u64>, u64), after: (Option<u64>, u64), elapsed_ns: u64) -> Option<u64> {
    let slept = after.1.saturating_sub(before.1).max(1) as f64;
    let spent = after.0?.saturating_sub(before.0?);
    Some((spent as f64 * elapsed_ns as f64 / slept) as u64)
}

/// The result of a thread of a load.
struct Ended {
    lane: Lane,
    latency: Histogram,
    elapsed_ns: u64,
    /// The time for which it waited for a processor, ns; `None` if the kernel does not count it.
    waited_ns: Option<u64>,
}

/// Waits for the threads of a load. Returns their lanes, and all latencies with the longest times.
fn join(threads: Vec<ScopedJoinHandle<'_, Result<Ended>>>) -> Result<(Vec<Lane>, Measured)> {
    let (mut lanes, mut measured) = (Vec::new(), Measured::default());
    for thread in threads {
        let ended = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        let Ended { lane, latency, elapsed_ns, waited_ns } = ended?;
        measured.latency.merge(&latency);
        measured.elapsed_ns = measured.elapsed_ns.max(elapsed_ns);
        measured.waited_ns = measured.waited_ns.max(waited_ns);
        lanes.push(lane);
    }
    Ok((lanes, measured))
}

/// The measured time, in ns of the clock.
#[derive(Clone, Copy)]
struct Window {
    from: u64,
    until: u64,
}

/// A lane's load while it runs.
struct Flow {
    lane: Lane,
    places: Places,
    latency: Histogram,
    /// Lower bounds of the same commands' latencies, up to the last poll that found nothing.
    at_least: Histogram,
    /// The time of that poll.
    looked: u64,
    /// The most completions that a step takes.
    most: usize,
    /// The time when each command was written; 0 while it is not in flight.
    since: Vec<u64>,
    /// Slots of commands that ended, and the times when these were written.
    ended: Vec<(usize, u64)>,
    in_flight: usize,
}

impl Flow {
    /// Writes all of the lane's commands at `now`.
    fn start(lane: Lane, places: Places, now: u64) -> Result<Self> {
        let depth = lane.commands.len();
        let (since, ended) = (vec![now.max(1); depth], Vec::with_capacity(depth));
        let mut flow = Self {
            lane,
            places,
            latency: Histogram::new(),
            at_least: Histogram::new(),
            looked: now,
            most: depth,
            since,
            ended,
            in_flight: depth,
        };
        for command in &mut flow.lane.commands {
            flow.places.aim(command);
            flow.lane.pair.push(command)?;
        }
        flow.lane.bell.ring(flow.lane.pair.tail())?;
        Ok(flow)
    }

    /// Takes completions, and writes as many new commands unless `stop` or the time ends the load.
    /// Returns the time, or `None` if nothing had completed. With `TIMED`, reads the clock at every
    /// poll, so that the delay of each is known.
    #[inline]
    fn step<const TIMED: bool>(
        &mut self,
        clock: &dyn Clock,
        window: &mut Window,
        stop: &AtomicBool,
    ) -> Result<Option<u64>> {
        let begun = if TIMED { clock.nanos() } else { 0 };
        take(&mut self.lane.pair, &mut self.since, &mut self.ended, self.most)?;
        if self.ended.is_empty() {
            if TIMED {
                self.looked = begun;
            }
            return Ok(None);
        }
        let now = clock.nanos();
        if now >= window.until && self.latency.count() == 0 {
            // The machine had no time for this thread: measure until the first command ends.
            window.until = now + 1;
        }
        let more = now < window.until && !stop.load(Ordering::Relaxed);
        let counted = now >= window.from && now < window.until;
        for &(slot, written) in &self.ended {
            if counted {
                self.latency.record(now.saturating_sub(written));
                if TIMED {
                    self.at_least.record(self.looked.saturating_sub(written));
                }
            }
            if more {
                self.places.aim(&mut self.lane.commands[slot]);
                self.lane.pair.push(&self.lane.commands[slot])?;
                self.since[slot] = now.max(1);
            }
        }
        if more {
            self.lane.bell.ring(self.lane.pair.tail())?;
        } else {
            self.in_flight -= self.ended.len();
        }
        self.lane.bell.ring(self.lane.pair.head())?;
        self.ended.clear();
        Ok(Some(now))
    }
}

/// Keeps the lane's commands in flight, and counts those that end after the warm-up. Returns the
/// measured time, which is longer than asked for only if no command ended in time.
fn drive(
    lane: Lane,
    places: Places,
    clock: &dyn Clock,
    stop: &AtomicBool,
    (warm_up_ns, time_ns): (u64, u64),
) -> Result<(Lane, Histogram, u64)> {
    let mut last = clock.nanos();
    let from = last + warm_up_ns;
    let mut window = Window { from, until: from + time_ns };
    let mut flow = Flow::start(lane, places, last)?;
    let mut polls = 0_u32;
    while flow.in_flight > 0 {
        match flow.step::<false>(clock, &mut window, stop)? {
            Some(now) => (polls, last) = (0, now),
            None => {
                polls += 1;
                std::hint::spin_loop();
                if polls.is_multiple_of(POLLS) {
                    give_up(clock.nanos() - last, stop)?;
                }
            }
        }
    }
    Ok((flow.lane, flow.latency, window.until - window.from))
}

/// Takes completions, `most` at most.
#[inline]
fn take(
    pair: &mut PinnedPair,
    since: &mut [u64],
    ended: &mut Vec<(usize, u64)>,
    most: usize,
) -> Result<()> {
    while let Some(done) = pair.pop()? {
        let slot = usize::from(done.id);
        if !done.status.is_success() {
            bail!("a command failed: {:?}", done.status);
        }
        match since.get_mut(slot).map(std::mem::take) {
            None | Some(0) => bail!("the target completed command {slot}, which is not in flight"),
            Some(written) => ended.push((slot, written)),
        }
        if ended.len() == most {
            break;
        }
    }
    Ok(())
}

fn give_up(silent_ns: u64, stop: &AtomicBool) -> Result<()> {
    if silent_ns > PATIENCE_NS {
        bail!("the target completed nothing for {} s", PATIENCE_NS / 1_000_000_000);
    }
    if stop.load(Ordering::Relaxed) {
        // Another thread's error has the reason; commands in flight here end with the connection.
        None.context("another thread of the load failed")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lbas(pattern: Pattern, blocks: u64, disk: u64, count: usize) -> Vec<(u8, u64)> {
        let mut places = Places::new(pattern, blocks, disk, 0).unwrap();
        let mut command = SubmissionEntry::default();
        let mut next = || {
            places.aim(&mut command);
            (command.opcode, command.starting_lba())
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn sequential_places_go_round() {
        let seen = lbas(Pattern::Read, 8, 24 + 7, 4);
        let read = NvmOpcode::Read.0;
        assert_eq!(seen, [(read, 0), (read, 8), (read, 16), (read, 0)]);
        assert!(Places::new(Pattern::Read, 8, 7, 0).is_err());
    }

    #[test]
    fn random_places_are_everywhere_and_within() {
        let seen = lbas(Pattern::RandRw, 8, 800, 10_000);
        let places: std::collections::HashSet<u64> = seen.iter().map(|(_, lba)| *lba).collect();
        assert_eq!(places.len(), 100);
        assert!(places.iter().all(|lba| lba % 8 == 0 && *lba < 800));
        let reads = seen.iter().filter(|(opcode, _)| *opcode == NvmOpcode::Read.0).count();
        assert!((4_000..6_000).contains(&reads), "{reads}");
    }
}
