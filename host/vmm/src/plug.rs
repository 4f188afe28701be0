//! The registers of hot plug: the guest reads in them which slots have changed, and ejects what it
//! has stopped using. The byte code in the ACPI tables uses them ([`crate::acpi`]).
//!
//! A bank has a bit for each of 32 slots. All registers have 32 bits; other accesses read zeros and
//! write nothing.
//!
//! | offset | register |
//! |---|---|
//! | 0 | slots that are taken |
//! | 4 | slots that were taken since the last read; reading clears |
//! | 8 | slots that the guest has been asked to give up since the last read; reading clears |
//! | 12 | written: slots that the guest gives up; slots that it was not asked for are ignored |
//!
//! PCI functions and CPUs have a bank each; memory comes by virtio-mem (`hot_memory`). Another kind
//! of part has a [`Kind`], a range of ports in `layout`, its slots in `board::Slots`, its bank in
//! `BoardState`, a bit of the events of `power`, byte code in `acpi/plug.rs`. `front/vmm` has a
//! command for it (`qmp`), and `host/hypervisor` a method of `Vm` (`interface`). Tests: `events.rs`
//! of `tests/guests`, `tests/e2e/71-plug.sh`, `42-plug-kills.sh`; `docs/vmm.md`, "Hot plug".

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::power;

/// Bytes of a bank.
pub const BANK: u16 = 16;

/// PCI devices that can be plugged and removed are those from this number on; lower numbers belong
/// to the machine's own functions.
pub const FIRST_FUNCTION: u8 = 4;
/// The most functions that can be on the bus beside the machine's own.
pub const MAX_FUNCTIONS: u8 = 32 - FIRST_FUNCTION;

/// Offsets of the registers.
const TAKEN: u16 = 0;
const PLUGGED: u16 = 4;
const LEAVING: u16 = 8;
const EJECT: u16 = 12;

/// The kinds of parts that come and go while a machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Functions, by the number of their PCI device.
    Function,
    /// CPUs, by their number.
    Cpu,
}

impl Kind {
    /// Returns the event that tells the guest of changes.
    pub(crate) fn event(self) -> u8 {
        match self {
            Self::Function => power::EVENT_FUNCTIONS,
            Self::Cpu => power::EVENT_CPUS,
        }
    }
}

/// A bank of 32 slots, a bit each; also its saved state.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bank {
    taken: u32,
    /// The slots that were taken since the guest last read the register.
    plugged: u32,
    /// The slots that the guest was asked to give up and has not given up.
    leaving: u32,
    /// The part of `leaving` that the guest has not read.
    untold: u32,
    /// The slots that the guest has given up since the host last called [`Bank::take_ejected`].
    ejected: u32,
}

impl Bank {
    /// Returns whether a saved bank is consistent, and uses no slot outside `slots`.
    pub fn is_sound(&self, slots: &Range<u8>) -> bool {
        let all = slots.clone().fold(0, |bits, slot| bits | bit(slot));
        let parts = [(self.taken, all), (self.plugged, self.taken), (self.leaving, self.taken)];
        let within = parts.iter().all(|(bits, whole)| bits & !whole == 0);
        within && self.untold & !self.leaving == 0 && self.ejected == 0
    }

    /// Returns the slots that are taken, a bit each.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Takes a slot, 0 to 31, without a note for the guest, which learns of it otherwise.
    pub fn take(&mut self, slot: u8) {
        self.taken |= bit(slot);
    }

    /// Takes a slot and notes it for the guest. The caller raises the event device's interrupt.
    pub fn plug(&mut self, slot: u8) {
        self.take(slot);
        self.plugged |= bit(slot);
    }

    /// Asks the guest to give up a slot. Returns `false` if nothing is there. The caller raises the
    /// event device's interrupt. A guest that was asked before is asked again.
    pub fn ask(&mut self, slot: u8) -> bool {
        let asked = self.taken & bit(slot);
        self.leaving |= asked;
        self.untold |= asked;
        asked != 0
    }

    /// Returns the slots that the guest has given up since the last call, a bit each.
    pub fn take_ejected(&mut self) -> u32 {
        std::mem::take(&mut self.ejected)
    }

    /// Reads the register at byte `offset` of the bank.
    pub fn read(&mut self, offset: u16, into: &mut [u8]) {
        into.fill(0);
        let Ok(into) = <&mut [u8; 4]>::try_from(into) else { return };
        let value = match offset {
            TAKEN => self.taken,
            PLUGGED => std::mem::take(&mut self.plugged),
            LEAVING => std::mem::take(&mut self.untold),
            _ => 0,
        };
        *into = value.to_le_bytes();
    }

    /// Writes the register at byte `offset` of the bank. Returns the slots that the guest has given
    /// up by it, a bit each; they are free.
    pub fn write(&mut self, offset: u16, from: &[u8]) -> u32 {
        let (EJECT, Ok(value)) = (offset, <[u8; 4]>::try_from(from)) else { return 0 };
        let ejected = u32::from_le_bytes(value) & self.leaving;
        for bits in [&mut self.taken, &mut self.plugged, &mut self.leaving, &mut self.untold] {
            *bits &= !ejected;
        }
        self.ejected |= ejected;
        ejected
    }
}

fn bit(slot: u8) -> u32 {
    1 << (slot & 31)
}

/// Returns the slots of a set of bits, ascending.
pub fn slots(bits: u32) -> impl Iterator<Item = u8> {
    (0..32).filter(move |&slot| bits & bit(slot) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bank: &mut Bank, offset: u16) -> u32 {
        let mut bytes = [0xff; 4];
        bank.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn what_has_changed_is_read_once() {
        let mut bank = Bank::default();
        bank.take(4);
        bank.plug(31);
        assert_eq!(read(&mut bank, TAKEN), 1 << 31 | 1 << 4);
        assert_eq!((read(&mut bank, PLUGGED), read(&mut bank, PLUGGED)), (1 << 31, 0));
        assert!(bank.ask(4) && !bank.ask(5), "nothing is in slot 5");
        assert_eq!((read(&mut bank, LEAVING), read(&mut bank, LEAVING)), (1 << 4, 0));
        assert!(bank.ask(4));
        assert_eq!(read(&mut bank, LEAVING), 1 << 4, "it is asked again");
    }

    #[test]
    fn only_what_was_asked_for_is_ejected() {
        let mut bank = Bank::default();
        bank.plug(4);
        bank.plug(5);
        let all = u32::MAX.to_le_bytes();
        assert_eq!(bank.write(EJECT, &all), 0);
        bank.ask(5);
        for (offset, bytes) in [(TAKEN, &all[..]), (PLUGGED, &all), (LEAVING, &all)] {
            assert_eq!(bank.write(offset, bytes), 0);
        }
        assert_eq!(bank.write(EJECT, &all[..2]), 0, "not 32 bits");
        assert_eq!(bank.write(EJECT, &[]), 0);
        assert_eq!(bank.write(EJECT, &all), 1 << 5);
        assert_eq!(bank.write(EJECT, &all), 0, "it is gone");
        assert_eq!((bank.take_ejected(), bank.take_ejected()), (1 << 5, 0));
        assert_eq!(read(&mut bank, TAKEN), 1 << 4);
        assert_eq!(read(&mut bank, PLUGGED), 1 << 4);
        assert!(bank.taken() & bit(5) == 0 && !bank.ask(5));
    }

    #[test]
    fn only_a_bank_of_its_slots_is_sound() {
        let mut bank = Bank::default();
        bank.plug(4);
        bank.ask(4);
        assert!(bank.is_sound(&(4..5)));
        assert!(!bank.is_sound(&(5..8)) && !bank.is_sound(&(0..0)), "slots that are not there");
        let unsound = [
            Bank { plugged: 1 << 5, ..bank.clone() },
            Bank { leaving: 1 << 5, ..bank.clone() },
            Bank { untold: 1 << 5, ..bank.clone() },
            Bank { ejected: 1 << 4, ..bank },
        ];
        assert!(unsound.iter().all(|bank| !bank.is_sound(&(4..8))));
    }

    #[test]
    fn registers_of_other_widths_read_as_zeros_and_keep_their_values() {
        let mut bank = Bank::default();
        bank.plug(0);
        let mut bytes = [0xff; 8];
        for len in [0, 1, 2, 8] {
            bank.read(PLUGGED, &mut bytes[..len]);
            assert!(bytes[..len].iter().all(|&byte| byte == 0));
        }
        assert_eq!(read(&mut bank, PLUGGED + 1), 0);
        assert_eq!(read(&mut bank, PLUGGED), 1);
    }
}
