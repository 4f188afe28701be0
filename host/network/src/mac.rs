//! MAC addresses that a sandbox may have, as the ledger and the command line write them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The MAC address of one station.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Mac([u8; 6]);

impl Mac {
    /// Returns the MAC address for the IPv4 address `of`: locally administered, and always the
    /// same, so that no neighbour remembers a station that is gone.
    pub fn derived(of: Ipv4Addr) -> Self {
        let [a, b, c, d] = of.octets();
        Self([0x5a, 0x11, a, b, c, d])
    }

    /// Returns the bytes in the order in which they are sent.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for Mac {
    type Err = Error;

    /// Parses six pairs of hexadecimal digits with `:` or `-` between them, and rejects groups and
    /// zeros.
    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Error::Invalid(format!("\"{text}\" is no MAC address: {why}"));
        let mac: slipway_ethernet_spec::Mac =
            text.parse().map_err(|_| bad("six pairs of digits, as 5a:11:00:00:00:01"))?;
        if mac.is_group() {
            return Err(bad("it is a group's (multicast), not a station's"));
        }
        if !mac.is_unicast() {
            return Err(bad("all of it is zero"));
        }
        Ok(Self(mac.0))
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
        fmt::Display::fmt(&slipway_ethernet_spec::Mac(self.0), formatter)
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
            ("5a:11:00:00:00:01:02", "six pairs"),
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
