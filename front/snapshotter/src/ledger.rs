//! The ledger of snapshots: one file, and one transaction for each call.
//!
//! A record is the truth about a snapshot. Its directory is made within the transaction that adds
//! the record, and removed after the one that removes it: a crash leaves directories without a
//! record, which the next start removes, and no record without its directory.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use redb::backends::FileBackend;
use redb::{
    Builder, Database, ReadableDatabase, ReadableTable, Table, TableDefinition, WriteTransaction,
};

use crate::record::{Chain, Commit, NewSnapshot, Record, SnapshotKind};
use crate::refusal::{Refusal, Result, shown};

/// Records by the key or name of their snapshot.
const SNAPSHOTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("snapshots");
/// References of images that are in the node's cache for the sake of snapshots alone.
const IMAGES: TableDefinition<'_, &str, ()> = TableDefinition::new("images");
/// The numbers `format` and `next`, the id of the next snapshot.
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("slipway-snapshotter");
/// The version of the file's format.
const FORMAT: u64 = 1;
/// The most bytes of the file that are kept in memory.
const CACHE: usize = 4 << 20;
/// The longest chain of snapshots; overlayfs takes 500 layers.
const LONGEST: usize = 1024;

/// The ledger's file.
pub struct Ledger {
    database: Database,
}

impl Ledger {
    /// Opens the file at `path`, and makes it if it is missing. No other process may have it open.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the file cannot be read or written, is damaged, or is of a later build.
    pub fn open(path: &Path) -> Result<Self> {
        let at = |error: &dyn Display| {
            Refusal::Failed(format!(
                "{}: {error}; restore it from a copy, or move it away and remove containerd's \
                 images of this snapshotter",
                path.display()
            ))
        };
        let mut options = std::fs::File::options();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path).map_err(|error| at(&error))?;
        let backend = FileBackend::new(file).map_err(|error| at(&error))?;
        let database = Builder::new().set_cache_size(CACHE).create_with_backend(backend);
        let ledger = Self { database: database.map_err(|error| at(&error))? };
        let format = ledger.write(|tables| tables.format()).map_err(|error| at(&error))?;
        match format {
            FORMAT => Ok(ledger),
            found => Err(at(&format!("its format is {found}, and {FORMAT} is known here"))),
        }
    }

    /// Makes a change in one transaction. If it fails, nothing has changed.
    fn write<T>(&self, change: impl FnOnce(&mut Tables<'_>) -> Result<T>) -> Result<T> {
        let transaction = self.database.begin_write().map_err(failed)?;
        let value = Tables::open(&transaction).and_then(|mut tables| change(&mut tables))?;
        transaction.commit().map_err(failed)?;
        Ok(value)
    }

    /// Adds a snapshot. `make` makes its directory, from its id and its parent's.
    ///
    /// # Errors
    /// [`Refusal::Exists`]; [`Refusal::NotFound`] without the parent; [`Refusal::Invalid`] if that
    /// is no layer; [`Refusal::Failed`].
    pub fn create(
        &self,
        new: &NewSnapshot,
        make: impl FnOnce(u64, Option<u64>) -> io::Result<()>,
    ) -> Result<Chain> {
        self.write(|tables| {
            let parents = tables.parents(&new.parent)?;
            if tables.find(&new.key)?.is_some() {
                return Err(Refusal::Exists(format!("snapshot {}", shown(&new.key))));
            }
            let id = tables.next_id()?;
            make(id, parents.first().copied()).map_err(failed)?;
            let now = now_ns();
            tables.add_child(&new.parent)?;
            let record = Record {
                id,
                kind: new.kind,
                parent: new.parent.clone(),
                children: 0,
                created_ns: now,
                updated_ns: now,
                labels: new.labels.clone(),
                usage: new.usage,
                remote: new.remote.clone(),
            };
            tables.put(&new.key, &record)?;
            Ok(Chain { id, kind: new.kind, parents })
        })
    }

    /// Makes an active snapshot a layer.
    ///
    /// # Errors
    /// [`Refusal::Exists`], [`Refusal::NotFound`]; [`Refusal::Precondition`] if it is not active,
    /// or the new parent is no layer; [`Refusal::Invalid`] if it has another parent already.
    pub fn commit(&self, commit: &Commit) -> Result<()> {
        self.write(|tables| {
            if tables.find(&commit.name)?.is_some() {
                return Err(Refusal::Exists(format!("snapshot {}", shown(&commit.name))));
            }
            let mut record = tables.get(&commit.key)?;
            if record.kind != SnapshotKind::Active {
                let what = shown(&commit.key);
                return Err(Refusal::Precondition(format!("snapshot {what} is not active")));
            }
            if !commit.parent.is_empty() && commit.parent != record.parent {
                tables.rebase(&mut record, commit)?;
            }
            record.kind = SnapshotKind::Committed;
            record.created_ns = now_ns();
            record.updated_ns = record.created_ns;
            record.labels = commit.labels.clone();
            record.usage = commit.usage;
            tables.snapshots.remove(commit.key.as_str()).map_err(failed)?;
            tables.put(&commit.name, &record)
        })
    }

    /// Removes a snapshot's record, and returns it.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Precondition`] while there are snapshots on top of it.
    pub fn remove(&self, key: &str) -> Result<Record> {
        self.write(|tables| {
            let record = tables.get(key)?;
            if record.children > 0 {
                let what = shown(key);
                return Err(Refusal::Precondition(format!("snapshot {what} has children")));
            }
            tables.remove_child(&record.parent)?;
            tables.snapshots.remove(key).map_err(failed)?;
            Ok(record)
        })
    }

    /// Changes the record of a snapshot by `change`, and returns it.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; those of `change`.
    pub fn update(
        &self,
        key: &str,
        change: impl FnOnce(&mut Record) -> Result<()>,
    ) -> Result<Record> {
        self.write(|tables| {
            let mut record = tables.get(key)?;
            change(&mut record)?;
            record.updated_ns = now_ns();
            tables.put(key, &record)?;
            Ok(record)
        })
    }

    /// Returns the record of a snapshot.
    ///
    /// # Errors
    /// [`Refusal::NotFound`].
    pub fn get(&self, key: &str) -> Result<Record> {
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = transaction.open_table(SNAPSHOTS).map_err(failed)?;
        match table.get(key).map_err(failed)? {
            Some(bytes) => decode(bytes.value()),
            None => Err(missing(key)),
        }
    }

    /// Returns the chain of an active snapshot or a view.
    ///
    /// # Errors
    /// [`Refusal::NotFound`]; [`Refusal::Precondition`] for a layer, which is not mounted itself.
    pub fn chain(&self, key: &str) -> Result<Chain> {
        let record = self.get(key)?;
        if record.kind == SnapshotKind::Committed {
            let what = shown(key);
            let why = format!("snapshot {what} is a layer: make a view of it");
            return Err(Refusal::Precondition(why));
        }
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = transaction.open_table(SNAPSHOTS).map_err(failed)?;
        let parents = parents(&table, &record.parent)?;
        Ok(Chain { id: record.id, kind: record.kind, parents })
    }

    /// Returns all snapshots that `is_wanted` chooses, sorted by key.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn list(&self, is_wanted: impl Fn(&str, &Record) -> bool) -> Result<Vec<(String, Record)>> {
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = transaction.open_table(SNAPSHOTS).map_err(failed)?;
        let mut found = Vec::new();
        for entry in table.iter().map_err(failed)? {
            let (key, bytes) = entry.map_err(failed)?;
            let record = decode(bytes.value())?;
            if is_wanted(key.value(), &record) {
                found.push((key.value().to_owned(), record));
            }
        }
        Ok(found)
    }

    /// Calls `look` with the ids of all snapshots, while none is made.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn with_ids<T>(&self, look: impl FnOnce(&BTreeSet<u64>) -> T) -> Result<T> {
        // Dropped without a commit: it only keeps others from making snapshots.
        let transaction = self.database.begin_write().map_err(failed)?;
        let tables = Tables::open(&transaction)?;
        let mut ids = BTreeSet::new();
        for entry in tables.snapshots.iter().map_err(failed)? {
            let (_, bytes) = entry.map_err(failed)?;
            ids.insert(decode(bytes.value())?.id);
        }
        Ok(look(&ids))
    }

    /// Returns the references of images of which no snapshot is left.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn unused_images(&self) -> Result<Vec<String>> {
        let remote = self.list(|_, record| record.remote.is_some())?;
        let used = remote.into_iter().filter_map(|(_, record)| record.remote);
        let used: BTreeSet<_> = used.map(|remote| remote.reference).collect();
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = transaction.open_table(IMAGES).map_err(failed)?;
        let mut unused = Vec::new();
        for entry in table.iter().map_err(failed)? {
            let (reference, _) = entry.map_err(failed)?;
            if !used.contains(reference.value()) {
                unused.push(reference.value().to_owned());
            }
        }
        Ok(unused)
    }

    /// Notes that the cache has an image, or is about to have it, for the sake of snapshots.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn own_image(&self, reference: &str) -> Result<()> {
        self.write(|tables| tables.images.insert(reference, ()).map(drop).map_err(failed))
    }

    /// Forgets that an image is in the cache for the sake of snapshots.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn forget_image(&self, reference: &str) -> Result<()> {
        self.write(|tables| tables.images.remove(reference).map(drop).map_err(failed))
    }
}

/// The tables within a transaction that changes them.
struct Tables<'t> {
    snapshots: Table<'t, &'static str, &'static [u8]>,
    images: Table<'t, &'static str, ()>,
    numbers: Table<'t, &'static str, u64>,
}

impl<'t> Tables<'t> {
    fn open(transaction: &'t WriteTransaction) -> Result<Self> {
        Ok(Self {
            snapshots: transaction.open_table(SNAPSHOTS).map_err(failed)?,
            images: transaction.open_table(IMAGES).map_err(failed)?,
            numbers: transaction.open_table(NUMBERS).map_err(failed)?,
        })
    }

    fn number(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.numbers.get(name).map_err(failed)?.map(|number| number.value()))
    }

    /// Returns the version of the format. A new file gets this build's.
    fn format(&mut self) -> Result<u64> {
        if let Some(found) = self.number("format")? {
            return Ok(found);
        }
        self.numbers.insert("format", FORMAT).map_err(failed)?;
        Ok(FORMAT)
    }

    fn next_id(&mut self) -> Result<u64> {
        let id = self.number("next")?.unwrap_or(1);
        self.numbers.insert("next", id + 1).map_err(failed)?;
        Ok(id)
    }

    fn find(&self, key: &str) -> Result<Option<Record>> {
        let found = self.snapshots.get(key).map_err(failed)?;
        found.map(|bytes| decode(bytes.value())).transpose()
    }

    fn get(&self, key: &str) -> Result<Record> {
        self.find(key)?.ok_or_else(|| missing(key))
    }

    fn put(&mut self, key: &str, record: &Record) -> Result<()> {
        let bytes = serde_json::to_vec(record).map_err(failed)?;
        self.snapshots.insert(key, bytes.as_slice()).map_err(failed)?;
        Ok(())
    }

    /// Returns the ids of the layers from `parent` down, after checking that it is one.
    fn parents(&self, parent: &str) -> Result<Vec<u64>> {
        if !parent.is_empty() && self.get(parent)?.kind != SnapshotKind::Committed {
            let what = shown(parent);
            return Err(Refusal::Invalid(format!("the parent {what} is not committed")));
        }
        parents(&self.snapshots, parent)
    }

    fn count(&mut self, parent: &str, count: impl FnOnce(u64) -> u64) -> Result<()> {
        if parent.is_empty() {
            return Ok(());
        }
        let mut record = self.get(parent)?;
        record.children = count(record.children);
        self.put(parent, &record)
    }

    fn add_child(&mut self, parent: &str) -> Result<()> {
        self.count(parent, |children| children + 1)
    }

    fn remove_child(&mut self, parent: &str) -> Result<()> {
        self.count(parent, |children| children.saturating_sub(1))
    }

    /// Gives a snapshot that was made without a parent the one that its commit names.
    fn rebase(&mut self, record: &mut Record, commit: &Commit) -> Result<()> {
        let (key, parent) = (shown(&commit.key), shown(&commit.parent));
        if !record.parent.is_empty() {
            return Err(Refusal::Invalid(format!("snapshot {key} has another parent already")));
        }
        if self.get(&commit.parent)?.kind != SnapshotKind::Committed {
            return Err(Refusal::Precondition(format!("the parent {parent} is not committed")));
        }
        self.add_child(&commit.parent)?;
        record.parent = commit.parent.clone();
        Ok(())
    }
}

/// Returns the ids of the layers from `parent` down.
fn parents(
    table: &impl ReadableTable<&'static str, &'static [u8]>,
    parent: &str,
) -> Result<Vec<u64>> {
    let (mut ids, mut next) = (Vec::new(), parent.to_owned());
    while !next.is_empty() {
        let found = table.get(next.as_str()).map_err(failed)?;
        let record = decode(found.ok_or_else(|| missing(&next))?.value())?;
        ids.push(record.id);
        if ids.len() > LONGEST {
            return Err(Refusal::Invalid(format!("a chain has more than {LONGEST} snapshots")));
        }
        next = record.parent;
    }
    Ok(ids)
}

fn decode(bytes: &[u8]) -> Result<Record> {
    serde_json::from_slice(bytes).map_err(failed)
}

fn missing(key: &str) -> Refusal {
    Refusal::NotFound(format!("snapshot {}", shown(key)))
}

fn failed(error: impl Display) -> Refusal {
    Refusal::Failed(error.to_string())
}

/// Returns the time since the epoch in nanoseconds.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
