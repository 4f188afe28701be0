//! The end of an engine that ends when nobody needs it.

use std::time::{Duration, Instant};

/// The time without clients and guests after which such an engine ends. Before the first family,
/// [`FIRST`] holds.
const LINGER: Duration = Duration::from_secs(2);
/// The time for which such an engine waits for its first family.
const FIRST: Duration = Duration::from_secs(60);

/// The time since when an engine is idle, if it ends when idle.
pub struct IdleEnd {
    ends_when_idle: bool,
    /// Set once there was a family.
    served: bool,
    /// The time since when there has been no client and no guest. `None` if there is one, or if the
    /// engine does not end when idle.
    since: Option<Instant>,
}

impl IdleEnd {
    /// Makes the state of an engine that starts at `now`.
    pub fn new(ends_when_idle: bool, now: Instant) -> Self {
        Self { ends_when_idle, served: false, since: ends_when_idle.then_some(now) }
    }

    /// Notes whether there is a client or a guest now, and whether there is a family. Returns
    /// whether the engine is to end.
    pub fn is_over(&mut self, is_used: bool, has_families: bool, now: Instant) -> bool {
        self.served |= has_families;
        if !self.ends_when_idle || is_used {
            self.since = None;
            return false;
        }
        self.since.get_or_insert(now);
        self.ends_at().is_some_and(|end| end <= now)
    }

    /// Returns when the engine ends unless a process comes. Returns `None` if there is a client or
    /// a guest, or if the engine does not end when idle.
    pub fn ends_at(&self) -> Option<Instant> {
        self.since.map(|since| since + if self.served { LINGER } else { FIRST })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_waits_for_its_first_family_and_not_long_after_its_last() {
        let start = Instant::now();
        let mut idle = IdleEnd::new(true, start);
        assert_eq!(idle.ends_at(), Some(start + FIRST));
        assert!(!idle.is_over(false, false, start + FIRST / 2));
        assert!(!idle.is_over(true, true, start + FIRST * 2));
        assert_eq!(idle.ends_at(), None);
        let last = start + FIRST * 3;
        assert!(!idle.is_over(false, false, last));
        assert_eq!(idle.ends_at(), Some(last + LINGER));
        assert!(idle.is_over(false, false, last + LINGER));
    }

    #[test]
    fn an_engine_that_does_not_end_when_idle_never_does() {
        let start = Instant::now();
        let mut idle = IdleEnd::new(false, start);
        assert!(!idle.is_over(false, false, start + FIRST * 2));
        assert_eq!(idle.ends_at(), None);
    }
}
