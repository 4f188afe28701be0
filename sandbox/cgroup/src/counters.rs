//! Counters of a group that the kernel only ever raises.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Counters since a group was made. Counters of controllers that the host lacks are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Time for which threads could not run because the limit of CPU time was reached, in
    /// nanoseconds, summed over CPUs.
    pub throttled_ns: u64,
    /// Processes that the kernel killed because the limit of memory was reached.
    pub oom_kills: u64,
    /// Attempts to start a thread that the limit of threads refused.
    pub threads_refused: u64,
}

impl Counters {
    /// Reads the counters of the group with the directories `dirs`.
    pub(crate) fn read(dirs: &[PathBuf]) -> Self {
        dirs.iter().fold(Self::default(), |sum, dir| {
            // The names of v2 come first. No directory has both.
            let ns = field(dir, "cpu.stat", "throttled_usec").map(|us| us.saturating_mul(1000));
            let ns = ns.or_else(|| field(dir, "cpu.stat", "throttled_time"));
            let kills = field(dir, "memory.events", "oom_kill");
            let kills = kills.or_else(|| field(dir, "memory.oom_control", "oom_kill"));
            Self {
                throttled_ns: sum.throttled_ns + ns.unwrap_or(0),
                oom_kills: sum.oom_kills + kills.unwrap_or(0),
                threads_refused: sum.threads_refused
                    + field(dir, "pids.events", "max").unwrap_or(0),
            }
        })
    }

    /// Returns how much the counters grew since `earlier`.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            throttled_ns: self.throttled_ns.saturating_sub(earlier.throttled_ns),
            oom_kills: self.oom_kills.saturating_sub(earlier.oom_kills),
            threads_refused: self.threads_refused.saturating_sub(earlier.threads_refused),
        }
    }
}

/// Returns the value of `name` in a file of lines such as `name 7`.
fn field(dir: &Path, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_the_names_of_either_version() {
        let dir = tempfile::tempdir().unwrap();
        let (v1, v2) = (dir.path().join("v1"), dir.path().join("v2"));
        fs::create_dir(&v1).unwrap();
        fs::create_dir(&v2).unwrap();
        fs::write(v1.join("cpu.stat"), "nr_periods 9\nnr_throttled 3\nthrottled_time 5000\n")
            .unwrap();
        fs::write(v1.join("memory.oom_control"), "oom_kill_disable 0\noom_kill 2\n").unwrap();
        fs::write(v2.join("cpu.stat"), "usage_usec 4\nthrottled_usec 6\n").unwrap();
        fs::write(v2.join("memory.events"), "oom 8\noom_kill 1\n").unwrap();
        fs::write(v2.join("pids.events"), "max 4\n").unwrap();
        let first = Counters::read(&[v1]);
        assert_eq!(first, Counters { throttled_ns: 5000, oom_kills: 2, threads_refused: 0 });
        let second = Counters::read(&[v2]);
        assert_eq!(second, Counters { throttled_ns: 6000, oom_kills: 1, threads_refused: 4 });
        let grown = Counters { throttled_ns: 1000, oom_kills: 0, threads_refused: 4 };
        assert_eq!(second.since(first), grown);
    }
}
