//! Snapshots: their records in the ledger and their directories. Every call blocks, so those that
//! serve containerd make it on another thread ([`blocking`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_lock::Lock;

use crate::filter::Filters;
use crate::folders::{self, Folders};
use crate::ledger::Ledger;
use crate::mounts;
use crate::record::{Commit, NewSnapshot, Record, RemoteImage, SnapshotKind, Usage};
use crate::refusal::{Refusal, Result, shown};
use crate::v1::Mount;

/// The label of the snapshot that a snapshot for extraction is to become.
pub const TARGET: &str = "containerd.io/snapshot.ref";
/// The time for which the root's lock is waited for: a process that was forked from the last holder
/// has it until it runs its own program.
const PATIENCE: Duration = Duration::from_millis(500);

/// The snapshots of one root.
pub struct Store {
    ledger: Ledger,
    folders: Folders,
    /// The options of all overlays.
    common: Vec<String>,
    /// No other process has this root.
    _lock: Lock,
}

impl Store {
    /// Opens the snapshots of a root, and makes it if it is missing. Removes what a crash left.
    ///
    /// # Errors
    /// One line: another process has the root, or it cannot be read or written.
    pub fn open(root: &Path) -> Result<Self> {
        slipway_private::make_folder(root).map_err(|error| Refusal::Failed(error.to_string()))?;
        let lock = Lock::within(&root.join("lock"), PATIENCE).map_err(|error| {
            Refusal::Failed(format!(
                "{error}: is another slipway-snapshotter running with this --root?"
            ))
        })?;
        let ledger = Ledger::open(&root.join("metadata.redb"))?;
        let folders = Folders::open(root)
            .map_err(|error| Refusal::Failed(format!("{}: {error}", root.display())))?;
        let store = Self { ledger, folders, common: mounts::common(), _lock: lock };
        store.sweep()?;
        Ok(store)
    }

    /// Makes an active snapshot or a view.
    ///
    /// # Errors
    /// [`Refusal::Exists`], [`Refusal::NotFound`], [`Refusal::Invalid`], [`Refusal::Failed`].
    pub fn create(
        &self,
        kind: SnapshotKind,
        key: String,
        parent: String,
        labels: BTreeMap<String, String>,
    ) -> Result<Vec<Mount>> {
        let usage = Usage::default();
        let new = NewSnapshot { key, kind, parent, labels, usage, remote: None };
        let chain = self.ledger.create(&new, |id, parent| self.folders.make(id, kind, parent))?;
        Ok(mounts::mounts(&self.folders, &chain, &self.common))
    }

    /// Makes a directory for a remote snapshot, aside.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn stage(&self) -> Result<tempfile::TempDir> {
        self.folders.stage().map_err(|error| Refusal::Failed(error.to_string()))
    }

    /// Adds a remote snapshot, whose directory was made aside at `staged`.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn add_remote(&self, mut new: NewSnapshot, staged: &Path) -> Result<()> {
        let usage = folders::usage(&staged.join(folders::FILES));
        new.usage = usage.map_err(|error| Refusal::Failed(error.to_string()))?;
        self.ledger.create(&new, |id, _| self.folders.adopt(staged, id)).map(drop)
    }

    /// Returns whether there is a remote snapshot of this image on this parent for `target`.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn has_remote(&self, target: &str, parent: &str, remote: &RemoteImage) -> Result<bool> {
        let same = |record: &Record| {
            record.labels.get(TARGET).is_some_and(|found| found == target)
                && record.parent == parent
                && record.remote.as_ref() == Some(remote)
        };
        Ok(!self.ledger.list(|_, record| same(record))?.is_empty())
    }

    /// Returns the mounts of an active snapshot or a view.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Precondition`] for a layer.
    pub fn mounts(&self, key: &str) -> Result<Vec<Mount>> {
        let chain = self.ledger.chain(key)?;
        Ok(mounts::mounts(&self.folders, &chain, &self.common))
    }

    /// Makes an active snapshot a layer.
    ///
    /// # Errors
    /// [`Refusal::Exists`], [`Refusal::NotFound`], [`Refusal::Precondition`],
    /// [`Refusal::Invalid`], [`Refusal::Failed`].
    pub fn commit(&self, mut commit: Commit) -> Result<()> {
        let record = self.ledger.get(&commit.key)?;
        // Before the transaction: there may be many files.
        commit.usage = self.usage_of(&record)?;
        self.ledger.commit(&commit)
    }

    /// Removes a snapshot, and returns its record. Its directory goes now or at the next sweep.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Precondition`] while there are snapshots on top of it.
    pub fn remove(&self, key: &str) -> Result<Record> {
        let record = self.ledger.remove(key)?;
        if let Err(error) = self.folders.remove(record.id) {
            let id = record.id;
            tracing::warn!(id, %error, "a removed snapshot's directory stays for now");
        }
        Ok(record)
    }

    /// Returns the record of a snapshot.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub fn get(&self, key: &str) -> Result<Record> {
        self.ledger.get(key)
    }

    /// Changes labels of a snapshot: those of `paths` (`labels` or `labels.NAME`), or all.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Invalid`] for another field.
    pub fn update(
        &self,
        key: &str,
        labels: &BTreeMap<String, String>,
        paths: &[String],
    ) -> Result<Record> {
        self.ledger.update(key, |record| {
            if paths.is_empty() {
                record.labels = labels.clone();
            }
            for path in paths {
                match path.strip_prefix("labels.") {
                    // As containerd does, an empty label is removed.
                    Some(name) => match labels.get(name).filter(|value| !value.is_empty()) {
                        Some(value) => drop(record.labels.insert(name.to_owned(), value.clone())),
                        None => drop(record.labels.remove(name)),
                    },
                    None if path == "labels" => record.labels = labels.clone(),
                    None => {
                        let what = shown(path);
                        return Err(Refusal::Invalid(format!("{what} cannot be changed")));
                    }
                }
            }
            Ok(())
        })
    }

    /// Returns the snapshots that match one of the filters, sorted by name.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn list(&self, filters: &Filters) -> Result<Vec<(String, Record)>> {
        self.ledger.list(|name, record| filters.match_one(name, record))
    }

    /// Returns the space that a snapshot takes without its parents.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Failed`].
    pub fn usage(&self, key: &str) -> Result<Usage> {
        let record = self.ledger.get(key)?;
        match record.kind {
            SnapshotKind::Active => self.usage_of(&record),
            SnapshotKind::View | SnapshotKind::Committed => Ok(record.usage),
        }
    }

    fn usage_of(&self, record: &Record) -> Result<Usage> {
        let usage = self.folders.usage(record.id);
        usage.map_err(|error| Refusal::Failed(format!("snapshot {}: {error}", record.id)))
    }

    /// Removes directories that belong to no snapshot.
    ///
    /// # Errors
    /// [`Refusal::Failed`] if they cannot be listed. What cannot be removed stays, and is logged.
    pub fn sweep(&self) -> Result<()> {
        let taken = self.ledger.with_ids(|ids| self.folders.take_away(ids))?;
        let taken: Vec<PathBuf> = taken.map_err(|error| Refusal::Failed(error.to_string()))?;
        for path in taken {
            if let Err(error) = folders::remove(&path) {
                tracing::warn!(path = %path.display(), %error, "a leftover stays");
            }
        }
        Ok(())
    }

    /// Returns the references of images that are in the node's cache for snapshots of which none
    /// is left.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn unused_images(&self) -> Result<Vec<String>> {
        self.ledger.unused_images()
    }

    /// Notes that the cache has an image, or is about to have it, for the sake of snapshots.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn own_image(&self, reference: &str) -> Result<()> {
        self.ledger.own_image(reference)
    }

    /// Forgets such an image, which was removed from the cache.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn forget_image(&self, reference: &str) -> Result<()> {
        self.ledger.forget_image(reference)
    }
}

/// Does what blocks on another thread.
///
/// # Errors
/// The errors of the work.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::Failed(error.to_string()))?
}
