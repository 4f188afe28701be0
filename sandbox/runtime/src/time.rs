//! The host's clock of the day; durations go by `slipway_telemetry::monotonic_ns`.

use rustix::time::{ClockId, clock_gettime};

/// CLOCK_REALTIME, nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    let time = clock_gettime(ClockId::Realtime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
