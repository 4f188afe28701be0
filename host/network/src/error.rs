//! Errors of networks: one clear line each, with the next step where there is one.

use std::io;
use std::net::IpAddr;

use tonic::{Code, Status};

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why an operation on a network failed and was undone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid argument of the caller.
    #[error("{0}")]
    Invalid(String),
    /// No network has this name.
    #[error(
        "there is no network \"{0}\"; `slipway network ls` lists them, `slipway network create` \
         makes one"
    )]
    Unknown(String),
    /// A network has this name already.
    #[error("the network \"{0}\" exists already; `slipway network rm {0}` removes it")]
    Exists(String),
    /// The network has memory ports.
    #[error(
        "the network \"{network}\" has memory ports: {}; `slipway port rm` removes them",
        ports.join(", ")
    )]
    HasPorts {
        /// The network.
        network: String,
        /// The names of the ports.
        ports: Vec<String>,
    },
    /// A memory port has this name already.
    #[error("a memory port called \"{0}\" is there already; `slipway port rm {0}` removes it")]
    ExistingPort(String),
    /// No memory port has this name.
    #[error("there is no memory port \"{0}\"; `slipway port ls` lists ports")]
    UnknownPort(String),
    /// Sandboxes use the network.
    #[error("the network \"{network}\" has sandboxes: {}", sandboxes.join(", "))]
    Used {
        /// The network.
        network: String,
        /// The names of the sandboxes.
        sandboxes: Vec<String>,
    },
    /// The address has another owner.
    #[error("the address {address} is taken by {owner}")]
    Taken {
        /// The address that was asked for: IP or MAC.
        address: String,
        /// The owner of the address.
        owner: String,
    },
    /// A network namespace cannot be used.
    #[error(transparent)]
    Namespace(#[from] slipway_netns::Error),
    /// Another sandbox has the interface of a network namespace.
    #[error("the interface {interface} of {namespace} is taken by sandbox {sandbox}")]
    InterfaceTaken {
        /// The name of the interface.
        interface: String,
        /// The path of the namespace.
        namespace: String,
        /// The name of the sandbox.
        sandbox: String,
    },
    /// A container has this attachment, or the interface of its namespace.
    #[error("the {0} is there already; DEL removes it")]
    ExistingAttachment(String),
    /// There is no such attachment.
    #[error("there is no {0}; ADD makes it")]
    UnknownAttachment(String),
    /// The subnet overlaps one that is in use.
    #[error("{subnet} overlaps {other}; `--subnet` takes another one")]
    Overlap {
        /// The subnet that was asked for.
        subnet: String,
        /// The network that it overlaps.
        other: String,
    },
    /// The network has no free address.
    #[error(
        "the network \"{network}\" is full: {subnet} has no address left; a sandbox that ends \
         gives its address back"
    )]
    Full {
        /// The network.
        network: String,
        /// The network's subnet.
        subnet: String,
    },
    /// Another program of the host has the port.
    #[error("port {port}/{protocol} of {address} is in use; `--publish` takes another one")]
    PortInUse {
        /// The address on the host.
        address: IpAddr,
        /// The port on the host.
        port: u16,
        /// The protocol, "tcp" or "udp".
        protocol: &'static str,
    },
    /// The host cannot do it, for the reason given.
    #[error("{0}")]
    Host(String),
    /// The plane refused.
    #[error("the plane: {0}")]
    Plane(String),
    /// The pools of functions refused.
    #[error("{}", .0.message())]
    Functions(Box<Status>),
    /// An operation on a file of the ledger failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The path of the file.
        path: std::path::PathBuf,
        /// The error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn file(
        what: &'static str,
        path: impl Into<std::path::PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }

    pub(crate) fn host(what: impl std::fmt::Display) -> impl FnOnce(io::Error) -> Self {
        let what = what.to_string();
        move |error| Self::Host(format!("{what}: {error}"))
    }

    fn code(&self) -> Code {
        match self {
            Self::Invalid(_) => Code::InvalidArgument,
            Self::Unknown(_) | Self::UnknownPort(_) | Self::UnknownAttachment(_) => Code::NotFound,
            Self::Exists(_)
            | Self::ExistingPort(_)
            | Self::ExistingAttachment(_)
            | Self::Taken { .. }
            | Self::InterfaceTaken { .. } => Code::AlreadyExists,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::Host(_)
            | Self::Namespace(_)
            | Self::Used { .. }
            | Self::HasPorts { .. }
            | Self::Overlap { .. }
            | Self::PortInUse { .. } => Code::FailedPrecondition,
            Self::Functions(status) => status.code(),
            Self::Plane(_) | Self::File { .. } => Code::Internal,
        }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
