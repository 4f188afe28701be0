//! The cost of processes: processor time, context switches, memory.

use serde::{Deserialize, Serialize};

use crate::cpu_time::process_cpu_ns;

/// Processor time and context switches of one or several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Processor time in user space and in the kernel, ns.
    pub cpu_ns: u64,
    /// Context switches of all threads.
    pub switches: u64,
}

impl Cost {
    /// Returns the cost of process `pid` so far, or zero if the process is gone.
    pub fn of(pid: u32) -> Self {
        Self { cpu_ns: process_cpu_ns(pid).unwrap_or(0), switches: switches(pid) }
    }

    /// Returns the sum of the costs of `pids` so far.
    pub fn of_all(pids: &[u32]) -> Self {
        pids.iter().map(|pid| Self::of(*pid)).fold(Self::default(), |sum, one| sum.plus(one))
    }

    /// Returns the sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self { cpu_ns: self.cpu_ns + other.cpu_ns, switches: self.switches + other.switches }
    }

    /// Returns the cost from `before` until now.
    pub fn since(self, before: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            switches: self.switches.saturating_sub(before.switches),
        }
    }
}

/// Returns the context switches of the present threads of `pid`.
fn switches(pid: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let of_thread = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let lines = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
        lines.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>()
    };
    threads.filter_map(Result::ok).map(of_thread).sum()
}

/// Returns the kernel's threads for deferred work of interrupts. The list is empty if they are not
/// visible.
pub fn softirq_threads() -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.starts_with("ksoftirqd/"))
    })
    .collect()
}

/// Returns the memory in use, in bytes: by this process's control group, kernel objects included,
/// if it is in one that counts memory; otherwise by the whole machine, whose other programs should
/// be quiet. Returns `None` if the kernel reports neither.
pub fn used() -> Option<u64> {
    of_group().or_else(of_machine)
}

fn of_group() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(counter)?;
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the file with the memory of a group, given a line of /proc/PID/cgroup. Returns `None`
/// for the root group, which contains everything.
fn counter(line: &str) -> Option<String> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    if path == "/" {
        return None;
    }
    match controllers {
        "" if number == "0" => Some(format!("/sys/fs/cgroup{path}/memory.current"))
            .filter(|file| std::path::Path::new(file).exists()),
        _ if controllers.split(',').any(|one| one == "memory") => {
            Some(format!("/sys/fs/cgroup/memory{path}/memory.usage_in_bytes"))
        }
        _ => None,
    }
}

/// Returns the machine's memory except for free memory and the page cache. Kernel objects count as
/// used, even those that the kernel calls reclaimable: open descriptors are among them.
fn of_machine() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| {
        let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
    };
    let free = field("MemFree")? + field("Buffers")? + field("Cached")?;
    (field("MemTotal")? + field("Shmem")?).checked_sub(free)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};

    use super::*;

    /// Measures another process: threads of this one begin and end with other tests, and take their
    /// context switches with them.
    #[test]
    fn a_process_that_answers_costs_time_and_switches() {
        let mut cat =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut to, mut from) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        let mut answer = || {
            to.write_all(b"?").unwrap();
            from.read_exact(&mut [0]).unwrap();
        };
        answer();
        let before = Cost::of(cat.id());
        let grew = (0..1_000_000).any(|_| {
            answer();
            let cost = Cost::of(cat.id()).since(before);
            cost.cpu_ns > 0 && cost.switches > 0
        });
        drop((to, from));
        cat.wait().unwrap();
        assert!(grew, "a million answers without a sleep");
        assert_eq!(Cost::of_all(&[]), Cost::default());
    }

    #[test]
    fn a_group_that_counts_memory_is_found() {
        let v1 = "9:name=systemd:/a\n8:cpu,memory:/b/c\n0::/";
        let found = |text: &str| text.lines().find_map(counter);
        let file = "/sys/fs/cgroup/memory/b/c/memory.usage_in_bytes";
        assert_eq!(found(v1).as_deref(), Some(file));
        assert_eq!(found("8:memory:/\n0::/"), None);
        assert_eq!(found("0::/no-such-group-at-all"), None);
        assert!(used().unwrap() > 0);
    }
}
