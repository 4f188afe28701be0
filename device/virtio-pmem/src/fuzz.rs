//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{FifoSink, Interrupt};
use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::pmem::{DONE, FLUSH};

use crate::driver::{Arena, SingleQueue, ask};
use crate::{Parts, Pmem, VECTORS};

/// The range that the device names.
const RANGE: (u64, u64) = (1 << 32, 2 << 20);

/// Lets a driver set the device up.
fn driver(pmem: Pmem, memory: &Memory) -> SingleQueue<Direct<Pmem>> {
    let arena = Arena::new(memory.clone(), 0, Pmem::MEMORY as u64);
    let driver = SingleQueue::new(Direct::new(pmem), arena, 8);
    let Ok(driver) = driver else { unreachable!("the device works") };
    driver
}

impl Guest for Pmem {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 512;

    fn new(memory: &Memory) -> Self {
        let sink = FifoSink::new();
        let interrupts = (0..VECTORS).map(|vector| Interrupt::new(sink.clone(), vector)).collect();
        let (start, bytes) = RANGE;
        let made = Self::new(Parts { memory: memory.clone(), interrupts, start, bytes });
        let Ok(pmem) = made else { unreachable!("the parts fit together") };
        pmem
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        driver(self, memory).registers.function
    }

    fn works(self, memory: &Memory) {
        assert_eq!(ask(&mut driver(self, memory), FLUSH).ok(), Some(DONE));
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
        slipway_virtio::fuzz::survive(100, &[super::device]);
    }
}
