//! How long the thread looks for more before it sleeps.
//!
//! To be woken costs tens of microseconds, so looking a little longer pays while answers come soon, and is a waste
//! when they do not, or when somebody else needs the processor.

use std::time::{Duration, Instant};

/// How long it looks at least after the last work.
const LEAST: Duration = Duration::from_micros(50);
/// And at most: as long as two others may need to wake up, one after the other, and answer.
const MOST: Duration = Duration::from_micros(200);
/// Sleeps that were longer than that, one after the other, before it looks half as long.
const LONG: u8 = 8;
/// Who is away for longer when it gives up the processor has given it to somebody who needs it.
const CROWDED: Duration = Duration::from_micros(20);
/// Who slept for less, twice, expects to be woken as soon the next time.
const BRIEF: Duration = Duration::from_micros(500);
/// For how long it does not look then but sleeps: a sleeper gets the processor back as soon as there is something,
/// who gives it up gets it back when the others have had enough of it.
const CALM: Duration = Duration::from_millis(100);

/// What was learnt.
pub(crate) struct Patience {
    /// The last work.
    worked: Instant,
    looks: Duration,
    long: u8,
    /// Others need the processor until then.
    crowded: Instant,
    /// Sleeps that were short, one after the other.
    brief: u8,
}

impl Patience {
    pub(crate) fn new(now: Instant) -> Self {
        Self { worked: now, looks: LEAST, long: 0, crowded: now, brief: 0 }
    }

    /// There was work.
    pub(crate) fn worked(&mut self, now: Instant) {
        self.worked = now;
    }

    /// There was none: whether to give up the processor for a moment, and look again.
    pub(crate) fn lasts(&self, now: Instant) -> bool {
        now < self.worked + self.looks && now >= self.crowded
    }

    /// The processor was given up from `then` to `now`.
    pub(crate) fn gave_up(&mut self, then: Instant, now: Instant) {
        if now - then > CROWDED {
            self.crowded = now + CALM;
        }
    }

    /// Whether the next sleep is taken to be a short one.
    pub(crate) fn is_brief(&self) -> bool {
        // Once may be an answer that was waited for, and a pause comes after it.
        self.brief > 1
    }

    /// It slept from `then` to `now`.
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
