//! Messages and descriptors on the connection.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use slipway_peer::{Bin, Foreign};
use slipway_pool_spec::MOST;

/// A failure of the protocol.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The pool does not give memory; the text says why.
    #[error("{0}")]
    Refused(String),
    /// The other side ended the connection.
    #[error("the connection to the pool of memory has ended")]
    Ended,
    /// The other side sent something else than the protocol has at this point.
    #[error("the pool of memory has another version")]
    Malformed,
    /// A call failed.
    #[error("{what}: {source}")]
    Io {
        /// The call.
        what: &'static str,
        /// Its error.
        source: std::io::Error,
    },
}

impl WireError {
    /// Returns a converter of errors for `map_err`.
    pub fn io<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |error| Self::Io { what, source: error.into() }
    }
}

/// Sends a message with at most two descriptors.
///
/// # Errors
/// [`WireError`].
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> Result<(), WireError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(WireError::Malformed);
    }
    let part = [IoSlice::new(bytes)];
    match rustix::net::sendmsg(socket, &part, &mut control, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(()),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(WireError::Ended),
        Err(errno) => Err(WireError::io("sending to the pool of memory")(errno)),
    }
}

/// Receives a message that has `FILES` descriptors.
///
/// # Errors
/// [`WireError`].
pub fn receive<const FILES: usize>(
    socket: BorrowedFd<'_>,
    bin: &Bin,
) -> Result<(Vec<u8>, [Foreign; FILES]), WireError> {
    let (bytes, files) = receive_any(socket, bin)?;
    Ok((bytes, files.try_into().map_err(|_| WireError::Malformed)?))
}

/// Receives a message with its descriptors.
pub(crate) fn receive_any(
    socket: BorrowedFd<'_>,
    bin: &Bin,
) -> Result<(Vec<u8>, Vec<Foreign>), WireError> {
    let mut bytes = vec![0; MOST];
    let mut part = [IoSliceMut::new(&mut bytes)];
    let received = loop {
        match slipway_peer::receive_reply(socket, &mut part, bin, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Err(WireError::Ended),
            other => break other.map_err(WireError::io("receiving from the pool of memory"))?,
        }
    };
    if received.bytes == 0 {
        return Err(WireError::Ended);
    }
    bytes.truncate(received.bytes);
    Ok((bytes, received.files))
}
