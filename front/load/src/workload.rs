//! Loads on disks.
//!
//! A new pattern is a variant of [`Pattern`] with its name, which is fio's value of `--rw`.
//! `fio_arguments` (`block/fio.rs` in `front/bench`) gives a further option of fio's that it needs.
//! `Places::aim` (`native::load`) has it for our own driver, on the host and in guests. In
//! `front/cli`, the default loads are `guests_workloads` and `own_workloads` (`bench/block.rs`),
//! and the help of `--workload` (`args/bench.rs`) names all patterns.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Order and direction of the accesses, under fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Reads at random places.
    RandRead,
    /// Writes at random places.
    RandWrite,
    /// Reads and writes, half of each, at random places.
    RandRw,
    /// Reads from the start to the end, repeated.
    Read,
    /// Writes from the start to the end, repeated.
    Write,
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 5] =
        [Self::RandRead, Self::RandWrite, Self::RandRw, Self::Read, Self::Write];

    /// Returns fio's name of the pattern.
    pub fn name(self) -> &'static str {
        match self {
            Self::RandRead => "randread",
            Self::RandWrite => "randwrite",
            Self::RandRw => "randrw",
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    /// Returns whether the places are random.
    pub fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite | Self::RandRw)
    }
}

impl FromStr for Pattern {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|pattern| pattern.name() == text);
        known.ok_or_else(|| {
            format!("\"{text}\" is no pattern: randread, randwrite, randrw, read or write")
        })
    }
}

/// A load that keeps a number of commands in flight. Written as `randread-4k-d32-t2`: pattern,
/// block size, depth, threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Workload {
    /// Order and direction.
    pub pattern: Pattern,
    /// Bytes of each command, 512 to 1 MiB, a power of two.
    pub block_size: u32,
    /// Commands that each thread keeps in flight, 1 to 1,023.
    pub depth: u32,
    /// Threads, each with a queue of its own, 1 to 64.
    pub threads: u32,
}

impl Workload {
    /// Largest block in bytes, which is the most that a controller of ours takes in one command.
    pub const LARGEST_BLOCK: u32 = 1 << 20;
    /// Greatest depth: a queue of 1,024 entries holds one command less.
    pub const GREATEST_DEPTH: u32 = 1023;
    /// Most threads, which is the number of I/O queues of a controller of ours.
    pub const MOST_THREADS: u32 = 64;

    fn check(self) -> Result<Self, String> {
        let size = self.block_size;
        if !size.is_power_of_two() || !(512..=Self::LARGEST_BLOCK).contains(&size) {
            return Err(format!("a block of {size} bytes is no power of two from 512 to 1 MiB"));
        }
        if !(1..=Self::GREATEST_DEPTH).contains(&self.depth) {
            return Err(format!("a depth of {} is not within 1 to 1023", self.depth));
        }
        if !(1..=Self::MOST_THREADS).contains(&self.threads) {
            return Err(format!("{} threads are not within 1 to 64", self.threads));
        }
        Ok(self)
    }
}

/// Formats a block size, in bytes, as `4k`, `1m`, `512`.
pub fn block_name(bytes: u32) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}m", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{}k", bytes >> 10),
        _ => bytes.to_string(),
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pattern, block) = (self.pattern.name(), block_name(self.block_size));
        let name = format!("{pattern}-{block}-d{}-t{}", self.depth, self.threads);
        f.pad(&name)
    }
}

fn block_size(text: &str) -> Option<u32> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 10),
        b'm' => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    digits.parse::<u32>().ok()?.checked_mul(1 << shift)
}

impl FromStr for Workload {
    type Err = String;

    /// Parses a workload. Depth and threads are 1 if they are left out.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is no workload: as randread-4k-d32-t1");
        let mut parts = text.split('-');
        let pattern = parts.next().unwrap_or_default().parse()?;
        let block_size = parts.next().and_then(block_size).ok_or_else(wrong)?;
        let mut workload = Self { pattern, block_size, depth: 1, threads: 1 };
        for part in parts {
            let number = part.get(1..).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
            match part.as_bytes()[0] {
                b'd' => workload.depth = number,
                b't' => workload.threads = number,
                _ => return Err(wrong()),
            }
        }
        workload.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for pattern in Pattern::ALL {
            for (block_size, depth, threads) in [(512, 1, 1), (4096, 32, 2), (1 << 20, 1023, 64)] {
                let workload = Workload { pattern, block_size, depth, threads };
                assert_eq!(workload.to_string().parse(), Ok(workload));
            }
        }
        let short: Workload = "randread-4k".parse().unwrap();
        assert_eq!(short.to_string(), "randread-4k-d1-t1");
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in [
            "",
            "read",
            "read-",
            "read-3k",
            "read-256",
            "read-2m",
            "read-4096k",
            "tape-4k",
            "read-4k-d0",
            "read-4k-d1024",
            "read-4k-t65",
            "read-4k-x1",
            "read-4k-d",
            "read-4k-",
            "read-4294967295m",
            "read-ä",
            "read-4k-ä1",
        ] {
            assert!(bad.parse::<Workload>().is_err(), "{bad}");
        }
    }
}
