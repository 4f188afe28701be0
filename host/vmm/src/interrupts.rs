//! The machine's interrupt lines: the IOAPIC, what is behind its pins, and the routes to the CPUs.

use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use slipway_pci::Message;

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

impl InterruptsState {
    /// Asserts or deasserts INTA# of PCI device `device`, 0 to 31. Returns the message to be sent,
    /// if this interrupts the guest.
    fn set_inta(&mut self, device: u8, asserted: bool) -> Option<Message> {
        let pin = layout::pci_pin(device);
        let lines = &mut self.asserted[usize::from(pin)];
        if asserted {
            *lines |= 1 << device
        } else {
            *lines &= !(1 << device)
        }
        let level = *lines != 0;
        self.ioapic.set(pin, level)
    }

    /// Ends the interrupts of `vector`. Deasserts INTA# of the PCI devices that assert a pin with
    /// this vector: a pin that stayed asserted would interrupt the guest once more, before the
    /// devices can say whether they still interrupt. Returns these devices, a bit each, and the
    /// message to be sent, if a pin interrupts again.
    fn end(&mut self, vector: u8) -> (u32, Option<Message>) {
        let pins: Vec<u8> = self.ioapic.level_pins(vector).collect();
        let mut devices = 0;
        for pin in pins {
            devices |= std::mem::take(&mut self.asserted[usize::from(pin)]);
            self.ioapic.set(pin, false);
        }
        (devices, self.ioapic.end(vector))
    }
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
        let mut state = lock(&self.state);
        if let Some(message) = state.set_inta(device, asserted) {
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
    /// that asserted a pin with this vector, and no longer do: their handlers have run, so each is
    /// to assert INTA# again if it still interrupts.
    pub fn end(&self, vector: u8) -> u32 {
        let mut state = lock(&self.state);
        let (devices, message) = state.end(vector);
        if let Some(message) = message {
            self.routes.send(message);
        }
        devices
    }
}

#[cfg(test)]
mod tests {
    use slipway_ioapic_spec::entry;
    use slipway_ioapic_spec::place::{SELECT, WINDOW};
    use slipway_ioapic_spec::register::REDIRECTION;

    use super::*;

    const VECTOR: u8 = 0x41;

    /// Returns the state of lines of which the pin of `device` interrupts by [`VECTOR`], triggered
    /// by level.
    fn lines(device: u8) -> InterruptsState {
        let mut state = InterruptsState { ioapic: Ioapic::default(), asserted: [0; PINS] };
        state.ioapic.write(SELECT, &[REDIRECTION + 2 * layout::pci_pin(device)]);
        let low = entry::LEVEL as u32 | u32::from(VECTOR);
        state.ioapic.write(WINDOW, &low.to_le_bytes());
        state
    }

    #[test]
    fn the_end_of_an_interrupt_sends_no_other_one() {
        let mut state = lines(5);
        for _ in 0..3 {
            assert!(state.set_inta(5, true).is_some());
            assert_eq!(state.end(VECTOR), (1 << 5, None));
            assert_eq!(state.end(VECTOR), (0, None));
        }
        assert_eq!(state.end(VECTOR + 1), (0, None));
    }

    #[test]
    fn devices_on_one_pin_say_each_whether_they_still_interrupt() {
        let mut state = lines(5);
        assert!(state.set_inta(5, true).is_some());
        assert_eq!(state.set_inta(9, true), None, "the pin is asserted already");
        assert_eq!(state.end(VECTOR), (1 << 5 | 1 << 9, None));
        assert!(state.set_inta(9, true).is_some(), "one of them still does");
        assert_eq!(state.set_inta(5, false), None);
        assert_eq!(state.end(VECTOR), (1 << 9, None));
    }
}
