//! Statistics of the sandbox, from procfs and sysfs.

use std::path::Path;

use slipway_agent_protocol::v1::{BlockStats, StatsReply};

use crate::cgroup::Cgroup;
use crate::{group, nvme};

/// The bytes of a sector in `/sys/block/*/stat`, whatever the device's block size.
const SECTOR: u64 = 512;

/// Collects the statistics of a container.
pub fn of_container(cgroup: &Cgroup) -> StatsReply {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = meminfo(&memory, "MemTotal:");
    let group = group::stats(cgroup.path());
    let (used, limit, cpu_us) = (
        group.memory.map_or(0, |memory| memory.usage),
        // Without the controller there is no limit, and the group says 0.
        group.memory.map_or(0, |memory| memory.usage_limit),
        group.cpu.map_or(0, |cpu| cpu.usage_usec),
    );
    let limit = if limit == 0 { total } else { limit.min(total) };
    StatsReply {
        memory_total_bytes: limit,
        memory_available_bytes: limit.saturating_sub(used),
        cpu_busy_ns: cpu_us.saturating_mul(1000),
        processes: cgroup.processes().len() as u32,
        blocks: Vec::new(),
        group: Some(group),
    }
}

/// Collects all statistics of the sandbox but the number of processes.
pub fn collect(sysfs: &Path) -> StatsReply {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    StatsReply {
        memory_total_bytes: meminfo(&memory, "MemTotal:"),
        memory_available_bytes: meminfo(&memory, "MemAvailable:"),
        cpu_busy_ns: busy_ticks(&stat).saturating_mul(1_000_000_000 / ticks_per_second()),
        processes: 0,
        blocks: blocks(sysfs),
        group: None,
    }
}

fn meminfo(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().unwrap_or(0);
    kilobytes.saturating_mul(1024)
}

/// Returns the busy time in ticks: user, nice, system, irq and softirq of the fields user, nice,
/// system, idle, iowait, irq, softirq, steal (proc(5)). User includes guest time.
fn busy_ticks(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let field = |text: &str| text.parse::<u64>().unwrap_or(0);
    let fields = line.split_whitespace().map(field).enumerate();
    fields.filter(|(index, _)| [0, 1, 2, 5, 6].contains(index)).map(|(_, ticks)| ticks).sum()
}

fn ticks_per_second() -> u64 {
    rustix::param::clock_ticks_per_second().max(1)
}

fn blocks(sysfs: &Path) -> Vec<BlockStats> {
    let Ok(controllers) = std::fs::read_dir(sysfs.join("class/nvme")) else { return Vec::new() };
    let namespaces =
        controllers.filter_map(Result::ok).flat_map(|entry| nvme::namespaces(&entry.path()));
    let mut blocks: Vec<BlockStats> = namespaces
        .filter_map(|namespace| {
            let path = sysfs.join("class/block").join(&namespace.disk).join("stat");
            block(namespace.nsid, &std::fs::read_to_string(path).ok()?)
        })
        .collect();
    blocks.sort_by_key(|block| block.nsid);
    blocks
}

/// Parses the statistics of one block device: reads, merges, sectors, ms, writes, merges, sectors
/// (kernel documentation, "Block layer statistics"). Returns `None` if fields are missing.
fn block(nsid: u32, text: &str) -> Option<BlockStats> {
    let fields: Vec<u64> = text.split_whitespace().map_while(|field| field.parse().ok()).collect();
    Some(BlockStats {
        nsid,
        reads: *fields.first()?,
        read_bytes: fields.get(2)?.saturating_mul(SECTOR),
        writes: *fields.get(4)?,
        written_bytes: fields.get(6)?.saturating_mul(SECTOR),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn procfs_texts() {
        let memory = "MemTotal:         501236 kB\nMemAvailable:   400000 kB\n";
        assert_eq!(meminfo(memory, "MemTotal:"), 501_236 * 1024);
        assert_eq!(meminfo(memory, "Missing:"), 0);
        assert_eq!(busy_ticks("cpu  1 2 4 800 900 8 16 32 0 0\ncpu0 1 1 1"), 31);
        assert_eq!(busy_ticks(""), 0);
    }

    #[test]
    fn block_statistics() {
        let stats = block(2, "  10 1 80 5 20 2 160 9 0 0 0\n").unwrap();
        assert_eq!((stats.nsid, stats.reads, stats.read_bytes), (2, 10, 40960));
        assert_eq!((stats.writes, stats.written_bytes), (20, 81920));
        assert!(block(1, "1 2").is_none());
    }
}
