//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};

use crate::driver::ask;
use crate::{Parts, Rng, VECTORS};

impl Guest for Rng {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 512;

    fn new(memory: &Memory) -> Self {
        let interrupts = fuzz::interrupts(VECTORS);
        let source = Box::new(|into: &mut [u8]| into.fill(7));
        let made = Self::new(Parts { memory: memory.clone(), interrupts, source });
        let Ok(rng) = made else { unreachable!("the parts fit together") };
        rng
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        fuzz::drive(self, memory).registers.function
    }

    fn works(self, memory: &Memory) {
        let bytes = ask(&mut fuzz::drive(self, memory), &[16]);
        assert!(bytes.is_ok_and(|bytes| bytes == [7; 16]));
    }
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Rng>(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        super::fuzz::survive(100, &[super::device]);
    }
}
