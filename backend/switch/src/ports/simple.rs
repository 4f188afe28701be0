//! Ports without a peer.

use crate::{Abilities, Burst, Delivered, Pick, Port, Waker};

/// A port that takes all frames and sends none.
#[derive(Debug, Default)]
pub struct NullPort;

impl Port for NullPort {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, _: &mut Burst, _: usize) -> bool {
        false
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let bytes = picks.iter().map(|pick| burst.len_of(*pick) as u64).sum();
        Delivered { frames: picks.len() as u32, bytes, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        false
    }
}

/// A port that stands for a missing peer: its link is down.
#[derive(Debug, Default)]
pub struct UnpluggedPort;

impl Port for UnpluggedPort {
    fn abilities(&self) -> Abilities {
        Abilities::NONE
    }

    fn is_up(&self) -> bool {
        false
    }

    fn take(&mut self, _: &mut Burst, _: usize) -> bool {
        false
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        Delivered { refused: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        false
    }
}

/// A port that sends every frame back, with source and destination exchanged.
#[derive(Default)]
pub struct LoopbackPort {
    waiting: std::collections::VecDeque<(slipway_ram::Span, crate::Offload)>,
    taken: usize,
    waker: Option<Waker>,
}

impl LoopbackPort {
    /// The largest number of frames that it holds; more are dropped.
    const ROOM: usize = 1024;
}

impl Port for LoopbackPort {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let count = self.waiting.len().min(limit).min(burst.room());
        for (span, offload) in self.waiting.iter().take(count) {
            // Reading memory of this process cannot fail.
            let _ = burst.push(span, 0, span.len(), *offload);
        }
        self.taken = count;
        self.waiting.len() > count
    }

    fn release(&mut self) {
        self.waiting.drain(..std::mem::take(&mut self.taken));
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let mut delivered = Delivered::default();
        for pick in picks {
            if self.waiting.len() == Self::ROOM {
                delivered.full = picks.len() as u32 - delivered.frames - delivered.refused;
                break;
            }
            match copy_back(burst, *pick) {
                Some(span) => {
                    delivered.frames += 1;
                    delivered.bytes += span.len() as u64;
                    self.waiting.push_back((span, burst.offload_of(*pick)));
                }
                None => delivered.refused += 1,
            }
        }
        if let Some(waker) = self.waker.as_ref().filter(|_| delivered.frames > 0) {
            waker.wake();
        }
        delivered
    }

    fn arm(&mut self) -> bool {
        !self.waiting.is_empty()
    }

    fn attached(&mut self, waker: Waker) {
        self.waker = Some(waker);
    }
}

/// Returns a copy of the frame with source and destination exchanged.
fn copy_back(burst: &Burst, pick: Pick) -> Option<slipway_ram::Span> {
    let len = burst.len_of(pick);
    let span = slipway_ram::Span::heap(len);
    burst.read(pick).copy_to(&span, 0, len).ok()?;
    let (mut to, mut from) = ([0; 6], [0; 6]);
    span.read(0, &mut to).and_then(|()| span.read(6, &mut from)).ok()?;
    span.write(0, &from).and_then(|()| span.write(6, &to)).ok()?;
    Some(span)
}
