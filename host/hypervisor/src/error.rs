//! The errors of a VM, each with a message of one clear line.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason for which a VM could not be started or controlled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No QEMU was found that can run a sandbox.
    #[error(
        "no usable QEMU: {reason}; run 'make setup' to install one, or set SLIPWAY_QEMU to a \
         qemu-system-x86_64 of version 10.1 or later"
    )]
    NoQemu {
        /// The candidates, and the fault of each.
        reason: String,
    },
    /// The program `slipway-vmm` was not found.
    #[error("no usable slipway-vmm: {reason}; SLIPWAY_VMM_PROGRAM may name one")]
    NoSlipwayVmm {
        /// The places that were searched, or the fault of the program.
        reason: String,
    },
    /// The program `slipway-hollow` was not found.
    #[error("no usable slipway-hollow: {reason}; `make build` builds one")]
    NoSlipwayHollow {
        /// The places that were searched, or the fault of the program.
        reason: String,
    },
    /// Slipway's own VMM was requested, and KVM cannot be used.
    #[error(
        "slipway-vmm needs KVM, which cannot be used: {reason}; with vmm = \"auto\" in the \
         settings QEMU emulates the CPU"
    )]
    NeedsKvm {
        /// The result of the probe.
        reason: String,
    },
    /// KVM was requested explicitly and cannot be used.
    #[error("KVM cannot be used: {reason}; use --accel tcg, or auto")]
    NoKvm {
        /// The result of the probe.
        reason: String,
    },
    /// The spec is invalid.
    #[error("{what}")]
    BadSpec {
        /// The field and its allowed range.
        what: String,
    },
    /// This VMM cannot do what was asked for.
    #[error("{what}")]
    Unsupported {
        /// The request, and the VMM that can.
        what: &'static str,
    },
    /// The pool gave no memory.
    #[error("memory of the pool: {0}")]
    Pool(#[from] slipway_pool_wire::WireError),
    /// A file or socket of the VM could not be opened or made.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The failed action: `open`, `listen on`, ….
        action: &'static str,
        /// The path of the file or socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The VM's process could not be spawned.
    #[error("cannot start {}: {source}{}", program.display(), root_hint(source))]
    Spawn {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The VM's process ended before it answered.
    #[error("the VM's process {exit}")]
    Died {
        /// The process's exit.
        exit: Box<crate::VmExit>,
    },
    /// The process that serves functions of the VM alone did not come to serve.
    #[error("{said}")]
    Helper {
        /// Its last words, or that there are none.
        said: String,
    },
    /// The VM's process runs but does not answer.
    #[error("the VM did not answer '{command}' within {} s", timeout.as_secs())]
    Timeout {
        /// The command that was sent.
        command: String,
        /// The time for which the answer was awaited.
        timeout: Duration,
    },
    /// The VM refused a command.
    #[error("the VM refused '{command}': {message}")]
    Refused {
        /// The command that was sent.
        command: String,
        /// The VM's answer.
        message: String,
    },
    /// The control channel is closed, or the data on it violate QMP.
    #[error("the VM's control channel failed: {0}")]
    Control(String),
    /// Another system call failed.
    #[error("{action}: {source}")]
    System {
        /// The failed action.
        action: &'static str,
        /// The system's error.
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

/// Returns a hint that changing the user needs root, which the bare errno does not say.
fn root_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            " (running the VM as another user, in a cgroup and in namespaces of its own needs \
             root with CAP_SYS_ADMIN)"
        }
        _ => "",
    }
}
