//! A queue with its interrupt.

use slipway_pci::Interrupt;
use slipway_ram::Memory;
use slipway_virtio_spec::RingFeatures;

use crate::queue::{Broken, Queue};
use crate::registers::QueueRegisters;

/// One queue and its interrupt.
pub struct Virtqueue {
    /// The queue.
    pub queue: Queue,
    /// The interrupt of the queue's vector, if the driver has set one.
    pub interrupt: Option<Interrupt>,
}

impl Virtqueue {
    /// Makes a queue as its registers describe it, with the features that the driver chose. It goes
    /// on where its used index in `resumes` says, which is guest memory, or begins at 0 without.
    ///
    /// # Errors
    /// [`Broken::Memory`]: the used ring cannot be read.
    pub fn new(
        registers: &QueueRegisters,
        rings: RingFeatures,
        resumes: Option<&Memory>,
    ) -> Result<Self, Broken> {
        let event_index = rings.contains(RingFeatures::EVENT_IDX);
        let indirect = rings.contains(RingFeatures::INDIRECT_DESC);
        let mut queue = Queue::new(&registers.layout(), event_index, indirect);
        if let Some(memory) = resumes {
            queue.resume(memory)?;
        }
        Ok(Self { queue, interrupt: None })
    }

    /// Makes the reported chains visible to the driver, and interrupts once if the driver wants
    /// that. Returns whether it interrupted.
    ///
    /// # Errors
    /// [`Broken::Memory`].
    #[inline]
    pub fn publish(&mut self, memory: &Memory) -> Result<bool, Broken> {
        self.queue.publish(memory)?;
        if self.queue.wants_interrupt(memory)?
            && let Some(interrupt) = &self.interrupt
        {
            interrupt.signal();
            return Ok(true);
        }
        Ok(false)
    }
}
