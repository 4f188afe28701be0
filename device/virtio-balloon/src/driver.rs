//! The driver's side of a balloon that is never inflated, for unit tests and fuzzing. It takes no
//! interrupts.

use slipway_virtio::driver::Start;
use slipway_virtio_spec::balloon::Features;
use slipway_virtio_spec::{RingFeatures, Status};

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, notification,
};

/// Entries of the queue: as many as Linux needs.
const ENTRIES: u16 = 32;

/// A driver with one queue, which reports free pages.
pub struct Reporter<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for the queue.
    pub arena: Arena,
    /// The queue.
    pub ring: Ring,
    /// The number of the queue.
    number: u16,
}

impl<R: RegisterAccess> Reporter<R> {
    /// Resets and initialises the device, with queue `number` alone.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(mut registers: R, mut arena: Arena, number: u16) -> Result<Self, DriverError> {
        let ring = initialise(&mut registers, &mut arena, number)?;
        Ok(Self { registers, arena, ring, number })
    }

    /// Resets the device and initialises it anew.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.ring = initialise(&mut self.registers, &mut self.arena, self.number)?;
        Ok(())
    }

    /// Makes a chain of `buffers` available, and notifies the device if it wants that.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn submit(&mut self, buffers: &[Buffer]) -> Result<(), DriverError> {
        self.ring.push(buffers)?;
        if self.ring.publish()? {
            self.registers.notify(self.number)?;
        }
        Ok(())
    }

    /// Reports ranges, each by its address and bytes, and waits until the device has used them.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn report(&mut self, ranges: &[(u64, u32)]) -> Result<(), DriverError> {
        let buffer = |&(at, len): &(u64, u32)| Buffer::writable(at, len);
        self.submit(&ranges.iter().map(buffer).collect::<Vec<_>>())?;
        loop {
            self.registers.idle()?;
            self.registers.needs_no_reset()?;
            if self.ring.pop()?.is_some() {
                return Ok(());
            }
        }
    }
}

fn initialise<R: RegisterAccess>(
    registers: &mut R,
    arena: &mut Arena,
    number: u16,
) -> Result<Ring, DriverError> {
    registers.reset()?;
    arena.clear();
    let rings = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    registers.negotiate(rings.bits() | Features::all().bits())?;
    let ring = registers.make_queue(arena, rings, number, ENTRIES, number)?;
    registers.set_status(Status::DRIVER_OK)?;
    registers.needs_no_reset()?;
    Ok(ring)
}
