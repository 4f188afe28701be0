//! Makes queues from the registers.

use slipway_virtio::Virtqueue;
use slipway_virtio::queue::Broken;
use slipway_virtio::registers::QueueRegisters;

use crate::Device;
use crate::control::ControlQueue;
use crate::path::DataPath;
use crate::receive::Receiver;
use crate::registers::{Role, role};
use crate::transmit::Transmitter;

impl Device {
    /// Makes the queues that were enabled, removes those that were reset, and sets the vectors of
    /// all.
    pub(crate) fn equip(&mut self, path: &mut DataPath) -> Result<(), Broken> {
        for number in 0..self.transport.registers.state.queues.len() as u16 {
            let registers = self.transport.registers.state.queues[usize::from(number)];
            let interrupt = self.transport.interrupt(registers.vector);
            let fresh = |there: bool| registers.enabled && !there;
            match self.role(number) {
                Role::Receive(pair) => {
                    let Some(place) = path.receivers.get_mut(pair) else { continue };
                    if fresh(place.is_some()) {
                        *place = Some(Receiver::new(self.virtqueue(&registers)?));
                    }
                    place.take_if(|_| !registers.enabled);
                    if let Some(receiver) = place {
                        receiver.virtqueue.interrupt = interrupt;
                    }
                }
                Role::Transmit(pair) => {
                    let Some(place) = path.transmitters.get_mut(pair) else { continue };
                    if fresh(place.is_some()) {
                        *place = Some(Transmitter::new(self.virtqueue(&registers)?));
                    }
                    place.take_if(|_| !registers.enabled);
                    if let Some(transmitter) = place {
                        transmitter.virtqueue.interrupt = interrupt;
                    }
                }
                Role::Control => {
                    if fresh(self.control.is_some()) {
                        self.control = Some(ControlQueue::new(self.virtqueue(&registers)?));
                    }
                    self.control.take_if(|_| !registers.enabled);
                    if let Some(control) = &mut self.control {
                        control.virtqueue.interrupt = interrupt;
                    }
                }
                Role::None => {}
            }
        }
        if std::mem::take(&mut self.resumes) {
            self.interrupt_all();
        }
        Ok(())
    }

    /// Interrupts for every queue. A predecessor may have published entries without interrupting; a
    /// surplus interrupt does no harm.
    fn interrupt_all(&self) {
        for queue in self.transport.registers.state.queues.iter().filter(|queue| queue.enabled) {
            if let Some(interrupt) = self.transport.interrupt(queue.vector) {
                interrupt.signal();
            }
        }
    }

    fn role(&self, number: u16) -> Role {
        role(self.features(), self.settings.pairs, number)
    }

    /// Makes a queue as its registers describe it.
    fn virtqueue(&self, registers: &QueueRegisters) -> Result<Virtqueue, Broken> {
        let rings = self.transport.registers.ring_features();
        Virtqueue::new(registers, rings, self.resumes.then_some(&self.memory))
    }

    /// Ends the resets of queues once nobody uses them any more (section 2.6.1).
    pub(crate) fn reset_queues(&mut self) {
        for number in 0..self.transport.registers.state.queues.len() as u16 {
            if !self.transport.registers.state.queues[usize::from(number)].resetting {
                continue;
            }
            let role = self.role(number);
            let place = &mut self.transport.registers.state.queues[usize::from(number)];
            *place = QueueRegisters::new(self.settings.queue_size);
            match (role, self.path.path_mut()) {
                (Role::Receive(pair), Some(path)) => path.receivers[pair] = None,
                (Role::Transmit(pair), Some(path)) => path.transmitters[pair] = None,
                (Role::Control, _) => self.control = None,
                _ => {}
            }
        }
    }
}
