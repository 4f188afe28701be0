//! Times in the formats of C.

use libc::timespec;
use slipway_socket::Deadline;

/// Returns the deadline `time` from now.
pub fn after(time: &timespec) -> Deadline {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0).min(1 << 32);
    Deadline::after(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_no_call_can_wait_for_is_a_long_one() {
        let far = timespec { tv_sec: i64::MAX, tv_nsec: 0 };
        assert!(after(&far).left().is_some_and(|left| left > 1 << 60));
        let past = timespec { tv_sec: -1, tv_nsec: -1 };
        assert!(after(&past).has_passed());
    }
}
