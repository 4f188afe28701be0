//! The parts that the fuzz targets of virtio devices share: bytes become the actions of a hostile
//! guest.

use slipway_pci::{FifoSink, Function, Interrupt};
use slipway_ram::Memory;
use slipway_virtio_spec::pci::common;

use crate::driver::{Arena, Direct, SingleQueue};
use crate::layout::{BAR_SIZE, COMMON, notification};

/// Most steps of one input.
pub const STEPS: usize = 2048;

/// A device under test: its driver is the input, its host the target.
pub trait Guest: Sized {
    /// The device.
    type Device: Function;
    /// Bytes of guest memory: few, so that random addresses hit it.
    const MEMORY: usize;
    /// Bytes from address 0 on that an input writes to; the rings of [`Guest::start`] lie there.
    const WRITABLE: u64 = Self::MEMORY as u64;
    /// Features of the device type that [`drive`] accepts.
    const FEATURES: u64 = 0;

    /// Makes the device, which has `memory`, in its state after power-on.
    fn new(memory: &Memory) -> Self;

    /// Returns the device.
    fn device(&mut self) -> &mut Self::Device;

    /// Lets a driver set the device up, so that inputs reach their subject.
    #[must_use]
    fn start(self, memory: &Memory) -> Self;

    /// Does what a host does from time to time; the eight bytes of the step may say how.
    fn turn(&mut self, _step: &[u8]) {
        self.device().poll();
    }

    /// Returns a device that goes on with the saved state of this one.
    ///
    /// # Panics
    /// When the state is refused, or the successor's differs.
    #[must_use]
    fn succeed(mut self, memory: &Memory) -> Self {
        assert!(self.device().quiesce());
        let saved = self.device().save();
        let mut successor = Self::new(memory);
        assert_eq!(successor.device().restore(&saved), Ok(()));
        assert!(successor.device().save() == saved, "a state that says the same");
        successor
    }

    /// Checks that a device which has just been reset works.
    ///
    /// # Panics
    /// When it does not.
    fn works(self, memory: &Memory);
}

/// Runs accesses to registers and configuration space, changes of memory, and turns of the host.
/// Inputs whose first byte is odd find the device set up; those that begin with a brace are
/// restored as a saved state.
///
/// # Panics
/// When the device has a defect.
pub fn device<G: Guest>(data: &[u8]) {
    let memory = Memory::heap(G::MEMORY);
    let mut guest = G::new(&memory);
    match data.first() {
        Some(b'{') => drop(guest.device().restore(data)),
        Some(first) if first & 1 == 1 => guest = guest.start(&memory),
        _ => {}
    }
    for step in data.chunks_exact(8).take(STEPS) {
        act(&mut guest, &memory, step);
    }
    finish(guest, &memory);
}

/// Runs one step of an input, of eight bytes.
fn act<G: Guest>(guest: &mut G, memory: &Memory, step: &[u8]) {
    let at = u64::from(u16::from_le_bytes([step[1], step[2]]));
    let len = 1 << (step[3] & 3);
    let mut bytes = [step[4], step[5], step[6], step[7], step[4], 0, 0, 0];
    let bytes = &mut bytes[..len];
    match step[0] >> 5 {
        0 => drop(guest.device().read(0, at % BAR_SIZE, bytes)),
        1 => drop(guest.device().write(0, at % COMMON.end.min(64), bytes)),
        2 => drop(guest.device().write(0, at % BAR_SIZE, bytes)),
        3 => guest.device().config_write(at as u16 % 256, bytes),
        4 => drop(memory.write(at % G::WRITABLE, bytes)),
        5 => drop(guest.device().write(0, notification(at as u16 % 8), &[0; 2])),
        6 if step[1] == 0 => drop(guest.device().quiesce()),
        _ => guest.turn(step),
    }
}

/// Checks that the device can be saved, and that a successor with the saved state works after a
/// reset, whatever happened before.
///
/// # Panics
/// When the device has a defect.
pub fn finish<G: Guest>(guest: G, memory: &Memory) {
    let mut guest = guest.succeed(memory);
    let turns = |guest: &mut G, count| (0..count).for_each(|_| guest.turn(&[0xff; 8]));
    turns(&mut guest, 4);
    guest.device().reset();
    // A host that has the queues gives them back in its turn.
    turns(&mut guest, 2);
    let mut status = [1];
    guest.device().read(0, common::DEVICE_STATUS, &mut status);
    assert_eq!(status, [0]);
    guest.works(memory);
}

/// Makes `count` interrupts that nobody looks at.
pub fn interrupts(count: u16) -> Vec<Interrupt> {
    FifoSink::new().interrupts(count)
}

/// Lets a driver of one queue set `device` up.
///
/// # Panics
/// When the device does not work.
pub fn drive<D: Guest + Function>(device: D, memory: &Memory) -> SingleQueue<Direct<D>> {
    let arena = Arena::new(memory.clone(), 0, D::MEMORY as u64);
    let driver = SingleQueue::with_features(Direct::new(device), arena, 8, D::FEATURES);
    let Ok(driver) = driver else { unreachable!("the device works") };
    driver
}

/// Runs the bodies of fuzz targets with `rounds` pseudo-random inputs of 4096 bytes, always the
/// same ones.
pub fn survive(rounds: usize, targets: &[fn(&[u8])]) {
    for data in slipway_ram::fuzz::inputs(1, 4096).take(rounds) {
        for target in targets {
            target(&data);
        }
    }
}
