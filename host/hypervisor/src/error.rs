//! What can go wrong with a VM, one clear line each.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a VM could not be started or controlled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no QEMU that could run a sandbox.
    #[error(
        "no usable QEMU: {reason}; run 'make setup' to install one, or set SLIPWAY_QEMU to a \
         qemu-system-x86_64 of version 10.1 or later"
    )]
    NoQemu {
        /// What was looked at and what is wrong with it.
        reason: String,
    },
    /// KVM was asked for by name and cannot be used.
    #[error("KVM cannot be used: {reason}; use --accel tcg, or auto")]
    NoKvm {
        /// What the probe found.
        reason: String,
    },
    /// The spec asks for something no VM can be.
    #[error("{what}")]
    BadSpec {
        /// The field and its allowed range.
        what: String,
    },
    /// A file or socket of the VM could not be opened or made.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// What was tried: `open`, `listen on`, ….
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The VM's process could not be spawned.
    #[error("cannot start {}: {source}{}", program.display(), root_hint(source))]
    Spawn {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The VM's process ended before it answered.
    #[error("the VM's process {exit}")]
    Died {
        /// How it ended.
        exit: Box<crate::VmExit>,
    },
    /// The VM's process lives but does not answer.
    #[error("the VM did not answer '{command}' within {} s", timeout.as_secs())]
    Timeout {
        /// What was asked.
        command: String,
        /// How long the answer was waited for.
        timeout: Duration,
    },
    /// The VM refused a command.
    #[error("the VM refused '{command}': {message}")]
    Refused {
        /// What was asked.
        command: String,
        /// Its answer.
        message: String,
    },
    /// What came over the control channel is no QMP, or the channel is closed.
    #[error("the VM's control channel failed: {0}")]
    Control(String),
    /// Any other system call.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
        source: impl Into<io::Error>,
    ) -> Self {
        Self::File { action, path: path.into(), source: source.into() }
    }

    pub(crate) fn system(action: &'static str, source: impl Into<io::Error>) -> Self {
        Self::System { action, source: source.into() }
    }
}

/// Changing the user needs root, and the bare errno does not say so.
fn root_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            " (running the VM as another user, in a cgroup and in namespaces of its own needs root with \
             CAP_SYS_ADMIN)"
        }
        _ => "",
    }
}
