//! Why a connection ends.

use rustix::io::Errno;
use slipway_warp::RecordError;
use slipway_warp::share::ShareError;

use crate::handshake::{HandshakeError, errno};

/// The reason why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("connection broken: {0}")]
    Io(#[from] Errno),
    #[error("connection broken: {0}")]
    Record(#[from] RecordError),
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("connection broken: a frame that cannot be")]
    Frame,
    #[error("connection broken: more bytes than were granted")]
    Credit,
    #[error("connection broken: frames and nobody who listens to the answers")]
    Flood,
    #[error("not a word any more")]
    Silent,
    #[error("the other side closed the connection")]
    Closed,
    #[error(
        "it is not to be trusted any more: the settings do not have it, or not for this tenant"
    )]
    Dropped,
    #[error("not served: the share of tenant {tenant} is not in force: {error}")]
    NoShare { tenant: String, error: ShareError },
    #[error("more connections than an engine has for a tenant")]
    Many,
    /// The connection has no streams and is not needed any more.
    #[error("not needed any more")]
    Idle,
}

impl Broken {
    /// Returns the error number that a program gets if it was waiting for the connection.
    pub(crate) fn errno(&self) -> u32 {
        let told = match self {
            Self::Handshake(error) => return errno(error),
            Self::Silent => Errno::TIMEDOUT,
            Self::Dropped => Errno::HOSTUNREACH,
            Self::Io(error) => *error,
            _ => Errno::CONNRESET,
        };
        told.raw_os_error().unsigned_abs()
    }
}
