//! Limits of a controller: I/O commands and bytes per second, each with a burst.
//!
//! A token bucket, kept as the one time at which it will be full again (the generic cell rate
//! algorithm of ITU-T I.371): a command may start while that lies less than the burst's time ahead,
//! and then moves it by its own cost. So nothing is refilled, an idle controller costs nothing, and
//! the time at which a held back command may start is known.
//!
//! Commands that may not start stay where they are, in the guest's queues. A limited controller
//! starts one of each queue in turn, so its queues share what there is. A command larger than the
//! burst starts when the bucket is not empty, and what follows waits until it is paid for.

use std::time::Duration;

/// A rate with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per second, at least 1.
    pub per_second: u64,
    /// Units that may come at once after a pause; 0 stands for a tenth of a second's.
    pub burst: u64,
}

/// What a controller is limited to; None: not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// I/O commands.
    pub commands: Option<Rate>,
    /// Bytes that I/O commands read, write or compare.
    pub bytes: Option<Rate>,
}

/// Parts of a nanosecond that costs are counted in: a byte at 10 GB/s takes a tenth of one.
const TICKS: u128 = 1 << 16;
const SECOND: u128 = 1_000_000_000 * TICKS;

struct Bucket {
    rate: Rate,
    /// When it will be full again, in ticks.
    full_at: u128,
}

impl Bucket {
    fn new(rate: Rate) -> Self {
        let burst = if rate.burst == 0 { rate.per_second.div_ceil(10) } else { rate.burst };
        let per_second = rate.per_second.max(1);
        Self { rate: Rate { per_second, burst: burst.max(1) }, full_at: 0 }
    }

    /// The time that `units` take.
    fn cost(&self, units: u64) -> u128 {
        u128::from(units) * SECOND / u128::from(self.rate.per_second)
    }

    /// When a command may start.
    fn opens_at(&self) -> Duration {
        // One unit is there: a whole command, or a byte, whose command may cost more.
        let ticks = (self.full_at + self.cost(1)).saturating_sub(self.cost(self.rate.burst));
        Duration::from_nanos(u64::try_from(ticks.div_ceil(TICKS)).unwrap_or(u64::MAX))
    }

    fn take(&mut self, units: u64, now: Duration) {
        self.full_at = self.full_at.max(now.as_nanos() * TICKS) + self.cost(units);
    }
}

/// The limits of a controller and how far they are used up.
#[derive(Default)]
pub(crate) struct Limiter {
    commands: Option<Bucket>,
    bytes: Option<Bucket>,
    /// The first queue of which a command was held back since [`Limiter::begin`].
    held: Option<u16>,
    now: Duration,
}

impl Limiter {
    pub fn new(rates: Rates) -> Self {
        let (commands, bytes) = (rates.commands.map(Bucket::new), rates.bytes.map(Bucket::new));
        Self { commands, bytes, ..Self::default() }
    }

    pub fn is_on(&self) -> bool {
        self.commands.is_some() || self.bytes.is_some()
    }

    /// A look at the queues begins, at time `now`. Gives the queue whose turn it is: the first that
    /// was held back last time.
    pub fn begin(&mut self, now: Duration) -> Option<u16> {
        self.now = now;
        self.held.take()
    }

    /// Whether a command may start.
    pub fn is_open(&self) -> bool {
        self.opens_at() <= self.now
    }

    fn opens_at(&self) -> Duration {
        let buckets = [&self.commands, &self.bytes].into_iter().flatten();
        buckets.map(Bucket::opens_at).max().unwrap_or_default()
    }

    /// A command of `queue` waits that may not start.
    pub fn hold(&mut self, queue: u16) {
        self.held.get_or_insert(queue);
    }

    /// A command starts that moves `bytes`.
    pub fn start(&mut self, bytes: u64) {
        let now = self.now;
        if let Some(commands) = &mut self.commands {
            commands.take(1, now);
        }
        self.move_bytes(bytes);
    }

    /// A command that has started moves `bytes` more.
    pub fn move_bytes(&mut self, bytes: u64) {
        if let Some(bucket) = &mut self.bytes {
            bucket.take(bytes, self.now);
        }
    }

    /// When a command that was held back may start.
    pub fn deadline(&self) -> Option<Duration> {
        self.held.map(|_| self.opens_at())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(per_second: u64, burst: u64) -> Option<Rate> {
        Some(Rate { per_second, burst })
    }

    /// Starts commands of `bytes` bytes for `millis` ms as soon as each may; how many.
    fn run(limiter: &mut Limiter, from: u64, millis: u64, bytes: u64) -> u64 {
        let (mut now, end) = (Duration::from_millis(from), Duration::from_millis(from + millis));
        let mut count = 0;
        while now < end {
            limiter.begin(now);
            if limiter.is_open() {
                limiter.start(bytes);
                count += 1;
            } else {
                limiter.hold(1);
                let next = limiter.deadline().unwrap();
                assert!(next > now, "it would not sleep");
                now = next;
            }
        }
        count
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut limiter = Limiter::new(Rates { commands: rate(1000, 50), bytes: None });
        // 50 at once, one each ms from then on, the first a ms after.
        assert_eq!(run(&mut limiter, 0, 1000, 1 << 20), 50 + 999);
        assert_eq!(run(&mut limiter, 1000, 1000, 1 << 20), 1000);
        // After a pause of 20 ms: 20 more.
        assert_eq!(run(&mut limiter, 2020, 1000, 1 << 20), 1020);
        // No pause saves more than the burst.
        assert_eq!(run(&mut limiter, 100_000, 1000, 1 << 20), 50 + 999);
    }

    #[test]
    fn bytes_are_exact_in_the_long_run() {
        for (per_second, bytes) in [(100 << 20, 4096), (10_000_000_000, 512), (1_000_003, 4096)] {
            let mut limiter =
                Limiter::new(Rates { commands: None, bytes: rate(per_second, bytes) });
            let millis = if per_second > 1 << 30 { 10 } else { 1000 };
            let moved = run(&mut limiter, 0, millis, bytes) * bytes;
            let due = per_second * millis / 1000;
            assert!((due..=due + 2 * bytes).contains(&moved), "{moved} of {due}");
        }
    }

    #[test]
    fn what_is_larger_than_the_burst_starts_and_is_paid_for() {
        let mut limiter = Limiter::new(Rates { commands: None, bytes: rate(1 << 20, 1) });
        assert_eq!(run(&mut limiter, 0, 4000, 1 << 20), 4);
    }

    #[test]
    fn the_stricter_limit_holds() {
        let rates = Rates { commands: rate(100, 1), bytes: rate(1 << 20, 1) };
        assert_eq!(run(&mut Limiter::new(rates), 0, 1000, 512), 100);
        assert!((15..=17).contains(&run(&mut Limiter::new(rates), 0, 1000, 64 << 10)));
    }

    #[test]
    fn impossible_numbers_do_no_harm() {
        for (per_second, burst) in [(0, 0), (u64::MAX, u64::MAX), (1, u64::MAX), (u64::MAX, 0)] {
            let rates = Rates { commands: rate(per_second, burst), bytes: rate(per_second, burst) };
            let mut limiter = Limiter::new(rates);
            limiter.begin(Duration::from_secs(1 << 32));
            for _ in 0..1000 {
                limiter.start(u64::from(u32::MAX) * 4096);
                let _ = (limiter.is_open(), limiter.deadline());
            }
        }
    }
}
