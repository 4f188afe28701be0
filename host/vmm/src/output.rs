//! The machine's output: standard output of the process, or what a launcher put in its place.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec};

/// Writes to the console if it takes bytes at once, and drops them otherwise: a guest must not be
/// able to stop its CPU, and with it a pause of the machine, by a console that nobody reads.
///
/// # Errors
/// An error of poll(2) or write(2).
pub fn write_or_drop(console: &OwnedFd, bytes: &[u8]) -> io::Result<()> {
    let mut poll = [PollFd::new(console, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut poll, Some(&now))? > 0 {
        rustix::io::write(console, bytes)?;
    }
    Ok(())
}
