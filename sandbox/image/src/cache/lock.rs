//! Locks between processes and between tasks, on files that no other user can open
//! (`slipway_lock`). The kernel drops a lock with its process, so `kill -9` leaves none behind.

use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_lock::Lock;

use crate::{Error, Result};

/// The longest wait for the index. Its holder does a few file operations and one fsync, which a
/// busy disk may stretch to seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// A held lock whose file is removed with the lock.
#[derive(Debug)]
pub(crate) struct WorkLock {
    path: PathBuf,
    /// The lock is held as long as this lives.
    _lock: Lock,
}

impl WorkLock {
    /// Takes the lock at `path`. Returns `None` if another process or task holds it.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        match Lock::try_take(path) {
            Ok(lock) => Ok(Some(Self { path: path.to_owned(), _lock: lock })),
            Err(slipway_lock::Error::Held { .. }) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }
}

impl Drop for WorkLock {
    fn drop(&mut self) {
        // The file is removed before the descriptor releases the lock, since `Lock` checks that its
        // file is still the one at the path. A file that stays does no harm.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Waits for the lock on a permanent file. Blocks for up to [`PATIENCE`], so it must not run on a
/// thread that others wait for.
pub(crate) fn wait(path: &Path) -> Result<Lock> {
    Lock::within(path, PATIENCE).map_err(Error::from)
}
