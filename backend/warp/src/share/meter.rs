//! Measured capacities and throughputs; both weigh recent work more.

use std::time::Duration;

/// Bytes per busy second of an executor: an average in which old work decays with the time worked
/// since, so that idleness changes nothing.
#[derive(Clone, Debug)]
pub struct Capacity {
    bytes: f64,
    seconds: f64,
    /// Bytes and busy time not yet added to the average: one addition serves many jobs.
    fresh: (u64, Duration),
}

/// Busy time in seconds after which a measurement counts a third.
const MEMORY: f64 = 0.1;
/// The busy time in seconds that a guess counts as.
const GUESS: f64 = 0.001;
/// Busy time that is gathered before the average decays for it.
const GATHERED: Duration = Duration::from_micros(200);

impl Capacity {
    /// Begins with a guess in bytes per second, at least 1, that counts as much as a millisecond of
    /// work.
    pub fn new(guess: u64) -> Self {
        Self { bytes: guess.max(1) as f64 * GUESS, seconds: GUESS, fresh: (0, Duration::ZERO) }
    }

    /// Adds `bytes` done in `busy`. Ignores a call where either is zero.
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

    /// Returns the capacity in bytes per second, at least 1.
    pub fn per_second(&self) -> f64 {
        let (bytes, seconds) = self.all();
        (bytes / seconds).max(1.0)
    }

    /// Returns the weighted bytes, and the seconds that they took.
    fn all(&self) -> (f64, f64) {
        let (bytes, seconds) = (self.fresh.0 as f64, self.fresh.1.as_secs_f64());
        // Approximates e^-x, without the cost of the exponential.
        let keep = (1.0 + seconds / MEMORY).recip();
        (self.bytes * keep + bytes, self.seconds * keep + seconds)
    }
}

/// A total of bytes, and their recent rate.
#[derive(Clone, Debug, Default)]
pub struct Throughput {
    total: u64,
    /// Bytes weighted by age: older ones count less.
    recent: f64,
    at: Duration,
    began: Option<Duration>,
}

/// Time in seconds after which bytes count a third.
const LATE: f64 = 0.5;
/// Bytes within this time are taken to come at once: nothing decays in between.
const AT_ONCE: Duration = Duration::from_millis(1);

impl Throughput {
    /// Adds `bytes` at `now`.
    pub fn add(&mut self, bytes: u64, now: Duration) {
        if now >= self.at + AT_ONCE {
            self.recent = self.decayed(now);
            self.at = now;
        }
        self.recent += bytes as f64;
        self.began.get_or_insert(now);
        self.total += bytes;
    }

    /// Returns the number of all bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the bytes per second over about the last second.
    pub fn per_second(&self, now: Duration) -> f64 {
        let age = self.began.map_or(0.0, |began| now.saturating_sub(began).as_secs_f64());
        // The weight that an even stream has gathered since the beginning; one without a beginning
        // would have gathered `LATE`.
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
