//! Loads on roots.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most owners.
const OWNERS: u32 = 1000;

/// A load: owners that ask for a root at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RootLoad {
    /// The number of owners, 1 to 1,000.
    pub owners: u32,
    /// The number of requests that are served at once, in the order of their arrival, at most
    /// 1,000. 0: all at once.
    pub at_once: u32,
    /// Set if the files are taken out of the page cache before the requests.
    pub cold: bool,
}

impl fmt::Display for RootLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}", self.owners)?;
        if self.at_once > 0 {
            write!(f, "-a{}", self.at_once)?;
        }
        f.write_str(if self.cold { "-cold" } else { "" })
    }
}

impl FromStr for RootLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (rest, cold) = match text.strip_suffix("-cold") {
                Some(rest) => (rest, true),
                None => (text, false),
            };
            let numbers = rest.strip_prefix('n')?;
            let (owners, at_once) = match numbers.split_once("-a") {
                Some((owners, some)) => (owners, some.parse().ok().filter(|one: &u32| *one > 0)?),
                None => (numbers, 0),
            };
            Some(Self { owners: owners.parse().ok()?, at_once, cold })
        };
        let fits = |load: &Self| (1..=OWNERS).contains(&load.owners) && load.at_once <= OWNERS;
        parse().filter(fits).ok_or_else(|| {
            format!(
                "\"{text}\" is no load such as n200-a2-cold: owners (1 to {OWNERS}), requests that \
                 are served at once (1 to {OWNERS}; all without it), files that are not cached"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["n1", "n200-a2", "n1000-cold", "n200-a16-cold"] {
            assert_eq!(text.parse::<RootLoad>().unwrap().to_string(), text);
        }
        let none = ["", "200", "n0", "n1001", "n1-a0", "n1-a1001", "n1-a", "n1-warm", "n1-cold-a2"];
        for text in none {
            assert!(text.parse::<RootLoad>().is_err(), "{text}");
        }
    }
}
