//! Frames that come from inside a switch, at a set rate.

use std::time::Instant;

use anyhow::{Result, ensure};
use slipway_ram::Span;
use slipway_switch::{
    Abilities, BURST, Burst, Delivered, Handle, Mac, Offload, Pick, Port, PortConfig,
};

/// Frames of a burst (the figure of *Speeding Up Packet I/O in Virtual Machines*, section 3.4).
const OFFERED: u64 = 100;
/// Bytes of memory for each frame of a burst.
const SLOT: usize = 2048;
/// The number in the destination's MAC address, and in the source's.
const STATIONS: [u64; 2] = [2, 3];
/// The place of a frame's number.
const NUMBER: usize = 14;

/// Frames that come from inside a switch, for the second of two stations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Bytes of a frame, 60 to 2,048.
    pub bytes: u32,
    /// Frames per second.
    pub rate: u64,
}

impl Source {
    /// The name of the source's port.
    pub const NAME: &'static str = "source";

    /// Attaches the source to a switch, whose thread never sleeps from then on; blocks.
    ///
    /// # Errors
    /// If the frames are too short or too long, or the switch has no port for the source.
    pub fn attach(self, switch: &Handle) -> Result<()> {
        let source = SourcePort::new(self)?;
        let config = PortConfig { name: Self::NAME.to_owned(), ..PortConfig::default() };
        let attached = switch.call(move |owner| owner.attach(Box::new(source), config));
        attached??;
        Ok(())
    }
}

/// A port without a peer that offers frames at a set rate, in bursts. What the switch has no time
/// for is not made up for by more than a burst.
struct SourcePort {
    memory: Span,
    bytes: usize,
    rate: u64,
    begin: Instant,
    /// Frames that were due so far, those left out included, and frames that were sent.
    due: u64,
    sent: u64,
}

impl SourcePort {
    fn new(source: Source) -> Result<Self> {
        let memory = Span::heap(BURST * SLOT);
        let (bytes, rate) = (source.bytes as usize, source.rate);
        ensure!((60..=SLOT).contains(&bytes), "frames have 60 to {SLOT} bytes");
        for slot in 0..BURST {
            let [to, from] = STATIONS.map(|number| Mac::local(number).0);
            // The type for experiments (IEEE 802, table 9-1).
            memory.write(slot * SLOT, &[&to[..], &from, &[0x88, 0xb5]].concat())?;
        }
        Ok(Self { memory, bytes, rate, begin: Instant::now(), due: 0, sent: 0 })
    }
}

impl Port for SourcePort {
    fn abilities(&self) -> Abilities {
        Abilities::NONE
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        let due = (self.begin.elapsed().as_secs_f64() * self.rate as f64) as u64;
        if due - self.due < OFFERED {
            return false;
        }
        let count = OFFERED.min(limit as u64);
        // A source that is late by more than the switch can catch up with leaves frames out.
        self.due = (self.due + count).max(due.saturating_sub(BURST as u64));
        for slot in 0..count as usize {
            let place = slot * SLOT;
            let number = self.memory.write(place + NUMBER, &self.sent.to_le_bytes());
            if number
                .and_then(|()| burst.push(&self.memory, place, self.bytes, Offload::NONE))
                .is_ok()
            {
                self.sent += 1;
            }
        }
        due - self.due >= OFFERED
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        let bytes = picks.iter().map(|pick| burst.len_of(*pick) as u64).sum();
        Delivered { frames: picks.len() as u32, bytes, ..Delivered::default() }
    }

    /// Frames are due all the time.
    fn arm(&mut self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_numbered_and_complete() {
        assert!(SourcePort::new(Source { bytes: 59, rate: 1 }).is_err());
        let mut port = SourcePort::new(Source { bytes: 1500, rate: u64::MAX >> 20 }).unwrap();
        port.begin -= std::time::Duration::from_secs(1);
        let (mut burst, mut number) = (Burst::new(), 0_u64);
        for _ in 0..3 {
            burst.clear();
            assert!(port.take(&mut burst, 256), "more than can be sent is due");
            for frame in 0..burst.len() {
                let pick = Pick { frame: frame as u16, tci: 0 };
                let head = burst.head(frame);
                assert_eq!((burst.len_of(pick), &head[..6]), (1500, &Mac::local(2).0[..]));
                assert_eq!(head[NUMBER..NUMBER + 8], number.to_le_bytes());
                number += 1;
            }
        }
        assert_eq!(number, 3 * OFFERED);
    }
}
