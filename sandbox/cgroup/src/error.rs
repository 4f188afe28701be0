//! Errors of control groups.

use std::io;
use std::path::{Path, PathBuf};

/// The result of an operation on control groups.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A file of a control group that the kernel did not let us use.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {source}", .path.display())]
pub struct Error {
    /// The attempt, as in "cannot create control group".
    pub what: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The kernel's answer.
    pub source: io::Error,
}

impl Error {
    /// Returns a function that makes an error of the kernel's answer.
    pub(crate) fn at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self { what, path, source }
    }
}
