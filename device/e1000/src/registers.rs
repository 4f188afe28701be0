//! Registers that keep what was written to them, and what a write has an effect on.
//!
//! A new register has its offset in `spec/e1000-spec` (`register`). One that keeps its value is a
//! row of `PLAIN`, with an [`Effect`] if more follows; it makes the saved state longer, so that
//! `STATE_VERSION` (`state`) is raised. One that does not is an arm of `read_register` and
//! `write_register` (`access`), and what it stores a field of `SavedState`. Counters of frames are
//! in `statistics`. Tests: `tests/lifecycle.rs`, `saved.rs`, `hostile.rs`; the fuzz targets reach
//! it as it is.

use slipway_e1000_spec::{ADDRESSES, TABLE, control, csb, rah, rctl, register};
use slipway_switch::Mac;

use crate::filter::Filter;

/// The effect of a write on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing beyond the register.
    None,
    /// The data path has new rules.
    Rules,
    /// The transmit ring begins anew.
    Transmit,
    /// The receive ring begins anew.
    Receive,
    /// The delay timers have new values.
    Delays,
}

/// A register that keeps its value.
struct Plain {
    offset: u32,
    /// The bits that a driver can set.
    writable: u32,
    /// The value after a reset.
    initial: u32,
    effect: Effect,
}

const fn plain(offset: u32, writable: u32, initial: u32, effect: Effect) -> Plain {
    Plain { offset, writable, initial, effect }
}

const ALL: u32 = u32::MAX;
const HALF: u32 = 0xffff;
/// Bits of a ring's base address, and of its length.
const BASE: u32 = !0xf;
const LENGTH: u32 = 0xf_ff80;

/// Values after a reset are those of chapter 13.
const PLAIN: [Plain; 42] = [
    plain(register::CTRL, !(control::RST | control::PHY_RST), 0x0a09, Effect::Rules),
    plain(register::CTRL_EXT, ALL & !slipway_e1000_spec::ctrl_ext::EE_RST, 0, Effect::None),
    plain(register::FLA, HALF, 0, Effect::None),
    plain(register::FCAL, ALL, 0, Effect::None),
    plain(register::FCAH, HALF, 0, Effect::None),
    plain(register::FCT, HALF, 0, Effect::None),
    plain(register::VET, HALF, slipway_ethernet_spec::ethertype::VLAN as u32, Effect::Rules),
    plain(register::RCTL, rctl::WRITABLE, 0, Effect::Rules),
    plain(register::FCTTV, HALF, 0, Effect::None),
    plain(register::TXCW, 0xc000_ffff, 0, Effect::None),
    plain(register::TCTL, 0x01ff_fffa, 0, Effect::Rules),
    plain(register::TIPG, 0x3fff_ffff, 0x0060_2008, Effect::None),
    plain(register::AIFS, HALF, 0, Effect::None),
    plain(register::LEDCTL, ALL, 0x0706_8302, Effect::None),
    plain(register::PBA, HALF, 0x30, Effect::None),
    plain(register::FCRTL, 0x8000_fff8, 0, Effect::None),
    plain(register::FCRTH, 0x8000_fff8, 0, Effect::None),
    plain(register::RDBAL, BASE, 0, Effect::Receive),
    plain(register::RDBAH, ALL, 0, Effect::Receive),
    plain(register::RDLEN, LENGTH, 0, Effect::Receive),
    plain(register::RDTR, HALF, 0, Effect::Delays),
    plain(register::RXDCTL, ALL, 0, Effect::None),
    plain(register::RADV, HALF, 0, Effect::Delays),
    plain(register::CSBAL, csb::ADDRESS | csb::ENABLE | csb::OFFLOADS, 0, Effect::Rules),
    plain(register::CSBAH, ALL, 0, Effect::None),
    plain(register::RSRPD, 0xfff, 0, Effect::Rules),
    plain(register::TXDMAC, 1, 0, Effect::None),
    plain(register::TDBAL, BASE, 0, Effect::Transmit),
    plain(register::TDBAH, ALL, 0, Effect::Transmit),
    plain(register::TDLEN, LENGTH, 0, Effect::Transmit),
    plain(register::TIDV, HALF, 0, Effect::Delays),
    plain(register::TXDCTL, ALL, 0, Effect::None),
    plain(register::TADV, HALF, 0, Effect::Delays),
    plain(register::TSPMT, ALL, 0x0100_0400, Effect::None),
    plain(register::RXCSUM, 0x7ff, 0, Effect::Rules),
    plain(register::WUC, 0xf, 0, Effect::None),
    plain(register::WUFC, ALL, 0, Effect::None),
    plain(register::MANC, ALL, 0, Effect::None),
    plain(register::IPAV, ALL, 0, Effect::None),
    plain(register::RXCW, 0, 0, Effect::None),
    plain(register::WUS, 0, 0, Effect::None),
    plain(register::ITR, HALF, 0, Effect::Delays),
];

/// Registers of a [`Registers`], in the order of its saved form: the plain ones, the receive
/// addresses, the multicast table and the VLAN table.
const SAVED: usize = PLAIN.len() + 2 * ADDRESSES + 2 * TABLE;

/// The registers' values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    plain: [u32; PLAIN.len()],
    addresses: [u32; 2 * ADDRESSES],
    multicast: [u32; TABLE],
    vlans: [u32; TABLE],
}

/// The place of a register.
enum RegisterStorage {
    Plain(usize),
    Address(usize),
    Multicast(usize),
    Vlan(usize),
}

fn place(offset: u32) -> Option<RegisterStorage> {
    let within = |first: u32, words: usize| {
        let at = (offset.checked_sub(first)? / 4) as usize;
        (at < words).then_some(at)
    };
    if let Some(at) = within(register::MTA, TABLE) {
        return Some(RegisterStorage::Multicast(at));
    }
    if let Some(at) = within(register::RAL, 2 * ADDRESSES) {
        return Some(RegisterStorage::Address(at));
    }
    if let Some(at) = within(register::VFTA, TABLE) {
        return Some(RegisterStorage::Vlan(at));
    }
    PLAIN.iter().position(|one| one.offset == offset).map(RegisterStorage::Plain)
}

/// Returns the pair of registers of a valid receive address.
fn receive_address(mac: Mac) -> [u32; 2] {
    let [a, b, c, d, e, f] = mac.0;
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0]) | rah::AV]
}

impl Registers {
    /// Makes the registers after a reset, with the receive address that the EEPROM has.
    pub fn new(mac: Mac) -> Self {
        let mut addresses = [0; 2 * ADDRESSES];
        addresses[..2].copy_from_slice(&receive_address(mac));
        Self {
            plain: PLAIN.each_ref().map(|one| one.initial),
            addresses,
            multicast: [0; TABLE],
            vlans: [0; TABLE],
        }
    }

    /// Makes `to` the first receive address, if it is `from`.
    pub fn readdress(&mut self, from: Mac, to: Mac) {
        if self.addresses[..2] == receive_address(from) {
            self.addresses[..2].copy_from_slice(&receive_address(to));
        }
    }

    /// Returns a register's value; 0 if there is no such register here.
    pub fn get(&self, offset: u32) -> u32 {
        match place(offset) {
            Some(RegisterStorage::Plain(at)) => self.plain[at],
            Some(RegisterStorage::Address(at)) => self.addresses[at],
            Some(RegisterStorage::Multicast(at)) => self.multicast[at],
            Some(RegisterStorage::Vlan(at)) => self.vlans[at],
            None => 0,
        }
    }

    /// Sets the writable bits of a register. A register that does not exist stays away.
    pub fn set(&mut self, offset: u32, value: u32) -> Effect {
        match place(offset) {
            Some(RegisterStorage::Plain(at)) => {
                self.plain[at] = value & PLAIN[at].writable;
                PLAIN[at].effect
            }
            Some(RegisterStorage::Address(at)) => {
                self.addresses[at] = if at % 2 == 0 { value } else { value & rah::WRITABLE };
                Effect::Rules
            }
            Some(RegisterStorage::Multicast(at)) => {
                self.multicast[at] = value;
                Effect::Rules
            }
            Some(RegisterStorage::Vlan(at)) => {
                self.vlans[at] = value;
                Effect::Rules
            }
            None => Effect::None,
        }
    }

    /// Returns an address in two registers.
    pub fn wide(&self, low: u32, high: u32) -> u64 {
        u64::from(self.get(high)) << 32 | u64::from(self.get(low))
    }

    /// Returns the receive filter.
    pub fn filter(&self) -> Filter {
        let rctl = self.get(register::RCTL);
        Filter::new(rctl, &self.addresses, &self.multicast, &self.vlans)
    }

    /// Returns all values, for a successor.
    pub fn save(&self) -> Vec<u32> {
        [&self.plain[..], &self.addresses, &self.multicast, &self.vlans].concat()
    }

    /// Takes over saved values. Returns `false` and changes nothing if they cannot be the values of
    /// these registers.
    pub fn restore(&mut self, values: &[u32]) -> bool {
        if values.len() != SAVED {
            return false;
        }
        let (plain, rest) = values.split_at(PLAIN.len());
        let sound = plain.iter().zip(&PLAIN).all(|(value, one)| {
            // Bits that no driver can set have the value after a reset, or 0 once written.
            value & !one.writable & !one.initial == 0
        });
        let (addresses, rest) = rest.split_at(2 * ADDRESSES);
        let high = addresses.iter().skip(1).step_by(2);
        if !sound || high.into_iter().any(|high| high & !rah::WRITABLE != 0) {
            return false;
        }
        self.plain.copy_from_slice(plain);
        self.addresses.copy_from_slice(addresses);
        let (multicast, vlans) = rest.split_at(TABLE);
        self.multicast.copy_from_slice(multicast);
        self.vlans.copy_from_slice(vlans);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The masks that Linux's `ethtool -t` tests.
    #[test]
    fn registers_keep_exactly_the_bits_that_they_have() {
        let mut registers = Registers::new(Mac::local(1));
        let tested = [
            (register::FCAL, ALL, ALL),
            (register::FCAH, HALF, ALL),
            (register::FCT, HALF, ALL),
            (register::VET, HALF, ALL),
            (register::RDTR, HALF, ALL),
            (register::RDBAH, ALL, ALL),
            (register::RDBAL, 0xffff_fff0, ALL),
            (register::RDLEN, 0x000f_ff80, 0x000f_ffff),
            (register::FCRTH, 0xfff8, 0xfff8),
            (register::FCTTV, HALF, ALL),
            (register::TIPG, 0x3fff_ffff, ALL),
            (register::TDBAH, ALL, ALL),
            (register::TDBAL, 0xffff_fff0, ALL),
            (register::TDLEN, 0x000f_ff80, 0x000f_ffff),
            (register::TXCW, 0xc000_ffff, HALF),
            (register::TIDV, HALF, HALF),
            (register::RAL + 4, 0x8003_ffff, ALL),
            (register::RAL + 8 * 14 + 4, 0x8003_ffff, ALL),
            (register::MTA, ALL, ALL),
            (register::MTA + 4 * 127, ALL, ALL),
        ];
        for (offset, mask, write) in tested {
            for pattern in [0x5a5a_5a5a, 0xa5a5_a5a5, 0, ALL] {
                registers.set(offset, pattern & write);
                assert_eq!(registers.get(offset), pattern & write & mask, "{offset:#x}");
            }
        }
        for (mask, write) in [(0x06df_b3fe, 0x003f_fffb), (0x06df_b3fe, ALL)] {
            registers.set(register::RCTL, write & mask);
            assert_eq!(registers.get(register::RCTL), write & mask);
        }
    }

    #[test]
    fn values_come_back_from_their_saved_form() {
        let mut registers = Registers::new(Mac::local(7));
        registers.set(register::VFTA + 8, 5);
        registers.set(register::RDBAL, 0x1234_5000);
        let saved = registers.save();
        let mut again = Registers::new(Mac::local(1));
        assert!(again.restore(&saved));
        assert_eq!(again, registers);
        assert!(!again.restore(&saved[1..]));
        let mut bad = saved;
        bad[PLAIN.len() + 1] = ALL;
        assert!(!again.restore(&bad));
    }
}
