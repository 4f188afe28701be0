//! The host's wall clock. For durations, use `slipway_telemetry::monotonic_ns`.

use rustix::time::{ClockId, clock_gettime};

/// Returns CLOCK_REALTIME, in nanoseconds since the epoch.
pub fn realtime_ns() -> u64 {
    let time = clock_gettime(ClockId::Realtime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
