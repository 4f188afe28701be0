//! Locks between processes that no other user can take: `flock(2)` on files of mode 0600.
//!
//! Opening a file for reading is enough to lock it. A lock file that others may read is therefore a
//! lock that anybody can hold for ever. [`Lock::within`] creates its file with mode 0600, waits no
//! longer than the caller allows, and names the holder when it gives up. The kernel drops a lock
//! with its last descriptor, so `kill -9` leaves none behind.
//!
//! # A lock file that others could open
//!
//! Removing permissions does not revoke descriptors that were opened before: such a descriptor can
//! still lock the inode, at any later time. So an inode that was ever open to others is used only
//! once more. Its mode becomes 0700, which keeps new openers out and marks it. The process that
//! gets its lock puts a new inode of mode 0600 in its place *while it holds the old one*, and holds
//! the new one from then on. Two processes cannot both do so. A process that waited for the old
//! inode checks, once it has the lock, whether the inode is still the one at the path, and starts
//! again if it is not.
//!
//! The new inode is not put in place without the old lock, even if a stranger holds that one: the
//! holder could as well be a process of this user from before an update, and two owners are worse
//! than an error that names the process to end.
//!
//! # Dependencies
//!
//! `rustix` (flock, fstat without a C library), `thiserror`. An `flock(2)` lock belongs to the open
//! file and not to the process (as one of `fcntl(2)` would): it is inherited with the descriptor.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

/// Time between the first two attempts to take a lock that another process holds. It doubles with
/// each attempt, up to [`LONGEST_LOOK`].
const LOOK: Duration = Duration::from_millis(2);
/// The longest time between two attempts to take a lock that another process holds.
const LONGEST_LOOK: Duration = Duration::from_millis(20);
/// The times that a file which is not at its path any more is opened again at once. After them the
/// lock counts as held, so that the caller's patience ends the attempts.
const RACES: usize = 64;
/// The mode of a file that only its owner may open.
const OURS: u32 = 0o600;
/// The mode of a file that is closed to others by now but that others may still have open. The file
/// is to be replaced.
const MARKED: u32 = 0o700;
/// Most bytes read of /proc/locks and of /proc/PID/status: both grow with what strangers do.
const PROC_MOST: u64 = 1 << 20;

/// The reason why a lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process held the lock for all of the time that the caller would wait.
    #[error("{} is locked by {holders}", path.display())]
    Held {
        /// The lock's file.
        path: PathBuf,
        /// The holders of the lock, as far as the kernel shows them.
        holders: Holders,
    },
    /// The file at the path is unfit for a lock: another user's, or no regular file.
    #[error("{} cannot be a lock: {reason}", path.display())]
    Unfit {
        /// The lock's file.
        path: PathBuf,
        /// The fault of the file.
        reason: String,
    },
    /// A system call failed.
    #[error("cannot {action} the lock {}: {source}", path.display())]
    Io {
        /// The failed action: "open", "take", "find" or "replace".
        action: &'static str,
        /// The lock's file.
        path: PathBuf,
        /// The error of the system call.
        source: std::io::Error,
    },
}

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The processes that hold a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders(pub Vec<Holder>);

/// A process that took a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Process id.
    pub pid: u32,
    /// Real user id. `None` if the process has ended: then a process that inherited its descriptor
    /// holds the lock.
    pub uid: Option<u32>,
}

impl Holders {
    /// Returns whether all holders are known and are neither root nor this process's user, so that
    /// none of them is supposed to hold the lock.
    pub fn are_strangers(&self) -> bool {
        let me = rustix::process::geteuid().as_raw();
        let stranger = |holder: &Holder| holder.uid.is_some_and(|uid| uid != 0 && uid != me);
        !self.0.is_empty() && self.0.iter().all(stranger)
    }
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("a process that /proc/locks does not show");
        }
        for (at, holder) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            match holder.uid {
                Some(uid) => write!(f, "{comma}process {} of user {uid}", holder.pid)?,
                None => write!(
                    f,
                    "{comma}a process that inherited it from process {}, which has ended",
                    holder.pid
                )?,
            }
        }
        Ok(())
    }
}

/// A held lock. It is released when the last descriptor of its open file is closed.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock at `path` and creates its file if it is missing. The calling thread sleeps up
    /// to `patience` while another process holds the lock, so no other work may depend on this
    /// thread.
    ///
    /// # Errors
    /// [`Error::Held`] after `patience`; [`Error::Unfit`] if the file is another user's or no
    /// regular file; [`Error::Io`].
    pub fn within(path: &Path, patience: Duration) -> Result<Self> {
        let begun = Instant::now();
        let mut pause = LOOK;
        loop {
            if let Some(lock) = attempt(path, OFlags::CREATE)? {
                return Ok(lock);
            }
            let left = patience.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(held(path));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_LOOK);
        }
    }

    /// Takes the lock at `path` if it is free, and creates its file if it is missing. Never waits.
    ///
    /// # Errors
    /// The errors of [`within`](Self::within), [`Error::Held`] at once.
    pub fn try_take(path: &Path) -> Result<Self> {
        Self::within(path, Duration::ZERO)
    }

    /// Takes the lock at `path` if it is free. Unlike for [`try_take`](Self::try_take), a missing
    /// file is an error ([`Error::Io`]).
    ///
    /// # Errors
    /// The errors of [`try_take`](Self::try_take).
    pub fn try_existing(path: &Path) -> Result<Self> {
        attempt(path, OFlags::empty())?.ok_or_else(|| held(path))
    }

    /// Returns the locked file, for instance to record the holder in it.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl From<Lock> for OwnedFd {
    /// Returns the descriptor that holds the lock.
    fn from(lock: Lock) -> Self {
        lock.file.into()
    }
}

/// Takes the lock of the file that is at `path` now. Returns `None` if another process holds it, or
/// if the file at the path changes all the time.
fn attempt(path: &Path, create: OFlags) -> Result<Option<Lock>> {
    for _ in 0..RACES {
        let (file, seen_by_others) = open(path, create)?;
        if !try_flock(&file, path)? {
            return Ok(None);
        }
        // The last holder may have replaced or removed the file since it was opened here. Then
        // nobody else would find this lock's file.
        if !is_at(&file, path)? {
            continue;
        }
        let file = if seen_by_others { replace(path, file)? } else { file };
        return Ok(Some(Lock { file }));
    }
    Ok(None)
}

/// Opens the lock's file. Also returns whether its mode was not exactly 0600, so that others can
/// have opened it.
fn open(path: &Path, create: OFlags) -> Result<(File, bool)> {
    // `NONBLOCK`: a FIFO or a device at the path must not make the caller wait.
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | create;
    let failed = |source: std::io::Error| io("open", path, source);
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(OURS));
    let file = File::from(file.map_err(|errno| failed(errno.into()))?);
    let meta = file.metadata().map_err(failed)?;
    let unfit = |reason: String| Error::Unfit { path: path.to_owned(), reason };
    if !meta.is_file() {
        return Err(unfit("it is no regular file".into()));
    }
    let me = rustix::process::geteuid().as_raw();
    if meta.uid() != me {
        return Err(unfit(format!("it belongs to user {}, not to user {me}", meta.uid())));
    }
    let mode = meta.mode() & 0o7777;
    if mode & 0o077 != 0 {
        file.set_permissions(PermissionsExt::from_mode(MARKED)).map_err(failed)?;
    }
    Ok((file, mode != OURS))
}

/// Replaces the inode `held`, whose lock the caller has, with a new one. Returns the new one
/// locked.
fn replace(path: &Path, held: File) -> Result<File> {
    let failed = |source: std::io::Error| io("replace", path, source);
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = PathBuf::from(new);
    // Only the holder of the lock comes here, so a file of this name was left by a killed holder.
    let _ = std::fs::remove_file(&new);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    let file = rustix::fs::open(&new, flags, Mode::from_raw_mode(OURS));
    let file = File::from(file.map_err(|errno| failed(errno.into()))?);
    // Restores the bits that the umask removed.
    file.set_permissions(PermissionsExt::from_mode(OURS)).map_err(failed)?;
    if !try_flock(&file, path)? {
        return Err(failed(Errno::WOULDBLOCK.into()));
    }
    std::fs::rename(&new, path).map_err(failed)?;
    // Until the new inode is in place, the old lock keeps the others out.
    drop(held);
    Ok(file)
}

/// Takes the lock of `file`. Returns `false` if another process holds it or a signal interrupted
/// the call. Never waits.
#[allow(clippy::disallowed_methods)] // the one place that takes locks
fn try_flock(file: &File, path: &Path) -> Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(errno) => Err(io("take", path, errno.into())),
    }
}

/// Returns whether `file` is the one at `path`.
fn is_at(file: &File, path: &Path) -> Result<bool> {
    let failed = |source: std::io::Error| io("find", path, source);
    let ours = file.metadata().map_err(failed)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) => Ok(ours.ino() == found.ino() && ours.dev() == found.dev()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(error)),
    }
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { action, path: path.to_owned(), source }
}

fn held(path: &Path) -> Error {
    Error::Held { path: path.to_owned(), holders: holders(path) }
}

/// Returns the holders of a lock on the file at `path`, from /proc/locks. The list is empty if the
/// kernel does not show them (a process in another PID namespace, a file system with device numbers
/// of its own).
pub fn holders(path: &Path) -> Holders {
    let Ok(meta) = std::fs::symlink_metadata(path) else { return Holders::default() };
    let (major, minor) = (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev()));
    let file = format!("{major:02x}:{minor:02x}:{}", meta.ino());
    let locks = read_some(Path::new("/proc/locks"));
    let mut pids: Vec<u32> = locks.lines().filter_map(|line| holder_in(line, &file)).collect();
    pids.sort_unstable();
    pids.dedup();
    Holders(pids.into_iter().map(|pid| Holder { pid, uid: user_of(pid) }).collect())
}

/// Returns the process in a line like `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`. Returns
/// `None` if the line is about another file or another kind of lock, or about a process that waits
/// for a lock: such a line has an arrow before the kind.
fn holder_in(line: &str, file: &str) -> Option<u32> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let is_flock = words.next()? == "FLOCK";
    let pid = words.nth(2)?.parse().ok()?;
    (is_flock && words.next()? == file).then_some(pid)
}

fn user_of(pid: u32) -> Option<u32> {
    let status = read_some(Path::new(&format!("/proc/{pid}/status")));
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns the beginning of a file of /proc, or nothing if the file cannot be read.
fn read_some(path: &Path) -> String {
    let mut bytes = Vec::new();
    // The text is for an error message only: a part of it is better than nothing.
    let _ = File::open(path).and_then(|file| file.take(PROC_MOST).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests;
