//! What processes cost.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Processor time and switches of one process or of several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// In user space and in the kernel, ns.
    pub cpu_ns: u64,
    /// Of the processor from one of its threads to another's.
    pub switches: u64,
}

impl Cost {
    /// Of process `pid` so far; nothing of one that is gone.
    pub fn of(pid: u32) -> Self {
        Self { cpu_ns: cpu_ns(pid).unwrap_or(0), switches: switches(pid) }
    }

    /// Of all of them so far.
    pub fn of_all(pids: &[u32]) -> Self {
        pids.iter().map(|pid| Self::of(*pid)).fold(Self::default(), |sum, one| sum.plus(one))
    }

    /// Both.
    pub fn plus(self, other: Self) -> Self {
        Self { cpu_ns: self.cpu_ns + other.cpu_ns, switches: self.switches + other.switches }
    }

    /// From `before` until now.
    pub fn since(self, before: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            switches: self.switches.saturating_sub(before.switches),
        }
    }
}

/// Of all threads of `pid`, those that have ended included, up to this moment: the clock of the process,
/// which is not, as files in /proc are, behind by a tick.
fn cpu_ns(pid: u32) -> Option<u64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    #[allow(unsafe_code)] // rustix has the clock of another process in no safe form
    // SAFETY: both functions write what they are given a valid place for.
    unsafe {
        let mut clock = 0;
        if libc::clock_getcpuclockid(pid as i32, &raw mut clock) != 0
            || libc::clock_gettime(clock, &raw mut time) != 0
        {
            return None;
        }
    }
    let time = Duration::new(time.tv_sec.try_into().ok()?, time.tv_nsec.try_into().ok()?);
    u64::try_from(time.as_nanos()).ok()
}

/// Of the threads that `pid` has now.
fn switches(pid: u32) -> u64 {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    let of_thread = |thread: std::fs::DirEntry| {
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let lines = status.lines().filter_map(|line| line.split_once("_ctxt_switches:"));
        lines.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum::<u64>()
    };
    threads.filter_map(Result::ok).map(of_thread).sum()
}

/// The kernel's threads for work that interrupts leave behind; none where they are not to be seen.
pub fn softirq_threads() -> Vec<u32> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid: &u32| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        name.is_ok_and(|name| name.starts_with("ksoftirqd/"))
    })
    .collect()
}

/// Memory that the machine has left, bytes.
pub fn available() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_does_costs() {
        let me = std::process::id();
        let before = Cost::of(me);
        let mut sum = 0_u64;
        while Cost::of(me).since(before).cpu_ns < 1_000_000 {
            sum = std::hint::black_box(sum + 1);
        }
        std::thread::sleep(Duration::from_millis(1));
        assert!(Cost::of(me).since(before).switches > 0, "it slept");
        assert_eq!(Cost::of_all(&[]), Cost::default());
        assert!(available().unwrap() > 0);
    }
}
