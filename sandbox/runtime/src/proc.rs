//! Processes, as the kernel's /proc describes them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The user id of root.
const ROOT: u32 = 0;

/// Returns the CPU time in nanoseconds and the resident memory in bytes of process `pid`. Both are
/// 0 if the process is gone.
pub fn usage(pid: i32) -> (u64, u64) {
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let schedstat = read("stat").and_then(|stat| cpu_ticks(&stat)).unwrap_or(0);
    let ticks = rustix::param::clock_ticks_per_second().max(1);
    let pages =
        read("statm").and_then(|statm| statm.split(' ').nth(1)?.parse::<u64>().ok()).unwrap_or(0);
    (schedstat * (1_000_000_000 / ticks), pages * rustix::param::page_size() as u64)
}

/// Returns utime + stime of proc_pid_stat(5), in clock ticks. The name in parentheses may contain
/// anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The properties by which a sandbox's processes are recognized. The user id alone is not enough:
/// daemons with other data directories may use the same ids.
pub struct Owned<'a> {
    /// The user id of the sandbox's VMM.
    pub uid: u32,
    /// Set if the sandbox has shares: a process of root's serves them.
    pub shares: bool,
    /// The run directory of the sandbox's VMM. The standard output of each of its processes is a
    /// file in it.
    pub run_dir: &'a Path,
    /// The name of the sandbox's control groups, which an unprivileged process cannot leave.
    pub cgroup: &'a str,
}

impl Owned<'_> {
    fn has(&self, pid: Pid) -> bool {
        let user = user_of(pid);
        let its = user == Some(self.uid) || (self.shares && user == Some(ROOT));
        its && (self.in_cgroup(pid) || self.in_run_dir(pid))
    }

    fn in_run_dir(&self, pid: Pid) -> bool {
        // The working directory would not tell: it is in a cage.
        std::fs::read_link(format!("/proc/{}/fd/1", pid.as_raw_pid()))
            .is_ok_and(|file| file.starts_with(self.run_dir))
    }

    fn in_cgroup(&self, pid: Pid) -> bool {
        let groups = std::fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_pid()));
        groups.is_ok_and(|groups| groups.lines().any(|line| line.ends_with(self.cgroup)))
    }
}

/// Finds the process of root's that serves a sandbox's shares. Returns a descriptor of it.
pub fn find_helper(owned: &Owned<'_>) -> Option<OwnedFd> {
    let its = |pid: Pid| user_of(pid) == Some(ROOT) && owned.has(pid);
    let mut found = processes().filter(|pid| its(*pid));
    // The descriptor names one process for good, so it is checked again after it was opened.
    found.find_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok().filter(|_| its(pid)))
}

/// Adjusts the score of the process of root's that serves a sandbox's shares, if there is one.
///
/// # Errors
/// Those of [`adjust_oom_score`].
pub fn adjust_helper(owned: &Owned<'_>, adjustment: i32) -> io::Result<()> {
    let its = |pid: Pid| user_of(pid) == Some(ROOT) && owned.has(pid);
    for pid in processes().filter(|pid| its(*pid)) {
        adjust_oom_score(pid.as_raw_pid(), adjustment, || its(pid))?;
    }
    Ok(())
}

/// Adjusts the score of a process for the kernel's OOM killer (proc_pid_oom_score_adj(5)), if the
/// process is the one that `is_it` looks for. One that has ended is no error.
///
/// # Errors
/// The kernel's refusal.
pub fn adjust_oom_score(pid: i32, adjustment: i32, is_it: impl FnOnce() -> bool) -> io::Result<()> {
    let file = format!("/proc/{pid}/oom_score_adj");
    // An open file of /proc is that of one process for good, so the process is checked after it was
    // opened.
    let mut file = match OpenOptions::new().write(true).open(file) {
        Err(error) if has_ended(&error) => return Ok(()),
        opened => opened?,
    };
    if !is_it() {
        return Ok(());
    }
    match file.write_all(adjustment.to_string().as_bytes()) {
        Err(error) if has_ended(&error) => Ok(()),
        written => written,
    }
}

/// Returns whether an access to a file of a process failed because the process has ended.
fn has_ended(error: &io::Error) -> bool {
    let gone = error.raw_os_error() == Some(Errno::SRCH.raw_os_error());
    gone || error.kind() == io::ErrorKind::NotFound
}

/// Kills every process of a sandbox and waits until none is left. This finds a VMM whose process id
/// was not recorded yet when the daemon was killed. Blocks the thread. Returns `false` if a process
/// is left after `patience`.
pub fn kill_all(owned: &Owned<'_>, patience: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let mut left = false;
        for pid in processes().filter(|pid| owned.has(*pid)) {
            left = true;
            // The descriptor names one process for good, so the owner is checked again after it was
            // opened.
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            if owned.has(pid) {
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        }
        if !left || begun.elapsed() > patience {
            return !left;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the user id of each process. Several processes may have one id.
pub fn users() -> impl Iterator<Item = u32> {
    processes().filter_map(user_of)
}

fn processes() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// Returns the real user id of a process.
fn user_of(pid: Pid) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_counted_after_a_hostile_name() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14";
        assert_eq!(cpu_ticks(stat), Some(11 + 12));
        assert_eq!(cpu_ticks("7"), None);
    }

    #[test]
    fn the_user_of_a_process_is_known() {
        let own = rustix::process::getpid();
        assert_eq!(user_of(own), Some(rustix::process::getuid().as_raw()));
    }

    /// A program that sleeps, with its output in `dir`. Dropping this kills it, also when a test
    /// fails.
    struct Sleeper(std::process::Child);

    impl Sleeper {
        fn start(dir: &Path) -> Self {
            let mut command = std::process::Command::new("sleep");
            let output = std::fs::File::create(dir.join("output")).unwrap();
            Self(command.arg("1000").stdout(output).spawn().unwrap())
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn only_the_sandboxes_own_processes_are_killed() {
        let uid = rustix::process::getuid().as_raw();
        let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run_dir = ours.path().canonicalize().unwrap();
        let owned =
            Owned { uid, shares: false, run_dir: &run_dir, cgroup: "/slipway/no-such-group" };
        let (mut mine, mut other) = (Sleeper::start(&run_dir), Sleeper::start(theirs.path()));
        // The child stays a zombie until it is reaped, and a zombie has no descriptors.
        assert!(kill_all(&owned, Duration::from_secs(60)));
        assert!(!mine.0.wait().unwrap().success());
        assert!(other.0.try_wait().unwrap().is_none());
        // Another user's process is left alone, wherever its output goes.
        let stranger = Owned { uid: u32::MAX - 7, run_dir: theirs.path(), ..owned };
        assert!(kill_all(&stranger, Duration::ZERO));
        assert!(other.0.try_wait().unwrap().is_none());
        // The server of shares is root's.
        if uid == ROOT {
            assert!(kill_all(&Owned { shares: true, ..stranger }, Duration::from_secs(60)));
            assert!(!other.0.wait().unwrap().success());
        }
    }

    #[test]
    fn the_score_of_the_process_that_is_meant_is_adjusted() {
        let dir = tempfile::tempdir().unwrap();
        let mut sleeper = Sleeper::start(dir.path());
        let pid = sleeper.0.id() as i32;
        let score = || std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
        let before = score();
        adjust_oom_score(pid, 1000, || false).unwrap();
        assert_eq!(score(), before, "another process");
        adjust_oom_score(pid, 1000, || true).unwrap();
        assert_eq!(score().trim(), "1000");
        sleeper.0.kill().unwrap();
        sleeper.0.wait().unwrap();
        adjust_oom_score(pid, 1000, || false).unwrap();
    }

    #[test]
    fn a_process_that_is_there_has_memory() {
        assert!(usage(std::process::id() as i32).1 > 0);
    }
}
