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

/// The error about a text that is no load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCgroupLoad(String);

impl fmt::Display for BadCgroupLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(text) = self;
        write!(
            f,
            "\"{text}\" is no load such as 2000-t50: groups (at most {MOST}), threads (at most \
             {MOST_THREADS})"
        )
    }
}

impl std::error::Error for BadCgroupLoad {}

impl FromStr for CgroupLoad {
    type Err = BadCgroupLoad;

    fn from_str(text: &str) -> Result<Self, BadCgroupLoad> {
        let numbers = text.split_once("-t");
        let parsed = numbers.and_then(|(groups, threads)| {
            let (groups, threads) = (groups.parse().ok()?, threads.parse().ok()?);
            Some(Self { groups, threads })
        });
        parsed
            .filter(|one| (1..=MOST).contains(&one.groups))
            .filter(|one| (1..=MOST_THREADS).contains(&one.threads))
            .ok_or_else(|| BadCgroupLoad(text.to_owned()))
    }
}

impl TryFrom<String> for CgroupLoad {
    type Error = BadCgroupLoad;

    fn try_from(text: String) -> Result<Self, BadCgroupLoad> {
        text.parse()
    }
}

impl From<CgroupLoad> for String {
    fn from(load: CgroupLoad) -> Self {
        load.to_string()
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
