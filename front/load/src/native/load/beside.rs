//! The load of a quiet client beside that of a noisy one, from one thread.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::Result;
use slipway_telemetry::{Clock, Histogram, stamp_clock};

use super::super::cpus;
use super::{Flow, Lane, POLLS, Places, Taker, Window, give_up};
use crate::{Measured, Workload};

/// The most completions of a noisy client that are taken between two polls of a quiet one.
const LOUD: usize = 4;

/// One client's part of a load by two clients.
pub struct Part<'a> {
    /// A lane for each thread that the load would have by itself.
    pub lanes: Vec<Lane>,
    /// The properties of the client's controller.
    pub taker: Taker<'a>,
    /// The load.
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

/// The CPU time that the target uses in the measured time.
struct TargetCpu {
    pid: Option<u32>,
    /// The CPU time at the begin of the measured time: the outer `None` before it was read.
    before: Option<Option<u64>>,
    /// The CPU time at its end.
    after: Option<Option<u64>>,
}

impl TargetCpu {
    fn of(pid: Option<u32>) -> Self {
        Self { pid, before: None, after: None }
    }

    /// Reads the CPU time when the measured time has begun, and when it has ended.
    fn look(&mut self, now: u64, window: Window) {
        let pid = self.pid;
        let read = || pid.and_then(cpus::cpu_ns);
        if self.before.is_none() && now >= window.from {
            self.before = Some(read());
        }
        if self.after.is_none() && now >= window.until {
            self.after = Some(read());
        }
    }

    /// Returns the CPU time in between, in ns. Returns `None` if it was not read at both ends.
    fn spent(&self) -> Option<u64> {
        let (after, before) = self.after.flatten().zip(self.before.flatten())?;
        Some(after.saturating_sub(before))
    }
}

/// The loads of two clients while they run on one thread.
struct Beside {
    quiet: Vec<Flow>,
    loud: Vec<Flow>,
    window: Window,
    target: TargetCpu,
}

impl Beside {
    /// Writes all commands of both at `now`.
    fn start(
        quiet: Part<'_>,
        loud: Option<Part<'_>>,
        now: u64,
        (warm_up, time): (Duration, Duration),
    ) -> Result<Self> {
        let from = now + warm_up.as_nanos() as u64;
        let window = Window { from, until: from + time.as_nanos() as u64 };
        let target = TargetCpu::of(quiet.taker.pid);
        let quiet = quiet.start(now)?;
        let mut loud = loud.map_or(Ok(Vec::new()), |loud| loud.start(now))?;
        loud.iter_mut().for_each(|flow| flow.most = LOUD);
        Ok(Self { quiet, loud, window, target })
    }

    /// Polls all lanes once. Returns the number of commands in flight. Moves `last` to the time of
    /// the last completion, if there was one.
    #[inline]
    fn poll(&mut self, clock: &dyn Clock, stop: &AtomicBool, last: &mut u64) -> Result<usize> {
        let (window, mut left) = (&mut self.window, 0);
        for flow in &mut self.quiet {
            *last = flow.step::<true>(clock, window, stop)?.unwrap_or(*last);
            left += flow.in_flight;
        }
        for flow in &mut self.loud {
            *last = flow.step::<false>(clock, window, stop)?.unwrap_or(*last);
            left += flow.in_flight;
        }
        Ok(left)
    }

    /// Polls until no command is in flight. `last` is the time of the start.
    fn drive(&mut self, clock: &dyn Clock, mut last: u64) -> Result<()> {
        let (stop, mut polls) = (AtomicBool::new(false), 0_u32);
        while self.poll(clock, &stop, &mut last)? > 0 {
            self.target.look(last, self.window);
            polls = polls.wrapping_add(1);
            if polls.is_multiple_of(POLLS) {
                give_up(clock.nanos().saturating_sub(last), &stop)?;
            }
        }
        Ok(())
    }
}

/// Runs two loads from one thread, which polls the lanes of both in turn: on a machine with two
/// processors both clients share the one that the target leaves. The noisy client's turns take only
/// a few completions, so that the quiet one waits little. The greatest delay of the quiet one's
/// polls is measured, too. `times` are the time before the measurement and the measured time.
/// Returns the lanes of both, and the quiet client's result.
///
/// # Errors
/// The errors of [`run`](super::run).
pub fn run_beside(
    quiet: Part<'_>,
    loud: Option<Part<'_>>,
    times: (Duration, Duration),
) -> Result<([Vec<Lane>; 2], Measured)> {
    let clock = stamp_clock();
    let (block_size, cpu) = (u64::from(quiet.workload.block_size), quiet.taker.cpus.client[0]);
    let work = move || {
        cpus::pin(&[cpu])?;
        let begun = clock.nanos();
        let mut both = Beside::start(quiet, loud, begun, times)?;
        both.drive(&*clock, begun)?;
        let Beside { quiet, loud, window, target } = both;
        let target_cpu_ns = target.spent();
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
