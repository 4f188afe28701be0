//! Assigns processors, and measures CPU time.

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processors of target and clients: different ones if there are at least two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// Processors of the target's threads.
    pub target: Vec<usize>,
    /// Processors of the load's threads, in turn.
    pub client: Vec<usize>,
}

impl Cpus {
    /// Assigns the first `target` processors that this process may use to the target, and the
    /// others to clients.
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

    /// Assigns all processors to clients: the target is not in this machine.
    ///
    /// # Errors
    /// If the kernel does not report the processors.
    pub fn all() -> Result<Self> {
        Ok(Self { target: Vec::new(), client: allowed()? })
    }

    /// Returns whether `threads` of a load have a processor each, which the target does not use.
    pub fn are_enough(&self, threads: usize) -> bool {
        threads <= self.client.len() && !self.client.iter().any(|cpu| self.target.contains(cpu))
    }
}

fn allowed() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("the processors of this process")?;
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

/// Returns the CPU time of all threads of process `pid` so far, ns. Returns `None` if the kernel
/// does not count it or the process is gone. Threads that have ended are not included.
pub fn cpu_ns(pid: u32) -> Option<u64> {
    let mut sum = 0_u64;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        // A thread that has just ended has no file any more.
        let Ok(text) = std::fs::read_to_string(thread.ok()?.path().join("schedstat")) else {
            continue;
        };
        sum += text.split(' ').next()?.parse::<u64>().ok()?;
    }
    Some(sum)
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

    /// The process is another one: threads of other tests that end take their time out of this
    /// process's sum.
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
}
