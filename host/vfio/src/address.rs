//! Addresses of PCI functions.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The address of a PCI function on this host, as `lspci -D` and sysfs write it: `0000:01:10.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Error: a text is no address of a PCI function.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is no PCI address: DOMAIN:BUS:DEVICE.FUNCTION, such as 0000:01:10.0")]
pub struct BadAddress(pub String);

impl FromStr for PciAddress {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        parse(text).ok_or_else(|| BadAddress(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (domain, rest) = text.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let address = PciAddress {
        domain: hex(domain, 4..=8)?,
        bus: hex(bus, 2..=2)? as u8,
        device: hex(device, 2..=2)? as u8,
        function: hex(function, 1..=1)? as u8,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

fn hex(text: &str, digits: RangeInclusive<usize>) -> Option<u32> {
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let fits = is_hex && digits.contains(&text.len());
    fits.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_it_is_read() {
        for text in ["0000:01:10.0", "0000:ff:1f.7", "10000:e1:00.1"] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), text);
        }
        let upper: PciAddress = "0000:0A:10.0".parse().unwrap();
        assert_eq!(upper.to_string(), "0000:0a:10.0");
    }

    #[test]
    fn other_texts_are_refused() {
        let bad = [
            "",
            "01:10.0",
            "0000:01:10",
            "0000:01:20.0",
            "0000:01:10.8",
            "0000:1:10.0",
            "000:01:10.0",
            "0000:01:10.0/..",
            "0000:+1:10.0",
            "123456789:01:10.0",
            "0000:01:10.00",
        ];
        for text in bad {
            assert_eq!(text.parse::<PciAddress>(), Err(BadAddress(text.into())));
        }
    }
}
