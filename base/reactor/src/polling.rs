//! The time for which a reactor polls before it sleeps, learned from the lengths of its sleeps, and
//! the times at which a reactor with ready tasks looks for kernel events.

use std::time::{Duration, Instant};

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

/// Time between two looks for kernel events while tasks are ready: a look costs a system call, a
/// round may cost far less. It is also the longest delay with which a busy reactor sees an event.
const LOOK_PERIOD: Duration = Duration::from_micros(20);
/// Time after an event in which another one is expected.
const ROW: Duration = Duration::from_micros(50);

/// The times of looks for kernel events while tasks are ready.
///
/// A peer that sends a message and waits for the reply, as a VMM does for each register that a
/// driver reads, sends the next message only then. With one look in a [`LOOK_PERIOD`] it would have
/// one reply in that time for as long as any task polls memory. So events that follow each other
/// are looked for after each round without work, in which a look takes nothing from a task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Looks {
    /// The time of the next look.
    due: Instant,
    /// The time up to which another event is expected.
    row_end: Instant,
}

impl Looks {
    /// Begins at `now`, as if a look had found nothing.
    pub(crate) fn new(now: Instant) -> Self {
        Self { due: now + LOOK_PERIOD, row_end: now }
    }

    /// Returns whether to look at `now`, after a round that `had_work` or had none.
    pub(crate) fn is_due(&self, now: Instant, had_work: bool) -> bool {
        now >= self.due || (!had_work && now < self.row_end)
    }

    /// Notes a look at `now`, which found an event or none.
    pub(crate) fn looked(&mut self, now: Instant, found: bool) {
        self.due = now + LOOK_PERIOD;
        if found {
            self.row_end = now + ROW;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_follow_each_other_are_seen_sooner_where_that_costs_no_work() {
        let begin = Instant::now();
        let at = |micros| begin + Duration::from_micros(micros);
        let mut looks = Looks::new(begin);
        assert!(!looks.is_due(at(19), false) && looks.is_due(at(20), false));
        looks.looked(at(20), true);
        assert!(looks.is_due(at(20), false) && !looks.is_due(at(39), true));
        assert!(looks.is_due(at(40), true), "work delays an event by one period at most");
        looks.looked(at(69), false);
        assert!(!looks.is_due(at(70), false), "the row has ended");
        assert!(looks.is_due(at(89), false));
    }

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
