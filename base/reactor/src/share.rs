//! Detection of other tasks that share the reactor.

use std::time::{Duration, Instant};

/// Time after its last work for which a task counts as one that others must keep steps short for.
/// Long against the pauses of a peer that sends one command at a time, short against a human's
/// patience for a neighbour's full speed. A task with a backlog does not count
/// ([`Step::Behind`](crate::Step::Behind)).
const MEMORY: Duration = Duration::from_millis(1);

/// Times of the last work of the two latest tasks: enough to answer for every task, at the same
/// cost however many there are.
#[derive(Default)]
pub(crate) struct Share {
    /// Place of the task that had work last, and the time.
    latest: Option<(usize, Instant)>,
    /// Time at which a task other than `latest` had work last.
    other: Option<Instant>,
}

impl Share {
    /// Notes that the task at `place` had work at `now`.
    pub(crate) fn worked(&mut self, place: usize, now: Instant) {
        if let Some((latest, at)) = self.latest
            && latest != place
        {
            self.other = Some(at);
        }
        self.latest = Some((place, now));
    }

    /// Returns whether a task other than that at `place` had work lately.
    pub(crate) fn is_shared(&self, place: usize, now: Instant) -> bool {
        let other = match self.latest {
            Some((latest, at)) if latest != place => Some(at),
            _ => self.other,
        };
        other.is_some_and(|at| now.saturating_duration_since(at) <= MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_works_alone_shares_nothing() {
        let (mut share, start) = (Share::default(), Instant::now());
        for step in 0..10 {
            let now = start + MEMORY * step;
            assert!(!share.is_shared(3, now));
            share.worked(3, now);
        }
    }

    #[test]
    fn a_neighbour_counts_while_it_works_and_a_moment_longer() {
        let (mut share, start) = (Share::default(), Instant::now());
        share.worked(1, start);
        share.worked(2, start);
        assert!(
            share.is_shared(1, start) && share.is_shared(2, start) && share.is_shared(3, start)
        );
        for _ in 0..10 {
            share.worked(1, start + MEMORY);
        }
        assert!(share.is_shared(1, start + MEMORY), "2 worked a moment ago");
        let later = start + MEMORY + Duration::from_nanos(1);
        assert!(!share.is_shared(1, later), "1 has been alone for long enough");
        assert!(share.is_shared(2, later), "1 works");
    }
}
