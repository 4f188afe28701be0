//! Log lines that other engines can cause, limited to one a second after a burst.

use std::fmt::Display;
use std::time::{Duration, Instant};

use slipway_rate::{Bucket, Rate};

/// Lines a second, and the burst after a pause.
const RATE: Rate = Rate { per_second: 1, burst: 5 };

pub(crate) struct Logs {
    bucket: Bucket,
    begin: Instant,
    dropped: u64,
}

impl Logs {
    pub(crate) fn new(now: Instant) -> Self {
        Self { bucket: Bucket::new(RATE), begin: now, dropped: 0 }
    }

    fn may(&mut self, now: Instant) -> bool {
        let now: Duration = now.saturating_duration_since(self.begin);
        let may = self.bucket.opens_at() <= now;
        if may {
            self.bucket.take(1, now)
        } else {
            self.dropped += 1
        }
        may
    }

    /// Logs a warning about another engine, if the limit allows.
    pub(crate) fn warn(&mut self, now: Instant, engine: &str, what: &dyn Display) {
        if self.may(now) {
            let dropped = std::mem::take(&mut self.dropped);
            tracing::warn!(engine, dropped, "{what}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_a_few_lines() {
        let begin = Instant::now();
        let mut logs = Logs::new(begin);
        let count = (0..1000).filter(|_| logs.may(begin)).count();
        assert_eq!((count, logs.dropped), (5, 995));
        assert!(logs.may(begin + Duration::from_secs(1)));
    }
}
