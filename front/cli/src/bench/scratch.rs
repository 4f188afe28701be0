//! Temporary folders of measurements. A process that is killed leaves its folder behind; the next
//! measurement in the same place removes it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use slipway_lock::Lock;
use tempfile::TempDir;

const PREFIX: &str = "slipway-bench";
/// The lock file in a folder. The owner holds the lock for as long as it lives, and the kernel
/// releases it in the end. The file gets this name only once it is locked, so an unlocked one is
/// left over.
const LOCK: &str = "lock";

/// A folder that is removed on drop.
pub struct Scratch {
    dir: TempDir,
    _lock: Lock,
}

impl Scratch {
    /// Makes a folder in `place`, and removes folders that ended processes of this user left there.
    ///
    /// # Errors
    /// If no folder can be made in `place`.
    pub fn make_in(place: &Path) -> Result<Self> {
        remove_left_over(place);
        let make = || -> std::io::Result<Self> {
            let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(place)?;
            let early = dir.path().join("lock.early");
            let lock = Lock::try_take(&early).map_err(std::io::Error::other)?;
            std::fs::rename(early, dir.path().join(LOCK))?;
            Ok(Self { dir, _lock: lock })
        };
        make().with_context(|| format!("no folder in {}", place.display()))
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes left-over folders in `place`. Failures are ignored: a file that stays in a place for
/// temporary files does no harm.
fn remove_left_over(place: &Path) {
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    for entry in entries {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX)
            && entry.metadata().is_ok_and(|found| {
                found.is_dir() && found.uid() == rustix::process::geteuid().as_raw()
            });
        if ours && is_left_over(&entry.path()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn is_left_over(dir: &Path) -> bool {
    Lock::try_existing(&dir.join(LOCK)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_holds_is_removed_by_the_next() {
        let place = tempfile::tempdir().unwrap();
        let alive = Scratch::make_in(place.path()).unwrap();
        // The state after kill -9: the folder and its file exist, the lock is not held.
        let dead = Scratch::make_in(place.path()).unwrap();
        let left = dead.dir.keep();
        drop(dead._lock);
        let others = place.path().join("slipway-benchmarks");
        std::fs::create_dir(&others).unwrap();
        let next = Scratch::make_in(place.path()).unwrap();
        assert!(alive.path().is_dir() && next.path().is_dir() && !left.exists());
        assert!(others.is_dir(), "a folder without a lock is somebody else's");
        let kept = [alive.path().to_owned(), next.path().to_owned()];
        drop((alive, next));
        assert!(kept.iter().all(|dir| !dir.exists()));
    }
}
