//! Writers that come at the same time share a transaction.
//!
//! Each writer adds its change to the queue and then waits for the database. The first one that
//! gets it commits all changes of the queue; the others find theirs done.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redb::{Database, ReadableDatabase, ReadableTable, TableError};
use slipway_lock::Lock;

use super::LedgerError;
use super::file::{DRAINS, POOLS, VFS, io};

pub(super) enum Change {
    Vf { pool: String, vf: u32, value: Option<Vec<u8>> },
    Drain { pool: String, vf: u32, is_wanted: bool },
    Pool { pool: String, value: Option<Vec<u8>> },
}

pub(super) struct Commits {
    path: PathBuf,
    queue: Mutex<Queue>,
    store: Mutex<Store>,
    /// Released after the database is closed: fields are dropped in their order.
    _lock: Lock,
}

/// Changes that no transaction has yet, in their order.
#[derive(Default)]
struct Queue {
    changes: Vec<Change>,
    /// The number of the next change.
    next: u64,
}

struct Store {
    database: Database,
    /// The number of the first change that no transaction has had.
    done: u64,
    /// Changes whose transaction failed, with the reason, until their writers have seen it.
    failed: BTreeMap<u64, String>,
}

impl Commits {
    pub(super) fn new(path: PathBuf, database: Database, lock: Lock) -> Self {
        let store = Store { database, done: 0, failed: BTreeMap::new() };
        Self { path, queue: Mutex::default(), store: Mutex::new(store), _lock: lock }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn commit(&self, change: Change) -> Result<(), LedgerError> {
        let number = {
            let mut queue = lock(&self.queue);
            queue.changes.push(change);
            queue.next += 1;
            queue.next - 1
        };
        let mut store = lock(&self.store);
        if store.done <= number {
            let (changes, end) = {
                let mut queue = lock(&self.queue);
                (std::mem::take(&mut queue.changes), queue.next)
            };
            let result = write(&store.database, &changes);
            if let Err(error) = result {
                let why = error.to_string();
                let begin = store.done;
                store.failed.extend((begin..end).map(|number| (number, why.clone())));
            }
            store.done = end;
        }
        match store.failed.remove(&number) {
            Some(why) => Err(io(&self.path, "written", why)),
            None => Ok(()),
        }
    }

    pub(super) fn vfs(&self, pool: &str) -> Result<Vec<(u32, Vec<u8>)>, LedgerError> {
        let read = || -> Result<_, redb::Error> {
            let transaction = lock(&self.store).database.begin_read()?;
            let table = transaction.open_table(VFS)?;
            let records = table.range((pool, 0)..=(pool, u32::MAX))?;
            let record = |entry: Result<(redb::AccessGuard<'_, (&str, u32)>, _), _>| {
                let (key, value): (_, redb::AccessGuard<'_, &[u8]>) = entry?;
                Ok((key.value().1, value.value().to_vec()))
            };
            records.map(record).collect()
        };
        read().map_err(|error| io(&self.path, "read", error))
    }

    pub(super) fn drains(&self, pool: &str) -> Result<Vec<u32>, LedgerError> {
        let read = || -> Result<_, redb::Error> {
            let transaction = lock(&self.store).database.begin_read()?;
            let table = match transaction.open_table(DRAINS) {
                Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
                table => table?,
            };
            let mut vfs = Vec::new();
            for entry in table.range((pool, 0)..=(pool, u32::MAX))? {
                vfs.push(entry?.0.value().1);
            }
            Ok(vfs)
        };
        read().map_err(|error| io(&self.path, "read", error))
    }

    pub(super) fn pools(&self) -> Result<Vec<(String, Vec<u8>)>, LedgerError> {
        let read = || -> Result<_, redb::Error> {
            let transaction = lock(&self.store).database.begin_read()?;
            let table = transaction.open_table(POOLS)?;
            let mut pools = Vec::new();
            for entry in table.iter()? {
                let (key, value) = entry?;
                pools.push((key.value().to_owned(), value.value().to_vec()));
            }
            Ok(pools)
        };
        read().map_err(|error| io(&self.path, "read", error))
    }

    pub(super) fn pools_with_records(&self) -> Result<Vec<String>, LedgerError> {
        let read = || -> Result<_, redb::Error> {
            let transaction = lock(&self.store).database.begin_read()?;
            let mut pools = Vec::new();
            for entry in transaction.open_table(VFS)?.iter()? {
                pools.push(entry?.0.value().0.to_owned());
            }
            pools.dedup();
            Ok(pools)
        };
        read().map_err(|error| io(&self.path, "read", error))
    }
}

fn write(database: &Database, changes: &[Change]) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    {
        let mut vfs = transaction.open_table(VFS)?;
        let mut drains = transaction.open_table(DRAINS)?;
        let mut pools = transaction.open_table(POOLS)?;
        for change in changes {
            match change {
                Change::Vf { pool, vf, value: Some(value) } => {
                    vfs.insert((&**pool, *vf), &**value)?;
                }
                Change::Vf { pool, vf, value: None } => {
                    vfs.remove((&**pool, *vf))?;
                }
                Change::Drain { pool, vf, is_wanted: true } => {
                    drains.insert((&**pool, *vf), ())?;
                }
                Change::Drain { pool, vf, is_wanted: false } => {
                    drains.remove((&**pool, *vf))?;
                }
                Change::Pool { pool, value: Some(value) } => {
                    pools.insert(&**pool, &**value)?;
                }
                Change::Pool { pool, value: None } => {
                    pools.remove(&**pool)?;
                    vfs.retain_in((&**pool, 0)..=(&**pool, u32::MAX), |_, _| false)?;
                    drains.retain_in((&**pool, 0)..=(&**pool, u32::MAX), |_, ()| false)?;
                }
            }
        }
    }
    transaction.commit()?;
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
