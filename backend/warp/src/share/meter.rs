//! What is measured: capacities and throughputs, both forgetting.

use std::time::Duration;

/// Bytes per busy second of an executor: an average in which work is forgotten with the time that was worked
/// since, so that idleness changes nothing.
#[derive(Clone, Debug)]
pub struct Capacity {
    bytes: f64,
    seconds: f64,
    /// What was done since: it is put with the rest when it is worth an operation.
    fresh: (u64, Duration),
}

/// Busy time after which a measurement counts a third.
const MEMORY: f64 = 0.1;
/// Busy time that a guess counts as.
const GUESS: f64 = 0.001;
/// Busy time that is gathered before anything is forgotten for it.
const GATHERED: Duration = Duration::from_micros(200);

impl Capacity {
    /// Begins with a guess, in bytes per second, at least 1, that counts as much as a millisecond of work.
    pub fn new(guess: u64) -> Self {
        Self { bytes: guess.max(1) as f64 * GUESS, seconds: GUESS, fresh: (0, Duration::ZERO) }
    }

    /// `bytes` were done in `busy`. No time at all says nothing.
    pub fn add(&mut self, bytes: u64, busy: Duration) {
        if busy == Duration::ZERO || bytes == 0 {
            return;
        }
        self.fresh.0 = self.fresh.0.saturating_add(bytes);
        self.fresh.1 += busy;
        if self.fresh.1 >= GATHERED {
            (self.bytes, self.seconds) = self.all();
            self.fresh = (0, Duration::ZERO);
        }
    }

    /// Bytes per second, at least 1.
    pub fn per_second(&self) -> f64 {
        let (bytes, seconds) = self.all();
        (bytes / seconds).max(1.0)
    }

    /// What counts: bytes, and the seconds that they took.
    fn all(&self) -> (f64, f64) {
        let (bytes, seconds) = (self.fresh.0 as f64, self.fresh.1.as_secs_f64());
        // e to the power of -x, well enough and without the exponential.
        let keep = (1.0 + seconds / MEMORY).recip();
        (self.bytes * keep + bytes, self.seconds * keep + seconds)
    }
}

/// Bytes, and bytes per second of late.
#[derive(Clone, Debug, Default)]
pub struct Throughput {
    total: u64,
    /// Bytes that count, less with the time since.
    recent: f64,
    at: Duration,
    began: Option<Duration>,
}

/// Time after which bytes count a third.
const LATE: f64 = 0.5;
/// Bytes that come within so long are taken to come at once: nothing is forgotten in between.
const AT_ONCE: Duration = Duration::from_millis(1);

impl Throughput {
    /// `bytes` more at `now`.
    pub fn add(&mut self, bytes: u64, now: Duration) {
        if now >= self.at + AT_ONCE {
            self.recent = self.decayed(now);
            self.at = now;
        }
        self.recent += bytes as f64;
        self.began.get_or_insert(now);
        self.total += bytes;
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes per second of about the last second.
    pub fn per_second(&self, now: Duration) -> f64 {
        let age = self.began.map_or(0.0, |began| now.saturating_sub(began).as_secs_f64());
        // What an even stream since the beginning would have gathered in place of one since ever.
        let gathered = LATE * (1.0 - (-age / LATE).exp());
        if gathered > 0.0 { self.decayed(now) / gathered } else { 0.0 }
    }

    fn decayed(&self, now: Duration) -> f64 {
        let since = now.saturating_sub(self.at).as_secs_f64();
        self.recent * (-since / LATE).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_follows_what_is_measured() {
        let mut capacity = Capacity::new(1);
        let step = |capacity: &mut Capacity, rate: u64| {
            (0..1000).for_each(|_| capacity.add(rate / 1000, Duration::from_millis(1)));
        };
        step(&mut capacity, 5_000_000);
        assert!((capacity.per_second() / 5e6 - 1.0).abs() < 0.01);
        step(&mut capacity, 1_000_000);
        assert!((capacity.per_second() / 1e6 - 1.0).abs() < 0.01);
        capacity.add(u64::MAX, Duration::ZERO);
        capacity.add(0, Duration::from_secs(100));
        assert!((capacity.per_second() / 1e6 - 1.0).abs() < 0.01);
    }

    #[test]
    fn a_throughput_is_right_from_the_beginning_and_forgets() {
        let mut bytes = Throughput::default();
        assert_eq!(bytes.per_second(Duration::from_secs(3)), 0.0);
        for milli in 0..2000u64 {
            let now = Duration::from_millis(milli);
            bytes.add(1000, now);
            if milli > 50 {
                let rate = bytes.per_second(now);
                assert!((rate / 1e6 - 1.0).abs() < 0.03, "{rate} after {milli} ms");
            }
        }
        assert_eq!(bytes.total(), 2_000_000);
        assert!(bytes.per_second(Duration::from_secs(6)) < 1000.0);
    }
}
