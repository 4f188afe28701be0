//! A decorator that loses a fraction of the frames.

use super::random::Random;
use super::{Direction, Directions, Layer};
use crate::{Burst, Delivered, Drop, Pick, Port, PortStats};

/// Loses frames at random, each independently.
pub struct Loss {
    inner: Box<dyn Port>,
    random: Random,
    /// The fraction in units of 2^-64: a frame is lost if a random number is below this.
    below: u128,
    ways: Directions,
    picks: Vec<Pick>,
    lost_in: u64,
    lost_bytes_in: u64,
    lost_out: u64,
}

impl Loss {
    /// Wraps `inner`. Loses `fraction` of the frames, 0 to 1, the same ones for the same seed.
    pub fn new(inner: Box<dyn Port>, fraction: f64, ways: Directions, seed: u64) -> Self {
        let below = (fraction.clamp(0.0, 1.0) * 2_f64.powi(64)) as u128;
        let (lost_in, lost_bytes_in, lost_out) = (0, 0, 0);
        let (random, picks) = (Random::new(seed), Vec::with_capacity(crate::BURST));
        Self { inner, random, below, ways, picks, lost_in, lost_bytes_in, lost_out }
    }
}

impl Port for Loss {
    super::forward_to_inner!(nothing_waits);

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let before = burst.len();
        let more = self.inner.take(burst, limit);
        if self.ways.has(Direction::In) {
            let (taken, bytes) = (burst.len(), burst.bytes());
            let (random, below) = (&mut self.random, self.below);
            burst.retain(before, || u128::from(random.next()) >= below);
            self.lost_in += (taken - burst.len()) as u64;
            self.lost_bytes_in += bytes - burst.bytes();
        }
        more
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        if !self.ways.has(Direction::Out) {
            return self.inner.deliver(burst, picks);
        }
        let (random, below) = (&mut self.random, self.below);
        self.picks.clear();
        self.picks.extend(picks.iter().filter(|_| u128::from(random.next()) >= below));
        self.lost_out += (picks.len() - self.picks.len()) as u64;
        self.inner.deliver(burst, &self.picks)
    }

    fn account(&mut self, stats: &mut PortStats) {
        self.inner.account(stats);
        stats.lose_in(Drop::Loss, &mut self.lost_in, &mut self.lost_bytes_in);
        stats.drop_out(Drop::Loss, std::mem::take(&mut self.lost_out));
    }

    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        Some((Layer::Impairment, &mut self.inner))
    }
}
