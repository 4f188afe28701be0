//! The interrupt pin (section 7.5.1).
//!
//! While MSI-X is off, the interrupt pin is asserted as long as entries of a completion queue with
//! vector 0 wait for the host and the vector is not masked (INTMS; section 7.5.1). A level needs no
//! rule against repetition, and coalescing does not apply to it. When the host writes the head
//! doorbell's register, the controller sees at once what the host took, before the host's client
//! asks for the level again. A host with shadow doorbells writes the register only when the
//! controller asks for it, and some clients (QEMU) look at the level again only when a register is
//! written. So as long as the pin is asserted the controller asks for it: the event index is the
//! head that was seen last. The order of stores and looks is that of the head of `cell`.

use std::sync::atomic::{Ordering, fence};

use slipway_ram::Memory;

use super::Home;
use crate::cell::BadDoorbell;
use crate::queue::CompletionQueue;

impl Home {
    /// Returns whether an interrupt of the pin is pending, with the pin disabled or not.
    pub fn has_pin_interrupt(&self) -> bool {
        !self.pci.msix_control().enabled
            && self.registers.interrupt_mask & PIN_VECTOR == 0
            && self.engine.queues.completions().any(waits_at_pin)
    }

    /// Asserts or deasserts the pin, if it is in use.
    #[inline]
    pub fn update_pin(&mut self) {
        if self.pci.pin_enabled() || self.pin.is_asserted() {
            self.drive_pin();
        }
    }

    fn drive_pin(&mut self) {
        let wanted = self.pci.pin_enabled() && self.has_pin_interrupt() && self.waits_for_host();
        self.pin.set(wanted);
    }

    /// Asks the host to write a register as soon as it takes entries of the pin's queues. Returns
    /// whether such entries still wait after that.
    fn waits_for_host(&mut self) -> bool {
        let (mut waits, mut wrong) = (false, None);
        for queue in self.engine.queues.completions_mut().filter(|queue| waits_at_pin(queue)) {
            let asked = ask_for_head(queue, &self.engine.memory);
            wrong = asked.err().or(wrong);
            waits |= queue.posted() > 0;
        }
        if let Some(bad) = wrong {
            self.engine.bad_doorbell(bad);
        }
        waits
    }
}

/// The bit of vector 0 in INTMS and INTMC.
const PIN_VECTOR: u32 = 1;

/// Returns whether entries wait in a completion queue whose interrupts are the pin's.
fn waits_at_pin(queue: &CompletionQueue) -> bool {
    queue.vector == Some(0) && queue.posted() > 0
}

/// Asks for a register write at the next change of the head, and looks once more.
fn ask_for_head(queue: &mut CompletionQueue, memory: &Memory) -> Result<(), BadDoorbell> {
    // Each round but the last finds entries taken, so there are no more rounds than entries.
    while queue.posted() > 0 {
        let head = queue.head;
        queue.doorbell.publish(memory, head)?;
        fence(Ordering::SeqCst);
        queue.observe(memory)?;
        if queue.head == head {
            break;
        }
    }
    Ok(())
}
