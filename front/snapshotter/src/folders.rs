//! Directories of snapshots: `snapshots/ID/fs` and `snapshots/ID/work`, as containerd's overlayfs
//! snapshotter has them.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::record::{SnapshotKind, Usage};

/// The directory of files and modes in a snapshot's.
pub const FILES: &str = "fs";
/// overlayfs's working directory beside it.
const WORK: &str = "work";
/// The beginning of the names of directories that are being removed.
const GONE: &str = "gone-";
const FILES_MODE: u32 = 0o755;
const WORK_MODE: u32 = 0o711;

/// Directories of snapshots, and of those that are being made.
pub struct Folders {
    snapshots: PathBuf,
    staging: PathBuf,
    /// The number of directories that were taken away.
    gone: AtomicU64,
}

impl Folders {
    /// Opens the directories below `root`, and makes them if they are missing. Removes what was
    /// being made when an earlier process died.
    ///
    /// # Errors
    /// A directory cannot be made, or belongs to another user.
    pub fn open(root: &Path) -> io::Result<Self> {
        let [snapshots, staging] = ["snapshots", "staging"].map(|name| root.join(name));
        for dir in [&snapshots, &staging] {
            slipway_private::make_folder(dir).map_err(io::Error::other)?;
        }
        for entry in fs::read_dir(&staging)? {
            fs::remove_dir_all(entry?.path())?;
        }
        Ok(Self { snapshots, staging, gone: AtomicU64::new(0) })
    }

    /// Returns the directory of a snapshot's files.
    pub fn files(&self, id: u64) -> PathBuf {
        self.of(id).join(FILES)
    }

    /// Returns overlayfs's working directory of a snapshot.
    pub fn work(&self, id: u64) -> PathBuf {
        self.of(id).join(WORK)
    }

    fn of(&self, id: u64) -> PathBuf {
        self.snapshots.join(id.to_string())
    }

    /// Makes the directory of a snapshot without a record. Its files have their parent's owner.
    ///
    /// # Errors
    /// The first system call that fails. Nothing is left then, if it can be removed.
    pub fn make(&self, id: u64, kind: SnapshotKind, parent: Option<u64>) -> io::Result<()> {
        let dir = self.of(id);
        remove(&dir)?;
        let made = self.make_in(&dir, kind, parent);
        if made.is_err() {
            // A directory that cannot be removed is removed with other leftovers.
            let _ = remove(&dir);
        }
        made
    }

    fn make_in(&self, dir: &Path, kind: SnapshotKind, parent: Option<u64>) -> io::Result<()> {
        make_dir(dir, 0o700)?;
        let files = dir.join(FILES);
        make_dir(&files, FILES_MODE)?;
        if kind == SnapshotKind::Active {
            make_dir(&dir.join(WORK), WORK_MODE)?;
        }
        if let Some(parent) = parent {
            let owner = fs::metadata(self.files(parent))?;
            lchown(&files, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(())
    }

    /// Makes a directory aside, with an empty directory for files, which [`adopt`](Self::adopt)
    /// makes a snapshot's. It is removed when the result is dropped before that.
    ///
    /// # Errors
    /// A directory cannot be made.
    pub fn stage(&self) -> io::Result<tempfile::TempDir> {
        let dir = tempfile::Builder::new().prefix("new-").tempdir_in(&self.staging)?;
        make_dir(&dir.path().join(FILES), FILES_MODE)?;
        Ok(dir)
    }

    /// Makes a directory that was made aside a snapshot's, durably.
    ///
    /// # Errors
    /// The first system call that fails.
    pub fn adopt(&self, staged: &Path, id: u64) -> io::Result<()> {
        let dir = self.of(id);
        remove(&dir)?;
        File::open(staged)?.sync_all()?;
        fs::rename(staged, &dir)?;
        File::open(&self.snapshots)?.sync_all()
    }

    /// Removes the directory of a snapshot whose record was removed.
    ///
    /// # Errors
    /// Something in it cannot be removed; [`sweep`](Self::sweep) tries again.
    pub fn remove(&self, id: u64) -> io::Result<()> {
        remove(&self.of(id))
    }

    /// Takes directories away that belong to none of the snapshots `ids`, so that nothing finds
    /// them any more, and returns where they are. No snapshot may be made meanwhile.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn take_away(&self, ids: &BTreeSet<u64>) -> io::Result<Vec<PathBuf>> {
        let mut taken = Vec::new();
        for entry in fs::read_dir(&self.snapshots)? {
            let (name, path) = entry.map(|entry| (entry.file_name(), entry.path()))?;
            let name = name.to_string_lossy();
            if name.starts_with(GONE) {
                taken.push(path);
                continue;
            }
            let id = name.parse::<u64>().ok().filter(|id| id.to_string() == *name);
            if id.is_some_and(|id| ids.contains(&id)) {
                continue;
            }
            let away = self.unused_name();
            fs::rename(&path, &away)?;
            taken.push(away);
        }
        Ok(taken)
    }

    fn unused_name(&self) -> PathBuf {
        loop {
            let number = self.gone.fetch_add(1, Ordering::Relaxed);
            let path = self.snapshots.join(format!("{GONE}{number}"));
            if !path.exists() {
                return path;
            }
        }
    }

    /// Returns the space that a snapshot's own files take.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn usage(&self, id: u64) -> io::Result<Usage> {
        usage(&self.files(id))
    }
}

/// Writes all files of the file system that has `dir` to its disk: many small ones at once.
///
/// # Errors
/// The directory cannot be opened, or the disk fails.
pub fn sync(dir: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(dir)?)?)
}

/// Returns the space that `top` and the files below it take: blocks on the disk, and inodes, each
/// once. Files that go meanwhile do not count.
///
/// # Errors
/// A directory cannot be read.
pub fn usage(top: &Path) -> io::Result<Usage> {
    let (mut usage, mut seen) = (Usage::default(), BTreeSet::new());
    let mut add = |metadata: &Metadata| {
        if seen.insert((metadata.dev(), metadata.ino())) {
            usage.bytes += metadata.blocks() * 512;
            usage.inodes += 1;
        }
    };
    add(&fs::symlink_metadata(top)?);
    let mut left = vec![top.to_owned()];
    while let Some(dir) = left.pop() {
        let Some(entries) = if_there(fs::read_dir(&dir))? else { continue };
        for entry in entries {
            let entry = entry?;
            let Some(metadata) = if_there(entry.metadata())? else { continue };
            add(&metadata);
            if metadata.is_dir() {
                left.push(entry.path());
            }
        }
    }
    Ok(usage)
}

fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

/// Removes a directory with all that is in it. That it is missing is no error.
///
/// # Errors
/// Something in it cannot be removed.
pub fn remove(dir: &Path) -> io::Result<()> {
    if_there(fs::remove_dir_all(dir)).map(drop)
}

/// Makes a directory with this mode, whatever the umask is.
fn make_dir(dir: &Path, mode: u32) -> io::Result<()> {
    fs::create_dir(dir)?;
    fs::set_permissions(dir, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_have_their_modes_and_their_usage() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::open(root.path()).unwrap();
        folders.make(1, SnapshotKind::Active, None).unwrap();
        folders.make(2, SnapshotKind::View, Some(1)).unwrap();
        let mode = |path: PathBuf| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!(mode(folders.of(1)), 0o700);
        assert_eq!((mode(folders.files(1)), mode(folders.work(1))), (0o755, 0o711));
        assert!(folders.files(2).is_dir() && !folders.work(2).exists());
        let empty = folders.usage(1).unwrap();
        assert_eq!(empty.inodes, 1);
        fs::create_dir(folders.files(1).join("d")).unwrap();
        fs::write(folders.files(1).join("d/f"), vec![1; 8192]).unwrap();
        fs::hard_link(folders.files(1).join("d/f"), folders.files(1).join("g")).unwrap();
        let usage = folders.usage(1).unwrap();
        assert_eq!(usage.inodes, 3);
        assert!(usage.bytes >= empty.bytes + 8192);
    }

    #[test]
    fn what_belongs_to_no_snapshot_is_taken_away() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::open(root.path()).unwrap();
        for id in [1, 2] {
            folders.make(id, SnapshotKind::Active, None).unwrap();
        }
        fs::create_dir(root.path().join("snapshots/01")).unwrap();
        fs::create_dir(root.path().join("snapshots/gone-0")).unwrap();
        let taken = folders.take_away(&BTreeSet::from([2])).unwrap();
        assert_eq!(taken.len(), 3);
        assert!(!folders.of(1).exists() && folders.of(2).is_dir());
        for path in taken {
            remove(&path).unwrap();
        }
        assert_eq!(fs::read_dir(root.path().join("snapshots")).unwrap().count(), 1);
    }

    #[test]
    fn what_was_being_made_goes_at_the_next_start() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::open(root.path()).unwrap();
        let dropped = folders.stage().unwrap();
        let path = dropped.path().to_owned();
        drop(dropped);
        assert!(!path.exists());
        let killed = folders.stage().unwrap().keep();
        let adopted = folders.stage().unwrap();
        folders.adopt(adopted.path(), 5).unwrap();
        drop(adopted);
        let folders = Folders::open(root.path()).unwrap();
        assert!(!killed.exists() && folders.files(5).is_dir());
    }
}
