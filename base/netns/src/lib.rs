//! Network namespaces of others: opened by path, checked, and entered by a thread of its own.
//!
//! A thread that has entered a network namespace opens its sockets there, and they stay there
//! wherever they are used later. So [`Namespace::run`] starts a thread, which enters the namespace
//! (setns(2)), runs a closure and ends. A thread that serves one namespace for long enters it by
//! [`Namespace::enter`]. No thread of a pool is ever in a foreign namespace.
//!
//! A [`Namespace`] keeps the kernel's namespace alive, and so does each socket that was opened in
//! it: `ip netns delete` only removes the name. Drop both as soon as they are not needed.
//!
//! Not here: making and naming namespaces, other kinds of namespaces.
//!
//! Dependencies: `rustix` for the system calls, `libc` for `SO_NETNS_COOKIE`, which rustix does not
//! have, `thiserror` for [`Error`].

mod cookie;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat, fstatfs};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

pub use self::cookie::cookie;

/// `NSFS_MAGIC` of linux/magic.h: the file system of all namespace files.
const NSFS_MAGIC: i128 = 0x6e73_6673;

/// The reason why a network namespace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be opened.
    #[error("cannot open the network namespace {}: {source}", path.display())]
    Open {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a namespace, or a namespace of another kind.
    #[error(
        "{} is no network namespace; `ip netns add NAME` makes /run/netns/NAME, and a process has \
         /proc/PID/ns/net",
        .0.display()
    )]
    NotOne(PathBuf),
    /// The namespace cannot be entered.
    #[error("cannot enter the network namespace {}: {source}", path.display())]
    Enter {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// The identity of a namespace, as long as it exists: device and inode number of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// Device number of the file system of namespaces.
    pub device: u64,
    /// Inode number of the namespace.
    pub inode: u64,
}

impl fmt::Display for Identity {
    /// As the kernel writes it in `/proc/PID/ns`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "net:[{}]", self.inode)
    }
}

/// An open network namespace.
#[derive(Debug)]
pub struct Namespace {
    file: OwnedFd,
    path: PathBuf,
    identity: Identity,
}

impl Namespace {
    /// Opens the network namespace at `path`; blocks on the file system of `path`. A file of
    /// another kind is not opened for reading, so that nothing happens to it.
    ///
    /// # Errors
    /// [`Error`].
    pub fn open(path: &Path) -> Result<Self, Error> {
        let namespace = Self::open_any(path)?;
        // The kernel checks the kind of namespace when a thread enters.
        namespace.run(|| ())?;
        Ok(namespace)
    }

    /// Opens the namespace at `path` as [`Namespace::open`] does, which may be one of another kind:
    /// then [`Namespace::run`] fails. It costs no thread.
    ///
    /// # Errors
    /// [`Error::Open`]; [`Error::NotOne`] for a file that is no namespace.
    pub fn open_any(path: &Path) -> Result<Self, Error> {
        let (place, identity) = find(path)?;
        let again = format!("/proc/self/fd/{}", place.as_raw_fd());
        let file = File::open(again).map_err(|source| Error::Open { path: path.into(), source })?;
        Ok(Self { file: file.into(), path: path.into(), identity })
    }

    /// Returns the identity of the namespace.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Runs `work` on a new thread in the namespace, waits for it, and returns its result. A panic
    /// of `work` is the caller's.
    ///
    /// # Errors
    /// [`Error::NotOne`], [`Error::Enter`]: no right to enter it, or no thread is left.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name("namespace".to_owned());
            let thread = builder.spawn_scoped(scope, || self.enter().map(|()| work()));
            match thread.map_err(|source| self.not_entered(source))?.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves the calling thread into the namespace, until the thread ends. For a thread that serves
    /// this namespace alone.
    ///
    /// # Errors
    /// [`Error::NotOne`], [`Error::Enter`]: no right to enter it.
    pub fn enter(&self) -> Result<(), Error> {
        let network = Some(LinkNameSpaceType::Network);
        let entered = move_into_link_name_space(self.file.as_fd(), network);
        entered.map_err(|error| self.not_entered(error.into()))
    }

    fn not_entered(&self, source: io::Error) -> Error {
        match source.kind() {
            io::ErrorKind::InvalidInput => Error::NotOne(self.path.clone()),
            _ => Error::Enter { path: self.path.clone(), source },
        }
    }
}

/// Returns the identity of the namespace at `path`, of whichever kind, without opening it; blocks
/// on the file system of `path`.
///
/// # Errors
/// [`Error::Open`]; [`Error::NotOne`] for a file that is no namespace.
pub fn identify(path: &Path) -> Result<Identity, Error> {
    find(path).map(|(_, identity)| identity)
}

/// Finds the namespace at `path`. Returns a descriptor of the file that is not open (`O_PATH`), and
/// the namespace's identity.
fn find(path: &Path) -> Result<(OwnedFd, Identity), Error> {
    let failed = |error: rustix::io::Errno| Error::Open { path: path.into(), source: error.into() };
    let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let place = place.map_err(failed)?;
    #[allow(clippy::unnecessary_cast, reason = "the type of the field differs by architecture")]
    let kind = fstatfs(&place).map_err(failed)?.f_type as i128;
    if kind != NSFS_MAGIC {
        return Err(Error::NotOne(path.into()));
    }
    let stat = fstat(&place).map_err(failed)?;
    #[allow(clippy::useless_conversion, reason = "the types differ by architecture")]
    let identity = Identity { device: stat.st_dev.into(), inode: stat.st_ino.into() };
    Ok((place, identity))
}

/// Returns the identity of this process's own network namespace, that of its main thread.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own() -> io::Result<Identity> {
    let stat = rustix::fs::stat("/proc/self/ns/net")?;
    #[allow(clippy::useless_conversion, reason = "the types differ by architecture")]
    let identity = Identity { device: stat.st_dev.into(), inode: stat.st_ino.into() };
    Ok(identity)
}
