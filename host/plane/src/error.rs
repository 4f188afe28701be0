//! Errors of the plane.

use std::path::PathBuf;

use slipway_nvme::ChangeError;

/// The reason for which a request to the plane failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// An endpoint with this id exists.
    #[error("an endpoint called \"{0}\" is there already")]
    Exists(String),
    /// No endpoint has this id.
    #[error("there is no endpoint \"{0}\"")]
    Unknown(String),
    /// The endpoint is being traced already.
    #[error("somebody snoops on endpoint \"{0}\" already; one at a time can")]
    Snooped(String),
    /// An endpoint uses the disk.
    #[error("disk \"{0}\" is attached to endpoint \"{1}\"")]
    DiskInUse(String, String),
    /// The endpoint is no NVMe controller of the plane.
    #[error("endpoint \"{0}\" is no NVMe controller of the plane and has no disks of it")]
    Network(String),
    /// The endpoint has no such namespace.
    #[error("endpoint \"{0}\" has no such namespace or disk")]
    UnknownNamespace(String),
    /// The disk of a namespace is neither an overlay nor a regular file.
    #[error(
        "the disk of namespace {1} of endpoint \"{0}\" is neither an overlay nor a regular file: \
         only those are copied"
    )]
    NotCopied(String, u32),
    /// A running controller refused a change.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// A disk could not be opened, made, resized or copied.
    #[error(transparent)]
    Disk(#[from] slipway_disks::Error),
    /// The controller refused its parts.
    #[error(transparent)]
    Controller(#[from] slipway_nvme::PartsError),
    /// The socket could not be made.
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
    /// The switches refused a request.
    #[error(transparent)]
    Fabric(#[from] slipway_fabric::Error),
}
