//! An impairment of a port's frames, as one setting: loss, delay, rate.
//!
//! A new kind of impairment is a field of [`Impairment`], with its range in [`Impairment::check`],
//! which also counts it among what has an effect, and with a decorator that `Impairment::wrap` puts
//! in front of the port. The decorator names its `Layer::Impairment`, so that `Switch::impair` can
//! remove it. [`Loss`] is the model of one that only omits frames. One that changes bytes copies
//! the frames first, as [`Queued`] does: [`Port::deliver`] lends the burst read-only, and beyond 96
//! bytes a frame lies in its sender's memory. One that adds frames copies them too, into a `Line`
//! as [`Queued`] does: [`Port::take`] appends at most `limit` frames, and the line keeps the rest
//! for the next turn. What the decorator does inward precedes the switch's
//! checks of addresses. The other places are in `docs/where.md`. In the CLI's `port_tools.rs`
//! `impair` refuses a command that asks for nothing, so it knows each option, and `describe` is
//! what `slipway port ls`, `inspect` and `impair` show.

use std::time::Duration;

use super::{ByDelay, ByRate, Directions, Loss, Queued};
use crate::{Port, Rate};

/// The longest delay.
pub const MAX_DELAY: Duration = Duration::from_secs(60);
/// The largest number of frames in a queue.
pub const MAX_QUEUE: u32 = 65_536;
/// The default number of frames in a queue; netem's default.
const QUEUE: u32 = 1000;

/// A simulated bad link. A frame may be lost, then is delayed, then waits for the rate. Each
/// direction is impaired separately.
#[derive(Clone, Debug, PartialEq)]
pub struct Impairment {
    /// The fraction of frames that is lost, 0 to 1, each frame independently.
    pub loss: f64,
    /// The delay of each frame.
    pub delay: Duration,
    /// The largest random change of the delay in either direction, at most `delay`. Frames keep
    /// their order.
    pub jitter: Duration,
    /// The largest rate in bytes per second, with a burst.
    pub rate: Option<Rate>,
    /// The number of frames of 2,048 bytes on average that may wait for the delay, and as many for
    /// the rate; 0 for 1,000.
    pub queue: u32,
    /// The directions that are impaired.
    pub ways: Directions,
    /// The seed of all random choices.
    pub seed: u64,
}

impl Default for Impairment {
    /// Returns no impairment, for both directions.
    fn default() -> Self {
        Self {
            loss: 0.0,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            queue: 0,
            ways: Directions::BOTH,
            seed: 0,
        }
    }
}

/// The reason why an impairment is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadImpairment {
    /// The loss is out of range, or not a number.
    #[error("a loss is a fraction from 0 to 1 (0% to 100%)")]
    Loss,
    /// The delay is too long.
    #[error("a delay is {} s at most", MAX_DELAY.as_secs())]
    Delay,
    /// The jitter exceeds the delay: a frame would arrive before it was sent.
    #[error("a jitter can be as large as the delay, and no larger")]
    Jitter,
    /// The rate is 0, so nothing would ever pass.
    #[error("a rate of 0 would let nothing pass: lose 100% instead, or set the link down")]
    Rate,
    /// The queue is too long.
    #[error("a queue has {MAX_QUEUE} frames at most")]
    Queue,
    /// The impairment has no effect.
    #[error("nothing to be done: give a loss, a delay or a rate, and at least one way")]
    Nothing,
}

impl Impairment {
    /// Checks whether an impairment is valid.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check(&self) -> Result<(), BadImpairment> {
        let nothing = self.loss == 0.0 && self.delay.is_zero() && self.rate.is_none();
        if !(0.0..=1.0).contains(&self.loss) {
            return Err(BadImpairment::Loss);
        } else if self.delay > MAX_DELAY {
            return Err(BadImpairment::Delay);
        } else if self.jitter > self.delay {
            return Err(BadImpairment::Jitter);
        } else if self.rate.is_some_and(|rate| rate.per_second == 0) {
            return Err(BadImpairment::Rate);
        } else if self.queue > MAX_QUEUE {
            return Err(BadImpairment::Queue);
        } else if nothing || !(self.ways.inward || self.ways.outward) {
            return Err(BadImpairment::Nothing);
        }
        Ok(())
    }

    /// Puts the decorators of this impairment in front of `port`.
    pub(crate) fn wrap(&self, mut port: Box<dyn Port>) -> Box<dyn Port> {
        let queue = if self.queue == 0 { QUEUE } else { self.queue } as usize;
        let ways = self.ways;
        if let Some(rate) = self.rate {
            port = Box::new(Queued::new(port, ways, queue, || ByRate::new(rate)));
        }
        if !self.delay.is_zero() {
            // Each direction has random numbers of its own.
            let mut seed = self.seed;
            let delay = || {
                seed = seed.wrapping_add(1);
                ByDelay::new(self.delay, self.jitter, seed)
            };
            port = Box::new(Queued::new(port, ways, queue, delay));
        }
        if self.loss > 0.0 {
            port = Box::new(Loss::new(port, self.loss, ways, self.seed));
        }
        port
    }
}
