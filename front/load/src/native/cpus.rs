//! Assigns processors to a target and to the clients that load it, and reads the CPU time of
//! processes.

use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of a target and of its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// The processors of the target's threads. Empty if the target is not on this machine.
    pub target: Vec<usize>,
    /// The processors of the load's threads. Each further thread gets the next one, round robin.
    pub client: Vec<usize>,
}

impl Cpus {
    /// Assigns the first `target` processors that this process may use to the target, and the
    /// others to clients. Each side gets at least one. If this process may use only one processor,
    /// both sides share it.
    ///
    /// # Errors
    /// If the kernel does not report the processors.
    pub fn split(target: usize) -> Result<Self> {
        let mut cpus = allowed()?;
        if cpus.len() < 2 {
            return Ok(Self { target: cpus.clone(), client: cpus });
        }
        let client = cpus.split_off(target.clamp(1, cpus.len() - 1));
        Ok(Self { target: cpus, client })
    }

    /// Assigns all processors that this process may use to clients: the target is not on this
    /// machine.
    ///
    /// # Errors
    /// If the kernel does not report the processors.
    pub fn all() -> Result<Self> {
        Ok(Self { target: Vec::new(), client: allowed()? })
    }

    /// Returns whether each of `threads` threads of a load can have a processor of its own that the
    /// target does not use.
    pub fn are_enough(&self, threads: usize) -> bool {
        threads <= self.client.len() && !self.client.iter().any(|cpu| self.target.contains(cpu))
    }
}

/// Returns the processors that this process may use, in ascending order.
fn allowed() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read this process's processors")?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// Binds the calling thread, and threads that it starts from now on, to `cpus`.
///
/// # Errors
/// If there is no such processor, or this process may not use it.
pub fn pin(cpus: &[usize]) -> Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu >= CpuSet::MAX_CPU {
            bail!("there is no processor {cpu}");
        }
        set.set(*cpu);
    }
    sched_setaffinity(None, &set).with_context(|| format!("cannot run on processors {cpus:?}"))
}

/// Returns the CPU time in ns that the running threads of process `pid` have used so far. Returns
/// `None` if the process is gone or the kernel has no `schedstat` files (`CONFIG_SCHED_INFO`). The
/// time of threads that have ended is not included.
pub fn cpu_ns(pid: u32) -> Option<u64> {
    cpu_ns_of_tasks(Path::new(&format!("/proc/{pid}/task")))
}

/// Returns the sum of the CPU times in the `schedstat` files of the threads in the folder `tasks`,
/// in ns. Returns `None` if no thread has such a file.
fn cpu_ns_of_tasks(tasks: &Path) -> Option<u64> {
    let mut sum: Option<u64> = None;
    for thread in std::fs::read_dir(tasks).ok()? {
        // A thread that has just ended has no file any more.
        let Ok(text) = std::fs::read_to_string(thread.ok()?.path().join("schedstat")) else {
            continue;
        };
        let thread_ns: u64 = text.split(' ').next()?.parse().ok()?;
        sum = Some(sum.unwrap_or(0) + thread_ns);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_has_a_processor() {
        for target in [0, 1, 2, 1000] {
            let cpus = Cpus::split(target).unwrap();
            assert!(!cpus.target.is_empty() && !cpus.client.is_empty());
        }
        assert!(pin(&[usize::MAX]).is_err());
        let three = Cpus { target: vec![0], client: vec![1, 2] };
        assert!(three.are_enough(2) && !three.are_enough(3));
        assert!(!Cpus { target: vec![0], client: vec![0] }.are_enough(1));
    }

    /// The test measures another process: threads of other tests that end take their time out of
    /// this process's sum.
    #[test]
    fn time_that_is_spent_is_counted() {
        if cpu_ns(std::process::id()).is_none() {
            println!("SKIPPED: time_that_is_spent_is_counted: needs /proc/PID/task/*/schedstat");
            return;
        }
        let mut busy = std::process::Command::new("sh");
        let mut busy = busy.args(["-c", "while :; do :; done"]).spawn().unwrap();
        let before = cpu_ns(busy.id()).unwrap();
        while cpu_ns(busy.id()).unwrap() <= before {
            std::thread::yield_now();
        }
        busy.kill().unwrap();
        busy.wait().unwrap();
        assert_eq!(cpu_ns(u32::MAX), None);
    }

    #[test]
    fn threads_without_a_file_are_passed_over() {
        let tasks = tempfile::tempdir().unwrap();
        let thread = |id: &str| {
            let dir = tasks.path().join(id);
            std::fs::create_dir(&dir).unwrap();
            dir.join("schedstat")
        };
        let (first, second) = (thread("1"), thread("2"));
        assert_eq!(cpu_ns_of_tasks(tasks.path()), None, "the kernel does not count");
        std::fs::write(first, "40 7 1\n").unwrap();
        assert_eq!(cpu_ns_of_tasks(tasks.path()), Some(40));
        std::fs::write(second, "2 0 1\n").unwrap();
        assert_eq!(cpu_ns_of_tasks(tasks.path()), Some(42));
    }
}
