//! How long to poll before sleeping.

use std::time::Duration;

/// The longest polling time. An idle virtual processor takes some tens of microseconds to wake up,
/// so that polling for a few times as long is the better bargain wherever a frame comes meanwhile.
const MOST: Duration = Duration::from_micros(200);
/// The shortest polling time: not zero, so that returning traffic is noticed.
const LEAST: Duration = Duration::from_micros(5);

/// A polling time that follows the traffic: doubled after polling that found a frame, halved after
/// polling that did not.
#[derive(Debug)]
pub struct Spin(Duration);

impl Default for Spin {
    fn default() -> Self {
        Self(LEAST)
    }
}

impl Spin {
    /// Returns for how long to poll this time.
    pub fn budget(&self) -> Duration {
        self.0
    }

    /// Adapts the polling time to whether the last polling `found` a frame.
    pub fn looked(&mut self, found: bool) {
        let next = if found { self.0 * 2 } else { self.0 / 2 };
        self.0 = next.clamp(LEAST, MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_follow_the_traffic() {
        let mut spin = Spin::default();
        (0..10).for_each(|_| spin.looked(true));
        assert_eq!(spin.budget(), MOST);
        spin.looked(false);
        assert_eq!(spin.budget(), MOST / 2);
        (0..10).for_each(|_| spin.looked(false));
        assert_eq!(spin.budget(), LEAST);
    }
}
