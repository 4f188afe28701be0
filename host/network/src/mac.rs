//! Ethernet addresses (IEEE 802).

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The address of one station.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac([u8; 6]);

impl Mac {
    /// The address of whoever has the IPv4 address `of`: locally administered, and the same each time,
    /// so that nobody remembers a station that is gone.
    pub fn derived(of: Ipv4Addr) -> Self {
        let [a, b, c, d] = of.octets();
        Self([0x5a, 0x11, a, b, c, d])
    }

    /// Its bytes in the order in which they are sent.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for Mac {
    type Err = Error;

    /// Six pairs of hexadecimal digits with `:` or `-` between them.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::Invalid(format!("\"{text}\" is no MAC address: {why}"));
        let mut octets = [0; 6];
        let mut parts = text.split([':', '-']);
        for octet in &mut octets {
            let part = parts.next().filter(|part| part.len() == 2);
            let digits = part.filter(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()));
            let digits = digits.ok_or_else(|| bad("six pairs of digits, as 5a:11:00:00:00:01"))?;
            *octet = u8::from_str_radix(digits, 16).map_err(|error| bad(&error.to_string()))?;
        }
        if parts.next().is_some() {
            return Err(bad("more than six pairs of digits"));
        }
        if octets[0] & 1 != 0 {
            return Err(bad("it is a group's (multicast), not a station's"));
        }
        if octets == [0; 6] {
            return Err(bad("all of it is zero"));
        }
        Ok(Self(octets))
    }
}

impl TryFrom<String> for Mac {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Mac> for String {
    fn from(mac: Mac) -> Self {
        mac.to_string()
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stations_only() {
        let mac: Mac = "5A-11-0a:d5:00:02".parse().unwrap();
        assert_eq!(mac, Mac::derived(Ipv4Addr::new(10, 213, 0, 2)));
        assert_eq!(mac.to_string(), "5a:11:0a:d5:00:02");
        for (bad, why) in [
            ("01:00:5e:00:00:01", "multicast"),
            ("ff:ff:ff:ff:ff:ff", "multicast"),
            ("00:00:00:00:00:00", "zero"),
            ("5a:11:00:00:00", "six pairs"),
            ("5a:11:00:00:00:01:02", "more than six"),
            ("5a:11:00:00:00:+1", "six pairs"),
            ("5a:11:0:00:00:01", "six pairs"),
            ("", "six pairs"),
            ("5a:11:00:00:00:0g", "six pairs"),
        ] {
            let error = bad.parse::<Mac>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(bad), "{error}");
        }
    }
}
