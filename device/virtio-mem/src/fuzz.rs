//! The body of the fuzz target: bytes become the actions of a hostile guest.

use std::ops::Range;

use slipway_pci::Function;
use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::mem::{request, response, state};

use crate::driver::{FEATURES, ask, request as request_of, unplug_all};
use crate::{Geometry, MIN_BLOCK, Mem, MemoryHost, PIECE, Parts, Refused, VECTORS};

/// The blocks of the region.
const BLOCKS: u64 = 70;
/// The pieces of the region.
const PIECES: usize = (2 * BLOCKS) as usize;
/// The region of the device.
const GEOMETRY: Geometry = Geometry {
    address: 1 << 32,
    bytes: BLOCKS * 2 * MIN_BLOCK,
    block: 2 * MIN_BLOCK,
    unit: 8 * 2 * MIN_BLOCK,
    node: 3,
};

/// A host that checks what is asked of it, and refuses now and then to unplug.
struct Watched {
    /// The bytes of the usable part.
    usable: u64,
    /// The guest may touch the piece.
    accessible: Vec<bool>,
    calls: usize,
}

impl Watched {
    fn refuse(&mut self) -> Result<(), Refused> {
        self.calls += 1;
        if self.calls.is_multiple_of(200) { Err(Refused) } else { Ok(()) }
    }
}

/// Checks that a range is within the region, and of whole pieces. Returns these.
fn pieces(range: &Range<u64>) -> Range<usize> {
    let (start, end) = (range.start, range.end);
    assert!(start < end && end <= GEOMETRY.bytes, "{range:?}");
    assert!(start.is_multiple_of(PIECE) && end.is_multiple_of(PIECE), "{range:?}");
    (start / PIECE) as usize..(end / PIECE) as usize
}

impl MemoryHost for Watched {
    fn reveal(&mut self, end: u64) -> Result<(), Refused> {
        assert!(end > self.usable && end <= GEOMETRY.bytes, "{end}");
        self.usable = end;
        Ok(())
    }

    fn plug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        assert!(range.end <= self.usable, "{range:?} is not usable");
        let found = &mut self.accessible[pieces(&range)];
        assert!(!found.contains(&true), "{range:?} is plugged twice");
        found.fill(true);
        Ok(())
    }

    fn unplug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        self.refuse()?;
        self.accessible[pieces(&range)].fill(false);
        Ok(())
    }

    fn discard(&mut self, piece: Range<u64>) -> Result<(), Refused> {
        let found = &self.accessible[pieces(&piece)];
        assert!(found == [false], "{piece:?} can be accessed");
        self.refuse()
    }
}

impl Guest for Mem {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 512;
    const FEATURES: u64 = FEATURES;

    fn new(memory: &Memory) -> Self {
        let host = Watched { usable: 0, accessible: vec![false; PIECES], calls: 0 };
        let made = Self::new(Parts {
            memory: memory.clone(),
            interrupts: fuzz::interrupts(VECTORS),
            geometry: GEOMETRY,
            host: Box::new(host),
        });
        let Ok(mem) = made else { unreachable!("the parts fit together") };
        mem
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(mut self, memory: &Memory) -> Self {
        let half = BLOCKS / 2;
        assert_eq!(self.request(half * GEOMETRY.block), Ok(()));
        let mut driver = fuzz::drive(self, memory);
        let plug = request_of(request::PLUG, GEOMETRY.address, half as u16 - 1);
        let answer = ask(&mut driver, &plug);
        assert!(answer.is_ok_and(|(kind, _)| kind == response::ACK));
        driver.registers.function
    }

    fn turn(&mut self, step: &[u8]) {
        let size = u64::from(step[1] % 80) * GEOMETRY.block;
        assert_eq!(self.request(size).is_ok(), size <= GEOMETRY.bytes);
        self.poll();
        assert!(self.plugged() <= GEOMETRY.bytes);
    }

    fn works(mut self, memory: &Memory) {
        assert_eq!(self.request(GEOMETRY.bytes), Ok(()));
        let mut driver = fuzz::drive(self, memory);
        while !ask(&mut driver, &unplug_all()).is_ok_and(|(kind, _)| kind == response::ACK) {
            // The host refuses now and then.
            assert!(driver.start().is_ok());
        }
        let whole = |kind| request_of(kind, GEOMETRY.address, BLOCKS as u16);
        let plugged = ask(&mut driver, &whole(request::PLUG));
        assert!(plugged.is_ok_and(|(kind, _)| kind == response::ACK));
        let found = ask(&mut driver, &whole(request::STATE));
        assert!(found.is_ok_and(|found| found == (response::ACK, state::PLUGGED)));
    }
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Mem>(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        super::fuzz::survive(100, &[super::device]);
    }
}
