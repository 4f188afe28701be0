//! Programs of others that the shim runs on the host: hooks and loggers.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The mask of file modes that they begin with. The shim's own is narrower.
const MASK: u32 = 0o022;
/// The most descriptors that they begin with, of which they may raise the number: some programs
/// close all that they could have. The shim has raised its own.
const MOST_DESCRIPTORS: u64 = 1024;
/// The time between two looks whether one has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Gives this process the mask and the limit of descriptors that a program of others begins with.
/// It only calls the kernel: a child of a process with threads may do that before execve(2).
///
/// # Errors
/// The kernel refuses.
pub fn begin() -> io::Result<()> {
    rustix::process::umask(Mode::from_raw_mode(MASK));
    let limit = getrlimit(Resource::Nofile);
    let limits = [limit.current, limit.maximum].into_iter().flatten();
    let current = Some(limits.fold(MOST_DESCRIPTORS, u64::min));
    Ok(setrlimit(Resource::Nofile, Rlimit { current, ..limit })?)
}

/// Waits for the end of the process of a descriptor (pidfd_open(2)), for at most `patience`.
/// Returns whether it has ended.
pub async fn ends_within(process: &impl AsFd, patience: Duration) -> bool {
    let begun = Instant::now();
    while !has_ended(process) {
        if begun.elapsed() >= patience {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}

/// Returns whether the process of a descriptor has ended, which can be read then.
pub fn has_ended(process: &impl AsFd) -> bool {
    let mut descriptors = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut descriptors, Some(&at_once)).is_ok_and(|ready| ready > 0)
}
