//! The bodies of the fuzz targets: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{FifoSink, Function, Interrupt, Progress};
use slipway_ram::Memory;
use slipway_virtio_spec::pci::common;

use crate::driver::{Arena, Driver, Options, notification};
use crate::layout::{BAR_SIZE, COMMON};
use crate::{Console, Parts, PortSettings, vectors};

/// Bytes of guest memory: few, so that random addresses hit it.
const MEMORY: usize = 1 << 18;
/// Most steps of one input.
const STEPS: usize = 2048;
const PORTS: u16 = 2;

/// A device whose guest is the input, and whose host reads and writes.
struct Guest {
    console: Console,
    memory: Memory,
}

impl Guest {
    fn new() -> Self {
        let memory = Memory::heap(MEMORY);
        let console = Self::console(&memory);
        Self { console, memory }
    }

    fn console(memory: &Memory) -> Console {
        let sink = FifoSink::new();
        let interrupt = |vector| Interrupt::new(sink.clone(), vector);
        let made = Console::new(Parts {
            memory: memory.clone(),
            interrupts: (0..vectors(PORTS)).map(interrupt).collect(),
            ports: vec![PortSettings::console(), PortSettings::named("agent")],
        });
        let Ok(mut console) = made else { unreachable!("the parts fit together") };
        console.set_host_open(0, true);
        console.set_host_open(1, true);
        console
    }

    /// Lets a driver set the device and its ports up, so that inputs reach their subject.
    fn start(self) -> Self {
        let arena = Arena::new(self.memory.clone(), 0, MEMORY as u64);
        let driver = Driver::new(Direct::new(self.console), arena, Options::default());
        let Ok(mut driver) = driver else { unreachable!("the device works") };
        assert!(driver.open(1, true).is_ok());
        Self { console: driver.registers.function, memory: self.memory }
    }

    /// Does what a host does after a poll, with calls of `len` bytes.
    fn turn(&mut self, len: usize) {
        let mut bytes = [7; 256];
        self.console.poll();
        for port in 0..=PORTS {
            assert!(self.console.port_read(port, &mut bytes[..len]) <= len);
            assert!(self.console.port_write(port, &bytes[..len]) <= len);
        }
    }
}

/// Runs accesses to registers and configuration space, changes of memory, and turns of the host.
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    let mut guest = Guest::new();
    if data.first().is_some_and(|first| first & 1 == 1) {
        guest = guest.start();
    }
    for step in data.chunks_exact(8).take(STEPS) {
        let at = u64::from(u16::from_le_bytes([step[1], step[2]]));
        let len = 1 << (step[3] & 3);
        let mut bytes = [step[4], step[5], step[6], step[7], step[4], 0, 0, 0];
        let bytes = &mut bytes[..len];
        match step[0] >> 5 {
            0 => drop(guest.console.read(0, at % BAR_SIZE, bytes)),
            1 => drop(guest.console.write(0, at % COMMON.end.min(64), bytes)),
            2 => drop(guest.console.write(0, at % BAR_SIZE, bytes)),
            3 => guest.console.config_write(at as u16 % 256, bytes),
            4 => drop(guest.memory.write(at, bytes)),
            5 => drop(guest.console.write(0, notification(at as u16 % 8), &[0; 2])),
            6 if step[1] == 0 => drop(guest.console.quiesce()),
            6 => guest.console.set_host_open(u16::from(step[2] & 1), step[3] & 1 == 0),
            _ => guest.turn(usize::from(step[1])),
        }
    }
    finish(guest);
}

/// Runs a driver whose memory is the input: rings, descriptors and control messages.
///
/// # Panics
/// When the device has a defect.
pub fn rings(data: &[u8]) {
    let mut guest = Guest::new().start();
    for chunk in data.chunks(0x4000) {
        // The rings and control messages of the driver come first in its arena.
        let _ = guest.memory.write(0, chunk);
        for len in [1, 100, 256] {
            guest.turn(len);
        }
    }
    finish(guest);
}

/// Restores saved states.
///
/// # Panics
/// When an accepted state is refused after it was saved again.
pub fn state(data: &[u8]) {
    let mut guest = Guest::new();
    let _ = guest.console.restore(data);
    guest.turn(64);
    finish(guest);
}

/// Checks that the device can be saved and works after a reset, whatever happened before.
fn finish(mut guest: Guest) {
    assert!(guest.console.quiesce());
    let saved = guest.console.save();
    let mut successor = Guest::console(&guest.memory);
    assert_eq!(successor.restore(&saved), Ok(()));
    assert!(successor.save() == saved, "a state that says the same");
    guest.console = successor;
    for _ in 0..4 {
        guest.turn(256);
    }
    guest.console.reset();
    let mut status = [1];
    guest.console.read(0, common::DEVICE_STATUS, &mut status);
    assert_eq!(status, [0]);
    guest.console.set_host_open(1, true);
    let mut guest = guest.start();
    while guest.console.poll() != Progress::Idle(None) {}
    assert!(guest.console.guest_open(0) && guest.console.guest_open(1));
    assert_eq!(guest.console.port_write(1, b"hello"), 5);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_targets_survive_pseudo_random_input() {
        let mut seed = 1_u64;
        for _ in 0..60 {
            let data: Vec<u8> = (0..4096)
                .map(|_| {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    (seed >> 56) as u8
                })
                .collect();
            super::device(&data);
            super::rings(&data);
            super::state(&data);
        }
    }
}
