//! Which completion queues interrupt, and when (section 7.5).
//!
//! Once per poll each queue that got entries interrupts. With Interrupt Coalescing (sections 5.21.1.8
//! and 5.21.1.9) the interrupt of an I/O queue is held back until so many entries wait for the host,
//! or so much time has passed since the first. It is not held back for a command that failed, as the
//! specification recommends, nor while the controller shuts down or its host takes memory away. What
//! the host has taken meanwhile needs no interrupt any more.
//!
//! # An interrupt is not saved because the guest is behind
//! While entries of the last interrupt wait, another one seems to tell the guest nothing new. But an
//! MSI-X message is an edge, and there is no moment of which both sides know that the guest's
//! handler has looked at the queue for the last time. A handler (Linux's) takes entries as long as
//! their phase tag says so, and then writes the head doorbell. An entry that is written between its
//! last look and that doorbell needs a message of its own. So a message could only be held back
//! until the head moves, and be sent then if entries are left. That loses none if each handler that
//! took entries moves the head in sight of the controller. Nothing promises it: section 4.1 does not
//! say how soon a host that took entries writes the doorbell, and that entries have to be
//! acknowledged before there is another message is a rule of pin and MSI interrupts (section 7.5.1),
//! not of MSI-X (section 7.5.2). A host that rings late, or once per half of the queue, would hang,
//! or, with a timer beside the rule, wait for that timer with every command. What would be saved is
//! an eventfd's signal per burst. Hosts that want fewer interrupts say so, by coalescing.
//!
//! # The pin
//! While MSI-X is off, the interrupt pin is asserted as long as entries of a completion queue with
//! vector 0 wait for the host and the vector is not masked (INTMS; section 7.5.1). A level needs no
//! rule against repetition, and coalescing does not apply to it. What the host took is seen at once
//! when it writes the doorbell's register, before its client asks for the level again. A host with
//! shadow doorbells writes the register only when it is asked to, and some clients (QEMU) look at the
//! level again only when a register is written. So it is asked to, for as long as the pin is asserted:
//! the event index is the head that was seen last. The order of stores and looks is that of the head
//! of `cell`.

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

    /// Whether there is an interrupt that the pin stands for, disabled or not.
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

    /// Whether entries that the pin stands for still wait when the host has been asked to write a
    /// register as soon as it takes some.
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

/// Bit of INTMS and INTMC.
const PIN_VECTOR: u32 = 1;

impl CompletionQueue {
    fn has_pin_interrupt(&self) -> bool {
        self.vector == Some(0) && self.posted() > 0
    }

    /// Asks for a register write at the next change of the head, and looks once more.
    fn ask_for_head(&mut self, memory: &Memory) -> Result<(), BadDoorbell> {
        // Each turn but the last finds entries taken, so there are no more turns than entries.
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

    /// Interrupts if there are entries of which the host has not heard.
    fn interrupt(&mut self, interrupts: &[Interrupt]) {
        if self.fresh > 0
            && let Some(vector) = self.take_interrupt()
            && let Some(interrupt) = interrupts.get(usize::from(vector))
        {
            interrupt.signal();
        }
    }

    /// The vector to interrupt, if there is one, for all entries that were written so far.
    fn take_interrupt(&mut self) -> Option<u16> {
        (self.fresh, self.urgent, self.held_since) = (0, false, None);
        self.vector
    }

    /// Whether the interrupt can wait, and until when. Afterwards `fresh` is 0 if none is needed.
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
