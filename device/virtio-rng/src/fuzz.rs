//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{FifoSink, Interrupt};
use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};

use crate::driver::{Arena, SingleQueue, ask};
use crate::{Parts, Rng, VECTORS};

/// Lets a driver set the device up.
fn driver(rng: Rng, memory: &Memory) -> SingleQueue<Direct<Rng>> {
    let arena = Arena::new(memory.clone(), 0, Rng::MEMORY as u64);
    let driver = SingleQueue::new(Direct::new(rng), arena, 8);
    let Ok(driver) = driver else { unreachable!("the device works") };
    driver
}

impl Guest for Rng {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 512;

    fn new(memory: &Memory) -> Self {
        let sink = FifoSink::new();
        let interrupts = (0..VECTORS).map(|vector| Interrupt::new(sink.clone(), vector)).collect();
        let source = Box::new(|into: &mut [u8]| into.fill(7));
        let made = Self::new(Parts { memory: memory.clone(), interrupts, source });
        let Ok(rng) = made else { unreachable!("the parts fit together") };
        rng
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        driver(self, memory).registers.function
    }

    fn works(self, memory: &Memory) {
        let bytes = ask(&mut driver(self, memory), &[16]);
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
        slipway_virtio::fuzz::survive(100, &[super::device]);
    }
}
