//! The body of the fuzz target: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_virtio_spec::pci::common;
use slipway_virtio_spec::pmem::{DONE, FLUSH};

use crate::driver::{Arena, Driver, notification};
use crate::layout::{BAR_SIZE, COMMON};
use crate::{Parts, Pmem, VECTORS};

/// The range that the device names.
const RANGE: (u64, u64) = (1 << 32, 2 << 20);
/// Bytes of guest memory: few, so that random addresses hit it.
const MEMORY: usize = 1 << 16;
/// Most steps of one input.
const STEPS: usize = 2048;

fn pmem(memory: &Memory) -> Pmem {
    let sink = FifoSink::new();
    let interrupts = (0..VECTORS).map(|vector| Interrupt::new(sink.clone(), vector)).collect();
    let (start, bytes) = RANGE;
    let made = Pmem::new(Parts { memory: memory.clone(), interrupts, start, bytes });
    let Ok(pmem) = made else { unreachable!("the parts fit together") };
    pmem
}

/// Lets a driver set the device up.
fn start(pmem: Pmem, memory: &Memory) -> Driver<Direct<Pmem>> {
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let driver = Driver::new(Direct::new(pmem), arena, 8);
    let Ok(driver) = driver else { unreachable!("the device works") };
    driver
}

/// Runs accesses to registers and configuration space, changes of memory, and polls. Inputs whose
/// first byte is odd find the device set up; those that begin with a brace are restored as a saved
/// state.
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    let memory = Memory::heap(MEMORY);
    let mut guest = pmem(&memory);
    match data.first() {
        Some(b'{') => drop(guest.restore(data)),
        Some(first) if first & 1 == 1 => guest = start(guest, &memory).registers.function,
        _ => {}
    }
    for step in data.chunks_exact(8).take(STEPS) {
        let at = u64::from(u16::from_le_bytes([step[1], step[2]]));
        let len = 1 << (step[3] & 3);
        let mut bytes = [step[4], step[5], step[6], step[7], step[4], 0, 0, 0];
        let bytes = &mut bytes[..len];
        match step[0] >> 5 {
            0 => drop(guest.read(0, at % BAR_SIZE, bytes)),
            1 => drop(guest.write(0, at % COMMON.end.min(64), bytes)),
            2 => drop(guest.write(0, at % BAR_SIZE, bytes)),
            3 => guest.config_write(at as u16 % 256, bytes),
            // The rings come first in the driver's arena.
            4 => drop(memory.write(at % 512, bytes)),
            5 => drop(guest.write(0, notification(at as u16 % 8), &[0; 2])),
            6 if step[1] == 0 => drop(guest.quiesce()),
            _ => drop(guest.poll()),
        }
    }
    finish(guest, &memory);
}

/// Checks that the device can be saved and works after a reset, whatever happened before.
fn finish(mut guest: Pmem, memory: &Memory) {
    assert!(guest.quiesce());
    let saved = guest.save();
    let mut successor = pmem(memory);
    assert_eq!(successor.restore(&saved), Ok(()));
    assert!(successor.save() == saved, "a state that says the same");
    successor.poll();
    successor.reset();
    let mut status = [1];
    successor.read(0, common::DEVICE_STATUS, &mut status);
    assert_eq!(status, [0]);
    assert_eq!(start(successor, memory).ask(FLUSH).ok(), Some(DONE));
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_target_survives_pseudo_random_input() {
        let mut seed = 1_u64;
        for _ in 0..100 {
            let data: Vec<u8> = (0..4096)
                .map(|_| {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    (seed >> 56) as u8
                })
                .collect();
            super::device(&data);
        }
    }
}
