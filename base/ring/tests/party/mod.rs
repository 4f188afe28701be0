//! One side of an arena, with all that it has for itself.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use slipway_ring::cross::{Arena, Own, Regions, Side, Stream};

pub struct Party {
    pub arena: Arena,
    side: Side,
    own: Vec<[AtomicU64; 4]>,
    pub bits: Arc<[AtomicU64]>,
}

impl Party {
    /// Both sides of a new arena, as two processes would have it.
    pub fn both(streams: u32) -> (Self, Self) {
        let zero = Arena::new(Regions::shape(streams)).unwrap();
        let one = Arena::open(zero.file().unwrap().try_clone_to_owned().unwrap()).unwrap();
        (Self::new(zero, Side::Zero), Self::new(one, Side::One))
    }

    pub fn new(arena: Arena, side: Side) -> Self {
        let own = (0..arena.shape().streams).map(|_| Default::default()).collect();
        let bits = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { arena, side, own, bits }
    }

    pub fn stream(&self, number: u32) -> Stream<'_> {
        let [tail, head_seen, head, tail_seen] = &self.own[number as usize];
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(&self.arena, number, self.side, out, into)
    }

    pub fn regions(&self) -> Regions<'_> {
        Regions::new(&self.bits, self.arena.shape())
    }
}
