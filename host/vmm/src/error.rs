//! The reasons for which a machine cannot be made or run, each one clear line.

use std::io;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason for which a machine could not be made or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is out of range.
    #[error("{0}")]
    Config(String),
    /// `/dev/kvm` cannot be used.
    #[error("KVM cannot be used: {0}")]
    NoKvm(String),
    /// KVM lacks a capability that the machine needs.
    #[error("this KVM lacks {0}, which slipway-vmm needs: use a newer kernel on the host")]
    KvmLacks(&'static str),
    /// KVM refused a request.
    #[error("KVM refused to {what}: {source}")]
    Kvm {
        /// The request.
        what: &'static str,
        /// KVM's error.
        source: io::Error,
    },
    /// The host cannot give the CPUs their features.
    #[error(transparent)]
    Features(#[from] slipway_machine::Error),
    /// The guest's memory cannot be used.
    #[error("the guest's memory: {0}")]
    Memory(String),
    /// The pages that the guest is to share with others cannot be used.
    #[error("the shared pages: {0}")]
    SharedPages(String),
    /// The kernel cannot be booted.
    #[error("the kernel cannot be booted: {0}")]
    Kernel(String),
    /// The initramfs cannot be loaded.
    #[error("the initramfs cannot be loaded: {0}")]
    Initramfs(String),
    /// A saved state cannot be made or used.
    #[error("the saved state: {0}")]
    State(String),
    /// A function behind a vfio-user socket cannot be used.
    #[error("function {index}: {reason}")]
    Function {
        /// The number of the function, in the order of the bus, from 0.
        index: usize,
        /// The reason.
        reason: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
}

impl From<Error> for String {
    fn from(error: Error) -> Self {
        error.to_string()
    }
}

impl Error {
    /// Makes the error of a request that KVM refused.
    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        move |error| Self::Kvm { what, source: io::Error::from_raw_os_error(error.errno()) }
    }

    /// Makes the error of a failed system call.
    pub(crate) fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System { what, source: error.into() }
    }
}
