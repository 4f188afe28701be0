//! The time of the host's processors: idle, and lost to a program that never sleeps.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use slipway_telemetry::monotonic_ns;

use crate::statistics::percentile;

/// The shortest time between two looks at the clock that counts as an interruption, ns. A look
/// takes some 30 ns.
const SHORTEST: u64 = 1_000;
/// How many looks at the clock an interruption takes at least, where a look takes longer: some
/// clocks are asked by a system call, or are a device.
const LOOKS: u64 = 4;

/// The processors' idle time since boot. The kernel counts it to the nanosecond and tells it by
/// ticks; the other times of `/proc/stat` are what a tick happens to find, which short runs escape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Idle {
    /// Idle time of all processors together, that of waits for disks included, ns.
    pub ns: u64,
    /// The number of processors.
    pub processors: u32,
}

impl Idle {
    /// Reads the time.
    ///
    /// # Errors
    /// The kernel does not tell it.
    pub fn read() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/stat").context("/proc/stat")?;
        let ticks = rustix::param::clock_ticks_per_second();
        Self::parse(&text, ticks).context("/proc/stat tells no idle time")
    }

    /// Parses the text of `/proc/stat` (proc(5)), whose unit is a second's part of `ticks`.
    fn parse(text: &str, ticks: u64) -> Option<Self> {
        let mut lines = text.lines();
        let mut all = lines.next()?.strip_prefix("cpu ")?.split_ascii_whitespace().skip(3);
        let mut next = || all.next()?.parse::<u64>().ok();
        let sum = next()?.checked_add(next()?)?;
        let ns = sum.checked_mul(1_000_000_000)?.checked_div(ticks)?;
        let processors = lines.take_while(|line| line.starts_with("cpu")).count() as u32;
        Some(Self { ns, processors })
    }

    /// Returns the time for which the processors were not idle since `before`, `passed_ns` ago, ns.
    pub fn busy_since(self, before: Self, passed_ns: u64) -> u64 {
        let all = passed_ns.saturating_mul(self.processors.into());
        all.saturating_sub(self.ns.saturating_sub(before.ns))
    }
}

/// The time that a program which never sleeps loses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Lost {
    /// The time in which it did not run, ns.
    pub ns: u64,
    /// The length of each interruption, ns, in ascending order.
    pub each: Vec<u64>,
}

impl Lost {
    /// Runs for a time without sleeping.
    pub fn during(time: Duration) -> Self {
        let (mut lost, shortest) = (Self::default(), shortest(look_ns()));
        let end = Instant::now() + time;
        let mut last = monotonic_ns();
        // The end is looked for now and then only, since each look at a clock takes time.
        while Instant::now() < end {
            for _ in 0..1000 {
                let now = monotonic_ns();
                lost.count(now.saturating_sub(last), shortest);
                last = now;
            }
        }
        lost.each.sort_unstable();
        lost
    }

    /// Counts the time between two looks at the clock, if it is as long as the `shortest`
    /// interruption.
    fn count(&mut self, ns: u64, shortest: u64) {
        if ns >= shortest {
            self.ns += ns;
            self.each.push(ns);
        }
    }

    /// Returns a percentile of the interruptions' lengths, ns; 0 if there were none.
    pub fn percentile(&self, percent: usize) -> u64 {
        percentile(&self.each, percent)
    }
}

/// Returns the time that a look at the clock takes, ns: the least of some.
fn look_ns() -> u64 {
    let look = |_| {
        let before = monotonic_ns();
        monotonic_ns().saturating_sub(before)
    };
    (0..1000).map(look).min().unwrap_or(0)
}

/// Returns the shortest interruption, ns, where a look at the clock takes so many.
fn shortest(look_ns: u64) -> u64 {
    SHORTEST.max(look_ns.saturating_mul(LOOKS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_all_processors() {
        let text = "cpu  10 1 5 100 4 1 1 2 0 0\ncpu0 1 1\ncpu1 1 1\nintr 1\n";
        let before = Idle::parse(text, 100).unwrap();
        assert_eq!(before, Idle { ns: 1_040_000_000, processors: 2 });
        let now = Idle { ns: 1_540_000_000, ..before };
        assert_eq!(now.busy_since(before, 400_000_000), 300_000_000);
        // Ticks are rounded.
        assert_eq!(now.busy_since(before, 200_000_000), 0);
        for none in ["", "intr 1", "cpu  1 2 3", "cpu  1 2 3 4 x"] {
            assert_eq!(Idle::parse(none, 100), None, "{none}");
        }
        assert!(Idle::read().unwrap().processors > 0);
    }

    #[test]
    fn short_times_are_no_interruptions() {
        let mut lost = Lost::default();
        let count = |ns| lost.count(ns, shortest(30));
        [30, 999, 1_000, 5_000].into_iter().for_each(count);
        assert_eq!((lost.ns, lost.percentile(50), lost.percentile(99)), (6_000, 1_000, 5_000));
        assert_eq!(shortest(800), 3_200, "a slow clock interrupts nothing");
        assert_eq!(Lost::default().percentile(50), 0);
    }
}
