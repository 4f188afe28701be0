//! Loads of idle control groups.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The most groups of a load: each has a process and a descriptor.
const MOST: u32 = 20_000;
/// The most times in a second that a process is woken.
const MOST_WAKES: u32 = 1000;

/// A load: so many groups with a process each, which is woken so often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdleLoad {
    /// The number of groups, and of processes, 1 to 20,000.
    pub groups: u32,
    /// The times in a second that each process is woken, 0 to 1,000.
    pub wakes: u32,
}

impl fmt::Display for IdleLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-w{}", self.groups, self.wakes)
    }
}

impl FromStr for IdleLoad {
    type Err = String;

    /// Reads a load such as `2000-w10`. A number alone stands for one wake a second.
    fn from_str(text: &str) -> Result<Self, String> {
        let (groups, wakes) = text.split_once("-w").unwrap_or((text, "1"));
        let parsed = groups.parse().ok().zip(wakes.parse().ok());
        let load = parsed.map(|(groups, wakes)| Self { groups, wakes });
        let fits = |one: &Self| (1..=MOST).contains(&one.groups) && one.wakes <= MOST_WAKES;
        load.filter(fits).ok_or_else(|| {
            format!(
                "\"{text}\" is no load such as 2000-w10: groups (1 to {MOST}), wakes of each in a \
                 second (at most {MOST_WAKES})"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["1-w0", "2000-w10"] {
            assert_eq!(text.parse::<IdleLoad>().unwrap().to_string(), text);
        }
        assert_eq!("500".parse::<IdleLoad>().unwrap().to_string(), "500-w1");
        for text in ["", "0", "0-w1", "20001", "1-w1001", "1-w", "x-w1", "1-t1", "-1"] {
            assert!(text.parse::<IdleLoad>().is_err(), "{text}");
        }
    }
}
