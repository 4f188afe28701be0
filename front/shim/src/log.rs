//! The shim's log: lines into the FIFO `log` of the bundle, which containerd copies to its own log.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags};

/// The longest line, bytes.
const LONGEST: usize = 2048;

static LOG: OnceLock<File> = OnceLock::new();

/// Opens the log of a bundle. Without a reader there is no log.
pub fn open(bundle: &Path) {
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if let Ok(file) = rustix::fs::open(bundle.join("log"), flags, Mode::empty()) {
        // Set once, by `main`.
        let _ = LOG.set(file.into());
    }
}

/// Goes on with the log that an earlier process has opened.
pub fn take(log: File) {
    // Set once, by `main`.
    let _ = LOG.set(log);
}

/// Returns a copy of the log's descriptor, if there is a log.
pub fn share() -> Option<OwnedFd> {
    LOG.get()?.try_clone().ok().map(OwnedFd::from)
}

/// Logs one line. What a guest said is made printable. A log that is full or has no reader drops
/// the line: nothing here waits for it.
pub fn warn(text: &str) {
    if let Some(mut log) = LOG.get() {
        let line = slipway_printable::line(text, LONGEST);
        let line = format!("level=warning msg={:?}\n", format!("slipway: {line}"));
        let _ = log.write_all(line.as_bytes());
    }
}
