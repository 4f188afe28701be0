//! The EEPROM: its contents, and the two ways to read it, EERD and the four wires of EECD.

use serde::{Deserialize, Serialize};
use slipway_e1000_spec::eeprom::{
    self, ADDRESS_BITS, CHECKSUM, CONTROL1, CONTROL1_VALUE, OPERATION_BITS, READ, WORDS,
};
use slipway_e1000_spec::{DEVICE, VENDOR, eecd, eerd};
use slipway_switch::Mac;

/// Returns the contents for a device with this address and subsystem. Words without a meaning for
/// a driver are 0.
pub(crate) fn contents(mac: Mac, subsystem_vendor: u16, subsystem: u16) -> [u16; WORDS] {
    let mut words = [0; WORDS];
    for (word, pair) in words.iter_mut().zip(mac.0.as_chunks::<2>().0) {
        *word = u16::from_le_bytes(*pair);
    }
    words[CONTROL1] = CONTROL1_VALUE;
    words[eeprom::SUBSYSTEM] = subsystem;
    words[eeprom::SUBSYSTEM_VENDOR] = subsystem_vendor;
    words[eeprom::DEVICE] = DEVICE;
    words[eeprom::VENDOR] = VENDOR;
    words[CHECKSUM] = eeprom::checksum(&words);
    words
}

/// Returns EERD after `value` was written to it: the word, and that the read is done.
pub(crate) fn read(words: &[u16; WORDS], value: u32) -> u32 {
    let address = value >> eerd::ADDRESS & 0xff;
    if value & eerd::START == 0 {
        return value & 0xff << eerd::ADDRESS;
    }
    let word = words.get(address as usize).copied().unwrap_or_default();
    u32::from(word) << eerd::DATA | address << eerd::ADDRESS | eerd::DONE
}

/// The chip behind EECD: a 93C46 that only reads. Writes and erasures are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wires {
    /// The bits of EECD that the driver wrote last.
    written: u32,
    /// The number of bits since the chip was selected, from the start bit on.
    count: u32,
    /// The bits themselves, at most as many as an operation has with its address.
    bits: u16,
    /// The bit on the chip's output.
    out: bool,
}

/// The bits of EECD that a driver can set.
const WRITABLE: u32 = eecd::SK | eecd::CS | eecd::DI | eecd::FWE | eecd::REQ;
/// Bits of an operation with its address.
const COMMAND_BITS: u32 = OPERATION_BITS + ADDRESS_BITS;

impl Wires {
    /// Returns EECD.
    pub fn read(&self) -> u32 {
        let granted = if self.written & eecd::REQ != 0 { eecd::GNT } else { 0 };
        let out = if self.out { eecd::DO } else { 0 };
        self.written | granted | out | eecd::PRES
    }

    /// Takes a write of EECD.
    pub fn write(&mut self, words: &[u16; WORDS], value: u32) {
        let before = std::mem::replace(&mut self.written, value & WRITABLE);
        if value & eecd::CS == 0 {
            // The chip is not selected: its output floats high, and its command is forgotten.
            (self.count, self.bits, self.out) = (0, 0, true);
        } else if before & eecd::SK == 0 && value & eecd::SK != 0 {
            self.clock(words, value & eecd::DI != 0);
        }
    }

    /// Takes a rising edge of the clock.
    fn clock(&mut self, words: &[u16; WORDS], input: bool) {
        if self.count < COMMAND_BITS {
            // Everything before the start bit is ignored.
            if self.count > 0 || input {
                self.bits = self.bits << 1 | u16::from(input);
                self.count += 1;
            }
            // A 0 comes out in front of the data.
            self.out = self.count < COMMAND_BITS;
            return;
        }
        if self.bits >> ADDRESS_BITS != READ {
            self.out = true;
            return;
        }
        let at = self.count - COMMAND_BITS;
        // A read goes on with the next word, and from the last with the first.
        let word = usize::from(self.bits) % WORDS + at as usize / 16;
        self.out = words[word % WORDS] >> (15 - at % 16) & 1 != 0;
        self.count = COMMAND_BITS + (at + 1) % (16 * WORDS as u32);
    }

    /// Returns whether the state can be that of a chip.
    pub fn is_sound(&self) -> bool {
        self.written & !WRITABLE == 0
            && self.count < COMMAND_BITS + 16 * WORDS as u32
            && self.bits < 1 << COMMAND_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> [u16; WORDS] {
        contents(Mac([2, 3, 4, 5, 6, 7]), 0x1af4, 0x5e10)
    }

    /// Shifts `count` bits in.
    fn shift_in(wires: &mut Wires, bits: u16, count: u32) {
        for at in (0..count).rev() {
            let data = if bits >> at & 1 != 0 { eecd::DI } else { 0 };
            for clock in [0, eecd::SK, 0] {
                wires.write(&words(), eecd::REQ | eecd::CS | data | clock);
            }
        }
    }

    fn shift_out(wires: &mut Wires) -> u16 {
        (0..16).fold(0, |word, _| {
            wires.write(&words(), eecd::REQ | eecd::CS | eecd::SK);
            let bit = wires.read() & eecd::DO != 0;
            wires.write(&words(), eecd::REQ | eecd::CS);
            word << 1 | u16::from(bit)
        })
    }

    #[test]
    fn all_words_are_the_same_by_both_ways_and_sum_up() {
        let mut wires = Wires::default();
        let mut sum = 0_u16;
        for at in 0..WORDS {
            wires.write(&words(), eecd::REQ | eecd::CS);
            assert_ne!(wires.read() & eecd::GNT, 0);
            shift_in(&mut wires, READ, OPERATION_BITS);
            shift_in(&mut wires, at as u16, ADDRESS_BITS);
            assert_eq!(wires.read() & eecd::DO, 0, "the 0 in front of the data");
            let word = shift_out(&mut wires);
            wires.write(&words(), eecd::REQ);
            let register = read(&words(), (at as u32) << eerd::ADDRESS | eerd::START);
            assert_ne!(register & eerd::DONE, 0);
            assert_eq!((register >> eerd::DATA) as u16, word);
            sum = sum.wrapping_add(word);
            assert!(wires.is_sound());
        }
        assert_eq!(sum, eeprom::SUM);
        assert_eq!(words()[..3], [0x0302, 0x0504, 0x0706]);
        assert_eq!(read(&words(), 0xff << eerd::ADDRESS | eerd::START) >> eerd::DATA, 0);
    }

    #[test]
    fn a_read_goes_on_with_the_next_words() {
        let mut wires = Wires::default();
        shift_in(&mut wires, READ, OPERATION_BITS);
        shift_in(&mut wires, 62, ADDRESS_BITS);
        let read: Vec<u16> = (0..4).map(|_| shift_out(&mut wires)).collect();
        assert_eq!(read, [words()[62], words()[63], words()[0], words()[1]]);
    }
}
