//! Rate limiting with a burst: token buckets.
//!
//! A bucket is stored as one time, at which it will be full again (the generic cell rate algorithm
//! of ITU-T I.371). An operation may start while that time is less than the burst's duration ahead,
//! and then moves it by its own cost. So nothing is refilled, an idle bucket costs nothing, and the
//! time at which a delayed operation may start is known.
//!
//! An operation larger than the burst starts as soon as the bucket is not empty; later ones wait
//! until it is paid for.
//!
//! Times are read from any one clock, counted from its own start. No dependencies.

mod lines;

pub use lines::Lines;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A rate with a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Units per second, at least 1.
    pub per_second: u64,
    /// Units that may be taken at once after a pause; 0 means the units of a tenth of a second.
    pub burst: u64,
}

/// Ticks in a nanosecond, the unit of costs: a byte at 10 GB/s takes a tenth of a nanosecond.
const TICKS: u128 = 1 << 16;
const SECOND: u128 = 1_000_000_000 * TICKS;

/// A token bucket for one thread.
#[derive(Clone, Debug)]
pub struct Bucket {
    rate: Rate,
    /// Time at which the bucket will be full again, in ticks.
    full_at: u128,
}

impl Bucket {
    /// Returns a full bucket.
    pub fn new(rate: Rate) -> Self {
        let burst = if rate.burst == 0 { rate.per_second.div_ceil(10) } else { rate.burst };
        let per_second = rate.per_second.max(1);
        Self { rate: Rate { per_second, burst: burst.max(1) }, full_at: 0 }
    }

    /// Returns the ticks that `units` take.
    fn cost(&self, units: u64) -> u128 {
        u128::from(units) * SECOND / u128::from(self.rate.per_second)
    }

    /// Returns the time at which the next operation may start: when one unit is available, even if
    /// the operation costs more.
    pub fn opens_at(&self) -> Duration {
        let ticks = (self.full_at + self.cost(1)).saturating_sub(self.cost(self.rate.burst));
        Duration::from_nanos(u64::try_from(ticks.div_ceil(TICKS)).unwrap_or(u64::MAX))
    }

    /// Takes `units` for an operation that starts at `now`.
    pub fn take(&mut self, units: u64, now: Duration) {
        self.full_at = self.full_at.max(now.as_nanos() * TICKS) + self.cost(units);
    }
}

/// Ticks in a nanosecond for a [`SharedBucket`]: its 64-bit times reach 18 years.
const SHARED_TICKS: u128 = 1 << 5;

/// A lock-free bucket that several threads take from; the rate holds for all of them together.
/// Threads that check at the same moment may all start, so there may be one excess operation for
/// each thread besides the first; their units are paid for all the same.
#[derive(Debug)]
pub struct SharedBucket {
    rate: Rate,
    /// Time at which the bucket will be full again, in ticks of `SHARED_TICKS`.
    full_at: AtomicU64,
}

impl SharedBucket {
    /// Returns a full bucket.
    pub fn new(rate: Rate) -> Self {
        Self { rate: Bucket::new(rate).rate, full_at: AtomicU64::new(0) }
    }

    /// Returns the ticks that `units` take.
    fn cost(&self, units: u64) -> u64 {
        let second = 1_000_000_000 * SHARED_TICKS;
        let ticks = (u128::from(units) * second).div_ceil(u128::from(self.rate.per_second));
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }

    /// Returns the time at which the next operation may start, like [`Bucket::opens_at`].
    pub fn opens_at(&self) -> Duration {
        let ahead = self.full_at.load(Ordering::Relaxed).saturating_add(self.cost(1));
        let ticks = ahead.saturating_sub(self.cost(self.rate.burst));
        Duration::from_nanos(ticks.div_ceil(SHARED_TICKS as u64))
    }

    /// Takes `units` for an operation that starts at `now`, like [`Bucket::take`].
    pub fn take(&self, units: u64, now: Duration) {
        let now = u64::try_from(now.as_nanos() * SHARED_TICKS).unwrap_or(u64::MAX);
        let cost = self.cost(units);
        let taken = |full_at: u64| Some(full_at.max(now).saturating_add(cost));
        // Relaxed: it publishes nothing else. It cannot fail: `taken` always returns a value.
        let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many operations of `units` start within `millis` ms, each as soon as it may.
    fn started(bucket: &SharedBucket, millis: u64, units: u64) -> u64 {
        let (mut now, mut count) = (Duration::ZERO, 0);
        while now < Duration::from_millis(millis) {
            match bucket.opens_at() {
                at if at <= now => {
                    bucket.take(units, now);
                    count += 1;
                }
                at => now = at,
            }
        }
        count
    }

    #[test]
    fn a_shared_bucket_has_the_burst_and_then_the_rate() {
        let bucket = SharedBucket::new(Rate { per_second: 1000, burst: 50 });
        // The last one may be due just after the end.
        assert!((1049..=1050).contains(&started(&bucket, 1000, 1)));
        let bucket = SharedBucket::new(Rate { per_second: 10_000_000_000, burst: 4096 });
        let expected = 10_000_000 / 4096;
        assert!(started(&bucket, 1, 4096).abs_diff(expected) < 5);
    }

    #[test]
    fn an_operation_above_the_burst_starts_and_is_paid_for_afterwards() {
        let mut bucket = Bucket::new(Rate { per_second: 1000, burst: 10 });
        let mut starts = Vec::new();
        for _ in 0..4 {
            let now = bucket.opens_at();
            starts.push(now.as_millis());
            bucket.take(100, now);
        }
        // A bucket of 10 is 90 in debt after the first operation, and opens with one unit.
        assert_eq!(starts, [0, 91, 191, 291]);
    }

    #[test]
    fn several_threads_have_one_rate() {
        let bucket = SharedBucket::new(Rate { per_second: 1000, burst: 1 });
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| bucket.take(1, Duration::ZERO)));
            }
        });
        // All 4,000 are paid for.
        assert_eq!(bucket.opens_at(), Duration::from_secs(4));
    }
}
