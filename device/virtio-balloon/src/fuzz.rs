//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_ram::Memory;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::balloon::queue::REPORTING_WITHOUT_OTHERS;

use crate::driver::{Arena, Direct, Reporter};
use crate::{Balloon, PIECE, Parts, VECTORS};

/// The end of the memory that can be given back.
const END: u64 = 64 << 20;

impl Guest for Balloon {
    type Device = Self;
    const MEMORY: usize = 1 << 16;
    const WRITABLE: u64 = 1024;

    fn new(memory: &Memory) -> Self {
        let interrupts = fuzz::interrupts(VECTORS);
        let discard = Box::new(|at: u64| {
            assert!(at.is_multiple_of(PIECE));
            at < END
        });
        let made = Self::new(Parts { memory: memory.clone(), interrupts, discard });
        let Ok(balloon) = made else { unreachable!("the parts fit together") };
        balloon
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    fn start(self, memory: &Memory) -> Self {
        drive(self, memory).registers.function
    }

    fn works(self, memory: &Memory) {
        let mut driver = drive(self, memory);
        assert!(driver.report(&[(0, 2 * PIECE as u32), (PIECE + 1, 4096)]).is_ok());
    }
}

fn drive(balloon: Balloon, memory: &Memory) -> Reporter<Direct<Balloon>> {
    let arena = Arena::new(memory.clone(), 0, Balloon::MEMORY as u64);
    let driver = Reporter::new(Direct::new(balloon), arena, REPORTING_WITHOUT_OTHERS);
    let Ok(driver) = driver else { unreachable!("the device works") };
    driver
}

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Balloon>(data);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        super::fuzz::survive(100, &[super::device]);
    }
}
