//! Tells whether a VM has anything to do, by the processor time of its process.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time between two looks.
const WINDOW: Duration = Duration::from_millis(100);
/// The most processor time of a VM at rest in a window, with the time for which its threads waited
/// for a processor. Timers of an idle Linux guest take less.
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
    let mut before = used(&folder)?;
    while Instant::now() < deadline {
        tokio::time::sleep(WINDOW).await;
        let now = used(&folder)?;
        if now.saturating_sub(before) <= IDLE {
            return Ok(true);
        }
        before = now;
    }
    Ok(false)
}

/// Returns the time for which the threads in `folder` ran or waited for a processor.
fn used(folder: &Path) -> io::Result<Duration> {
    let threads = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Duration::ZERO),
        other => other?,
    };
    let mut sum = Duration::ZERO;
    for thread in threads {
        match std::fs::read_to_string(thread?.path().join("schedstat")) {
            Ok(text) => sum = sum.saturating_add(parse(&text)?),
            // The thread has ended.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound && !folder.exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sum)
}

/// Parses `/proc/PID/task/TID/schedstat`: nanoseconds on a processor, nanoseconds of waiting for
/// one, and the number of time slices (Linux, *Documentation/scheduler/sched-stats.rst*).
fn parse(text: &str) -> io::Result<Duration> {
    let mut words = text.split_ascii_whitespace().map(str::parse::<u64>);
    match (words.next(), words.next()) {
        (Some(Ok(ran)), Some(Ok(waited))) => Ok(Duration::from_nanos(ran.saturating_add(waited))),
        _ => Err(io::Error::other(format!("{text:?} is no schedstat"))),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn times_of_running_and_of_waiting_count() {
        assert_eq!(parse("1500 500 3\n").unwrap(), Duration::from_nanos(2000));
        assert_eq!(parse("18446744073709551615 1 0").unwrap(), Duration::from_nanos(u64::MAX));
        for bad in ["", "1", "a b c", "-1 2 3"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    #[tokio::test]
    async fn a_process_that_waits_rests_and_one_that_has_ended_does() {
        let mut child = Command::new("/bin/cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        assert!(await_rest(pid).await.unwrap());
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
