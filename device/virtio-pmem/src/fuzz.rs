//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::pmem::{DONE, FLUSH};

use crate::driver::ask;
use crate::{Parts, Pmem, VECTORS};

/// The range that the device names.
const RANGE: (u64, u64) = (1 << 32, 2 << 20);

impl Guest for Pmem {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 512;

    fn new(memory: &Memory) -> Self {
        let interrupts = fuzz::interrupts(VECTORS);
        let (start, bytes) = RANGE;
        let made = Self::new(Parts { memory: memory.clone(), interrupts, start, bytes });
        let Ok(pmem) = made else { unreachable!("the parts fit together") };
        pmem
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        fuzz::drive(self, memory).registers.function
    }

    fn works(self, memory: &Memory) {
        assert_eq!(ask(&mut fuzz::drive(self, memory), FLUSH).ok(), Some(DONE));
    }
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Pmem>(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        super::fuzz::survive(100, &[super::device]);
    }
}
