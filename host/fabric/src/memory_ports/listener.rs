//! The socket of a memory port: a packet socket, accessible to root or its owner alone, whose name
//! is removed with it.

use std::io::{Error as IoError, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_peer::{Bin, Foreign};
use slipway_plane_api::v1;

use crate::error::Error;

/// The number of clients that may wait to be accepted.
const BACKLOG: i32 = 16;

/// A listening socket.
pub struct Listener {
    /// The socket. It holds connections that were not accepted, with the descriptors that came over
    /// them.
    socket: Foreign,
    /// The bin of all clients of the port.
    bin: Bin,
    path: PathBuf,
    /// The device and inode of the name, so that only our own socket is removed.
    identity: (u64, u64),
}

impl Listener {
    /// Listens. A socket of this name without a listener is replaced.
    pub fn bind(path: &str, owner: Option<&v1::Owner>) -> Result<Self, Error> {
        if !path.starts_with('/') {
            return Err(Error::Invalid(format!("\"{path}\" is no absolute path for a socket")));
        }
        let path = Path::new(path);
        let bound = bind(path, owner);
        bound.map_err(|source| Error::Socket { path: path.to_owned(), source })
    }

    /// Returns the bin that closes connections and the descriptors that come over them.
    pub fn bin(&self) -> &Bin {
        &self.bin
    }

    /// Returns the descriptor to watch.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Accepts the next waiting client. Returns `None` if no client waits.
    ///
    /// # Errors
    /// For example, no descriptors are left: the client still waits then.
    pub fn accept(&self) -> Result<Option<Foreign>, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(Foreign::new(socket, &self.bin))),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn socket(bin: &Bin) -> Result<Foreign, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    // If the kernel supports it, a client that sends descriptors gets an error. Accepted
    // connections inherit this.
    slipway_peer::refuse_descriptors(&socket);
    Ok(Foreign::new(socket, bin))
}

fn bind(path: &Path, owner: Option<&v1::Owner>) -> std::io::Result<Listener> {
    let address = SocketAddrUnix::new(path).map_err(|_| {
        IoError::new(
            ErrorKind::InvalidInput,
            "the path is too long for a socket: 107 bytes at most",
        )
    })?;
    let bin = Bin::new();
    remove_stale(path, &address, &bin)?;
    let socket = socket(&bin)?;
    // The socket's name gets this mode, so no client can connect before the owner is set.
    rustix::fs::fchmod(&socket, Mode::empty())?;
    rustix::net::bind(&socket, &address)?;
    // From here on the name is ours, and is removed with this value.
    let listener = Listener { socket, bin, path: path.to_owned(), identity: identity(path)? };
    if let Some(owner) = owner {
        let (user, group) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
        rustix::fs::chownat(CWD, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?;
    }
    rustix::fs::chmod(path, Mode::RUSR | Mode::WUSR)?;
    rustix::net::listen(&listener.socket, BACKLOG)?;
    Ok(listener)
}

/// Removes a socket without a listener: its server was killed.
fn remove_stale(path: &Path, address: &SocketAddrUnix, bin: &Bin) -> std::io::Result<()> {
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(IoError::new(ErrorKind::AlreadyExists, "exists and is no socket"));
    }
    match rustix::net::connect(socket(bin)?, address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        _ => Err(IoError::new(ErrorKind::AddrInUse, "somebody listens on it")),
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}
