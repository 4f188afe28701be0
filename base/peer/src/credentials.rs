//! The process at the other end of a Unix socket.
//!
//! Dependencies: `libc` for `SO_PEERCRED`. rustix's type has no room for process id 0, which the
//! kernel reports for a peer in another PID namespace.

#![allow(unsafe_code)] // the one getsockopt(2)

use std::io::Error;
use std::os::fd::{AsFd, AsRawFd};

/// The process at the other end of a Unix socket, as the kernel recorded it at `connect(2)`,
/// `listen(2)` or `socketpair(2)`. By now another process may hold the descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process id in this process's PID namespace; 0 if the peer has none there.
    pub pid: u32,
    /// Effective user id; [`Peer::NOBODY`] on a socket that is not connected.
    pub uid: u32,
}

impl Peer {
    /// User id for a socket without a peer: no user's id, least of all root's.
    pub const NOBODY: u32 = u32::MAX;

    /// Returns the process at the other end of `socket`.
    ///
    /// # Errors
    /// The error of getsockopt(2): `socket` is no socket.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        let mut found = libc::ucred { pid: 0, uid: Self::NOBODY, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the descriptor is borrowed for the call, and the kernel writes at most `len`
        // bytes to a structure of that size, which holds any bytes.
        let outcome = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                std::ptr::from_mut(&mut found).cast(),
                &mut len,
            )
        };
        if outcome != 0 {
            return Err(Error::last_os_error());
        }
        Ok(Self { pid: found.pid.unsigned_abs(), uid: found.uid })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn both_ends_know_each_other() {
        let me = Peer { pid: std::process::id(), uid: rustix::process::geteuid().as_raw() };
        let (one, other) = UnixStream::pair().unwrap();
        assert_eq!((Peer::of(&one).unwrap(), Peer::of(&other).unwrap()), (me, me));
        let path = std::env::temp_dir().join(format!("slipway-peer-{}", me.pid));
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(Peer::of(&client).unwrap(), me);
        assert_eq!(Peer::of(listener.accept().unwrap().0).unwrap(), me);
    }

    #[test]
    fn what_has_no_peer_has_nobody() {
        use rustix::net::{AddressFamily, SocketType, socket};
        for family in [AddressFamily::UNIX, AddressFamily::INET] {
            let socket = socket(family, SocketType::STREAM, None).unwrap();
            assert_eq!(Peer::of(&socket).unwrap(), Peer { pid: 0, uid: Peer::NOBODY });
        }
        let error = Peer::of(std::io::pipe().unwrap().0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTSOCK));
    }
}
