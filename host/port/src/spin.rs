//! How long to look before sleeping.

use std::time::Duration;

/// Longest look. An idle virtual processor takes some tens of microseconds to wake up, so that looking
/// for a few times as long is the better bargain wherever something comes meanwhile.
const MOST: Duration = Duration::from_micros(200);
/// Shortest: so that traffic that comes back is noticed.
const LEAST: Duration = Duration::from_micros(5);

/// A look that follows the traffic: twice as long after one that found something, half as long after
/// one that did not.
#[derive(Debug)]
pub struct Spin(Duration);

impl Default for Spin {
    fn default() -> Self {
        Self(LEAST)
    }
}

impl Spin {
    /// For how long to look this time.
    pub fn budget(&self) -> Duration {
        self.0
    }

    /// A look has ended.
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
