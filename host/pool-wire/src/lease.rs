//! The launcher's side.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_numa::NumaNode;
use slipway_peer::{Bin, Foreign};
use slipway_pool_spec::{Answer, Completion, Request, Traits};

use crate::message::{WireError, receive_any, send};

/// Memory of the pool that was given to a launcher. The pool takes it back when the VMM that it is
/// passed to has ended; if no VMM hands faults over, the pool gives the pages to the kernel when
/// the connection ends.
#[derive(Debug)]
pub struct Lease {
    /// The file of the memory, whose bytes may be those of an earlier user.
    pub file: OwnedFd,
    /// The connection, to be passed to the VMM.
    pub connection: OwnedFd,
    /// The NUMA node on which the kernel makes the memory's pages; `None` if it is that of the
    /// thread that touches a page first, as on a host with one node.
    pub home: Option<NumaNode>,
}

impl Lease {
    /// Asks the pool whose socket is at `path` for memory. Waits for its answer.
    ///
    /// # Errors
    /// [`WireError`]; [`WireError::Refused`] has the pool's reason.
    pub fn ask(path: &Path, request: Request) -> Result<Self, WireError> {
        let connection = ask(path, &request.encode())?;
        let (file, Traits { home, .. }) = given(&connection)?;
        Ok(Self { file, connection, home })
    }
}

/// Has the pool whose socket is at `path` copy what is left of its template into the memory of a
/// fork, and returns the file of the memory: another process that has it mapped sees what the
/// fork's guest sees, without faults of the pool's. Waits for the copy.
///
/// # Errors
/// [`WireError`]; [`WireError::Refused`] if no fork has this memory, or the host has none left.
pub fn complete(path: &Path, completion: Completion) -> Result<OwnedFd, WireError> {
    let connection = ask(path, &completion.encode())?;
    given(&connection).map(|(file, _)| file)
}

/// Connects to the pool, and sends the first message.
fn ask(path: &Path, message: &[u8]) -> Result<OwnedFd, WireError> {
    let failed = WireError::io("connecting to the pool of memory");
    let address = SocketAddrUnix::new(path).map_err(&failed)?;
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let connection = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
    let connection = connection.map_err(&failed)?;
    rustix::net::connect(&connection, &address).map_err(&failed)?;
    send(connection.as_fd(), message, &[])?;
    Ok(connection)
}

/// Receives the answer to a request.
fn given(connection: &OwnedFd) -> Result<(OwnedFd, Traits), WireError> {
    let (message, files) = receive_any(connection.as_fd(), &Bin::new())?;
    let files: Vec<OwnedFd> = files.into_iter().map(Foreign::into_owned).collect();
    match (Answer::decode(&message), <[OwnedFd; 1]>::try_from(files)) {
        (Some(Answer::Given(traits)), Ok([file])) => Ok((file, traits)),
        (Some(Answer::Refused(text)), Err(none)) if none.is_empty() => {
            Err(WireError::Refused(String::from_utf8_lossy(text).into_owned()))
        }
        _ => Err(WireError::Malformed),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rustix::net::socketpair;

    use super::*;

    /// Returns a connection's two ends.
    pub(crate) fn pair() -> (OwnedFd, OwnedFd) {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        socketpair(AddressFamily::UNIX, kind, flags, None).unwrap()
    }

    #[test]
    fn answers_without_their_file_or_with_others_are_refused() {
        let (here, there) = pair();
        let file = there.as_fd();
        let traits = Traits { home: None, fork: false };
        send(file, &Answer::Given(traits).encode(), &[file]).unwrap();
        assert_eq!(given(&here).unwrap().1, traits);
        send(file, &Answer::Refused(b"empty").encode(), &[]).unwrap();
        assert!(matches!(given(&here), Err(WireError::Refused(text)) if text == "empty"));
        for (answer, files) in [
            (Answer::Given(traits), &[][..]),
            (Answer::Given(traits), &[file, file]),
            (Answer::Refused(b"empty"), &[file]),
        ] {
            send(file, &answer.encode(), files).unwrap();
            let refused = given(&here);
            assert!(matches!(refused, Err(WireError::Malformed)), "{answer:?}: {refused:?}");
        }
    }
}
