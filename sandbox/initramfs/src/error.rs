//! Errors of kernels and initramfs files, one clear line each.

use std::io;
use std::path::PathBuf;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a kernel or an initramfs cannot be provided.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The directory has no kernel, since set-up has not run.
    #[error(
        "there is no guest kernel in {}: run 'make setup' as root, or give one with --kernel FILE",
        .0.display()
    )]
    NotInstalled(PathBuf),
    /// The file is not a bootable kernel.
    #[error("{} is no kernel: {what} (expected an x86-64 bzImage or vmlinux)", path.display())]
    NoKernel {
        /// The file's path.
        path: PathBuf,
        /// The reason why it is not a kernel.
        what: &'static str,
    },
    /// The kernel lacks required modules, so it cannot run sandboxes.
    #[error(
        "the kernel lacks {}: neither built in nor in {}",
        missing.join(", "),
        directory.display()
    )]
    MissingModules {
        /// The names of the missing modules.
        missing: Vec<String>,
        /// The directory that was searched for modules.
        directory: PathBuf,
    },
    /// The dependencies of modules are nested too deeply.
    #[error("the dependencies of module {0} have no order")]
    NoOrder(String),
    /// A module file is invalid.
    #[error("{} is no kernel module: {what}", path.display())]
    BadModule {
        /// The file's path.
        path: PathBuf,
        /// The reason why it is invalid.
        what: String,
    },
    /// A file cannot be part of an initramfs: it is too large, or not a static x86-64 program where
    /// one is needed.
    #[error("{} cannot be part of a guest: {what}", path.display())]
    BadProgram {
        /// The file's path.
        path: PathBuf,
        /// The reason why it is refused.
        what: &'static str,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self::File { action, path: path.into(), source }
    }
}
