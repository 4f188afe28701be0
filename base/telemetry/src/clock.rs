//! Clocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::ClockId;

/// Time since an arbitrary start that never goes back. Devices take it as a part, so that their
/// tests need no real time.
pub trait Clock: Send + Sync {
    /// Time since the clock's start.
    fn now(&self) -> Duration;

    /// The same in whole nanoseconds: what stamps on a data path take.
    fn nanos(&self) -> u64 {
        u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`: the one axis that all processes of a machine share.
pub fn monotonic_ns() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Returns the host's wall clock, `CLOCK_REALTIME`, in nanoseconds since the epoch. For durations,
/// use [`monotonic_ns`].
pub fn realtime_ns() -> u64 {
    nanoseconds(ClockId::Realtime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    now.tv_sec.unsigned_abs().saturating_mul(1_000_000_000) + now.tv_nsec.unsigned_abs()
}

/// The machine's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    /// Starts at zero now.
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for MonotonicClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for MonotonicClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// A clock that moves only when a test turns it; clones share their time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Starts at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets `by` pass.
    pub fn advance(&self, by: Duration) {
        let nanos = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.0.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_moves_when_it_is_turned_and_shares_its_time() {
        let clock = ManualClock::new();
        let other = clock.clone();
        assert_eq!(other.now(), Duration::ZERO);
        clock.advance(Duration::from_nanos(1_500));
        clock.advance(Duration::from_secs(2));
        assert_eq!(other.now(), Duration::from_nanos(2_000_001_500));
    }

    #[test]
    fn the_machines_clock_never_goes_back() {
        let clock = MonotonicClock::new();
        let times: Vec<Duration> = (0..1000).map(|_| clock.now()).collect();
        assert!(times.is_sorted());
        assert!(MonotonicClock::new().now() <= clock.now(), "each starts at zero");
    }
}
