//! Loads on a VMM.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The memory that a guest may have, in bytes.
const LEAST: u64 = 16 * MIB;
const MOST: u64 = 1024 * GIB;

/// A load: a guest with this memory and one processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VmmLoad {
    /// The guest's memory in bytes: 16 MiB to 1 TiB, whole MiB.
    pub memory: u64,
}

impl VmmLoad {
    /// Returns the guest's memory in MiB.
    pub fn mib(&self) -> u64 {
        self.memory / MIB
    }
}

impl fmt::Display for VmmLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.memory {
            memory if memory.is_multiple_of(GIB) => write!(f, "{}G", memory / GIB),
            memory => write!(f, "{}M", memory / MIB),
        }
    }
}

impl FromStr for VmmLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = match text.strip_suffix('G') {
            Some(digits) => (Some(digits), GIB),
            None => (text.strip_suffix('M'), MIB),
        };
        let count = digits.and_then(|digits| digits.parse::<u64>().ok());
        count
            .and_then(|count| count.checked_mul(unit))
            .filter(|memory| (LEAST..=MOST).contains(memory))
            .map(|memory| Self { memory })
            .ok_or_else(|| {
                format!("\"{text}\" is no guest's memory such as 128M or 16G (16M to 1024G)")
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["16M", "128M", "1G", "16G", "1536M"] {
            assert_eq!(text.parse::<VmmLoad>().unwrap().to_string(), text);
        }
        assert_eq!("1024M".parse::<VmmLoad>().unwrap().to_string(), "1G");
        assert_eq!("2G".parse::<VmmLoad>().unwrap().mib(), 2048);
    }

    #[test]
    fn no_load_is_refused() {
        for text in ["", "M", "128", "128K", "15M", "1025G", "-1G", "99999999999999999999G"] {
            assert!(text.parse::<VmmLoad>().is_err(), "{text}");
        }
    }
}
