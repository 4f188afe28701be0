//! Locks between processes and between tasks, by `flock` on files: the kernel drops them with the
//! process, so a `kill -9` leaves none behind.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::{Error, Result};

/// A held lock whose file goes when the lock does.
#[derive(Debug)]
pub(crate) struct WorkLock {
    path: PathBuf,
    /// Open as long as the lock is held.
    _file: File,
}

impl WorkLock {
    /// Takes the lock at `path`, or returns `None` if somebody has it.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        loop {
            let file = open(path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(Error::io("lock", path, e.into())),
            }
            // The last holder may have removed the file after it was opened here: then this lock
            // is on nothing that others would find.
            if is_at(&file, path) {
                return Ok(Some(Self { path: path.to_owned(), _file: file }));
            }
        }
    }
}

impl Drop for WorkLock {
    fn drop(&mut self) {
        // Before the lock goes with the file, see `try_take`. A file that stays does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(a), Ok(b)) => a.ino() == b.ino() && a.dev() == b.dev(),
        _ => false,
    }
}

/// Waits for the lock on a file that always stays. Held for a few file operations only.
pub(crate) fn wait(path: &Path) -> Result<File> {
    let file = open(path)?;
    loop {
        match flock(&file, FlockOperation::LockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("lock", path, e.into())),
        }
    }
}

fn open(path: &Path) -> Result<File> {
    let open = File::options().create(true).truncate(false).write(true).open(path);
    open.map_err(|e: io::Error| Error::io("open", path, e))
}
