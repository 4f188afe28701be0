//! Loads on attachments.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The most owners, and the most KiB of all scrubs together.
const OWNERS: u32 = 1000;
const ALL_KIB: u64 = 8 << 20;
const RESET_MS: u32 = 10_000;

/// A load: owners that ask for a VF at once, and what a VF needs before the next owner has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AttachLoad {
    /// The number of owners and of VFs, 1 to 1,000.
    pub owners: u32,
    /// Memory of a VF that is zeroed, in KiB, at least 1; 8 GiB for all VFs at most.
    pub scrub_kib: u32,
    /// The wait that stands for a function-level reset, in ms, at most 10,000.
    pub reset_ms: u32,
}

impl AttachLoad {
    /// Returns the bytes of a scrub.
    pub(super) fn scrub_bytes(&self) -> usize {
        self.scrub_kib as usize * 1024
    }

    /// Returns the wait of a reset.
    pub(super) fn reset(&self) -> Duration {
        Duration::from_millis(self.reset_ms.into())
    }
}

impl fmt::Display for AttachLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "n{}-{}k-{}ms", self.owners, self.scrub_kib, self.reset_ms)
    }
}

impl FromStr for AttachLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let mut parts = text.split('-');
            let owners = parts.next()?.strip_prefix('n')?.parse().ok()?;
            let scrub_kib = parts.next()?.strip_suffix('k')?.parse().ok()?;
            let reset_ms = parts.next()?.strip_suffix("ms")?.parse().ok()?;
            parts.next().is_none().then_some(Self { owners, scrub_kib, reset_ms })
        };
        let fits = |load: &Self| {
            let all = u64::from(load.owners) * u64::from(load.scrub_kib);
            (1..=OWNERS).contains(&load.owners)
                && (1..=ALL_KIB).contains(&all)
                && load.reset_ms <= RESET_MS
        };
        parse().filter(fits).ok_or_else(|| {
            format!(
                "\"{text}\" is no load such as n200-1024k-100ms: owners (1 to {OWNERS}), KiB of \
                 each scrub (8 GiB for all), ms of a reset (at most {RESET_MS})"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in ["n200-1024k-100ms", "n1-1k-0ms", "n1000-4k-10000ms"] {
            assert_eq!(text.parse::<AttachLoad>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn no_load_is_refused() {
        let texts = ["", "n200", "n0-1k-1ms", "n1001-1k-1ms", "n1-0k-1ms", "n1-1k-10001ms"];
        for text in [&texts[..], &["n1000-4294967295k-1ms", "n1-1k-1ms-", "200-1k-1ms"]].concat() {
            assert!(text.parse::<AttachLoad>().is_err(), "{text}");
        }
    }
}
