//! Errors of an engine as a whole.
//!
//! A program is told a number of errno(3) in its reply (`Reply::Refused` of `spec/sgiov-spec`,
//! `control`), as the `broker` returns it: `connect`, `listen`, `route`. The library decides what
//! the program sees of it (`front/preload`, `open`): the kernel's own answer, where it asks the
//! kernel then, or the error. A new one has a line in `docs/sockets.md` and a test in
//! `tests/engine.rs`.

use std::path::PathBuf;

use rustix::io::Errno;

/// Returns the number of errno(3), as messages and events carry it.
pub fn errno_number(errno: Errno) -> u32 {
    errno.raw_os_error().unsigned_abs()
}

/// The reason why an engine could not start, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another engine has the lock.
    #[error("another socket engine serves {}", .0.display())]
    Busy(PathBuf),
    /// Something at the path is in the way of an engine.
    #[error("no engine can have the path {}: {why}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
    /// An error of the system.
    #[error("the socket engine failed: {0}")]
    System(std::io::Error),
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<Errno> for Error {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}
