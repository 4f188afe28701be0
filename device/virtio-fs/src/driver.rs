//! A small real virtio file system driver, for unit tests and fuzzing. It takes no interrupts.

use slipway_virtio::driver::Start;
use slipway_virtio_spec::fs::{FIRST_REQUEST_QUEUE, HIGH_PRIORITY_QUEUE};
use slipway_virtio_spec::{RingFeatures, Status};

pub use slipway_virtio::driver::{
    AccessError, Arena, Buffer, Direct, DriverError, RegisterAccess, Ring, Used, notification,
};

/// A request of the driver that the device has not answered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingRequest {
    /// The number of its queue.
    pub queue: u16,
    /// The ID of its chain.
    pub id: u16,
    /// The guest-physical address of the buffers for the reply, which lie one after the other.
    at: u64,
}

/// The driver of one device.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for queues and buffers.
    pub arena: Arena,
    /// The queue of high priority, and the request queue.
    pub rings: [Ring; 2],
    entries: u16,
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets and initialises the device, with queues of `entries` entries.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(mut registers: R, mut arena: Arena, entries: u16) -> Result<Self, DriverError> {
        let rings = initialise(&mut registers, &mut arena, entries)?;
        Ok(Self { registers, arena, rings, entries })
    }

    /// Resets the device and initialises it anew. All memory for buffers is free again.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.rings = initialise(&mut self.registers, &mut self.arena, self.entries)?;
        Ok(())
    }

    /// Puts a chain into queue `queue`: one readable buffer with `message`, and for each length in
    /// `room` a writable buffer of so many bytes for the reply. Notifies the device if the queue
    /// asks for that.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn ask(
        &mut self,
        queue: u16,
        message: &[u8],
        room: &[u32],
    ) -> Result<PendingRequest, DriverError> {
        let request = self.arena.allocate(message.len().max(1))?;
        self.arena.memory().write(request, message)?;
        let at = self.arena.allocate(room.iter().sum::<u32>().max(1) as usize)?;
        let mut buffers = vec![Buffer::readable(request, message.len() as u32)];
        let mut next = at;
        for &len in room {
            buffers.push(Buffer::writable(next, len));
            next += u64::from(len);
        }
        let ring = &mut self.rings[usize::from(queue)];
        let id = ring.push(&buffers)?;
        if ring.publish()? {
            self.registers.notify(queue)?;
        }
        Ok(PendingRequest { queue, id, at })
    }

    /// Returns the next used chain of a queue, or `None` if the device has not used one.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn pop(&mut self, queue: u16) -> Result<Option<Used>, DriverError> {
        self.registers.idle()?;
        self.registers.needs_no_reset()?;
        Ok(self.rings[usize::from(queue)].pop()?)
    }

    /// Reads the reply to `asked`, which the device has used.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reply(&mut self, asked: PendingRequest, used: Used) -> Result<Vec<u8>, DriverError> {
        let mut bytes = vec![0; used.len as usize];
        self.arena.memory().read(asked.at, &mut bytes)?;
        Ok(bytes)
    }

    /// Sends a request, as [`Driver::ask`] does, polls until the device has used its chain, and
    /// returns the reply. The first chain that the device uses is taken for the request's: no other
    /// request of the queue may be under way.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn call(
        &mut self,
        queue: u16,
        message: &[u8],
        room: &[u32],
    ) -> Result<Vec<u8>, DriverError> {
        let asked = self.ask(queue, message, room)?;
        loop {
            if let Some(used) = self.pop(queue)? {
                return self.reply(asked, used);
            }
        }
    }
}

fn initialise<R: RegisterAccess>(
    registers: &mut R,
    arena: &mut Arena,
    entries: u16,
) -> Result<[Ring; 2], DriverError> {
    registers.reset()?;
    arena.clear();
    let rings = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    registers.negotiate(rings.bits())?;
    let mut make = |number| registers.make_queue(arena, rings, number, entries, number + 1);
    let queues = [make(HIGH_PRIORITY_QUEUE)?, make(FIRST_REQUEST_QUEUE)?];
    registers.set_status(Status::DRIVER_OK)?;
    registers.needs_no_reset()?;
    Ok(queues)
}
