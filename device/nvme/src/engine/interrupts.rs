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

use std::time::Duration;

use slipway_pci::Interrupt;

use super::IoEngine;
use crate::features::Coalescing;
use crate::queue::CompletionQueue;

impl IoEngine {
    /// Interrupts for the completion queues whose interrupt is due.
    pub fn signal(&mut self) {
        match self.tuning.coalescing {
            Some(coalescing) if self.is_running() => self.signal_due(coalescing),
            _ => self.signal_all(),
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.signalled(|queue| self.queues.is_held(queue));
        }
    }

    /// Interrupts once for each completion queue that got entries: nothing is held back.
    pub fn signal_all(&mut self) {
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
            let may_wait = queue.id != 0 && self.tuning.coalesces(vector);
            if may_wait && let Some(due) = queue.hold(coalescing, now) {
                self.interrupt_at = Some(self.interrupt_at.map_or(due, |at| at.min(due)));
            } else {
                queue.interrupt(&self.interrupts);
            }
        }
    }
}

impl CompletionQueue {
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
