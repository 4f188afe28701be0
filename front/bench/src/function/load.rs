//! Loads on functions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most sandboxes and requests of a load.
const MOST_SANDBOXES: u32 = 160;
const MOST_REQUESTS: u32 = 1000;

/// A load: so many requests at once to a function that has so many sandboxes with a replica each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FunctionLoad {
    /// The number of sandboxes, 1 to 160.
    pub sandboxes: u32,
    /// The number of requests, 1 to 1,000.
    pub requests: u32,
}

impl fmt::Display for FunctionLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}-q{}", self.sandboxes, self.requests)
    }
}

impl FromStr for FunctionLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.strip_prefix('s').and_then(|rest| rest.split_once("-q"));
        let parsed = numbers.and_then(|(sandboxes, requests)| {
            let (sandboxes, requests) = (sandboxes.parse().ok()?, requests.parse().ok()?);
            Some(Self { sandboxes, requests })
        });
        let fits = |one: &Self| {
            (1..=MOST_SANDBOXES).contains(&one.sandboxes)
                && (1..=MOST_REQUESTS).contains(&one.requests)
        };
        parsed.filter(fits).ok_or_else(|| {
            format!(
                "\"{text}\" is no load such as s4-q24: sandboxes (at most {MOST_SANDBOXES}), \
                 requests at once (at most {MOST_REQUESTS})"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["s1-q1", "s16-q24"] {
            assert_eq!(text.parse::<FunctionLoad>().unwrap().to_string(), text);
        }
        for text in ["", "s4", "4-q24", "s0-q1", "s1-q0", "s161-q1", "s1-q1001", "sx-qy"] {
            assert!(text.parse::<FunctionLoad>().is_err(), "{text}");
        }
    }
}
