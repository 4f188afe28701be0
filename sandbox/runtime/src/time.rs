//! The host's clocks, in nanoseconds.

use rustix::time::{ClockId, clock_gettime};

fn now(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// CLOCK_MONOTONIC: the axis of timelines.
pub fn monotonic_ns() -> u64 {
    now(ClockId::Monotonic)
}

/// CLOCK_REALTIME, since the epoch.
pub fn realtime_ns() -> u64 {
    now(ClockId::Realtime)
}
