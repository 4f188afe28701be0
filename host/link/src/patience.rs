//! How long the thread polls for more work before it sleeps.
//!
//! A wake-up costs tens of microseconds, so polling a little longer pays while answers come soon,
//! and is a waste when they do not, or when another thread needs the processor.

use std::time::{Duration, Instant};

/// The shortest time to poll after the last work.
const LEAST: Duration = Duration::from_micros(50);
/// The longest time to poll: as long as two others may need to wake up, one after the other, and
/// answer.
const MOST: Duration = Duration::from_micros(200);
/// Consecutive sleeps longer than `MOST` before the next such sleep halves the polling time.
const LONG: u8 = 8;
/// A yield that takes longer has given the processor to a thread that needs it.
const CROWDED: Duration = Duration::from_micros(20);
/// After two sleeps shorter than this, the next is expected to be as short.
const BRIEF: Duration = Duration::from_micros(500);
/// Time without polling after a long yield: a sleeper gets the processor back as soon as there is
/// something, while a thread that yields gets it back when the others have had enough of it.
const CALM: Duration = Duration::from_millis(100);

/// The state of the thread's polling.
pub(crate) struct Patience {
    /// The time of the last work.
    worked: Instant,
    looks: Duration,
    long: u8,
    /// Other threads need the processor until this time.
    crowded: Instant,
    /// Consecutive short sleeps.
    brief: u8,
}

impl Patience {
    pub(crate) fn new(now: Instant) -> Self {
        Self { worked: now, looks: LEAST, long: 0, crowded: now, brief: 0 }
    }

    /// Notes that there was work.
    pub(crate) fn worked(&mut self, now: Instant) {
        self.worked = now;
    }

    /// Returns whether a thread without work should yield the processor for a moment and poll
    /// again.
    pub(crate) fn lasts(&self, now: Instant) -> bool {
        now < self.worked + self.looks && now >= self.crowded
    }

    /// Notes that a yield took from `then` to `now`.
    pub(crate) fn gave_up(&mut self, then: Instant, now: Instant) {
        if now - then > CROWDED {
            self.crowded = now + CALM;
        }
    }

    /// Returns whether the next sleep is expected to be short.
    pub(crate) fn is_brief(&self) -> bool {
        // A single short sleep may be the wait for an answer, after which there is a pause.
        self.brief > 1
    }

    /// Notes that the thread slept from `then` to `now`.
    pub(crate) fn slept(&mut self, then: Instant, now: Instant) {
        self.brief = if now - then < BRIEF { self.brief.saturating_add(1) } else { 0 };
        if now - then < MOST {
            (self.looks, self.long) = (MOST, 0);
        } else if self.long < LONG {
            self.long += 1;
        } else {
            (self.looks, self.long) = ((self.looks / 2).max(LEAST), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_make_patient_and_long_ones_do_not() {
        let now = Instant::now();
        let micros = Duration::from_micros;
        let mut patience = Patience::new(now);
        assert!(patience.lasts(now + micros(49)) && !patience.lasts(now + micros(50)));
        assert!(!patience.is_brief());
        patience.slept(now, now + micros(60));
        assert!(!patience.is_brief());
        patience.slept(now, now + micros(60));
        assert!(patience.is_brief());
        assert!(patience.lasts(now + micros(199)));
        for _ in 0..3 * (LONG + 1) {
            patience.slept(now, now + micros(1000));
        }
        assert!(!patience.lasts(now + micros(50)) && !patience.is_brief());
        patience.worked(now + micros(50));
        assert!(patience.lasts(now + micros(99)));
    }

    #[test]
    fn nobody_looks_while_others_need_the_processor() {
        let now = Instant::now();
        let mut patience = Patience::new(now);
        patience.gave_up(now, now + CROWDED);
        assert!(patience.lasts(now));
        let later = now + Duration::from_millis(3);
        patience.gave_up(now, later);
        patience.worked(later);
        assert!(!patience.lasts(later));
        patience.worked(later + CALM);
        assert!(patience.lasts(later + CALM));
    }
}
