//! Loads on memory that is given late.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::vmm::VmmLoad;

/// The size of the pages of a sandbox's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PageSize {
    /// 4 KiB.
    #[serde(rename = "4k")]
    Base,
    /// 2 MiB.
    #[serde(rename = "2m")]
    Huge,
}

/// An access of a device to guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    /// 4 KiB are pinned and copied, as a disk's request is.
    Block,
    /// 128 KiB are pinned and not touched.
    Pin,
    /// A word of 4 bytes is written.
    Word,
    /// 128 KiB are copied, one piece behind the other: the bandwidth of memory.
    Stream,
}

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum MemoryLoad {
    /// A sandbox takes memory and touches all of it.
    Give {
        /// The size in bytes: 16 MiB to 1 TiB, whole MiB; whole 2 MiB for huge pages.
        bytes: u64,
        /// The size of its pages.
        page: PageSize,
    },
    /// A sandbox takes memory in pages of 4 KiB, and touches some of them.
    Set {
        /// The size in bytes: 16 MiB to 1 TiB, whole MiB.
        bytes: u64,
        /// The number of pages that it touches, evenly apart: at least 1, at most all.
        pages: u64,
    },
    /// A device accesses memory again and again, all of which was touched before.
    Gate(Operation),
}

const HUGE: u64 = 2 << 20;
const BASE: u64 = 4 << 10;

impl PageSize {
    /// The names of all sizes.
    const NAMES: [(Self, &str); 2] = [(Self::Base, "4k"), (Self::Huge, "2m")];

    /// Returns the size as in a load's name.
    pub(super) fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(one, _)| *one == self).map_or("", |(_, name)| name)
    }
}

impl Operation {
    /// The names of all operations.
    const NAMES: [(Self, &str); 4] = [
        (Self::Block, "gate-block"),
        (Self::Pin, "gate-pin"),
        (Self::Word, "gate-word"),
        (Self::Stream, "gate-stream"),
    ];
}

impl fmt::Display for MemoryLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Give { bytes, page } => {
                write!(f, "{}-{}", VmmLoad { memory: bytes }, page.name())
            }
            Self::Set { bytes, pages } => {
                write!(f, "{}-{pages}p", VmmLoad { memory: bytes })
            }
            Self::Gate(operation) => {
                let name = Operation::NAMES.iter().find(|(one, _)| *one == operation);
                f.write_str(name.map_or("", |(_, name)| name))
            }
        }
    }
}

impl FromStr for MemoryLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let about = "128M-4k or 16G-2m (memory of 16M to 1024G, pages of 4k or 2m), 512M-3072p \
                     (some pages are touched), gate-block, gate-pin, gate-word, gate-stream";
        parse(text).ok_or_else(|| format!("\"{text}\" is no load such as {about}"))
    }
}

fn parse(text: &str) -> Option<MemoryLoad> {
    if let Some((operation, _)) = Operation::NAMES.iter().find(|(_, name)| *name == text) {
        return Some(MemoryLoad::Gate(*operation));
    }
    let (size, page) = text.split_once('-')?;
    let bytes = size.parse::<VmmLoad>().ok()?.memory;
    if let Some(pages) = page.strip_suffix('p') {
        let pages: u64 = pages.parse().ok()?;
        return (1..=bytes / BASE).contains(&pages).then_some(MemoryLoad::Set { bytes, pages });
    }
    let &(page, _) = PageSize::NAMES.iter().find(|(_, name)| *name == page)?;
    let whole = page == PageSize::Base || bytes.is_multiple_of(HUGE);
    whole.then_some(MemoryLoad::Give { bytes, page })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in [
            "16M-4k",
            "17M-4k",
            "128M-2m",
            "16G-2m",
            "512M-3072p",
            "gate-block",
            "gate-pin",
            "gate-word",
            "gate-stream",
        ] {
            assert_eq!(text.parse::<MemoryLoad>().unwrap().to_string(), text);
        }
        let load = MemoryLoad::Give { bytes: 1 << 30, page: PageSize::Huge };
        assert_eq!("1024M-2m".parse(), Ok(load));
    }

    #[test]
    fn no_load_is_refused() {
        for text in [
            "",
            "128M",
            "128M-",
            "128M-1g",
            "15M-4k",
            "17M-2m",
            "gate",
            "gate-tape",
            "-4k",
            "16M-p",
            "16M-0p",
            "16M-4097p",
        ] {
            assert!(text.parse::<MemoryLoad>().is_err(), "{text}");
        }
    }
}
