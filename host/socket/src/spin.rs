//! How long it pays to poll before going to sleep.
//!
//! A wake-up costs tens of microseconds, so polling a little longer is worth it while the other
//! side is busy too, and a waste when it is not. A wait that ends while polling restores the
//! credit, one that does not costs some; without credit nobody polls, until sleeps turn out short
//! again.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The most nanoseconds to poll: longer than a sleeper needs to wake up, so that two sides that
/// both slept find each other awake.
const LONGEST: u64 = 100_000;
/// Nanoseconds below which a sleep might have been polled through.
const SHORT: u64 = 250_000;
/// Consecutive waits that may fail before polling stops.
const CREDIT: u32 = 6;
/// Consecutive short sleeps that earn one more attempt at polling.
const TRY_AFTER: u32 = 8;

/// Returns monotonic nanoseconds.
#[inline]
pub(crate) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// The history of waiting for one thing.
#[derive(Debug)]
pub struct Spin {
    credit: AtomicU32,
    short: AtomicU32,
    slept: AtomicU64,
    /// The time since when callers of [`Spin::again`] poll; 0 if none does.
    looking: AtomicU64,
}

impl Default for Spin {
    fn default() -> Self {
        let credit = AtomicU32::new(CREDIT);
        let (short, slept, looking) = Default::default();
        Self { credit, short, slept, looking }
    }
}

impl Spin {
    /// Polls `ready` for as long as it seems worth it, at most `limit` nanoseconds. Returns whether
    /// it was ready.
    pub fn until(&self, limit: u64, mut ready: impl FnMut() -> bool) -> bool {
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 {
            return ready();
        }
        let (start, limit) = (now(), LONGEST.min(limit));
        loop {
            for _ in 0..64 {
                if ready() {
                    self.credit.store(CREDIT, Ordering::Relaxed);
                    return true;
                }
                std::hint::spin_loop();
            }
            let passed = now().wrapping_sub(start);
            if passed > limit {
                self.credit.store(credit - 1, Ordering::Relaxed);
                return ready();
            }
            if passed > 2_000 {
                // The other side may need this very processor; which ones it may use is unknown
                // here.
                rustix::thread::sched_yield();
            }
        }
    }

    /// Returns whether to poll once more rather than to sleep, for callers that do other work
    /// between two polls.
    pub fn again(&self) -> bool {
        let credit = self.credit.load(Ordering::Relaxed);
        if credit == 0 {
            return false;
        }
        let (since, now) = (self.looking.load(Ordering::Relaxed), now());
        if since == 0 {
            self.looking.store(now, Ordering::Relaxed);
            return true;
        }
        let more = now.wrapping_sub(since) <= LONGEST;
        if !more {
            self.looking.store(0, Ordering::Relaxed);
            self.credit.store(credit - 1, Ordering::Relaxed);
        }
        more
    }

    /// Notes that a wait ended with success, after [`Spin::again`] or [`Spin::sleeps`].
    pub fn found(&self) {
        if self.looking.load(Ordering::Relaxed) != 0 {
            self.looking.store(0, Ordering::Relaxed);
            self.credit.store(CREDIT, Ordering::Relaxed);
        }
        if self.slept.load(Ordering::Relaxed) != 0 {
            self.woke();
            self.slept.store(0, Ordering::Relaxed);
        }
    }

    /// Notes that a sleep begins.
    pub fn sleeps(&self) {
        self.slept.store(now(), Ordering::Relaxed);
    }

    /// Notes that a sleep ended with success.
    pub fn woke(&self) {
        let length = now().wrapping_sub(self.slept.load(Ordering::Relaxed));
        if length > SHORT {
            self.short.store(0, Ordering::Relaxed);
            return;
        }
        let short = self.short.load(Ordering::Relaxed) + 1;
        self.short.store(short % TRY_AFTER, Ordering::Relaxed);
        if short == TRY_AFTER {
            self.credit.fetch_max(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_in_vain_stops_polling() {
        let spin = Spin::default();
        for _ in 0..CREDIT {
            assert!(!spin.until(1000, || false));
        }
        let mut looks = 0;
        assert!(!spin.until(u64::MAX, || {
            looks += 1;
            false
        }));
        assert_eq!(looks, 1);
        assert!(spin.until(1000, || true));
    }

    #[test]
    fn who_looks_in_between_stops_as_well() {
        let spin = Spin::default();
        let mut sleeps = 0;
        while spin.credit.load(Ordering::Relaxed) > 0 {
            sleeps += u32::from(!spin.again());
        }
        assert_eq!(sleeps, CREDIT);
        assert!(!spin.again());
        // Eight consecutive short sleeps, as soon as this thread gets them.
        while !spin.again() {
            spin.sleeps();
            spin.found();
        }
        spin.found();
        assert_eq!(spin.credit.load(Ordering::Relaxed), CREDIT);
    }
}
