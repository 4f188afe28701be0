//! The time for which the thread `slipway-link` polls for more work before it sleeps.
//!
//! A wake-up costs tens of microseconds. So polling a little longer pays while answers come soon.
//! It is a waste when they do not, or when another thread needs the processor.

use std::time::{Duration, Instant};

/// The shortest time to poll after the last work.
const LEAST: Duration = Duration::from_micros(50);
/// The longest time to poll: as long as two others may need to wake up, one after the other, and
/// answer.
const MOST: Duration = Duration::from_micros(200);
/// The number of consecutive sleeps of at least `MOST` that change nothing. The next one halves the
/// time to poll.
const LONG_SLEEPS: u8 = 8;
/// A yield that takes longer has given the processor to a thread that needs it.
const CROWDED: Duration = Duration::from_micros(20);
/// After two consecutive sleeps shorter than this, the next one is expected to be as short.
const BRIEF: Duration = Duration::from_micros(500);
/// The time without polling after a yield that took longer than `CROWDED`. The kernel gives a
/// sleeper the processor as soon as there is work for it, but a thread that yields only when the
/// others have had their time.
const CALM: Duration = Duration::from_millis(100);

/// The state of the thread's polling.
pub(crate) struct Patience {
    /// The time of the last work.
    worked: Instant,
    /// The time to poll after the last work, from `LEAST` to `MOST`.
    polling: Duration,
    /// The number of consecutive sleeps of at least `MOST` since `polling` changed.
    long_sleeps: u8,
    /// Other threads need the processor until this time.
    crowded_until: Instant,
    /// The number of consecutive sleeps shorter than `BRIEF`.
    brief_sleeps: u8,
}

impl Patience {
    pub(crate) fn new(now: Instant) -> Self {
        let (worked, crowded_until) = (now, now);
        Self { worked, polling: LEAST, long_sleeps: 0, crowded_until, brief_sleeps: 0 }
    }

    /// Notes that there was work.
    pub(crate) fn worked(&mut self, now: Instant) {
        self.worked = now;
    }

    /// Returns whether a thread without work should yield the processor for a moment and poll
    /// again.
    pub(crate) fn should_poll(&self, now: Instant) -> bool {
        now < self.worked + self.polling && now >= self.crowded_until
    }

    /// Notes that a yield took from `then` to `now`.
    pub(crate) fn yielded(&mut self, then: Instant, now: Instant) {
        if now - then > CROWDED {
            self.crowded_until = now + CALM;
        }
    }

    /// Returns whether the next sleep is expected to be short.
    pub(crate) fn expects_brief_sleep(&self) -> bool {
        // A single short sleep may be the wait for an answer, after which there is a pause.
        self.brief_sleeps > 1
    }

    /// Notes that the thread slept from `then` to `now`.
    pub(crate) fn slept(&mut self, then: Instant, now: Instant) {
        let is_brief = now - then < BRIEF;
        self.brief_sleeps = if is_brief { self.brief_sleeps.saturating_add(1) } else { 0 };
        if now - then < MOST {
            (self.polling, self.long_sleeps) = (MOST, 0);
        } else if self.long_sleeps < LONG_SLEEPS {
            self.long_sleeps += 1;
        } else {
            (self.polling, self.long_sleeps) = ((self.polling / 2).max(LEAST), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sleeps_lengthen_the_polling_and_long_ones_shorten_it() {
        let now = Instant::now();
        let micros = Duration::from_micros;
        let mut patience = Patience::new(now);
        assert!(patience.should_poll(now + micros(49)) && !patience.should_poll(now + micros(50)));
        assert!(!patience.expects_brief_sleep());
        patience.slept(now, now + micros(60));
        assert!(!patience.expects_brief_sleep());
        patience.slept(now, now + micros(60));
        assert!(patience.expects_brief_sleep());
        assert!(patience.should_poll(now + micros(199)));
        for _ in 0..3 * (LONG_SLEEPS + 1) {
            patience.slept(now, now + micros(1000));
        }
        assert!(!patience.should_poll(now + micros(50)) && !patience.expects_brief_sleep());
        patience.worked(now + micros(50));
        assert!(patience.should_poll(now + micros(99)));
    }

    #[test]
    fn a_thread_does_not_poll_while_others_need_the_processor() {
        let now = Instant::now();
        let mut patience = Patience::new(now);
        patience.yielded(now, now + CROWDED);
        assert!(patience.should_poll(now));
        let later = now + Duration::from_millis(3);
        patience.yielded(now, later);
        patience.worked(later);
        assert!(!patience.should_poll(later));
        patience.worked(later + CALM);
        assert!(patience.should_poll(later + CALM));
    }
}
