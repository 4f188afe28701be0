//! A decorator with an observer, which sees a port's frames.

use super::Layer;
use crate::{Burst, Delivered, Pick, Port, PortStats};

/// The direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the port's peer to the switch.
    In,
    /// From the switch to the port's peer.
    Out,
}

/// A set of directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Directions {
    /// From the port's peer to the switch.
    pub inward: bool,
    /// From the switch to the port's peer.
    pub outward: bool,
}

impl Directions {
    /// Both directions.
    pub const BOTH: Self = Self { inward: true, outward: true };

    /// Returns whether `way` is in the set.
    pub fn has(self, way: Direction) -> bool {
        match way {
            Direction::In => self.inward,
            Direction::Out => self.outward,
        }
    }
}

/// Sees a port's frames. The switch's thread calls it, so it must neither wait nor make system
/// calls.
pub trait Observer: Send {
    /// Sees frames of the burst that came from the peer, or were given to it. Their offloads are
    /// still to be done.
    fn see(&mut self, way: Direction, burst: &Burst, picks: &[Pick]);
}

/// A port with an [`Observer`].
pub struct Observed {
    inner: Box<dyn Port>,
    number: u64,
    observer: Box<dyn Observer>,
    picks: Vec<Pick>,
}

impl Observed {
    /// Puts `observer` in front of `inner`; `number` identifies it.
    pub fn new(inner: Box<dyn Port>, number: u64, observer: Box<dyn Observer>) -> Self {
        Self { inner, number, observer, picks: Vec::with_capacity(crate::BURST) }
    }
}

impl Port for Observed {
    super::forward_to_inner!(nothing_waits);

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let before = burst.len();
        let more = self.inner.take(burst, limit);
        // A burst has at most 256 frames.
        let taken = before as u16..burst.len() as u16;
        if !taken.is_empty() {
            self.picks.clear();
            self.picks.extend(taken.map(|frame| Pick { frame, tci: 0 }));
            self.observer.see(Direction::In, burst, &self.picks);
        }
        more
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let delivered = self.inner.deliver(burst, picks);
        // The frames without room are the last ones.
        let had = picks.len().saturating_sub(delivered.full as usize);
        self.observer.see(Direction::Out, burst, &picks[..had]);
        delivered
    }

    fn account(&mut self, stats: &mut PortStats) {
        self.inner.account(stats);
    }

    fn inner(&mut self) -> Option<(Layer, &mut Box<dyn Port>)> {
        Some((Layer::Observer(self.number), &mut self.inner))
    }
}
