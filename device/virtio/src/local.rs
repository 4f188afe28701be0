//! A transport and its queues, all served by the function itself.

use slipway_pci::{Access, Interrupt, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio_spec::RingFeatures;

use crate::layout::DeviceKind;
use crate::queue::Broken;
use crate::registers::{Effect, Offer};
use crate::state::TransportState;
use crate::{Configured, MAX_VECTORS, Transport, Virtqueue, Written};

/// A transport and its queues, for a device that serves every queue in its own `poll`, on its
/// host's thread. Offers must not include RING_RESET.
pub struct Local {
    /// The transport.
    pub transport: Transport,
    memory: Memory,
    /// The queues, by number. `None` until the driver is ready and has enabled the queue.
    queues: Vec<Option<Virtqueue>>,
    /// `true` if the registers of a queue have changed since the queues were made.
    changed: bool,
    /// `true` if queues go on where their used index says, instead of at 0.
    resumes: bool,
    /// `true` if nothing may touch guest memory.
    quiesced: bool,
    /// `true` if the device was reset since [`Local::take_reset`].
    was_reset: bool,
}

/// There is no interrupt, or there are more than the MSI-X table has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a virtio device needs 1 to 256 interrupts")]
pub struct InterruptCount;

impl Local {
    /// Makes the transport of a device of type `kind`, which has `memory`, in its state after
    /// power-on.
    ///
    /// # Errors
    /// [`InterruptCount`].
    ///
    /// # Panics
    /// If RING_RESET is offered, a mistake of the device.
    pub fn new(
        kind: &DeviceKind,
        offer: &Offer,
        memory: Memory,
        interrupts: Vec<Interrupt>,
    ) -> Result<Self, InterruptCount> {
        if !(1..=MAX_VECTORS).contains(&interrupts.len()) {
            return Err(InterruptCount);
        }
        let rings = RingFeatures::from_bits_truncate(offer.features);
        assert!(!rings.contains(RingFeatures::RING_RESET), "no reset of single queues");
        Ok(Self {
            transport: Transport::new(kind, offer, interrupts),
            memory,
            queues: (0..offer.queues).map(|_| None).collect(),
            changed: false,
            resumes: false,
            quiesced: false,
            was_reset: false,
        })
    }

    /// Returns whether the driver is ready, the device needs no reset, and memory may be touched.
    pub fn runs(&self) -> bool {
        self.transport.registers.is_live() && !self.quiesced
    }

    /// Returns whether the driver or the host has reset the device, which a driver had found, since
    /// the last call. The device then resets what is its own.
    pub fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.was_reset)
    }

    /// Returns the guest's memory, and queue `number`. Returns `None` if the queue is not in use,
    /// as while the device does not run.
    pub fn queue(&mut self, number: u16) -> Option<(&Memory, &mut Virtqueue)> {
        if !self.runs() {
            return None;
        }
        let queue = self.queues.get_mut(usize::from(number))?.as_mut()?;
        Some((&self.memory, queue))
    }

    /// Begins a poll: ends the quiesced state, and makes the queues that the driver has enabled.
    /// Returns whether the device runs.
    pub fn begin(&mut self) -> bool {
        self.quiesced = false;
        if self.runs() && std::mem::take(&mut self.changed) {
            let made = self.equip();
            self.checked(made);
        }
        self.runs()
    }

    /// Returns the value of `outcome`. After an error the device needs a reset; returns `None`
    /// then.
    pub fn checked<T>(&mut self, outcome: Result<T, Broken>) -> Option<T> {
        if outcome.is_err() {
            self.transport.need_reset();
        }
        outcome.ok()
    }

    /// Returns the result of a poll that has served the queues: busy if there was anything to do.
    /// After an error the device needs a reset.
    pub fn progress(&mut self, served: Result<bool, Broken>) -> Progress {
        match self.checked(served) {
            Some(true) => Progress::Busy,
            _ => Progress::Idle(None),
        }
    }

    /// Makes the queues that were enabled, and sets the vectors of all. Queues that are resumed are
    /// interrupted: a predecessor may have published entries without interrupting.
    fn equip(&mut self) -> Result<(), Broken> {
        let resumes = std::mem::take(&mut self.resumes);
        for (number, place) in self.queues.iter_mut().enumerate() {
            let registers = self.transport.registers.state.queues[number];
            if !registers.enabled {
                continue;
            }
            let interrupt = self.transport.interrupt(registers.vector);
            if place.is_none() {
                let rings = self.transport.registers.ring_features();
                let memory = resumes.then_some(&self.memory);
                *place = Some(Virtqueue::new(&registers, rings, memory)?);
                interrupt.iter().filter(|_| resumes).for_each(Interrupt::signal);
            }
            if let Some(queue) = place {
                queue.interrupt = interrupt;
            }
        }
        Ok(())
    }

    /// Implements [`slipway_pci::Function::config_read`], with the bytes of the device
    /// configuration.
    pub fn config_read(&mut self, offset: u16, into: &mut [u8], config: &[u8]) {
        if let Some((at, len)) = self.transport.config_read(offset, into) {
            self.transport.read(0, at, &mut into[..len], config);
        }
    }

    /// Implements [`slipway_pci::Function::config_write`]. The device then calls
    /// [`Local::take_reset`].
    pub fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.transport.config_write(offset, from) {
            Configured::Done => {}
            Configured::Reset => self.reset(),
            Configured::Window(at, len) => drop(self.write(0, at, &from[..len])),
        }
    }

    /// Implements [`slipway_pci::Function::read`], with the bytes of the device configuration.
    pub fn read(&mut self, bar: u8, offset: u64, into: &mut [u8], config: &[u8]) -> Access {
        self.transport.read(bar, offset, into, config)
    }

    /// Implements [`slipway_pci::Function::write`]. The device then calls [`Local::take_reset`].
    pub fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        match self.transport.write(bar, offset, from) {
            Written::Refused => return Access::Refused,
            Written::Common(Effect::Reset) => self.reset_device(),
            Written::Common(Effect::Enable(queue)) => self.enabled(queue),
            Written::Common(effect) => self.changed |= effect != Effect::None,
            Written::Notified(_) | Written::Other => {}
        }
        Access::Done
    }

    fn enabled(&mut self, queue: u16) {
        let registers = &mut self.transport.registers;
        let largest = registers.offer().queue_size;
        let queue = &mut registers.state.queues[usize::from(queue)];
        queue.enabled = queue.is_sound(largest);
        if queue.enabled {
            self.changed = true;
        } else {
            self.transport.need_reset();
        }
    }

    fn reset_device(&mut self) {
        self.was_reset |= !self.transport.registers.status().is_empty();
        self.transport.reset_device();
        self.queues.iter_mut().for_each(|queue| *queue = None);
        (self.changed, self.resumes) = (false, false);
    }

    /// Implements [`slipway_pci::Function::reset`].
    pub fn reset(&mut self) {
        self.transport.reset_pci();
        self.reset_device();
    }

    /// Implements [`slipway_pci::Function::quiesce`].
    pub fn quiesce(&mut self) -> bool {
        self.quiesced = true;
        self.queues.iter_mut().flatten().for_each(|queue| queue.queue.release_memory());
        true
    }

    /// Takes over a saved state of a transport that was made with the same arguments. Every queue
    /// goes on where its used index says.
    ///
    /// # Errors
    /// [`StateError`]. The caller then resets the function.
    pub fn restore(&mut self, state: TransportState) -> Result<(), StateError> {
        self.reset_device();
        self.transport.restore(state)?;
        if self.transport.registers.state.queues.iter().any(|queue| queue.resetting) {
            return Err(StateError::Inconsistent("a queue in a reset".into()));
        }
        (self.changed, self.resumes, self.was_reset) = (true, true, false);
        Ok(())
    }
}

/// The methods of [`slipway_pci::Function`] by which a device with a field `local`, a [`Local`],
/// passes its host's calls on. Goes into the device's `impl Function`, beside `save` and
/// `take_over`.
///
/// - `config` is the device's method that returns its configuration;
/// - `follow_reset`, if it is named, is the device's method that [`Local::take_reset`] speaks of;
/// - `serve` is the device's method that serves its queues, and returns whether there was anything
///   to do. A device that polls and quiesces in a way of its own writes `registers` instead.
#[macro_export]
macro_rules! function_on_local {
    (registers, $config:ident $(, $follow_reset:ident)?) => {
        fn description(&self) -> &slipway_pci::Description {
            self.local.transport.description()
        }

        fn config_read(&mut self, offset: u16, into: &mut [u8]) {
            let config = self.$config();
            self.local.config_read(offset, into, $crate::IntoBytes::as_bytes(&config));
        }

        fn config_write(&mut self, offset: u16, from: &[u8]) {
            self.local.config_write(offset, from);
            $(self.$follow_reset();)?
        }

        fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> slipway_pci::Access {
            let config = self.$config();
            self.local.read(bar, offset, into, $crate::IntoBytes::as_bytes(&config))
        }

        fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> slipway_pci::Access {
            let access = self.local.write(bar, offset, from);
            $(self.$follow_reset();)?
            access
        }

        fn reset(&mut self) {
            self.local.reset();
            $(self.$follow_reset();)?
        }
    };
    ($serve:ident, $config:ident $(, $follow_reset:ident)?) => {
        $crate::function_on_local!(registers, $config $(, $follow_reset)?);

        fn poll(&mut self) -> slipway_pci::Progress {
            self.local.begin();
            let served = self.$serve();
            self.local.progress(served)
        }

        fn quiesce(&mut self) -> bool {
            self.local.quiesce()
        }
    };
}
