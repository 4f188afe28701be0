//! Times in the formats of C.

use libc::{c_int, timespec};
use slipway_socket::{Deadline, Errno};

/// Nanoseconds of a second.
const SECOND: u64 = 1_000_000_000;

/// Returns the deadline `time` from now.
///
/// # Errors
/// `EINVAL` if `time` is negative, or its nanoseconds are a second or more.
pub fn after(time: &timespec) -> Result<Deadline, Errno> {
    let whole = |number: i64| u64::try_from(number).map_err(|_| Errno::INVAL);
    let (seconds, nanoseconds) = (whole(time.tv_sec)?, whole(time.tv_nsec)?);
    if nanoseconds >= SECOND {
        return Err(Errno::INVAL);
    }
    Ok(Deadline::after(seconds.min(1 << 32) * SECOND + nanoseconds))
}

/// Returns the deadline of a socket's timeout from now. A timeout of 0 ms has no end.
pub fn after_timeout(milliseconds: u32) -> Deadline {
    match u64::from(milliseconds) {
        0 => Deadline::NEVER,
        some => Deadline::after(some * 1_000_000),
    }
}

/// Returns the deadline of a timeout of poll(2) or epoll_wait(2). A negative one has no end.
pub fn after_milliseconds(timeout: c_int) -> Deadline {
    u64::try_from(timeout).map_or(Deadline::NEVER, |time| Deadline::after(time * 1_000_000))
}

/// Converts a timeout to milliseconds, rounded up, and at most 4,000,000 s and a second, so that it
/// fits 32 bits.
pub fn milliseconds(time: libc::timeval) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0).min(4_000_000);
    seconds * 1000 + u64::try_from(time.tv_usec).unwrap_or(0).div_ceil(1000)
}

/// Returns a length of time in nanoseconds in C's format.
pub fn timespec_of(nanoseconds: u64) -> timespec {
    timespec {
        tv_sec: (nanoseconds / 1_000_000_000) as _,
        tv_nsec: (nanoseconds % 1_000_000_000) as _,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_no_call_can_wait_for_is_a_long_one() {
        let far = timespec { tv_sec: i64::MAX, tv_nsec: 0 };
        assert!(after(&far).unwrap().left().is_some_and(|left| left > 1 << 60));
        let past = timespec { tv_sec: 0, tv_nsec: 0 };
        assert!(after(&past).unwrap().has_passed());
    }

    #[test]
    fn a_time_that_cannot_be_is_invalid() {
        let second = SECOND as i64;
        for (tv_sec, tv_nsec) in [(-1, 0), (0, -1), (1, second), (i64::MAX, i64::MAX)] {
            assert_eq!(after(&timespec { tv_sec, tv_nsec }), Err(Errno::INVAL));
        }
        assert!(after(&timespec { tv_sec: 1, tv_nsec: second - 1 }).is_ok());
    }

    #[test]
    fn the_longest_timeout_of_a_socket_is_far() {
        assert_eq!(after_timeout(0), Deadline::NEVER);
        assert!(after_timeout(u32::MAX).left().is_some_and(|left| left > 1 << 51));
    }

    #[test]
    fn times_at_the_limits_of_their_types_do_not_overflow() {
        let far = timespec { tv_sec: i64::MAX, tv_nsec: 999_999_999 };
        assert!(after(&far).unwrap().left().is_some_and(|left| left > 1 << 60));
        assert!(after_milliseconds(c_int::MAX).left().is_some_and(|left| left > 1 << 50));
        assert_eq!(after_milliseconds(c_int::MIN), Deadline::NEVER);
        let longest = timespec_of(u64::MAX);
        assert_eq!((longest.tv_sec, longest.tv_nsec), (18_446_744_073, 709_551_615));
    }

    #[test]
    fn a_negative_timeout_has_no_end() {
        assert_eq!(after_milliseconds(-1).left(), None);
        assert!(after_milliseconds(1000).left().is_some_and(|left| left <= 1_000_000_000));
        assert!(after_milliseconds(0).has_passed());
    }

    #[test]
    fn nanoseconds_are_seconds_and_a_rest() {
        let time = timespec_of(3_000_000_007);
        assert_eq!((time.tv_sec, time.tv_nsec), (3, 7));
    }

    #[test]
    fn a_timeout_is_rounded_up_and_fits_its_half_of_a_word() {
        let time = |tv_sec, tv_usec| milliseconds(libc::timeval { tv_sec, tv_usec });
        assert_eq!((time(0, 0), time(0, 1), time(0, 1000), time(1, 1001)), (0, 1, 1, 1002));
        assert_eq!((time(-1, 0), time(-5, 20)), (0, 1), "the kernel's of a past time is none");
        assert!(time(i64::MAX, 999_999) <= u64::from(u32::MAX));
        assert_eq!(time(i64::MAX, 999_999), 4_000_001_000);
    }
}
