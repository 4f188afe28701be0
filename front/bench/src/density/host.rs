//! Slipway's processes on the host: what memory they have, and what processor time they use.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::Rollup;
use crate::cpu_time::process_cpu_ns;
use crate::meminfo::meminfo;
use crate::program::runs_slipway;
use crate::watch::busy_ns;

/// The bytes that a measurement leaves to the rest of the host.
const SPARE: u64 = 512 << 20;

/// Slipway's processes, by their ids on the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    /// The sandboxes' VMMs.
    pub vmms: Vec<u32>,
    /// The daemon, in which the plane is.
    pub daemon: u32,
    /// All others: the keeper, `slipway-fs`, shims.
    pub others: Vec<u32>,
}

/// Memory of Slipway's processes and of the host at a moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// All VMMs together, guests included.
    pub vmms: Rollup,
    /// The least and the greatest PSS of a VMM, with its huge pages; zeros without VMMs.
    pub vmm_range: (u64, u64),
    /// The daemon.
    pub daemon: Rollup,
    /// All other processes together.
    pub others: Rollup,
    /// Memory of the host that the kernel could still give away (`MemAvailable`).
    pub available: u64,
    /// The pool of memory, if the node has one.
    pub pool: Option<PoolMemory>,
}

/// Memory of the node's pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolMemory {
    /// Lent to sandboxes, whether they have touched it or not.
    pub lent: u64,
    /// Pages that present users have been given.
    pub given: u64,
}

/// Processor time of Slipway's processes and of the host, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// All VMMs together, guests included.
    pub vmms: u64,
    /// The daemon.
    pub daemon: u64,
    /// All other processes of Slipway's together.
    pub others: u64,
    /// All processors of the host, whoever used them.
    pub host: u64,
}

impl Processes {
    /// Returns the daemon, these VMMs, and all other processes of Slipway's that run on the host,
    /// but the calling one.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn find(daemon: u32, vmms: Vec<u32>) -> Result<Self> {
        let mut others = Vec::new();
        for entry in std::fs::read_dir("/proc").context("/proc")? {
            let name = entry.context("/proc")?.file_name();
            let Some(id) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let is_known = id == daemon || id == std::process::id() || vmms.contains(&id);
            if !is_known && runs_slipway(id) {
                others.push(id);
            }
        }
        Ok(Self { vmms, daemon, others })
    }

    /// Reads the memory of the processes. Another process that is gone counts as having none. The
    /// field `pool` is left to the caller, since the daemon alone knows that memory.
    ///
    /// # Errors
    /// A VMM or the daemon is gone, or may not be looked at.
    pub fn memory(&self) -> Result<Taken> {
        let vmms = self.vmms.iter().map(|id| Rollup::of(*id)).collect::<Result<Vec<_>>>()?;
        let of_vmms = || vmms.iter().map(Rollup::all);
        let others = self.others.iter().filter_map(|id| Rollup::of(*id).ok());
        Ok(Taken {
            vmm_range: (of_vmms().min().unwrap_or(0), of_vmms().max().unwrap_or(0)),
            daemon: Rollup::of(self.daemon)?,
            others: others.fold(Rollup::default(), Rollup::and),
            available: available_bytes(),
            vmms: vmms.into_iter().fold(Rollup::default(), Rollup::and),
            pool: None,
        })
    }

    /// Reads the processor time that the processes have used so far.
    ///
    /// # Errors
    /// A VMM or the daemon is gone.
    pub fn cpu(&self) -> Result<Cpu> {
        let vmms = self.vmms.iter().map(|id| process_cpu_ns(*id)).sum::<Result<u64>>()?;
        let others = self.others.iter().filter_map(|id| process_cpu_ns(*id).ok());
        let daemon = process_cpu_ns(self.daemon)?;
        Ok(Cpu { vmms, daemon, others: others.sum(), host: busy_ns().unwrap_or(0) })
    }
}

impl Cpu {
    /// Returns the processor time since `before`.
    pub fn since(self, before: Self) -> Self {
        Self {
            vmms: self.vmms.saturating_sub(before.vmms),
            daemon: self.daemon.saturating_sub(before.daemon),
            others: self.others.saturating_sub(before.others),
            host: self.host.saturating_sub(before.host),
        }
    }

    /// Returns the processor time of Slipway's processes.
    pub fn own(self) -> u64 {
        self.vmms + self.daemon + self.others
    }
}

/// Returns the bytes of memory that the kernel could still give away.
pub fn available_bytes() -> u64 {
    meminfo("MemAvailable:") << 10
}

/// Returns the reason why `count` further sandboxes of `each` bytes do not fit into `available`
/// bytes. Returns `None` if they fit, with something left for the rest of the host.
pub fn shortage(available: u64, count: u32, each: u64) -> Option<String> {
    let needed = each.saturating_mul(count.into()).saturating_add(SPARE);
    (available < needed).then(|| {
        format!(
            "{count} more sandboxes of about {} MiB need {} MiB with what is left to the host, \
             which has {} MiB",
            each >> 20,
            needed >> 20,
            available >> 20
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One more than Linux gives (`PID_MAX_LIMIT`).
    const GONE: u32 = (4 << 20) + 1;

    #[test]
    fn this_process_has_memory_and_has_used_time() {
        let id = std::process::id();
        let all = Processes { vmms: vec![id, id], daemon: id, others: vec![GONE] };
        let taken = all.memory().unwrap();
        assert!(taken.vmms.pss > 0 && taken.daemon.pss > 0 && taken.available > 0, "{taken:?}");
        assert!(taken.vmm_range.0 > 0 && taken.vmm_range.0 <= taken.vmm_range.1);
        assert_eq!(taken.others, Rollup::default());
        let used = all.cpu().unwrap();
        assert!(used.daemon > 0 && used.vmms > 0, "{used:?}");
        assert_eq!(used.since(used), Cpu::default());
        let gone = Processes { vmms: vec![GONE], daemon: id, others: Vec::new() };
        assert!(gone.memory().is_err() && gone.cpu().is_err());
    }

    #[test]
    fn a_host_that_is_too_small_is_told_what_is_missing() {
        assert_eq!(shortage(1 << 40, 1000, 256 << 20), None);
        let reason = shortage(1 << 30, 4, 256 << 20).unwrap();
        assert!(reason.contains("4 more") && reason.contains("1536 MiB"), "{reason}");
        assert!(shortage(u64::MAX - 1, u32::MAX, u64::MAX).is_some());
    }
}
