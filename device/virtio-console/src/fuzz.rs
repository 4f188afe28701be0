//! The bodies of the fuzz targets: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{FifoSink, Function, Interrupt, Progress};
use slipway_ram::Memory;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::console::{Control, Features, queue};
use slipway_virtio_spec::pci::common;
use slipway_virtio_spec::queue::{DESCRIPTOR, Descriptor, available, used};
use slipway_virtio_spec::{RingFeatures, Status};
use zerocopy::IntoBytes;

use crate::driver::{Arena, Driver, DriverError, Options, Ring, notification};
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
}

/// Does what a host does after a poll, with calls of `len` bytes.
fn turn(console: &mut Console, len: usize) {
    let mut bytes = [7; 256];
    console.poll();
    for port in 0..=PORTS {
        assert!(console.port_read(port, &mut bytes[..len]) <= len);
        assert!(console.port_write(port, &bytes[..len]) <= len);
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
            _ => turn(&mut guest.console, usize::from(step[1])),
        }
    }
    finish(guest);
}

/// Runs a driver that makes descriptors, chains and control messages of its own.
///
/// # Panics
/// When the device has a defect.
pub fn rings(data: &[u8]) {
    let Guest { console, memory } = Guest::new();
    let Ok((mut registers, mut rings)) = bare(console, &memory) else {
        unreachable!("the device works")
    };
    for step in data.chunks_exact(8).take(STEPS) {
        let ring = usize::from(step[0] & 31) % rings.len();
        let at = u64::from(u16::from_le_bytes([step[2], step[3]])) << 2;
        match step[0] >> 5 {
            0 | 1 => describe(&rings[ring], step, at),
            2 | 3 => push(&mut rings[ring], u16::from(step[1] % 9)),
            4 if step[1] == 0 => {
                let _ = rings[ring].areas()[1].store_u16(available::INDEX, at as u16);
            }
            4 | 5 => {
                let (id, event) = (u32::from(step[1] % 3), u16::from(step[6] % 8));
                let value = u16::from(step[7] & 1);
                let control = Control { id: id.into(), event: event.into(), value: value.into() };
                let _ = memory.write(at, control.as_bytes());
            }
            6 => registers.function.set_host_open(u16::from(step[1] & 1), step[2] & 1 == 0),
            _ => turn(&mut registers.function, usize::from(step[1])),
        }
    }
    drop(rings);
    finish(Guest { console: registers.function, memory });
}

/// Starts a device with queues of 8 entries and no buffers.
fn bare(console: Console, memory: &Memory) -> Result<(Direct<Console>, Vec<Ring>), DriverError> {
    let (mut registers, mut rings) = (Direct::new(console), Vec::new());
    let mut arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let features = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    registers.reset()?;
    registers.negotiate(features.bits() | Features::MULTIPORT.bits())?;
    for queue in 0..queue::count(PORTS) {
        rings.push(registers.make_queue(&mut arena, features, queue, 8, queue + 1)?);
    }
    registers.set_status(Status::DRIVER_OK)?;
    Ok((registers, rings))
}

/// Writes the descriptor that a step describes.
fn describe(ring: &Ring, step: &[u8], at: u64) {
    let descriptor = Descriptor {
        address: at.into(),
        len: u32::from(u16::from_le_bytes([step[4], step[5]])).into(),
        flags: u16::from(step[6] & 7).into(),
        next: u16::from(step[7] % 9).into(),
    };
    let _ = ring.areas()[0].write(DESCRIPTOR * usize::from(step[1] % 8), descriptor.as_bytes());
}

/// Makes a chain available if the ring has room for it.
fn push(ring: &mut Ring, head: u16) {
    let [_, available, used] = ring.areas();
    let indexes = (available.load_u16(available::INDEX), used.load_u16(used::INDEX));
    if let (Ok(available), Ok(used)) = indexes
        && available.wrapping_sub(used) < 8
        && ring.push_head(head).is_ok()
    {
        let _ = ring.publish();
    }
}

/// Restores saved states.
///
/// # Panics
/// When an accepted state is refused after it was saved again.
pub fn state(data: &[u8]) {
    let mut guest = Guest::new();
    let _ = guest.console.restore(data);
    turn(&mut guest.console, 64);
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
        turn(&mut guest.console, 256);
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
