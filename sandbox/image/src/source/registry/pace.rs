//! The least rate of a layer: a registry that sends a byte now and then keeps a pull at work.

use std::fmt;
use std::time::Duration;

use crate::Limits;

/// The bytes of a layer and the time that was waited for them. Time in which nobody asks for more,
/// since a disk is slow, does not count.
#[derive(Clone)]
pub(super) struct Pace {
    /// The least bytes in a second.
    least: u64,
    /// The time over which they are counted.
    time: Duration,
    waited: Duration,
    bytes: u64,
}

impl Pace {
    pub(super) fn new(limits: &Limits) -> Self {
        let Limits { least_rate: least, rate_time: time, .. } = *limits;
        Self { least, time, waited: Duration::ZERO, bytes: 0 }
    }

    /// Counts bytes that came after `waited`. Returns `false` if they come too slowly.
    pub(super) fn goes_on(&mut self, bytes: usize, waited: Duration) -> bool {
        self.bytes += bytes as u64;
        self.waited += waited;
        if self.waited < self.time {
            return true;
        }
        let least = u128::from(self.least) * self.waited.as_millis() / 1000;
        let goes_on = u128::from(self.bytes) >= least;
        (self.waited, self.bytes) = (Duration::ZERO, 0);
        goes_on
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "less than {} bytes a second for {} s", self.least, self.time.as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_its_least_rate_in_each_stretch_of_time() {
        let limits =
            Limits { least_rate: 100, rate_time: Duration::from_secs(10), ..Limits::default() };
        let second = Duration::from_secs(1);
        let mut pace = Pace::new(&limits);
        // Nothing for most of the time, and then all of it.
        for _ in 0..3 {
            assert!((0..9).all(|_| pace.goes_on(0, second)));
            assert!(pace.goes_on(1000, second));
        }
        // What came before does not count.
        assert!(pace.goes_on(1_000_000, 10 * second));
        assert!((0..9).all(|_| pace.goes_on(99, second)));
        assert!(!pace.goes_on(99, second));
        // A long wait is as bad as several short ones.
        assert!(pace.goes_on(2000, 20 * second));
        assert!(!pace.goes_on(1999, 20 * second));
        // No time is waited for bytes that are there.
        assert!((0..1000).all(|_| pace.goes_on(1, Duration::ZERO)));
        assert!(pace.to_string().contains("less than 100 bytes a second for 10 s"), "{pace}");
    }
}
