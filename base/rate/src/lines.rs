//! A limit for log lines that another party can cause.

use std::time::Instant;

use crate::{Bucket, Rate};

/// A limit for log lines that another party can cause: one a second, after a burst. Each line that
/// may be written comes with the number of lines that were left out before it.
#[derive(Clone, Debug)]
pub struct Lines {
    bucket: Bucket,
    begin: Instant,
    left_out: u64,
}

impl Lines {
    /// Returns a limit of one line a second that lets `burst` lines (at least 1) through at once
    /// after a pause, as at `now`.
    pub fn new(burst: u64, now: Instant) -> Self {
        let rate = Rate { per_second: 1, burst: burst.max(1) };
        Self { bucket: Bucket::new(rate), begin: now, left_out: 0 }
    }

    /// Returns `None` if no line may be written at `now`, and counts it as left out. Otherwise
    /// returns the number of lines that were left out since the last one that was written.
    pub fn may(&mut self, now: Instant) -> Option<u64> {
        let now = now.saturating_duration_since(self.begin);
        if self.bucket.opens_at() > now {
            self.left_out += 1;
            return None;
        }
        self.bucket.take(1, now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_flood_is_a_few_lines_and_a_count() {
        let begin = Instant::now();
        let mut lines = Lines::new(5, begin);
        let written = (0..1000).filter(|_| lines.may(begin).is_some()).count();
        assert_eq!(written, 5);
        let later = begin + Duration::from_secs(1);
        assert_eq!([lines.may(later), lines.may(later)], [Some(995), None]);
        assert_eq!(lines.may(later + Duration::from_secs(1)), Some(1));
    }
}
