//! The machine's interrupt lines: the IOAPIC, what is behind its pins, and the routes to the CPUs.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::ioapic::{Effect, Ioapic};
use crate::layout::{self, PINS};
use crate::lock::lock;
use crate::routes::Routes;
use crate::{Error, Result};

/// The state of the lines; also their saved state.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterruptsState {
    ioapic: Ioapic,
    /// The PCI devices that assert INTA#, a bit each, for each pin: a pin is asserted while any is.
    asserted: [u32; PINS],
}

#[cfg(feature = "fuzz")]
impl InterruptsState {
    /// Returns the IOAPIC, or `None` if it cannot be one.
    pub(crate) fn into_sound(self) -> Option<Ioapic> {
        Some(self.ioapic).filter(Ioapic::is_sound)
    }
}

/// The interrupt lines of a machine.
pub struct Interrupts {
    routes: Arc<Routes>,
    state: Mutex<InterruptsState>,
}

impl Interrupts {
    /// Makes the lines, with no pin asserted.
    pub fn new(routes: Arc<Routes>) -> Self {
        let state = InterruptsState { ioapic: Ioapic::default(), asserted: [0; PINS] };
        Self { routes, state: Mutex::new(state) }
    }

    /// Returns the state for a successor.
    pub fn save(&self) -> InterruptsState {
        lock(&self.state).clone()
    }

    /// Takes over the state of a predecessor, and has KVM report the ends of its interrupts.
    ///
    /// # Errors
    /// [`Error::State`], [`Error::Kvm`].
    pub fn restore(&self, saved: &InterruptsState) -> Result<()> {
        if !saved.ioapic.is_sound() {
            return Err(Error::State("an IOAPIC that cannot be".into()));
        }
        let mut state = lock(&self.state);
        *state = saved.clone();
        for pin in 0..PINS {
            self.routes.set(pin as u32, state.ioapic.route(pin))?;
        }
        Ok(())
    }

    /// Returns the routes of messages.
    pub fn routes(&self) -> &Arc<Routes> {
        &self.routes
    }

    /// Interrupts once by a pin that is triggered by edges.
    pub fn pulse(&self, pin: u8) {
        let mut state = lock(&self.state);
        let message = state.ioapic.set(pin, true);
        state.ioapic.set(pin, false);
        if let Some(message) = message {
            self.routes.send(message);
        }
    }

    /// Asserts or deasserts INTA# of PCI device `device`, 0 to 31.
    pub fn set_inta(&self, device: u8, asserted: bool) {
        let pin = layout::pci_pin(device);
        let mut state = lock(&self.state);
        let lines = &mut state.asserted[usize::from(pin)];
        if asserted {
            *lines |= 1 << device
        } else {
            *lines &= !(1 << device)
        }
        let level = *lines != 0;
        if let Some(message) = state.ioapic.set(pin, level) {
            self.routes.send(message);
        }
    }

    /// Reads a register of the IOAPIC.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        lock(&self.state).ioapic.read(offset, into);
    }

    /// Writes a register of the IOAPIC. Returns the reason if KVM refused the new route.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let mut state = lock(&self.state);
        let Effect { message, route } = state.ioapic.write(offset, from);
        if let Some(pin) = route {
            self.routes.set(pin as u32, state.ioapic.route(pin))?;
        }
        if let Some(message) = message {
            self.routes.send(message);
        }
        Ok(())
    }

    /// Ends the interrupts of `vector`, as an exit reports it. Returns the PCI devices, a bit each,
    /// that assert a pin with this vector: their handlers have run, so each may say whether it
    /// still interrupts.
    pub fn end(&self, vector: u8) -> u32 {
        let mut state = lock(&self.state);
        let pins: Vec<u8> = state.ioapic.level_pins(vector).collect();
        let devices = pins.iter().fold(0, |all, &pin| all | state.asserted[usize::from(pin)]);
        if let Some(message) = state.ioapic.end(vector) {
            self.routes.send(message);
        }
        devices
    }
}
