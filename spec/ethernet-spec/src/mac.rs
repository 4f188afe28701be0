//! Addresses of network interfaces.

use core::fmt;
use core::str::FromStr;

/// A 48-bit MAC address (IEEE 802 clause 8.2), first byte first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The broadcast address.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// Returns the address in the low 48 bits of `bits`, first byte lowest.
    pub const fn from_bits(bits: u64) -> Self {
        let [a, b, c, d, e, f, ..] = bits.to_le_bytes();
        Self([a, b, c, d, e, f])
    }

    /// Returns the address as a number, the inverse of [`Mac::from_bits`].
    pub const fn to_bits(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }

    /// Returns whether this is a group's address: multicast or broadcast.
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns whether this is one interface's address: neither a group's nor all zeros.
    pub const fn is_unicast(self) -> bool {
        !self.is_group() && self.to_bits() != 0
    }

    /// Returns a locally administered unicast address with the low 40 bits of `seed`.
    pub const fn local(seed: u64) -> Self {
        Self::from_bits(seed << 8 | 2)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error for a text that is no MAC address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadMac;

impl fmt::Display for BadMac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a MAC address is six bytes in hexadecimal, such as 02:5a:00:12:34:56")
    }
}

impl core::error::Error for BadMac {}

impl FromStr for Mac {
    type Err = BadMac;

    fn from_str(text: &str) -> Result<Self, BadMac> {
        let mut bytes = [0; 6];
        let mut parts = text.split([':', '-']);
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or(BadMac)?;
            let digits = part.bytes().all(|digit| digit.is_ascii_hexdigit());
            *byte = u8::from_str_radix(part, 16).ok().filter(|_| digits).ok_or(BadMac)?;
        }
        parts.next().is_none().then_some(Self(bytes)).ok_or(BadMac)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::ToString;

    #[test]
    fn an_address_reads_as_it_prints() {
        let mac = Mac([0x02, 0x5a, 0, 0x12, 0x34, 0xff]);
        assert_eq!(mac.to_string(), "02:5a:00:12:34:ff");
        assert_eq!("02:5A:00:12:34:FF".parse(), Ok(mac));
        assert_eq!("02-5a-00-12-34-ff".parse(), Ok(mac));
        assert_eq!(Mac::from_bits(mac.to_bits()), mac);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "",
            "02:5a:00:12:34",
            "02:5a:00:12:34:ff:00",
            "2:5a:0:12:34:ff",
            "+2:5a:00:12:34:ff",
            "025a001234ff",
        ] {
            assert_eq!(text.parse::<Mac>(), Err(BadMac), "{text}");
        }
    }

    #[test]
    fn made_up_addresses_are_local_and_of_one_interface() {
        for seed in 0..4096 {
            let mac = Mac::local(seed << 28 | seed);
            assert!(mac.0[0] & 2 != 0 && mac.is_unicast());
            assert_ne!(mac, Mac::local((seed << 28 | seed) + 1));
        }
        assert!(Mac::BROADCAST.is_group() && !Mac([0; 6]).is_unicast());
    }
}
