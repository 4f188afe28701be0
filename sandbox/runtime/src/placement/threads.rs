//! The CPUs on which the threads of a process run.

use std::collections::BTreeSet;

use rustix::process::Pid;
use rustix::thread::CpuSet;

use crate::record::Placement;

/// The most looks for threads that were started while others were told their CPUs.
const LOOKS: usize = 16;

/// Returns the list of the CPUs on which a thread may run; `None` stands for the calling one. The
/// list of a thread that has ended is empty.
pub(super) fn run_on(thread: Option<Pid>) -> String {
    let Ok(cpus) = rustix::thread::sched_getaffinity(thread) else { return String::new() };
    let numbers: BTreeSet<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)).collect();
    Placement::list(&numbers)
}

/// Tells the threads of a process on which CPUs they run. A process that has ended is no error.
pub(super) fn tell(pid: i32, cpus: &CpuSet) -> std::io::Result<()> {
    match tell_all(pid, cpus) {
        Err(error) if has_ended(&error) => Ok(()),
        told => told,
    }
}

fn tell_all(pid: i32, cpus: &CpuSet) -> std::io::Result<()> {
    let mut told = BTreeSet::new();
    for _ in 0..LOOKS {
        let before = told.len();
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let name = thread?.file_name();
            let Some(thread) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if told.insert(thread) {
                match rustix::thread::sched_setaffinity(Pid::from_raw(thread), cpus) {
                    // It has ended.
                    Err(rustix::io::Errno::SRCH) => {}
                    done => done?,
                }
            }
        }
        if told.len() == before {
            break;
        }
    }
    Ok(())
}

/// Returns whether a look at a process in /proc failed because the process has ended.
fn has_ended(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn threads_are_told_their_cpus() {
        let before = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| before.is_set(*cpu)).unwrap();
        let mut one = CpuSet::new();
        one.set(last);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        tell(pid.as_raw_nonzero().get(), &one).unwrap();
        assert_eq!(sched_getaffinity(Some(pid)).unwrap(), one);
        assert_eq!(run_on(Some(pid)), last.to_string());
        child.kill().unwrap();
        child.wait().unwrap();
        tell(pid.as_raw_nonzero().get(), &one).unwrap();
        assert_eq!(run_on(Some(pid)), "", "it has ended");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
