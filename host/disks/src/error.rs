//! Errors of disks.

use std::path::PathBuf;

use slipway_block::OpenError;

/// The reason for which a request for a disk failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// A disk with this name exists.
    #[error("a disk called \"{0}\" is there already")]
    ExistingDisk(String),
    /// No disk has this name.
    #[error("there is no disk \"{0}\"")]
    UnknownDisk(String),
    /// A file that was to be made exists.
    #[error("{} is there already; name another file", .0.display())]
    ExistingFile(PathBuf),
    /// A file could not be made.
    #[error("cannot create {}: {source}", path.display())]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A disk could not be opened, resized or copied.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No descriptors, memory or threads are left.
    #[error("out of resources: {0}")]
    Resources(String),
}
