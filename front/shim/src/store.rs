//! Records that outlive the shim's serving process: small files in a directory of the shim's own
//! beside its socket, which is in memory (`/run` is a tmpfs).
//!
//! The next serving process begins with these files after the last one was killed. A file is
//! replaced as a whole, so a process that is killed leaves the old content or the new one. The
//! directory is the user's alone, since requests may have secrets.
//!
//! # A file system without room
//!
//! A record is written before what it tells of is done. Where that can be refused, as a call can,
//! it is refused without a record ([`try_put`](Store::try_put), [`append`](Store::append),
//! [`refusal`]). The end of a process cannot be refused: its record takes the room of a file that
//! the store keeps for that ([`put`](Store::put)), and so does a call that asks for an end
//! ([`put_with_room`](Store::put_with_room)). Without such room too, the record of an end waits in
//! memory, and is written once there is some ([`catch_up`](Store::catch_up)). A file of a fixed
//! size has its room from its beginning ([`fixed`](Store::fixed)).
//!
//! # Several stores
//!
//! The directory's name is a digest of containerd's address, its namespace, and the container's id.
//! A shim that ends may still write its last records when the next one by its name begins: that one
//! takes a directory with a number. The serving process and the holder have the directory open and
//! locked, and reach the files by this descriptor only. So a directory that is not locked is of a
//! shim that died with its holder, and is removed ([`make`](Store::make), [`sweep`]).

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

use crate::hold::Holder;

/// The most stores of one name at once: of shims that end while the next one begins.
const MOST_AT_ONCE: usize = 16;
/// The end of the directories' names.
const EXTENSION: &str = "state";
/// The files that keep room, by their names, which are not looked for.
const ROOMS: [&str; 2] = [".room-0", ".room-1"];
/// The size of a file that keeps room, bytes: enough for a record of a process.
const ROOM: usize = 8 << 10;
/// The time between two attempts to write what waits.
const AGAIN: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });

/// The parts of a shim that outlive its serving process; without them nothing does.
#[derive(Clone, Default)]
pub struct RestartStore {
    /// The files.
    pub store: Store,
    /// The process that has copies of descriptors.
    pub holder: Option<Arc<Holder>>,
}

/// The directory of the files. A store without a directory keeps nothing. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Store(Option<Arc<Directory>>);

/// A directory that this process has open, and what is to be written there.
#[derive(Debug)]
struct Directory {
    /// Locked, as long as this process or its holder has it.
    file: OwnedFd,
    /// The content of files that could not be written, by their names.
    late: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Set while a file that keeps room may be missing.
    lacks_room: AtomicBool,
    /// Notified when there is something to catch up on.
    is_behind: Notify,
}

impl Directory {
    /// Returns the path of a file, which leads to this directory wherever it is.
    fn path(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.file.as_raw_fd()).into()
    }

    /// Returns the directory's own path, if it has one.
    fn own_path(&self) -> Option<PathBuf> {
        let path = fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()?;
        is_at(&self.file, &path).then_some(path)
    }

    fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.path(name);
        // Left by a process that was killed, it has no name that is looked for.
        let new = self.path(&format!(".{name}"));
        let written = fs::write(&new, content).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // A part of it would take memory that the file system lacks.
            let _ = fs::remove_file(&new);
        }
        written
    }

    /// Writes a file as [`write`](Self::write) does, with the room that is kept if there is no
    /// other.
    fn write_with_room(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let mut rooms = ROOMS.into_iter();
        loop {
            match self.write(name, content) {
                Err(error) if is_full(&error) => {
                    self.lacks_room.store(true, Ordering::Relaxed);
                    self.is_behind.notify_one();
                    // The next room that there is.
                    if !rooms.any(|room| fs::remove_file(self.path(room)).is_ok()) {
                        return Err(error);
                    }
                }
                written => return written,
            }
        }
    }

    /// Makes the files that keep room, as far as they are missing.
    fn keep_room(&self) -> io::Result<()> {
        for room in ROOMS {
            let path = self.path(room);
            let size = fs::metadata(&path).map_or(0, |file| file.len());
            if size == ROOM as u64 {
                continue;
            }
            if let Err(error) = fs::write(&path, vec![0; ROOM]) {
                let _ = fs::remove_file(&path);
                return Err(error);
            }
        }
        self.lacks_room.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn late(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        // Single insertions and removals: the map is valid after any panic.
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what waits. Returns whether nothing is left to be done.
    fn has_caught_up(&self) -> bool {
        let mut late = self.late();
        late.retain(|name, content| self.write_with_room(name, content).is_err());
        late.is_empty() && (!self.lacks_room.load(Ordering::Relaxed) || self.keep_room().is_ok())
    }
}

impl Store {
    /// Makes an empty store at `dir`, or beside it if a shim that ends has that still. The store of
    /// a shim that died is removed.
    ///
    /// # Errors
    /// The directory cannot be made, or has no room.
    pub fn make(dir: &Path) -> io::Result<Self> {
        for number in 0..MOST_AT_ONCE {
            let path = numbered(dir, number);
            remove_dead(&path)?;
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            let file = open(&path)?;
            // Another process may take it for a dead one's just before it is locked.
            if lock(&file)? && is_at(&file, &path) {
                let store = Self::open(file);
                let room = store.directory().map_or(Ok(()), Directory::keep_room);
                return room.inspect_err(|_| store.delete()).map(|()| store);
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Returns the store that an earlier process has made, by its directory.
    pub fn open(file: OwnedFd) -> Self {
        let late = Mutex::default();
        // Files that keep room may be missing.
        let (lacks_room, is_behind) = (AtomicBool::new(true), Notify::new());
        is_behind.notify_one();
        Self(Some(Arc::new(Directory { file, late, lacks_room, is_behind })))
    }

    /// Returns the path of a file, which leads to it while this process has the store. A store that
    /// is nowhere has none.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.directory().map(|directory| directory.path(name))
    }

    fn directory(&self) -> Option<&Directory> {
        self.0.as_deref()
    }

    /// Returns a copy of the directory's descriptor, by which the next process opens the store.
    ///
    /// # Errors
    /// The process has no descriptor left, or nothing is kept.
    pub fn share(&self) -> io::Result<OwnedFd> {
        self.directory().ok_or(io::ErrorKind::NotFound)?.file.try_clone()
    }

    /// Returns whether the directory was removed: the work of its shim was done.
    pub fn is_gone(&self) -> bool {
        self.directory().is_some_and(|directory| directory.own_path().is_none())
    }

    /// Writes a file, in place of the one by this name. A failure is logged, and the file is
    /// written once there is room.
    pub fn put(&self, name: &str, content: &[u8]) {
        let Some(directory) = self.directory() else { return };
        let written = directory.write_with_room(name, content);
        match &written {
            Ok(()) => drop(directory.late().remove(name)),
            Err(_) => {
                directory.late().insert(name.to_owned(), content.to_owned());
                directory.is_behind.notify_one();
            }
        }
        warn(name, written);
    }

    /// Writes a file, in place of the one by this name, before what it tells of is done.
    ///
    /// # Errors
    /// It cannot be written, and the old one stays.
    pub fn try_put(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let Some(directory) = self.directory() else { return Ok(()) };
        directory.write(name, content)?;
        directory.late().remove(name);
        Ok(())
    }

    /// Writes a file as [`try_put`](Self::try_put) does, with the room that is kept if there is no
    /// other: of a call that gives room back.
    ///
    /// # Errors
    /// It cannot be written, and the old one stays.
    pub fn put_with_room(&self, name: &str, content: &[u8]) -> io::Result<()> {
        self.directory().map_or(Ok(()), |directory| directory.write_with_room(name, content))
    }

    /// Writes a value as JSON, as [`put`](Self::put) does.
    pub fn put_json(&self, name: &str, value: &impl Serialize) {
        match serde_json::to_vec(value) {
            Ok(json) => self.put(name, &json),
            Err(error) => warn(name, Err(error.into())),
        }
    }

    /// Writes a value as JSON, as [`try_put`](Self::try_put) does.
    ///
    /// # Errors
    /// It cannot be written, and the old one stays.
    pub fn try_put_json(&self, name: &str, value: &impl Serialize) -> io::Result<()> {
        self.try_put(name, &serde_json::to_vec(value)?)
    }

    /// Writes `piece` behind the first `before` bytes of a file; 0 stands for a new file. A process
    /// that is killed may leave a part of it.
    ///
    /// # Errors
    /// It cannot be written. A part of it may be there, and is written over by the next attempt.
    pub fn append(&self, name: &str, piece: &[u8], before: usize) -> io::Result<()> {
        let Some(directory) = self.directory() else { return Ok(()) };
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(before == 0);
        options.open(directory.path(name))?.write_all_at(piece, before as u64)
    }

    /// Opens a file of `size` bytes for writing, and makes it if there is none, of zeros. It has
    /// its room from then on: a write within it does not fail for want of any. Returns `None` if
    /// nothing is kept.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn fixed(&self, name: &str, size: usize) -> io::Result<Option<File>> {
        let Some(directory) = self.directory() else { return Ok(None) };
        let mut options = OpenOptions::new();
        options.create(true).write(true).truncate(false);
        let file = options.open(directory.path(name))?;
        if file.metadata()?.len() < size as u64 {
            file.write_all_at(&vec![0; size], 0)?;
        }
        Ok(Some(file))
    }

    /// Gives a file another name.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let Some(directory) = self.directory() else { return Ok(()) };
        fs::rename(directory.path(from), directory.path(to))
    }

    /// Reads a file, if there is one.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.directory()?.path(name)).ok()
    }

    /// Reads a value that was written as JSON. A value that cannot be read is logged.
    pub fn get_json<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let read = serde_json::from_slice(&self.get(name)?);
        read.map_err(|error| warn(name, Err(error.into()))).ok()
    }

    /// Removes a file. That there is none is no error.
    pub fn remove(&self, name: &str) {
        if let Some(directory) = self.directory() {
            directory.late().remove(name);
            let _ = fs::remove_file(directory.path(name));
        }
    }

    /// Returns the names of the files whose names begin with `prefix`, in order.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let Some(directory) = self.directory() else { return Vec::new() };
        let entries = fs::read_dir(directory.path("")).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let is_one = |name: &String| name.starts_with(prefix) && !name.starts_with('.');
        let mut names: Vec<_> = names.filter(is_one).collect();
        names.sort();
        names
    }

    /// Writes what could not be written, once there is room. Never returns.
    pub async fn catch_up(&self) {
        let Some(directory) = self.directory() else { return std::future::pending().await };
        loop {
            directory.is_behind.notified().await;
            while !directory.has_caught_up() {
                tokio::time::sleep(AGAIN).await;
            }
        }
    }

    /// Removes the directory with all files.
    pub fn delete(&self) {
        if let Some(path) = self.directory().and_then(Directory::own_path) {
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// Removes the stores in the directory `sockets` whose shims died with their holders.
pub fn sweep(sockets: &Path) {
    for entry in fs::read_dir(sockets).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let Some((shim, rest)) = name.to_str().and_then(|name| name.split_once('.')) else {
            continue;
        };
        let is_store = rest.rsplit('.').next() == Some(EXTENSION);
        // A shim of an earlier build has not locked its store.
        let serves = || UnixStream::connect(sockets.join(shim)).is_ok();
        if is_store && is_dead(&path) && !serves() {
            // One that cannot be removed takes a little memory.
            let _ = remove_dead(&path);
        }
    }
}

fn is_dead(path: &Path) -> bool {
    open(path).and_then(lock).unwrap_or(false)
}

/// Returns the path of a store beside `dir`; 0 stands for that itself.
fn numbered(dir: &Path, number: usize) -> PathBuf {
    match number {
        0 => dir.to_owned(),
        _ => dir.with_extension(format!("{number}.{EXTENSION}")),
    }
}

/// Removes a store, if there is one and nobody has it.
fn remove_dead(path: &Path) -> io::Result<()> {
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    // Removed while it is locked: nobody else removes it, and then the next one by its name.
    match lock(&file)? && is_at(&file, path) {
        true => fs::remove_dir_all(path),
        false => Ok(()),
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

/// Locks a directory until its last descriptor is closed. Returns `false` if it is locked.
fn lock(file: impl AsFd) -> io::Result<bool> {
    let operation = FlockOperation::NonBlockingLockExclusive;
    #[allow(clippy::disallowed_methods, reason = "nobody but its user could ever open it")]
    let locked = rustix::fs::flock(file, operation);
    match locked {
        Err(Errno::WOULDBLOCK) => Ok(false),
        locked => Ok(locked.map(|()| true)?),
    }
}

/// Returns whether the open directory is the one at `path`.
fn is_at(file: &OwnedFd, path: &Path) -> bool {
    let open = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (Ok(open), Ok(there)) = (open, fs::symlink_metadata(path)) else { return false };
    (open.ino(), open.dev()) == (there.ino(), there.dev())
}

/// Returns the name of a file of this kind for what these parts name, which may be any text.
pub fn name(kind: &str, parts: &[&str]) -> String {
    format!("{kind}-{}", &hex::encode(Sha256::digest(parts.join("/")))[..32])
}

/// Returns whether a file system has no room.
pub fn is_full(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

fn warn(name: &str, outcome: io::Result<()>) {
    if let Err(error) = outcome {
        crate::log::warn(&format!("{name} would not outlive the shim's process: {error}"));
    }
}

#[cfg(test)]
#[path = "tests/store.rs"]
mod tests;
