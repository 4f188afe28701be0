//! The engine's files: where programs find it, and what only the user that runs it may use.
//!
//! - `PATH`: the programs' socket, which everybody may connect to;
//! - `PATH` with the ending `.d`: a folder with a second name of that socket and nothing else
//!   ([`folder`]);
//! - `PATH` with the ending `.admin`: the administrator's directory ([`AdminDirectory`]), which
//!   only the user that runs the engine may enter. The administrator's socket and the engine's lock
//!   are in it.
//!
//! A user id does not make anybody an administrator, since root in a container has root's. Access
//! to the socket in the administrator's directory does.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::Error;

/// The number of connections that may wait at a socket of the engine.
const BACKLOG: i32 = 4096;
/// The permissions on the administrator's directory that nobody but its owner may have.
const OTHERS: u32 = 0o077;
/// The name of the engine's lock in the administrator's directory.
const LOCK: &str = "lock";

/// The name of the socket in its [`folder`] and in the administrator's directory.
pub const SHARED: &str = "engine.sock";

/// Returns the folder beside an engine's socket that holds a second name of the socket, [`SHARED`],
/// and nothing else. Containers may be given this folder: they reach no other file, and find the
/// next engine's socket there too.
pub fn folder(socket: &Path) -> PathBuf {
    socket.with_extension("d")
}

/// Returns the administrator's directory of the engine at `socket`. It is not for containers.
pub fn administration(socket: &Path) -> PathBuf {
    socket.with_extension("admin")
}

fn bad(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |why| Error::Path { path: path.to_owned(), why }
}

/// An administrator's directory, open.
pub struct AdminDirectory {
    directory: OwnedFd,
    path: PathBuf,
}

impl AdminDirectory {
    /// Opens the administrator's directory, and makes it if there is none.
    ///
    /// # Errors
    /// The directory belongs to another user, or others may enter it.
    pub fn make(socket: &Path) -> Result<Self, Error> {
        let path = administration(socket);
        match std::fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(why) if why.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(Error::Path { path, why });
            }
            _ => {}
        }
        let own = Self::open(socket).map_err(bad(&path))?;
        let owner = rustix::fs::fstat(&own.directory).map_err(std::io::Error::from)?.st_uid;
        if owner != rustix::process::geteuid().as_raw() {
            return Err(bad(&path)(std::io::Error::other("it belongs to another user")));
        }
        Ok(own)
    }

    /// Opens an administrator's directory that an engine made.
    ///
    /// # Errors
    /// There is no such directory, this process may not enter it, or everybody may.
    pub fn open(socket: &Path) -> std::io::Result<Self> {
        let path = administration(socket);
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
        let directory = rustix::fs::open(&path, flags, Mode::empty())?;
        if rustix::fs::fstat(&directory)?.st_mode & OTHERS != 0 {
            return Err(std::io::Error::other("users other than its owner may enter it"));
        }
        Ok(Self { directory, path })
    }

    /// Takes the engine's lock. The lock ends with the process, however that ends. Only the owner
    /// can open the file, so nobody else can take it.
    ///
    /// # Errors
    /// [`Error::Busy`] if another engine has the lock, or an error of the system.
    pub fn lock(&self, socket: &Path) -> Result<std::fs::File, Error> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let path = self.path.join(LOCK);
        let file = rustix::fs::openat(&self.directory, LOCK, flags, mode);
        let file = std::fs::File::from(file.map_err(|errno| bad(&path)(errno.into()))?);
        #[allow(
            clippy::disallowed_methods,
            reason = "nobody else can enter the directory; it does not wait"
        )]
        let locked = file.try_lock();
        match locked {
            Ok(()) => Ok(file),
            Err(std::fs::TryLockError::WouldBlock) => Err(Error::Busy(socket.to_owned())),
            Err(std::fs::TryLockError::Error(error)) => Err(error.into()),
        }
    }

    /// Returns a path of the administrator's socket that only this process can use. It is short,
    /// however long the directory's path is.
    pub fn socket(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.directory.as_raw_fd().to_string()).join(SHARED)
    }

    /// Listens at the administrator's socket.
    ///
    /// # Errors
    /// An error of the system.
    pub fn listen(&self) -> Result<OwnedFd, Error> {
        listen(&self.socket(), Mode::RUSR | Mode::WUSR)
    }

    /// Removes the administrator's socket. The directory and the lock stay.
    pub fn end(&self) {
        let _ = std::fs::remove_file(self.socket());
    }
}

/// Listens at the programs' socket, and replaces the socket that an engine that died left there.
/// Everybody may attach: a program gets no more than it has with the kernel's sockets.
///
/// # Errors
/// [`Error::Path`] if something other than a socket is there.
pub fn listen_for_programs(path: &Path) -> Result<OwnedFd, Error> {
    listen(path, Mode::from_raw_mode(0o666))
}

fn listen(path: &Path, mode: Mode) -> Result<OwnedFd, Error> {
    let bad = bad(path);
    let address = SocketAddrUnix::new(path).map_err(|errno| bad(errno.into()))?;
    let there = std::fs::symlink_metadata(path);
    if there.is_ok_and(|there| !there.file_type().is_socket()) {
        return Err(bad(std::io::Error::other("it is there, and no socket")));
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(bad(error)),
        _ => {}
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&listener, &address).map_err(|errno: Errno| bad(errno.into()))?;
    rustix::fs::chmod(path, mode).map_err(|errno| bad(errno.into()))?;
    rustix::net::listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// Gives the programs' socket its second name. The folder stays when an engine ends, since
/// containers have it.
///
/// # Errors
/// An error of the system.
pub fn share(socket: &Path) -> std::io::Result<()> {
    let folder = folder(socket);
    std::fs::create_dir_all(&folder)?;
    let name = folder.join(SHARED);
    match std::fs::remove_file(&name) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::fs::hard_link(socket, name),
    }
}
