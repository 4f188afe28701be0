//! Power management: registers for sleep, reset and events of a hardware-reduced ACPI machine
//! (ACPI 6.4, 4.8.3.7 *Sleep Control*, 4.8.3.6 *Reset Register*, 5.6.9 *Generic Event Device*).
//!
//! | port | register |
//! |---|---|
//! | 0x600 | sleep control: S5 powers off |
//! | 0x601 | sleep status: reads as zero |
//! | 0x602 | reset: [`RESET_VALUE`] resets |
//! | 0x604 | pending events ([`EVENT_POWER_BUTTON`]…); reading clears them |

use serde::{Deserialize, Serialize};

use crate::layout::POWER;

/// Offset of the sleep control register.
pub const SLEEP_CONTROL: u16 = 0;
/// Offset of the sleep status register.
pub const SLEEP_STATUS: u16 = 1;
/// Offset of the reset register.
pub const RESET: u16 = 2;
/// Offset of the register of pending events, 8 bits.
pub const EVENTS: u16 = 4;

/// The value that resets the machine.
pub const RESET_VALUE: u8 = 1;
/// `SLP_TYP` of S5.
pub const SLEEP_TYPE_OFF: u8 = 5;
/// Sleep control, `SLP_EN`.
const SLEEP_ENABLE: u8 = 1 << 5;
const SLEEP_TYPE_SHIFT: u32 = 2;

/// The host asked the guest to power off.
pub const EVENT_POWER_BUTTON: u8 = 1 << 0;
/// The VM's generation ID has changed.
pub const EVENT_GENERATION: u8 = 1 << 1;
/// Slots of the bus have changed ([`crate::plug`]).
pub const EVENT_FUNCTIONS: u8 = 1 << 2;
/// CPUs were plugged, or are to leave ([`crate::plug`]).
pub const EVENT_CPUS: u8 = 1 << 3;

/// The action that a write asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The guest powers off.
    PowerOff,
    /// The guest resets the machine.
    Reset,
}

/// The registers; also their saved state.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    events: u8,
}

impl Power {
    /// Reads at byte `offset` of [`POWER`].
    pub fn read(&mut self, offset: u16, into: &mut [u8]) {
        into.fill(0);
        if let (EVENTS, Some(first)) = (offset, into.first_mut()) {
            *first = std::mem::take(&mut self.events);
        }
    }

    /// Writes at byte `offset` of [`POWER`].
    pub fn write(&mut self, offset: u16, from: &[u8]) -> Effect {
        const OFF: u8 = SLEEP_ENABLE | SLEEP_TYPE_OFF << SLEEP_TYPE_SHIFT;
        match (offset, from.first()) {
            (SLEEP_CONTROL, Some(&OFF)) => Effect::PowerOff,
            (RESET, Some(&RESET_VALUE)) => Effect::Reset,
            _ => Effect::None,
        }
    }

    /// Marks events as pending. The caller raises the event device's interrupt afterwards.
    pub fn announce(&mut self, events: u8) {
        self.events |= events;
    }

    /// Returns whether the guest has not read of an event yet.
    pub fn is_pending(&self) -> bool {
        self.events != 0
    }
}

const _: () = assert!(EVENTS < POWER.end - POWER.start);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_s5_powers_off_and_only_the_reset_value_resets() {
        let mut power = Power::default();
        assert_eq!(power.write(SLEEP_CONTROL, &[1 << 5 | 5 << 2]), Effect::PowerOff);
        assert_eq!(power.write(RESET, &[1]), Effect::Reset);
        for (offset, byte) in [(0, 5 << 2), (0, 1 << 5 | 3 << 2), (2, 0), (3, 1), (4, 1)] {
            assert_eq!(power.write(offset, &[byte]), Effect::None);
        }
        assert_eq!(power.write(RESET, &[]), Effect::None);
    }

    #[test]
    fn events_are_read_once() {
        let mut power = Power::default();
        let mut byte = [0xff];
        power.read(EVENTS, &mut byte);
        assert_eq!(byte, [0]);
        power.announce(EVENT_POWER_BUTTON);
        power.announce(EVENT_GENERATION);
        power.read(EVENTS, &mut byte);
        assert_eq!(byte, [0b11]);
        power.read(EVENTS, &mut byte);
        assert_eq!(byte, [0]);
    }
}
