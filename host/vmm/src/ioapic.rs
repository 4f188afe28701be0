//! The IOAPIC: turns levels and edges of pins into messages to the local APICs, which the kernel
//! emulates. Its registers are those of `slipway_ioapic_spec`.
//!
//! The machine has a split interrupt controller: an exit tells of the end of an interrupt (EOI)
//! whose vector belongs to a pin that is triggered by level. The kernel learns these vectors from
//! the routes of the pins' interrupts, see [`crate::routes`].

use serde::{Deserialize, Serialize};
use slipway_ioapic_spec::place::{EOI, SELECT, WINDOW};
use slipway_ioapic_spec::register::{ARBITRATION, ID, ID_BITS, REDIRECTION, VERSION};
use slipway_ioapic_spec::{entry, version};
use slipway_pci::Message;

use crate::layout::PINS;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    entry: u64,
    /// The level of the pin, or of the last edge.
    asserted: bool,
}

/// The registers and pins of the IOAPIC; also their saved state.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ioapic {
    select: u8,
    id: u32,
    pins: [Pin; PINS],
}

/// The action that a register write asks of the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// A message to be sent.
    pub message: Option<Message>,
    /// The pin whose route has changed.
    pub route: Option<usize>,
}

impl Default for Ioapic {
    fn default() -> Self {
        Self { select: 0, id: 0, pins: [Pin { entry: entry::MASKED, asserted: false }; PINS] }
    }
}

impl Ioapic {
    /// Returns whether registers that were saved can be those of an IOAPIC.
    pub fn is_sound(&self) -> bool {
        let can_be = |pin: &Pin| entry::is_sound(pin.entry);
        self.id & !ID_BITS == 0 && self.pins.iter().all(can_be)
    }

    /// Reads a register; accesses that are not 32 bits at a register's start read zeros.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let value = match offset {
            SELECT => self.select.into(),
            WINDOW => self.register(),
            _ => 0,
        };
        into.fill(0);
        let bytes = value.to_le_bytes();
        let len = into.len().min(bytes.len());
        into[..len].copy_from_slice(&bytes[..len]);
    }

    fn register(&self) -> u32 {
        match self.select {
            ID | ARBITRATION => self.id,
            VERSION => version(PINS),
            _ => match self.selected_pin() {
                Some((pin, high)) if high => (self.pins[pin].entry >> 32) as u32,
                Some((pin, _)) => self.pins[pin].entry as u32,
                None => 0,
            },
        }
    }

    /// Returns the selected pin, and whether the upper half of its entry is selected.
    fn selected_pin(&self) -> Option<(usize, bool)> {
        let index = usize::from(self.select.checked_sub(REDIRECTION)?);
        (index < 2 * PINS).then_some((index / 2, index % 2 != 0))
    }

    /// Writes a register.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Effect {
        let mut word = [0; 4];
        let len = from.len().min(word.len());
        word[..len].copy_from_slice(&from[..len]);
        let value = u32::from_le_bytes(word);
        match offset {
            SELECT => self.select = value as u8,
            WINDOW => return self.write_register(value),
            EOI => return Effect { message: self.end(value as u8), route: None },
            _ => {}
        }
        Effect::default()
    }

    fn write_register(&mut self, value: u32) -> Effect {
        if self.select == ID {
            self.id = value & ID_BITS;
        }
        let Some((number, high)) = self.selected_pin() else { return Effect::default() };
        let pin = &mut self.pins[number];
        let old = pin.entry;
        pin.entry = entry::written(old, high, value);
        let route = (route_of(old) != route_of(pin.entry)).then_some(number);
        let is_level = pin.entry & entry::LEVEL != 0;
        let message = if is_level { self.deliver(number) } else { None };
        Effect { message, route }
    }

    /// Sets the level of a pin. Returns the message to be sent, if this interrupts the guest.
    pub fn set(&mut self, pin: u8, asserted: bool) -> Option<Message> {
        let state = self.pins.get_mut(usize::from(pin))?;
        let rises = asserted && !state.asserted;
        state.asserted = asserted;
        let is_level = state.entry & entry::LEVEL != 0;
        (rises || is_level).then(|| self.deliver(pin.into())).flatten()
    }

    /// Returns the message of an asserted, unmasked pin that waits for no end of interrupt.
    fn deliver(&mut self, number: usize) -> Option<Message> {
        let pin = &mut self.pins[number];
        if !pin.asserted || pin.entry & (entry::MASKED | entry::REMOTE_IRR) != 0 {
            return None;
        }
        if pin.entry & entry::LEVEL != 0 {
            pin.entry |= entry::REMOTE_IRR;
        }
        Some(message(pin.entry))
    }

    /// Ends the interrupts of `vector`. A pin that is still asserted interrupts again with the
    /// returned message.
    pub fn end(&mut self, vector: u8) -> Option<Message> {
        for number in 0..PINS {
            let entry = &mut self.pins[number].entry;
            if *entry & entry::VECTOR == u64::from(vector) && *entry & entry::REMOTE_IRR != 0 {
                *entry &= !entry::REMOTE_IRR;
                if let Some(message) = self.deliver(number) {
                    return Some(message);
                }
            }
        }
        None
    }

    /// Returns whether a pin with this vector is triggered by level and asserted.
    pub fn level_pins(&self, vector: u8) -> impl Iterator<Item = u8> + '_ {
        (0..PINS as u8).filter(move |&pin| {
            let entry = self.pins[usize::from(pin)].entry;
            entry & entry::LEVEL != 0 && entry & entry::VECTOR == u64::from(vector)
        })
    }

    /// Returns the message by which the kernel learns that ends of the pin's interrupts are to be
    /// reported. Returns `None` if they are not, since the pin is triggered by edges. A masked pin
    /// has a route as well: the guest may end an interrupt while its pin is masked.
    pub fn route(&self, pin: usize) -> Option<Message> {
        route_of(self.pins.get(pin)?.entry)
    }
}

fn route_of(entry: u64) -> Option<Message> {
    (entry & entry::LEVEL != 0).then(|| message(entry))
}

/// Translates a redirection entry to a message (Intel SDM, volume 3, *Message Signalled
/// Interrupts*).
fn message(entry: u64) -> Message {
    let (address, data) = entry::message(entry);
    Message { address, data }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(ioapic: &mut Ioapic, register: u8, value: u32) -> Effect {
        assert_eq!(ioapic.write(SELECT, &u32::from(register).to_le_bytes()), Effect::default());
        ioapic.write(WINDOW, &value.to_le_bytes())
    }

    fn read(ioapic: &mut Ioapic, register: u8) -> u32 {
        ioapic.write(SELECT, &[register]);
        let mut bytes = [0; 4];
        ioapic.read(WINDOW, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Vector 0x30, to APIC 1.
    fn program(ioapic: &mut Ioapic, pin: u8, flags: u64) -> Effect {
        let register = REDIRECTION + 2 * pin;
        write(ioapic, register + 1, 1 << 24);
        write(ioapic, register, 0x30 | flags as u32)
    }

    const TO_1: u64 = 0xfee0_1000;

    #[test]
    fn an_edge_is_one_message() {
        let mut ioapic = Ioapic::default();
        assert_eq!(ioapic.set(4, true), None, "masked after reset");
        ioapic.set(4, false);
        program(&mut ioapic, 4, 0);
        let message = ioapic.set(4, true).unwrap();
        assert_eq!((message.address, message.data), (TO_1, 0x4030));
        assert_eq!(ioapic.set(4, true), None, "it stays asserted");
        ioapic.set(4, false);
        assert!(ioapic.set(4, true).is_some());
        assert_eq!(ioapic.route(4), None);
    }

    #[test]
    fn a_level_interrupts_until_it_is_deasserted() {
        let mut ioapic = Ioapic::default();
        assert_eq!(ioapic.set(2, true), None);
        let effect = program(&mut ioapic, 2, entry::LEVEL);
        assert_eq!(effect.route, Some(2));
        let message = effect.message.expect("asserted before it was unmasked");
        assert_eq!((message.address, message.data), (TO_1, 0xc030));
        assert_eq!(ioapic.route(2), Some(message));
        assert_eq!(ioapic.level_pins(0x30).collect::<Vec<_>>(), [2]);
        assert_eq!(ioapic.set(2, true), None, "the guest has not ended it");
        assert!(read(&mut ioapic, REDIRECTION + 4) & entry::REMOTE_IRR as u32 != 0);
        assert_eq!(ioapic.end(0x31), None);
        assert_eq!(ioapic.end(0x30), Some(message), "still asserted");
        ioapic.set(2, false);
        assert_eq!(ioapic.end(0x30), None);
        assert_eq!(ioapic.set(2, true), Some(message));
        // By the EOI register as well.
        assert_eq!(ioapic.write(EOI, &[0x30, 0, 0, 0]).message, Some(message));
    }

    #[test]
    fn an_interrupt_that_ends_while_its_pin_is_masked_is_over() {
        let mut ioapic = Ioapic::default();
        program(&mut ioapic, 2, entry::LEVEL);
        let message = ioapic.set(2, true).unwrap();
        ioapic.set(2, false);
        program(&mut ioapic, 2, entry::LEVEL | entry::MASKED);
        assert_eq!(ioapic.route(2), Some(message), "its end is still reported");
        assert_eq!(ioapic.end(0x30), None);
        program(&mut ioapic, 2, entry::LEVEL);
        assert_eq!(ioapic.set(2, true), Some(message));
    }

    #[test]
    fn a_guest_cannot_set_the_remote_irr_or_reach_pins_that_do_not_exist() {
        let mut ioapic = Ioapic::default();
        program(&mut ioapic, 3, entry::LEVEL | entry::REMOTE_IRR);
        assert_eq!(read(&mut ioapic, REDIRECTION + 6) & entry::REMOTE_IRR as u32, 0);
        for register in (REDIRECTION + 2 * PINS as u8)..=255 {
            assert_eq!(write(&mut ioapic, register, 0x30), Effect::default());
            assert_eq!(read(&mut ioapic, register), 0);
        }
        assert_eq!(ioapic.set(PINS as u8, true), None);
        assert_eq!(read(&mut ioapic, VERSION) >> 16, PINS as u32 - 1);
    }
}
