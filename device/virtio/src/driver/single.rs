//! A driver of a device with one queue, which asks and waits for the answer.

use slipway_virtio_spec::{RingFeatures, Status};

use super::{Arena, DriverError, RegisterAccess, Ring, Start, Used};

/// The only queue of the device, as entropy and memory devices have it.
const QUEUE: u16 = 0;

/// The driver of a device whose only queue is queue 0. It takes no interrupts.
pub struct SingleQueue<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for the queue and buffers.
    pub arena: Arena,
    /// The queue.
    pub ring: Ring,
    entries: u16,
    /// Features of the device type that the driver accepts.
    features: u64,
}

impl<R: RegisterAccess> SingleQueue<R> {
    /// Resets and initialises the device, with a queue of `entries` entries.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(registers: R, arena: Arena, entries: u16) -> Result<Self, DriverError> {
        Self::with_features(registers, arena, entries, 0)
    }

    /// As [`SingleQueue::new`], with features of the device type that the driver accepts.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn with_features(
        mut registers: R,
        mut arena: Arena,
        entries: u16,
        features: u64,
    ) -> Result<Self, DriverError> {
        let ring = initialise(&mut registers, &mut arena, entries, features)?;
        Ok(Self { registers, arena, ring, entries, features })
    }

    /// Resets the device and initialises it anew.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        let (entries, features) = (self.entries, self.features);
        self.ring = initialise(&mut self.registers, &mut self.arena, entries, features)?;
        Ok(())
    }

    /// Makes the chains that were pushed available, and waits until the device has used one.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn wait(&mut self) -> Result<Used, DriverError> {
        if self.ring.publish()? {
            self.registers.notify(QUEUE)?;
        }
        loop {
            self.registers.idle()?;
            self.registers.needs_no_reset()?;
            if let Some(used) = self.ring.pop()? {
                return Ok(used);
            }
        }
    }
}

fn initialise<R: RegisterAccess>(
    registers: &mut R,
    arena: &mut Arena,
    entries: u16,
    features: u64,
) -> Result<Ring, DriverError> {
    registers.reset()?;
    arena.clear();
    let rings = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    registers.negotiate(rings.bits() | features)?;
    let ring = registers.make_queue(arena, rings, QUEUE, entries, 1)?;
    registers.set_status(Status::DRIVER_OK)?;
    registers.needs_no_reset()?;
    Ok(ring)
}
