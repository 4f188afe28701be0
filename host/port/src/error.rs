//! Errors of a memory port.

use std::path::PathBuf;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket has no server, or this program may not use it.
    #[error(
        "cannot reach the memory port at {}: {source}; `slipway port ls` lists ports",
        path.display()
    )]
    Connect {
        /// The path of the socket.
        path: PathBuf,
        /// The error.
        source: std::io::Error,
    },
    /// Another program has the port.
    #[error("another program has the memory port at {}; one at a time can", .0.display())]
    Busy(PathBuf),
    /// The daemon speaks another version.
    #[error(
        "the daemon speaks version {0} of the protocol of memory ports, this program version \
         {ours}",
        ours = slipway_ring::PROTOCOL
    )]
    Version(u32),
    /// The daemon refused for another reason.
    #[error("the daemon refused: {0}")]
    Refused(std::io::Error),
    /// The server of the socket is neither root nor this user.
    #[error("user {0} serves the memory port; root or this program's own user should")]
    Stranger(u32),
    /// The answer is not that of a daemon.
    #[error("what came over the socket is no memory port: {0}")]
    Protocol(&'static str),
    /// The daemon went away, or removed the port.
    #[error("the memory port is gone: its daemon ended, or `slipway port rm` removed it")]
    Gone,
    /// A counter of the other side is invalid.
    #[error("the switch moved a counter where it cannot be: the link is of no use any more")]
    Broken,
    /// A system call failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

impl From<slipway_ring::Broken> for Error {
    fn from(_: slipway_ring::Broken) -> Self {
        Self::Broken
    }
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}
