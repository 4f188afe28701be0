//! What can go wrong with a kernel or an initramfs, one clear line each.

use std::io;
use std::path::PathBuf;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why there is nothing to boot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Set-up has not been here.
    #[error(
        "there is no guest kernel in {}: run 'make setup' as root, or give one with --kernel FILE",
        .0.display()
    )]
    NotInstalled(PathBuf),
    /// The file is not something that boots.
    #[error("{} is no kernel: {what} (expected an x86-64 bzImage or vmlinux)", path.display())]
    NoKernel {
        /// The file.
        path: PathBuf,
        /// What it is, or lacks.
        what: &'static str,
    },
    /// The kernel cannot run sandboxes.
    #[error(
        "the kernel lacks {}: neither built in nor in {}",
        missing.join(", "),
        directory.display()
    )]
    MissingModules {
        /// What is missing.
        missing: Vec<String>,
        /// Where modules were looked for.
        directory: PathBuf,
    },
    /// Modules depend on each other in a circle, or too deeply.
    #[error("the dependencies of module {0} have no order")]
    NoOrder(String),
    /// A module file is damaged.
    #[error("{} is no kernel module: {what}", path.display())]
    BadModule {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A program cannot run in an initramfs, or a file is none for one.
    #[error("{} cannot be part of a guest: {what}", path.display())]
    BadProgram {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { action, path: path.into(), source }
    }
}
