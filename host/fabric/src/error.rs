//! Errors of the fabric.

use std::path::PathBuf;
use std::time::Duration;

use slipway_switch::{AttachError, BadConfig};

/// The reason for which a request to the fabric failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A switch with this name exists.
    #[error("a switch called \"{0}\" is there already")]
    ExistingSwitch(String),
    /// No switch has this name.
    #[error("there is no switch \"{0}\"")]
    UnknownSwitch(String),
    /// No switch has a port of this name or index.
    #[error("there is no port \"{0}\"; `slipway port ls` lists ports")]
    UnknownPort(String),
    /// Several switches have a port of this name.
    #[error("there is a port \"{0}\" in more than one network: say which as NETWORK/PORT")]
    AmbiguousPort(String),
    /// A TAP interface could not be opened.
    #[error("cannot have the TAP interface {name}: {source}")]
    Tap {
        /// The name of the interface.
        name: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A TAP interface was not open in time.
    #[error(
        "the TAP interface {name} was not open within {} s: programs in its network namespace may \
         slow it down",
        patience.as_secs()
    )]
    SlowTap {
        /// The name of the interface.
        name: String,
        /// The time for which it was waited for.
        patience: Duration,
    },
    /// A TAP interface could not be set up; the text names the setting.
    #[error(transparent)]
    TapSettings(std::io::Error),
    /// The network namespace of an uplink cannot be used.
    #[error(transparent)]
    Namespace(#[from] slipway_netns::Error),
    /// The path of an uplink's namespace leads to another one than was asked for.
    #[error("{0} is another network namespace than before")]
    OtherNamespace(String),
    /// The interface of an uplink could not be opened.
    #[error("cannot have the interface {name} of {namespace}: {source}")]
    Uplink {
        /// The name of the interface.
        name: String,
        /// The path of the namespace.
        namespace: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A memory port with this name exists.
    #[error("a memory port called \"{0}\" is there already; `slipway port rm {0}` removes it")]
    ExistingPort(String),
    /// No memory port has this name.
    #[error("there is no memory port \"{0}\"; `slipway port ls` lists ports")]
    UnknownMemoryPort(String),
    /// A TAP interface with this name is attached.
    #[error("a TAP interface called \"{0}\" is attached already")]
    ExistingTap(String),
    /// No TAP interface with this name is attached.
    #[error("there is no attached TAP interface \"{0}\"")]
    UnknownTap(String),
    /// A port cannot have these settings.
    #[error(transparent)]
    Port(#[from] BadConfig),
    /// The socket of a memory port could not be made.
    #[error("cannot serve {}: {source}", path.display())]
    Socket {
        /// The path of the socket.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// No descriptors, memory or threads are left.
    #[error("out of resources: {0}")]
    Resources(String),
}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Config(bad) => Self::Port(bad),
            AttachError::Watch(_) => Self::Resources(error.to_string()),
        }
    }
}

impl From<Error> for tonic::Status {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Port(BadConfig::Full) | Error::Resources(_) => Self::resource_exhausted(message),
            Error::Invalid(_) | Error::AmbiguousPort(_) | Error::Port(_) => {
                Self::invalid_argument(message)
            }
            Error::ExistingSwitch(_) | Error::ExistingPort(_) | Error::ExistingTap(_) => {
                Self::already_exists(message)
            }
            Error::UnknownPort(_)
            | Error::UnknownMemoryPort(_)
            | Error::UnknownTap(_)
            | Error::UnknownSwitch(_) => Self::not_found(message),
            Error::Tap { .. }
            | Error::SlowTap { .. }
            | Error::TapSettings(_)
            | Error::Socket { .. }
            | Error::Namespace(_)
            | Error::OtherNamespace(_)
            | Error::Uplink { .. } => Self::failed_precondition(message),
        }
    }
}
