//! The transport of one device: configuration space, MSI-X and the registers of BAR0.

use slipway_pci::{Access, ConfigEffect, ConfigSpace, Description, Interrupt, Msix, StateError};
use slipway_virtio_spec::Status;
use slipway_virtio_spec::pci::isr;

use crate::layout::{
    self, BAR_SIZE, COMMON, DEVICE, DeviceKind, ISR, MSIX_TABLE, NOTIFY, NOTIFY_MULTIPLIER,
};
use crate::registers::{Effect, Offer, Registers, copy_from};
use crate::state::TransportState;

/// Most MSI-X vectors: the table has one page.
pub const MAX_VECTORS: usize = 256;

/// The parts of a virtio function over PCI that do not depend on its device type. The function
/// passes its host's calls on, and acts on the results.
pub struct Transport {
    description: Description,
    pci: ConfigSpace,
    /// The offset of the window capability.
    window: u16,
    msix: Msix,
    interrupts: Vec<Interrupt>,
    /// The common configuration.
    pub registers: Registers,
    isr: u8,
}

/// The result of a write to configuration space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Configured {
    /// The write is done.
    Done,
    /// The function is to be reset (function-level reset).
    Reset,
    /// The bytes are a write to BAR0: offset, length.
    Window(u64, usize),
}

/// The result of a write to a BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// There is no such BAR.
    Refused,
    /// The driver notifies of this queue, which may not exist. The state is as before.
    Notified(u64),
    /// The common configuration was written.
    Common(Effect),
    /// The MSI-X table was written, or nothing.
    Other,
}

impl Transport {
    /// Makes the transport of a device of type `kind` in its state after power-on, with one
    /// interrupt per MSI-X vector, in order.
    ///
    /// # Panics
    /// If there are not 1 to [`MAX_VECTORS`] interrupts. The device checks its parts before.
    pub fn new(kind: &DeviceKind, offer: &Offer, interrupts: Vec<Interrupt>) -> Self {
        assert!((1..=MAX_VECTORS).contains(&interrupts.len()), "1 to 256 vectors");
        let vectors = interrupts.len() as u16;
        let queues = usize::from(offer.queues);
        let (description, msix) = (layout::description(vectors, queues), layout::msix(vectors));
        let (pci, window) = layout::config_space(kind, &description, &msix, queues);
        let registers = Registers::new(offer, vectors);
        Self { description, pci, window, msix: Msix::new(msix), interrupts, registers, isr: 0 }
    }

    /// Implements [`slipway_pci::Function::description`].
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the interrupt of MSI-X vector `vector`. Returns `None` if there is no such vector.
    pub fn interrupt(&self, vector: u16) -> Option<Interrupt> {
        self.interrupts.get(usize::from(vector)).cloned()
    }

    /// Tells the driver that the configuration has changed (section 2.5.1).
    pub fn config_changed(&mut self) {
        self.registers.state.generation = self.registers.state.generation.wrapping_add(1);
        if self.registers.status().contains(Status::DRIVER_OK) {
            self.isr |= isr::CONFIG;
            if let Some(interrupt) = self.interrupt(self.registers.state.config_vector) {
                interrupt.signal();
            }
        }
    }

    /// Tells the driver that the device needs a reset (section 2.1.2).
    pub fn need_reset(&mut self) {
        if !self.registers.status().contains(Status::DEVICE_NEEDS_RESET) {
            self.registers.state.status |= Status::DEVICE_NEEDS_RESET.bits();
            self.config_changed();
        }
    }

    /// Returns to the state after construction but for configuration space and MSI-X, as the driver
    /// asks by writing 0 to the status.
    pub fn reset_device(&mut self) {
        self.registers.reset();
        self.isr = 0;
    }

    /// Returns configuration space and MSI-X to their state after construction, as a function-level
    /// reset does before it resets the device.
    pub fn reset_pci(&mut self) {
        self.pci.reset();
        self.msix.reset();
    }

    /// Implements [`slipway_pci::Function::config_read`]. Returns the offset in BAR0, and the
    /// length, of the bytes that the caller is to read into `into`, if the driver reads BAR0 by
    /// the window.
    pub fn config_read(&self, offset: u16, into: &mut [u8]) -> Option<(u64, usize)> {
        self.pci.read(offset, into);
        self.shown(offset, into.len())
    }

    /// Implements [`slipway_pci::Function::config_write`].
    pub fn config_write(&mut self, offset: u16, from: &[u8]) -> Configured {
        if self.pci.write(offset, from) == ConfigEffect::FunctionLevelReset {
            return Configured::Reset;
        }
        match self.shown(offset, from.len()) {
            Some((at, len)) => Configured::Window(at, len),
            None => Configured::Done,
        }
    }

    /// Returns the part of BAR0 that an access of `len` bytes at `offset` of configuration space
    /// reaches. Returns `None` if the offset is not that of the window's data.
    fn shown(&self, offset: u16, len: usize) -> Option<(u64, usize)> {
        if offset != layout::window_data(self.window) {
            return None;
        }
        layout::shown(&self.pci, self.window).map(|(at, most)| (at, most.min(len)))
    }

    /// Implements [`slipway_pci::Function::read`], with the bytes of the device configuration.
    pub fn read(&mut self, bar: u8, offset: u64, into: &mut [u8], config: &[u8]) -> Access {
        if bar != 0 {
            return Access::Refused;
        }
        into.fill(0);
        match offset {
            _ if COMMON.contains(&offset) => self.registers.read(offset, into),
            // Reading clears it (section 4.1.4.5).
            _ if offset == ISR.start => {
                if let Some(first) = into.first_mut() {
                    *first = std::mem::take(&mut self.isr);
                }
            }
            _ if DEVICE.contains(&offset) => copy_from(config, offset - DEVICE.start, into),
            MSIX_TABLE..BAR_SIZE => drop(self.msix.read(bar, offset, into)),
            _ => {}
        }
        Access::Done
    }

    /// Implements [`slipway_pci::Function::write`] as far as the transport goes.
    pub fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Written {
        match offset {
            _ if bar != 0 => return Written::Refused,
            _ if NOTIFY.contains(&offset) => {
                let queue = (offset - NOTIFY.start) / u64::from(NOTIFY_MULTIPLIER);
                return Written::Notified(queue);
            }
            _ if COMMON.contains(&offset) => {
                return Written::Common(self.registers.write(offset, from));
            }
            MSIX_TABLE..BAR_SIZE => drop(self.msix.write(bar, offset, from)),
            _ => {}
        }
        Written::Other
    }

    /// Returns the state for a successor.
    pub fn save(&self) -> TransportState {
        let (pci, msix) = (self.pci.save(), self.msix.save());
        TransportState { pci, msix, registers: self.registers.save(), isr: self.isr }
    }

    /// Takes over a saved state of a transport that was made with the same arguments.
    ///
    /// # Errors
    /// [`StateError`]. The caller then resets the function.
    pub fn restore(&mut self, state: TransportState) -> Result<(), StateError> {
        self.pci.restore(&state.pci)?;
        self.msix.restore(&state.msix)?;
        self.registers.restore(state.registers)?;
        self.isr = state.isr;
        Ok(())
    }
}
