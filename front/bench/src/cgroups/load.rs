//! Loads on control groups.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most groups and threads of a load.
const MOST: u32 = 100_000;
const MOST_THREADS: u32 = 1000;

/// A load: so many groups, asked for by so many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CgroupLoad {
    /// The number of groups, 1 to 100,000.
    pub groups: u32,
    /// The number of threads, 1 to 1,000.
    pub threads: u32,
}

impl fmt::Display for CgroupLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-t{}", self.groups, self.threads)
    }
}

impl FromStr for CgroupLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text.split_once("-t");
        let parsed = numbers.and_then(|(groups, threads)| {
            let (groups, threads) = (groups.parse().ok()?, threads.parse().ok()?);
            Some(Self { groups, threads })
        });
        let fits = |one: &Self| {
            (1..=MOST).contains(&one.groups) && (1..=MOST_THREADS).contains(&one.threads)
        };
        parsed.filter(fits).ok_or_else(|| {
            format!(
                "\"{text}\" is no load such as 2000-t50: groups (at most {MOST}), threads (at most \
                 {MOST_THREADS})"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["1-t1", "2000-t200"] {
            assert_eq!(text.parse::<CgroupLoad>().unwrap().to_string(), text);
        }
        for text in ["", "2000", "0-t1", "1-t0", "1-t1001", "100001-t1", "x-ty", "-1-t1"] {
            assert!(text.parse::<CgroupLoad>().is_err(), "{text}");
        }
    }
}
