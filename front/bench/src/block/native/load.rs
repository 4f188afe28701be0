//! The load itself: threads that keep commands in flight.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_nvme::driver::PinnedPair;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_telemetry::{Clock, Histogram, stamp_clock};

use super::bell::Bell;
use super::cpus::{self, Cpus};
use crate::block::{Measured, Pattern, Workload};

/// A target that completes nothing for this time has failed.
const PATIENCE_NS: u64 = 10_000_000_000;
/// The most completions of a noisy client that are taken between two polls of a quiet one.
const LOUD: usize = 4;
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
pub(super) struct Lane {
    pub pair: PinnedPair,
    pub bell: Bell,
    pub commands: Vec<SubmissionEntry>,
}

/// The properties of the controller under load.
pub(super) struct Taker<'a> {
    pub cpus: &'a Cpus,
    /// Logical blocks of the disk.
    pub blocks: u64,
    /// Bytes of a logical block.
    pub block_size: u32,
    /// The target's process.
    pub pid: Option<u32>,
}

/// Runs the load on `lanes`, which are returned with nothing in flight.
pub(super) fn run(
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
                let ended =
                    pinned.and_then(|()| drive(lane, places, &*clock, stop, (warm_up_ns, time_ns)));
                if ended.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                ended
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
        // This thread wakes a little late, so the target's CPU time is scaled to the measured time.
        let slept = after.1.saturating_sub(before.1).max(1) as f64;
        let elapsed = measured.elapsed_ns as f64;
        measured.target_cpu_ns = before
            .0
            .zip(after.0)
            .map(|(before, after)| (after.saturating_sub(before) as f64 * elapsed / slept) as u64);
        Ok((lanes, measured))
    })
}

/// Waits for the threads of a load. Returns their lanes, and all latencies with the longest time.
fn join(
    threads: Vec<ScopedJoinHandle<'_, Result<(Lane, Histogram, u64)>>>,
) -> Result<(Vec<Lane>, Measured)> {
    let (mut lanes, mut measured) = (Vec::new(), Measured::default());
    for thread in threads {
        let ended = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        let (lane, latency, elapsed_ns) = ended?;
        measured.latency.merge(&latency);
        measured.elapsed_ns = measured.elapsed_ns.max(elapsed_ns);
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

/// One client's part of a load by two clients.
pub(super) struct Part<'a> {
    pub lanes: Vec<Lane>,
    pub taker: Taker<'a>,
    pub workload: &'a Workload,
}

impl Part<'_> {
    fn start(self, now: u64) -> Result<Vec<Flow>> {
        let per_command = u64::from(self.workload.block_size / self.taker.block_size).max(1);
        let (pattern, blocks) = (self.workload.pattern, self.taker.blocks);
        let flows = self.lanes.into_iter().zip(0..).map(|(lane, number)| {
            Flow::start(lane, Places::new(pattern, per_command, blocks, number)?, now)
        });
        flows.collect()
    }
}

/// Runs two loads from one thread, which polls the lanes of both in turn: on a machine with two
/// processors both clients share the one that the target leaves. The noisy client's turns take only
/// a few completions, so that the quiet one waits little. The greatest delay of the quiet one's
/// polls is measured, too. Returns the lanes of both, and the quiet client's result.
pub(super) fn run_beside(
    quiet: Part<'_>,
    loud: Option<Part<'_>>,
    (warm_up, time): (Duration, Duration),
) -> Result<([Vec<Lane>; 2], Measured)> {
    let (clock, stop) = (stamp_clock(), AtomicBool::new(false));
    let pid = quiet.taker.pid;
    let (block_size, cpu) = (u64::from(quiet.workload.block_size), quiet.taker.cpus.client[0]);
    let work = move || {
        cpus::pin(&[cpu])?;
        let mut last = clock.nanos();
        let from = last + warm_up.as_nanos() as u64;
        let mut window = Window { from, until: from + time.as_nanos() as u64 };
        let mut before = None;
        let mut quiet = quiet.start(last)?;
        let mut loud = loud.map_or(Ok(Vec::new()), |loud| loud.start(last))?;
        loud.iter_mut().for_each(|flow| flow.most = LOUD);
        let (mut polls, mut spent) = (0_u32, None);
        loop {
            let mut left = 0;
            for flow in &mut quiet {
                last = flow.step::<true>(&*clock, &mut window, &stop)?.unwrap_or(last);
                left += flow.in_flight;
            }
            for flow in &mut loud {
                last = flow.step::<false>(&*clock, &mut window, &stop)?.unwrap_or(last);
                left += flow.in_flight;
            }
            if left == 0 {
                break;
            }
            if before.is_none() && last >= from {
                before = Some(pid.and_then(cpus::cpu_ns));
            }
            if spent.is_none() && last >= window.until {
                spent = Some(pid.and_then(cpus::cpu_ns));
            }
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS) {
                give_up(clock.nanos().saturating_sub(last), &stop)?;
            }
        }
        let spent = spent.flatten().zip(before.flatten());
        let target_cpu_ns = spent.map(|(after, before)| after.saturating_sub(before));
        let measured = Measured { target_cpu_ns, ..sum_up(&quiet, &loud, window, block_size) };
        let lanes = |flows: Vec<Flow>| flows.into_iter().map(|flow| flow.lane).collect();
        Ok(([lanes(quiet), lanes(loud)], measured))
    };
    // A thread of its own, so that the caller's affinity stays.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("load".into()).spawn_scoped(scope, work)?;
        thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })
}

/// Sums up what the quiet client's lanes measured, and counts the commands of the noisy one.
fn sum_up(quiet: &[Flow], loud: &[Flow], window: Window, block_size: u64) -> Measured {
    let (mut latency, mut at_least) = (Histogram::new(), Histogram::new());
    for flow in quiet {
        latency.merge(&flow.latency);
        at_least.merge(&flow.at_least);
    }
    let ended = loud.iter().map(|flow| flow.latency.count()).sum();
    Measured {
        elapsed_ns: window.until - window.from,
        bytes: latency.count() * block_size,
        latency,
        at_least: Some(at_least),
        neighbour_commands: (!loud.is_empty()).then_some(ended),
        ..Measured::default()
    }
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
