//! A small real entropy driver, for unit tests and fuzzing. It takes no interrupts.

use slipway_virtio::driver::Start;
use slipway_virtio_spec::entropy::REQUEST_QUEUE;
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

    /// Asks for bytes for buffers of these lengths, one chain, and waits for them.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn ask(&mut self, lengths: &[u32]) -> Result<Vec<u8>, DriverError> {
        let len: u32 = lengths.iter().sum();
        let at = self.arena.allocate(len as usize)?;
        let mut next = at;
        let mut buffers = Vec::new();
        for &len in lengths {
            buffers.push(Buffer::writable(next, len));
            next += u64::from(len);
        }
        self.ring.push(&buffers)?;
        if self.ring.publish()? {
            self.registers.notify(REQUEST_QUEUE)?;
        }
        let used = loop {
            self.registers.idle()?;
            self.registers.needs_no_reset()?;
            if let Some(used) = self.ring.pop()? {
                break used;
            }
        };
        let mut bytes = vec![0; used.len.min(len) as usize];
        self.arena.memory().read(at, &mut bytes)?;
        Ok(bytes)
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
