//! The bodies of the fuzz targets: bytes become the actions of a hostile guest.

use slipway_pci::driver::Direct;
use slipway_pci::{Function, Progress};
use slipway_ram::Memory;
use slipway_virtio::driver::Start;
use slipway_virtio::fuzz::{self, Guest};
use slipway_virtio_spec::console::{Control, Features, queue};
use slipway_virtio_spec::queue::{DESCRIPTOR, Descriptor, available, used};
use slipway_virtio_spec::{RingFeatures, Status};
use zerocopy::IntoBytes;

use crate::driver::{Arena, Driver, DriverError, Options, Ring};
use crate::{Console, Parts, PortSettings, vectors};

const PORTS: u16 = 2;

impl Guest for Console {
    type Device = Self;
    const MEMORY: usize = 1 << 18;

    fn new(memory: &Memory) -> Self {
        let made = Self::new(Parts {
            memory: memory.clone(),
            interrupts: fuzz::interrupts(vectors(PORTS)),
            ports: vec![PortSettings::console(), PortSettings::named("agent")],
        });
        let Ok(mut console) = made else { unreachable!("the parts fit together") };
        console.set_host_open(0, true);
        console.set_host_open(1, true);
        console
    }

    fn device(&mut self) -> &mut Self {
        self
    }

    /// Sets the ports up too.
    fn start(self, memory: &Memory) -> Self {
        let arena = Arena::new(memory.clone(), 0, Self::MEMORY as u64);
        let driver = Driver::new(Direct::new(self), arena, Options::default());
        let Ok(mut driver) = driver else { unreachable!("the device works") };
        assert!(driver.open(1, true).is_ok());
        driver.registers.function
    }

    fn turn(&mut self, step: &[u8]) {
        match step[0] >> 5 {
            6 => self.set_host_open(u16::from(step[2] & 1), step[3] & 1 == 0),
            _ => turn(self, usize::from(step[1])),
        }
    }

    fn works(mut self, memory: &Memory) {
        self.set_host_open(1, true);
        let mut console = self.start(memory);
        while console.poll() != Progress::Idle(None) {}
        assert!(console.guest_open(0) && console.guest_open(1));
        assert_eq!(console.port_write(1, b"hello"), 5);
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

/// Runs a hostile guest: [`fuzz::device`].
///
/// # Panics
/// When the device has a defect.
pub fn device(data: &[u8]) {
    fuzz::device::<Console>(data);
}

/// Runs a driver that makes descriptors, chains and control messages of its own.
///
/// # Panics
/// When the device has a defect.
pub fn rings(data: &[u8]) {
    let memory = Memory::heap(Console::MEMORY);
    let console = <Console as Guest>::new(&memory);
    let Ok((mut registers, mut rings)) = bare(console, &memory) else {
        unreachable!("the device works")
    };
    for step in data.chunks_exact(8).take(fuzz::STEPS) {
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
    fuzz::finish(registers.function, &memory);
}

/// Starts a device with queues of 8 entries and no buffers.
fn bare(console: Console, memory: &Memory) -> Result<(Direct<Console>, Vec<Ring>), DriverError> {
    let (mut registers, mut rings) = (Direct::new(console), Vec::new());
    let mut arena = Arena::new(memory.clone(), 0, Console::MEMORY as u64);
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
    let memory = Memory::heap(Console::MEMORY);
    let mut console = <Console as Guest>::new(&memory);
    let _ = console.restore(data);
    turn(&mut console, 64);
    fuzz::finish(console, &memory);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_targets_survive_pseudo_random_input() {
        super::fuzz::survive(60, &[super::device, super::rings, super::state]);
    }
}
