//! A small real driver of persistent memory, for unit tests and fuzzing. It takes no interrupts.

use slipway_virtio::driver::Start;
use slipway_virtio_spec::pmem::{REQUEST, REQUEST_QUEUE, RESPONSE};
use slipway_virtio_spec::{RingFeatures, Status};

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, Used, notification,
};

/// The driver of one device.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for the queue and buffers.
    pub arena: Arena,
    /// The queue.
    pub ring: Ring,
    entries: u16,
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets and initialises the device, with a queue of `entries` entries.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(mut registers: R, mut arena: Arena, entries: u16) -> Result<Self, DriverError> {
        let ring = start(&mut registers, &mut arena, entries)?;
        Ok(Self { registers, arena, ring, entries })
    }

    /// Resets the device and initialises it anew.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.ring = start(&mut self.registers, &mut self.arena, self.entries)?;
        Ok(())
    }

    /// Makes a request of type `kind` available, with a response of all ones, as one chain. Returns
    /// the address of the response.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn submit(&mut self, kind: u32) -> Result<u64, DriverError> {
        let at = self.arena.allocate(REQUEST + RESPONSE)?;
        let response = at + REQUEST as u64;
        self.arena.memory().write(at, &kind.to_le_bytes())?;
        self.arena.memory().write(response, &[0xee; RESPONSE])?;
        let request = Buffer::readable(at, REQUEST as u32);
        self.ring.push(&[request, Buffer::writable(response, RESPONSE as u32)])?;
        Ok(response)
    }

    /// Sends a request of type `kind`, and waits for its response.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn ask(&mut self, kind: u32) -> Result<u32, DriverError> {
        let response = self.submit(kind)?;
        if self.ring.publish()? {
            self.registers.notify(REQUEST_QUEUE)?;
        }
        loop {
            self.registers.idle()?;
            self.registers.needs_no_reset()?;
            if self.ring.pop()?.is_some() {
                break;
            }
        }
        let mut bytes = [0; RESPONSE];
        self.arena.memory().read(response, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }
}

fn start<R: RegisterAccess>(
    registers: &mut R,
    arena: &mut Arena,
    entries: u16,
) -> Result<Ring, DriverError> {
    registers.reset()?;
    arena.clear();
    let rings = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    registers.negotiate(rings.bits())?;
    let ring = registers.make_queue(arena, rings, REQUEST_QUEUE, entries, 1)?;
    registers.set_status(Status::DRIVER_OK)?;
    registers.needs_no_reset()?;
    Ok(ring)
}
