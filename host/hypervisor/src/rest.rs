//! Tells whether a VM has anything to do, by the processor time of its process, and by its threads
//! that are ready to run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time between two looks.
const WINDOW: Duration = Duration::from_millis(100);
/// The most processor time of a VM at rest in a window. Timers of an idle Linux guest take less.
const IDLE: Duration = Duration::from_millis(2);
/// The longest wait: a guest may never rest.
const PATIENCE: Duration = Duration::from_secs(5);

/// Waits until the process `pid` rests, and at most [`PATIENCE`]. Returns whether it does. A
/// process that has ended rests.
///
/// # Errors
/// The kernel does not tell the time: there is no /proc, or it lacks `CONFIG_SCHED_INFO`.
pub(crate) async fn await_rest(pid: i32) -> io::Result<bool> {
    let folder = PathBuf::from(format!("/proc/{pid}/task"));
    let deadline = Instant::now() + PATIENCE;
    let mut before = ProcessorUse::of(&folder)?;
    while Instant::now() < deadline {
        tokio::time::sleep(WINDOW).await;
        let now = ProcessorUse::of(&folder)?;
        if !now.is_ready && now.used.saturating_sub(before.used) <= IDLE {
            return Ok(true);
        }
        before = now;
    }
    Ok(false)
}

/// The work of a process.
struct ProcessorUse {
    /// The processor time of its threads up to now.
    used: Duration,
    /// A thread runs, or would if it had a processor: it may wait for one for longer than a window.
    is_ready: bool,
}

impl ProcessorUse {
    /// Looks at the threads in `folder`.
    fn of(folder: &Path) -> io::Result<Self> {
        let mut sum = Self { used: Duration::ZERO, is_ready: false };
        let threads = match std::fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(sum),
            other => other?,
        };
        for thread in threads {
            let thread = thread?.path();
            let read = |name| std::fs::read_to_string(thread.join(name));
            match read("schedstat").and_then(|time| Ok((time, read("stat")?))) {
                Ok((time, state)) => {
                    sum.used = sum.used.saturating_add(processor_time(&time)?);
                    sum.is_ready |= is_ready(&state);
                }
                // The thread has ended.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound && !thread.exists() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(sum)
    }
}

/// Returns the processor time in `/proc/PID/task/TID/schedstat`, whose first word it is in
/// nanoseconds (Linux, *Documentation/scheduler/sched-stats.rst*).
fn processor_time(text: &str) -> io::Result<Duration> {
    let first = text.split_ascii_whitespace().next().map(str::parse);
    match first {
        Some(Ok(ran)) => Ok(Duration::from_nanos(ran)),
        _ => Err(io::Error::other(format!("{text:?} is no schedstat"))),
    }
}

/// Returns whether `/proc/PID/task/TID/stat` has the state `R`, behind the name in parentheses,
/// which may have any characters (proc_pid_stat(5)).
fn is_ready(text: &str) -> bool {
    text.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn time_and_state_are_read() {
        assert_eq!(processor_time("1500 500 3\n").unwrap(), Duration::from_nanos(1500));
        for bad in ["", "a b c", "-1 2 3"] {
            assert!(processor_time(bad).is_err(), "{bad:?}");
        }
        assert!(is_ready("7 (a) S b) R 1 2") && !is_ready("7 (a) R b) S 1 2"));
        assert!(!is_ready("") && !is_ready("7 (R"));
    }

    #[tokio::test]
    async fn a_process_that_waits_rests_and_one_that_has_ended_does() {
        let mut child = Command::new("/bin/cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        // On a busy host it may take its time to begin.
        while !await_rest(pid).await.unwrap() {}
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(await_rest(pid).await.unwrap());
    }

    #[tokio::test]
    async fn a_process_that_computes_does_not_rest() {
        let mut child =
            Command::new("/bin/sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let rests = await_rest(child.id() as i32).await;
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!rests.unwrap());
    }
}
