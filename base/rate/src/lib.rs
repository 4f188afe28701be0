//! Rates with a burst, and what is left of one.
//!
//! A token bucket, kept as the one time at which it will be full again (the generic cell rate
//! algorithm of ITU-T I.371): something may start while that lies less than the burst's time ahead,
//! and then moves it by its own cost. So nothing is refilled, what is idle costs nothing, and the time
//! at which something held back may start is known.
//!
//! What is larger than the burst starts when the bucket is not empty, and what follows waits until it
//! is paid for.
//!
//! Times are those of any one clock, from its own beginning. No dependencies.

use std::time::Duration;

/// A rate with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per second, at least 1.
    pub per_second: u64,
    /// Units that may come at once after a pause; 0 stands for a tenth of a second's.
    pub burst: u64,
}

/// Parts of a nanosecond that costs are counted in: a byte at 10 GB/s takes a tenth of one.
const TICKS: u128 = 1 << 16;
const SECOND: u128 = 1_000_000_000 * TICKS;

/// How far a rate is used up.
#[derive(Clone, Debug)]
pub struct Bucket {
    rate: Rate,
    /// When it will be full again, in ticks.
    full_at: u128,
}

impl Bucket {
    /// A full bucket.
    pub fn new(rate: Rate) -> Self {
        let burst = if rate.burst == 0 { rate.per_second.div_ceil(10) } else { rate.burst };
        let per_second = rate.per_second.max(1);
        Self { rate: Rate { per_second, burst: burst.max(1) }, full_at: 0 }
    }

    /// The time that `units` take.
    fn cost(&self, units: u64) -> u128 {
        u128::from(units) * SECOND / u128::from(self.rate.per_second)
    }

    /// When something may start: one unit is there. (What starts may cost more.)
    pub fn opens_at(&self) -> Duration {
        let ticks = (self.full_at + self.cost(1)).saturating_sub(self.cost(self.rate.burst));
        Duration::from_nanos(u64::try_from(ticks.div_ceil(TICKS)).unwrap_or(u64::MAX))
    }

    /// Something of `units` starts at `now`.
    pub fn take(&mut self, units: u64, now: Duration) {
        self.full_at = self.full_at.max(now.as_nanos() * TICKS) + self.cost(units);
    }
}
