//! The time for which a reactor polls before it sleeps, learned from the lengths of its sleeps, and
//! the times at which a reactor with ready tasks checks for kernel events.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The kernel's list of the processors that run.
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// The shortest polling time is the longest one divided by this: it costs little CPU and still
/// catches work that comes at once.
const LEAST: u32 = 8;

/// Returns the longest polling time of a reactor that is to poll for `most`. On a machine with one
/// processor that is no time: whoever brings work needs the processor, so that polling delays what
/// it waits for.
pub(crate) fn budget(most: Duration, has_one_processor: bool) -> Duration {
    if has_one_processor { Duration::ZERO } else { most }
}

/// Returns whether the machine has one processor. Returns `false` if the kernel does not say.
pub(crate) fn has_one_processor() -> bool {
    static ONE: OnceLock<bool> = OnceLock::new();
    *ONE.get_or_init(|| std::fs::read_to_string(ONLINE).is_ok_and(|list| is_one(&list)))
}

/// Returns whether a list of processors, such as `0-3,5`, has one.
fn is_one(list: &str) -> bool {
    list.trim().parse::<u32>().is_ok()
}

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

/// Time between two checks for kernel events while tasks are ready: a check is a system call, and a
/// round may cost far less. It is also the longest delay with which a busy reactor sees an event.
const CHECK_PERIOD: Duration = Duration::from_micros(20);
/// Time after an event in which another one is expected.
const ROW: Duration = Duration::from_micros(50);
/// Time between two checks where the tasks look for their work by themselves
/// ([`Settings::self_polling`](crate::Settings::self_polling)): a check is for messages that only
/// the reactor takes, such as its end.
const RARE_PERIOD: Duration = Duration::from_micros(200);

/// The times of checks for kernel events while tasks are ready.
///
/// A peer that sends a message and waits for the reply, as a VMM does for each register that a
/// driver reads, sends the next message only then. With one check in a [`CHECK_PERIOD`] it would
/// have one reply in that time for as long as any task polls memory. So events that follow each
/// other are looked for after each round without work, in which a check takes nothing from a task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventChecks {
    /// The time between two checks.
    period: Duration,
    /// The time after an event in which another one is expected.
    row: Duration,
    /// The time of the next check.
    due: Instant,
    /// The time up to which another event is expected.
    row_end: Instant,
}

impl EventChecks {
    /// Begins at `now`, as if a check had found nothing.
    pub(crate) fn new(now: Instant, self_polling: bool) -> Self {
        let (period, row) =
            if self_polling { (RARE_PERIOD, Duration::ZERO) } else { (CHECK_PERIOD, ROW) };
        Self { period, row, due: now + period, row_end: now }
    }

    /// Returns whether to check at `now`, after a round that `had_work` or had none.
    pub(crate) fn is_due(&self, now: Instant, had_work: bool) -> bool {
        now >= self.due || (!had_work && now < self.row_end)
    }

    /// Notes a check at `now`, which found an event or none.
    pub(crate) fn checked(&mut self, now: Instant, found: bool) {
        self.due = now + self.period;
        if found {
            self.row_end = now + self.row;
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
        let mut checks = EventChecks::new(begin, false);
        assert!(!checks.is_due(at(19), false) && checks.is_due(at(20), false));
        checks.checked(at(20), true);
        assert!(checks.is_due(at(20), false) && !checks.is_due(at(39), true));
        assert!(checks.is_due(at(40), true), "work delays an event by one period at most");
        checks.checked(at(69), false);
        assert!(!checks.is_due(at(70), false), "the row has ended");
        assert!(checks.is_due(at(89), false));
    }

    #[test]
    fn tasks_that_look_by_themselves_cost_few_checks() {
        let begin = Instant::now();
        let at = |micros| begin + Duration::from_micros(micros);
        let mut checks = EventChecks::new(begin, true);
        assert!(!checks.is_due(at(199), false) && checks.is_due(at(200), true));
        checks.checked(at(200), true);
        assert!(!checks.is_due(at(201), false), "no row follows an event");
        assert!(!checks.is_due(at(399), false) && checks.is_due(at(400), false));
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
    fn the_only_processor_is_not_polled_away() {
        assert_eq!((budget(MOST, true), budget(MOST, false)), (Duration::ZERO, MOST));
        assert!(is_one("0\n") && !is_one("0-1\n") && !is_one("0,2\n") && !is_one(""));
    }

    #[test]
    fn never_stays_never() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.slept(Duration::ZERO);
        polling.slept(MOST);
        assert_eq!(polling.budget(), Duration::ZERO);
    }
}
