//! A queue with its interrupt.

use slipway_pci::Interrupt;
use slipway_ram::Memory;

use crate::queue::{Broken, Queue};

/// One queue and its interrupt.
pub struct Virtqueue {
    /// The queue.
    pub queue: Queue,
    /// The interrupt of the queue's vector, if the driver has set one.
    pub interrupt: Option<Interrupt>,
}

impl Virtqueue {
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
