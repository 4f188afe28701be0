//! Decides which completion queues interrupt, and when (section 7.5).
//!
//! Each queue that got entries interrupts at most once per poll. With Interrupt Coalescing
//! (sections 5.21.1.8 and 5.21.1.9) the interrupt of an I/O queue is held back until enough entries
//! wait for the host, or enough time has passed since the first. The interrupt is not held back for
//! a command that failed, as the specification recommends, nor while the controller shuts down or
//! its host takes memory away. Entries that the host has taken meanwhile need no interrupt any
//! more.
//!
//! # An interrupt is not saved because the guest is behind
//! While entries of the last interrupt wait, another interrupt seems to tell the guest nothing new.
//! But an MSI-X message is an edge, and there is no moment of which both sides know that the
//! guest's handler has looked at the queue for the last time. A handler (Linux's) takes entries as
//! long as their phase tag says so, and then writes the head doorbell. An entry that is written
//! between the handler's last look and that doorbell needs a message of its own. So a message could
//! only be held back until the head moves, and be sent then if entries are left. That loses no
//! interrupt if each handler that took entries moves the head in sight of the controller. The
//! specification does not promise that: section 4.1 does not say how soon a host that took entries
//! writes the doorbell. That entries must be acknowledged before there is another message is a rule
//! of pin and MSI interrupts (section 7.5.1), not of MSI-X (section 7.5.2). A host that rings late,
//! or once per half of the queue, would hang, or, with a timer beside the rule, wait for that timer
//! with every command. The gain would be an eventfd's signal per burst. Hosts that want fewer
//! interrupts say so, by coalescing.
//!
//! # The pin
//! While MSI-X is off, the interrupt pin is asserted as long as entries of a completion queue with
//! vector 0 wait for the host and the vector is not masked (INTMS; section 7.5.1). A level needs no
//! rule against repetition, and coalescing does not apply to it. When the host writes the head
//! doorbell's register, the controller sees at once what the host took, before the host's client
//! asks for the level again. A host with shadow doorbells writes the register only when the
//! controller asks for it, and some clients (QEMU) look at the level again only when a register is
//! written. So as long as the pin is asserted the controller asks for it: the event index is the
//! head that was seen last. The order of stores and looks is that of the head of `cell`.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use slipway_pci::Interrupt;
use slipway_ram::Memory;

use crate::admin::features::Coalescing;
use crate::cell::BadDoorbell;
use crate::controller::Controller;
use crate::queue::CompletionQueue;

impl Controller {
    /// Interrupts for the completion queues whose interrupt is due.
    pub(crate) fn signal(&mut self) {
        match self.features.coalescing() {
            Some(coalescing) if self.is_running() => self.signal_due(coalescing),
            _ => self.signal_all(),
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.signalled(|queue| self.queues.is_held(queue));
        }
    }

    /// Interrupts once for each completion queue that got entries: nothing is held back.
    pub(crate) fn signal_all(&mut self) {
        self.interrupt_at = None;
        for queue in self.queues.completions_mut() {
            queue.interrupt(&self.interrupts);
        }
    }

    #[cold]
    fn signal_due(&mut self, coalescing: Coalescing) {
        self.interrupt_at = None;
        if self.queues.completions().all(|queue| queue.fresh == 0) {
            return;
        }
        let now = self.clock.now();
        for queue in self.queues.completions_mut() {
            let Some(vector) = queue.vector.filter(|_| queue.fresh > 0) else {
                queue.fresh = 0;
                continue;
            };
            let may_wait = queue.id != 0 && self.features.coalesces(vector);
            if may_wait && let Some(due) = queue.hold(coalescing, now) {
                self.interrupt_at = Some(self.interrupt_at.map_or(due, |at| at.min(due)));
            } else {
                queue.interrupt(&self.interrupts);
            }
        }
    }

    /// Returns whether an interrupt of the pin is pending, with the pin disabled or not.
    pub(crate) fn has_pin_interrupt(&self) -> bool {
        !self.pci.msix_control().enabled
            && self.registers.interrupt_mask & PIN_VECTOR == 0
            && self.queues.completions().any(CompletionQueue::has_pin_interrupt)
    }

    /// Asserts or deasserts the pin, if it is in use.
    #[inline]
    pub(crate) fn update_pin(&mut self) {
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
        for queue in self.queues.completions_mut().filter(|queue| queue.has_pin_interrupt()) {
            let asked = queue.ask_for_head(&self.memory);
            wrong = asked.err().or(wrong);
            waits |= queue.posted() > 0;
        }
        if let Some(bad) = wrong {
            self.bad_doorbell(bad);
        }
        waits
    }
}

/// The bit of vector 0 in INTMS and INTMC.
const PIN_VECTOR: u32 = 1;

impl CompletionQueue {
    fn has_pin_interrupt(&self) -> bool {
        self.vector == Some(0) && self.posted() > 0
    }

    /// Asks for a register write at the next change of the head, and looks once more.
    fn ask_for_head(&mut self, memory: &Memory) -> Result<(), BadDoorbell> {
        // Each round but the last finds entries taken, so there are no more rounds than entries.
        while self.posted() > 0 {
            let head = self.head;
            self.doorbell.publish(memory, head)?;
            fence(Ordering::SeqCst);
            self.observe(memory)?;
            if self.head == head {
                break;
            }
        }
        Ok(())
    }

    /// Interrupts if there are entries that the host was not told of.
    fn interrupt(&mut self, interrupts: &[Interrupt]) {
        if self.fresh > 0
            && let Some(vector) = self.take_interrupt()
            && let Some(interrupt) = interrupts.get(usize::from(vector))
        {
            interrupt.signal();
        }
    }

    /// Returns the queue's vector, if it has one, for an interrupt for all entries so far, and
    /// marks them as told.
    fn take_interrupt(&mut self) -> Option<u16> {
        (self.fresh, self.urgent, self.held_since) = (0, false, None);
        self.vector
    }

    /// Returns the time until which the interrupt can wait, or `None` if it cannot. Afterwards
    /// `fresh` is 0 if no interrupt is needed.
    fn hold(&mut self, coalescing: Coalescing, now: Duration) -> Option<Duration> {
        self.fresh = self.fresh.min(self.posted());
        if self.fresh == 0 {
            self.take_interrupt();
            return None;
        }
        let due = *self.held_since.get_or_insert(now) + coalescing.time;
        (!self.urgent && self.fresh < coalescing.entries && now < due).then_some(due)
    }
}
