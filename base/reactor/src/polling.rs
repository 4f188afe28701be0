//! The time for which a reactor polls before it sleeps, learned from the lengths of its sleeps.

use std::time::Duration;

/// The shortest polling time is the longest one divided by this: it costs little CPU and still
/// catches work that comes at once.
const LEAST: u32 = 8;

/// A polling time that follows the traffic. It doubles if work came within the longest polling time
/// after the reactor fell asleep: polling would have caught it, and the sleep and the wake-up, some
/// tens of microseconds, were the greater part of the wait. It halves if work came later: polling
/// was in vain. So a stream with short gaps is polled through, and a stream with long gaps costs
/// little CPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Polling {
    most: Duration,
    now: Duration,
}

impl Polling {
    /// Begins with the longest polling time, `most`.
    pub(crate) fn new(most: Duration) -> Self {
        Self { most, now: most }
    }

    /// Returns how long to poll after the last work.
    pub(crate) fn budget(&self) -> Duration {
        self.now
    }

    /// Adapts to a sleep of length `time` that ended with work.
    pub(crate) fn slept(&mut self, time: Duration) {
        let wanted = if time <= self.most { self.now * 2 } else { self.now / 2 };
        self.now = wanted.clamp(self.most / LEAST, self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(80);

    #[test]
    fn long_sleeps_shorten_it_to_the_least_and_short_ones_lengthen_it_to_the_most() {
        let mut polling = Polling::new(MOST);
        assert_eq!(polling.budget(), MOST);
        for expected in [40, 20, 10, 10, 10] {
            polling.slept(MOST * 2);
            assert_eq!(polling.budget(), Duration::from_micros(expected));
        }
        for expected in [20, 40, 80, 80] {
            polling.slept(MOST);
            assert_eq!(polling.budget(), Duration::from_micros(expected));
        }
    }

    #[test]
    fn never_stays_never() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.slept(Duration::ZERO);
        polling.slept(MOST);
        assert_eq!(polling.budget(), Duration::ZERO);
    }
}
