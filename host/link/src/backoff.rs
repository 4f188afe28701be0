//! Backoff before the next attempt to reach an engine.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(50);
/// Short, so that new connections come up soon after their engine.
const LAST: Duration = Duration::from_secs(1);

/// The last failure to reach one engine, if any.
#[derive(Default)]
pub(crate) struct Backoff {
    failed: Option<Failed>,
}

struct Failed {
    until: Instant,
    wait: Duration,
    errno: u32,
}

impl Backoff {
    /// Notes that the engine was not reached; programs get `errno` until the next attempt.
    pub(crate) fn failed(&mut self, now: Instant, errno: u32) {
        let wait = self.failed.as_ref().map_or(FIRST, |failed| (failed.wait * 2).min(LAST));
        self.failed = Some(Failed { until: now + wait, wait, errno });
    }

    /// Notes that the engine was reached, or has reached this one.
    pub(crate) fn reached(&mut self) {
        self.failed = None;
    }

    /// Returns the error number for a program if it is too early for another attempt.
    pub(crate) fn errno(&self, now: Instant) -> Option<u32> {
        self.failed.as_ref().filter(|failed| now < failed.until).map(|failed| failed.errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_up_to_a_second_and_is_forgotten() {
        let (mut backoff, mut now) = (Backoff::default(), Instant::now());
        assert_eq!(backoff.errno(now), None);
        let mut waits = Vec::new();
        for _ in 0..7 {
            backoff.failed(now, 111);
            let begin = now;
            while backoff.errno(now) == Some(111) {
                now += Duration::from_millis(10);
            }
            waits.push((now - begin).as_millis());
        }
        assert_eq!(waits, [50, 100, 200, 400, 800, 1000, 1000]);
        backoff.failed(now, 113);
        backoff.reached();
        assert_eq!(backoff.errno(now), None);
    }
}
