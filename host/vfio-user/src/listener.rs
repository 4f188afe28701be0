//! The socket that clients connect to.

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_peer::{Bin, Foreign, Peer};

use crate::{Config, Location};

/// The number of connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// A listening socket, and its name, which is removed with it.
pub(crate) struct Listener {
    /// The socket. It holds connections that were not accepted, with the descriptors that came over
    /// them.
    socket: Foreign,
    bin: Bin,
    /// The socket's name; `None` if it belongs to another party.
    name: Option<Name>,
    /// The socket's directory, to remove with it if it is empty: one that this process made, or any
    /// directory of a resumed socket.
    directory: Option<PathBuf>,
}

struct Name {
    path: PathBuf,
    /// The device and inode of the name, so that only our own socket is removed.
    identity: (u64, u64),
}

impl Listener {
    /// Takes over a Unix socket that listens already, and whose name belongs to another party.
    pub(crate) fn given(socket: OwnedFd, bin: &Bin) -> std::io::Result<Self> {
        use rustix::net::sockopt;
        let socket = Foreign::new(socket, bin);
        let unix = sockopt::socket_domain(&socket)? == AddressFamily::UNIX
            && sockopt::socket_type(&socket)? == SocketType::STREAM;
        if !unix || !sockopt::socket_acceptconn(&socket)? {
            return Err(Error::new(ErrorKind::InvalidInput, "it is no Unix socket that listens"));
        }
        let flags = rustix::fs::fcntl_getfl(&socket)? | rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&socket, flags)?;
        Ok(Self { socket, bin: bin.clone(), name: None, directory: None })
    }

    /// Binds the socket, which listens unless the endpoint is to be shut at first. A socket of this
    /// name without a listener is replaced.
    pub(crate) fn bind(config: &Config, bin: &Bin) -> std::io::Result<Self> {
        let directory = match &config.location {
            Location::Socket(_) => None,
            Location::Directory(path) => make_directory(path)?.then(|| path.clone()),
        };
        let path = config.location.socket();
        let outcome = bind(&path, config, bin);
        match outcome {
            Ok((socket, identity)) => {
                let name = Some(Name { path, identity });
                Ok(Self { socket, bin: bin.clone(), name, directory })
            }
            Err(error) => {
                directory.map(std::fs::remove_dir);
                Err(Error::new(error.kind(), format!("{}: {error}", path.display())))
            }
        }
    }

    /// Continues on a predecessor's socket, which may not listen yet.
    pub(crate) fn resume(socket: Foreign, config: &Config, bin: &Bin) -> std::io::Result<Self> {
        let path = config.location.socket();
        let identity = identity(&path)?;
        let directory = match &config.location {
            Location::Socket(_) => None,
            Location::Directory(path) => Some(path.clone()),
        };
        let name = Some(Name { path, identity });
        Ok(Self { socket, bin: bin.clone(), name, directory })
    }

    /// Returns a duplicate of a socket that does not listen yet, or `None` if it listens.
    pub(crate) fn shut(&self) -> std::io::Result<Option<Foreign>> {
        if rustix::net::sockopt::socket_acceptconn(&self.socket)? {
            return Ok(None);
        }
        self.socket.try_clone().map(Some)
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Accepts the next waiting client. Returns `None` if no client waits.
    ///
    /// # Errors
    /// For example, no descriptors are left: the client still waits then.
    pub(crate) fn accept(&self) -> std::io::Result<Option<(Foreign, Peer)>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => {
                let socket = Foreign::new(socket, &self.bin);
                let peer = Peer::of(&socket)?;
                Ok(Some((socket, peer)))
            }
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(name) = &self.name
            && identity(&name.path).is_ok_and(|identity| identity == name.identity)
        {
            let _ = std::fs::remove_file(&name.path);
        }
        if let Some(directory) = &self.directory {
            // Fails if another party put something there.
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Has a bound socket listen.
pub(crate) fn listen(socket: &Foreign) -> std::io::Result<()> {
    Ok(rustix::net::listen(socket, BACKLOG)?)
}

fn make_directory(path: &Path) -> std::io::Result<bool> {
    match std::fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(Error::new(error.kind(), format!("{}: {error}", path.display()))),
    }
}

fn bind(path: &Path, config: &Config, bin: &Bin) -> std::io::Result<(Foreign, (u64, u64))> {
    let address = SocketAddrUnix::new(path)
        .map_err(|_| Error::new(ErrorKind::InvalidInput, "the path is too long for a socket"))?;
    remove_stale(path, &address, bin)?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let socket = Foreign::new(socket, bin);
    // The socket's name gets this mode, so no client can connect before the owner is set.
    rustix::fs::fchmod(&socket, Mode::empty())?;
    rustix::net::bind(&socket, &address)?;
    let prepared = prepare(path, config).and_then(|()| identity(path));
    let listening = prepared.and_then(|identity| {
        if !config.shut {
            listen(&socket)?;
        }
        Ok(identity)
    });
    match listening {
        Ok(identity) => Ok((socket, identity)),
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

/// Gives the socket at `path` to a user and a group.
pub(crate) fn give(path: &Path, (user, group): (u32, u32)) -> std::io::Result<()> {
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    Ok(rustix::fs::chownat(CWD, path, Some(user), Some(group), AtFlags::SYMLINK_NOFOLLOW)?)
}

fn prepare(path: &Path, config: &Config) -> std::io::Result<()> {
    if let Some(owner) = config.owner {
        give(path, owner)?;
    }
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(config.mode & 0o777))?)
}

/// Removes a socket without a listener: its server was killed.
fn remove_stale(path: &Path, address: &SocketAddrUnix, bin: &Bin) -> std::io::Result<()> {
    use std::os::unix::fs::FileTypeExt;
    let Ok(found) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !found.file_type().is_socket() {
        return Err(Error::new(ErrorKind::AlreadyExists, "exists and is no socket"));
    }
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let probe = Foreign::new(probe, bin);
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path),
        _ => Err(Error::new(ErrorKind::AddrInUse, "somebody listens on it")),
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}
