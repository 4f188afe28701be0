//! The memory of a process, as the kernel adds it up (proc(5), `/proc/PID/smaps_rollup`).

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Memory of one process, or of several together, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollup {
    /// Proportional set size: a page that several processes map counts by its part for each.
    pub pss: u64,
    /// The part of `pss` that is anonymous memory: heaps, stacks, copies.
    pub pss_anon: u64,
    /// The part of `pss` that is pages of files: programs and libraries.
    pub pss_file: u64,
    /// The part of `pss` that is files in memory: guests' memory, volatile layers.
    pub pss_shmem: u64,
    /// Pages that no other process maps, clean and dirty.
    pub private: u64,
    /// Pages that other processes map too, counted whole.
    pub shared: u64,
    /// Pages of hugetlbfs, which no other figure has.
    pub hugetlb: u64,
    /// The process's part of pages that are swapped out, which no other figure has.
    pub swapped: u64,
}

impl Rollup {
    /// Parses the text of the kernel's file. Returns `None` if a figure is missing that Linux 5.4
    /// has.
    pub fn parse(text: &str) -> Option<Self> {
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        // A kernel without hugetlbfs or swap does not tell of them.
        let hugetlb =
            kib("Shared_Hugetlb").unwrap_or(0).checked_add(kib("Private_Hugetlb").unwrap_or(0))?;
        Some(Self {
            pss: kib("Pss")?,
            pss_anon: kib("Pss_Anon")?,
            pss_file: kib("Pss_File")?,
            pss_shmem: kib("Pss_Shmem")?,
            private: kib("Private_Clean")?.checked_add(kib("Private_Dirty")?)?,
            shared: kib("Shared_Clean")?.checked_add(kib("Shared_Dirty")?)?,
            hugetlb,
            swapped: kib("SwapPss").unwrap_or(0),
        })
    }

    /// Reads the memory of the process `id`.
    ///
    /// # Errors
    /// The process is gone, or may not be looked at, or the kernel does not tell.
    pub(crate) fn of(id: u32) -> Result<Self> {
        let path = format!("/proc/{id}/smaps_rollup");
        let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        Self::parse(&text).with_context(|| format!("{path} lacks figures of Linux 5.4"))
    }

    /// Returns the memory of both together.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            pss: self.pss + other.pss,
            pss_anon: self.pss_anon + other.pss_anon,
            pss_file: self.pss_file + other.pss_file,
            pss_shmem: self.pss_shmem + other.pss_shmem,
            private: self.private + other.private,
            shared: self.shared + other.shared,
            hugetlb: self.hugetlb + other.hugetlb,
            swapped: self.swapped + other.swapped,
        }
    }

    /// Returns all of the memory that counts for these processes: what is mapped, by its parts, and
    /// huge pages.
    pub(crate) fn all(&self) -> u64 {
        self.pss + self.hugetlb
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
55d0f0a00000-7ffd3a9ff000 ---p 00000000 00:00 0                          [rollup]
Rss:                1884 kB
Pss:                 385 kB
Pss_Dirty:            90 kB
Pss_Anon:             84 kB
Pss_File:            201 kB
Pss_Shmem:           100 kB
Shared_Clean:        600 kB
Shared_Dirty:         96 kB
Private_Clean:       104 kB
Private_Dirty:        80 kB
Referenced:          884 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    4096 kB
Swap:                 12 kB
SwapPss:               3 kB
";

    #[test]
    fn the_kernels_text_is_read_in_bytes() {
        let one = Rollup::parse(TEXT).unwrap();
        assert_eq!((one.pss, one.pss_anon), (385 << 10, 84 << 10));
        assert_eq!((one.pss_file, one.pss_shmem), (201 << 10, 100 << 10));
        assert_eq!((one.private, one.shared), (184 << 10, 696 << 10));
        assert_eq!((one.hugetlb, one.swapped), (6 << 20, 3 << 10));
        assert_eq!(one.all(), (385 << 10) + (6 << 20));
        assert_eq!(one.and(one).private, 368 << 10);
    }

    #[test]
    fn what_the_kernel_does_not_tell_is_no_zero() {
        let without = |name: &str| {
            let lines = TEXT.lines().filter(|line| !line.starts_with(name));
            Rollup::parse(&lines.collect::<Vec<_>>().join("\n"))
        };
        for name in ["Pss:", "Pss_Shmem:", "Private_Dirty:", "Shared_Clean:"] {
            assert_eq!(without(name), None, "{name}");
        }
        let one = without("Swap").unwrap();
        assert_eq!((one.swapped, one.pss), (0, 385 << 10));
        assert_eq!(without("Private_Hugetlb").unwrap().hugetlb, 2 << 20);
        assert_eq!(Rollup::parse(""), None);
        assert_eq!(Rollup::parse(&TEXT.replace("385", "x")), None);
        assert_eq!(Rollup::parse(&TEXT.replace("385", "18446744073709551615")), None);
    }

    #[test]
    fn a_process_has_memory_and_one_that_is_gone_has_none() {
        let own = Rollup::of(std::process::id()).unwrap();
        assert!(own.pss > 0 && own.private > 0, "{own:?}");
        // Beyond the greatest id that Linux gives.
        assert!(Rollup::of(1 << 30).is_err());
    }
}
