//! The ledger's file.

use std::fs::File;
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use redb::backends::FileBackend;
use redb::{Builder, Database, DatabaseError, ReadableDatabase, TableDefinition, TableError};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use slipway_lock::Lock;

use super::{Ledger, LedgerError};

/// The key is the word "format".
pub(super) const FORMAT: TableDefinition<'_, &str, u32> = TableDefinition::new("slipway-vf-ledger");
/// Records by pool and VF.
pub(super) const VFS: TableDefinition<'_, (&str, u32), &[u8]> = TableDefinition::new("vfs");
/// VFs that are to be closed as soon as nobody has them, by pool. Files of earlier versions lack
/// the table.
pub(super) const DRAINS: TableDefinition<'_, (&str, u32), ()> = TableDefinition::new("drains");
/// Templates by pool.
pub(super) const POOLS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("pools");
/// The time for which a lock is waited for. A process that was forked from the last holder has its
/// descriptors, and so its locks, until it runs its own program.
const PATIENCE: Duration = Duration::from_millis(500);
/// The time between two attempts.
const LOOK: Duration = Duration::from_millis(5);
/// The most bytes of the file that are kept in memory.
const CACHE: usize = 4 << 20;

/// Takes the lock beside the file at `path`: its holder alone may open, make or move the file. The
/// store's own lock of the file is no help: a damaged file is no store.
pub(super) fn lock(path: &Path) -> Result<Lock, LedgerError> {
    let lock = Lock::within(&PathBuf::from(format!("{}.lock", path.display())), PATIENCE);
    lock.map_err(|error| match error {
        slipway_lock::Error::Held { .. } => LedgerError::InUse { path: path.into() },
        error => io(path, "opened", error),
    })
}

/// Opens the file at `path`, and makes one if there is none. The caller has the lock.
pub(super) fn open(path: &Path) -> Result<Database, LedgerError> {
    let begun = Instant::now();
    loop {
        match open_once(path) {
            Err(LedgerError::InUse { .. }) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(LOOK);
            }
            result => return result,
        }
    }
}

fn open_once(path: &Path) -> Result<Database, LedgerError> {
    match open_file(path) {
        Ok(file) => check(path, file),
        Err(Errno::NOENT) => make(path),
        Err(error) => Err(io(path, "opened", error)),
    }
}

/// Moves the file at `path` away. Returns its new path, or `None` if there is no file. The caller
/// has the lock.
pub(super) fn move_away(path: &Path) -> Result<Option<PathBuf>, LedgerError> {
    let aside = |n: u32| PathBuf::from(format!("{}.damaged-{n}", path.display()));
    let Some(aside) = (1..=1000).map(aside).find(|path| !path.exists()) else {
        return Err(io(path, "moved away", "there are 1000 damaged ones; remove some"));
    };
    match std::fs::rename(path, &aside) {
        Ok(()) => Ok(Some(aside)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io(path, "moved away", error)),
    }
}

fn open_file(path: &Path) -> Result<File, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(CWD, path, flags, Mode::empty()).map(File::from)
}

/// Makes the file under another name and moves it into place when it is whole: a file at `path`
/// that is empty or short was damaged.
fn make(path: &Path) -> Result<Database, LedgerError> {
    let new = PathBuf::from(format!("{}.new", path.display()));
    // Left by a process that was killed here.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(io(path, "written", error));
        }
        _ => {}
    }
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::CREATE | OFlags::EXCL;
    let file = rustix::fs::openat(CWD, &new, flags, Mode::RUSR | Mode::WUSR);
    let file = file.map_err(|error| io(path, "written", error))?;
    let database = store(file.into(), false).map_err(|error| damage(path, error))?;
    initialise(&database).map_err(|error| io(path, "written", error))?;
    std::fs::rename(&new, path).map_err(|error| io(path, "written", error))?;
    Ok(database)
}

/// Opens the store in a file that is empty or has one.
fn store(file: File, is_checked: bool) -> Result<Database, DatabaseError> {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE).set_check_integrity_on_open(is_checked);
    builder.create_with_backend(FileBackend::new(file)?)
}

fn initialise(database: &Database) -> Result<(), redb::Error> {
    let transaction = database.begin_write()?;
    transaction.open_table(FORMAT)?.insert("format", Ledger::FORMAT)?;
    transaction.open_table(VFS)?;
    transaction.open_table(DRAINS)?;
    transaction.open_table(POOLS)?;
    transaction.commit()?;
    Ok(())
}

/// Opens a file that is there, and checks it.
fn check(path: &Path, file: File) -> Result<Database, LedgerError> {
    let damaged = |reason: String| LedgerError::Damaged { path: path.into(), reason };
    let length = file.metadata().map_err(|error| io(path, "opened", error))?;
    if !length.is_file() {
        return Err(damaged("not a regular file".into()));
    }
    if length.len() == 0 {
        return Err(damaged("it is empty".into()));
    }
    // The store asserts some of what it reads from the file's header.
    let database = catch_unwind(AssertUnwindSafe(|| store(file, true)))
        .map_err(|panic| damaged(format!("its head makes no sense: {}", said(&*panic))))?
        .map_err(|error| damage(path, error))?;
    let found = catch_unwind(AssertUnwindSafe(|| format(&database)))
        .map_err(|panic| damaged(format!("its tables make no sense: {}", said(&*panic))))?;
    match found.map_err(|error| damaged(error.to_string()))? {
        Some(Ledger::FORMAT) => Ok(database),
        Some(found) => {
            Err(LedgerError::Foreign { path: path.into(), found, known: Ledger::FORMAT })
        }
        None => Err(damaged("it is a database of something else".into())),
    }
}

fn format(database: &Database) -> Result<Option<u32>, redb::Error> {
    let transaction = database.begin_read()?;
    match transaction.open_table(FORMAT) {
        Ok(table) => Ok(redb::ReadableTable::get(&table, "format")?.map(|value| value.value())),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn damage(path: &Path, error: DatabaseError) -> LedgerError {
    match error {
        DatabaseError::DatabaseAlreadyOpen => LedgerError::InUse { path: path.into() },
        // A file that ends too soon reads as this.
        DatabaseError::Storage(redb::StorageError::Io(error))
            if !matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData) =>
        {
            io(path, "opened", error)
        }
        error => LedgerError::Damaged { path: path.into(), reason: error.to_string() },
    }
}

pub(super) fn io(path: &Path, action: &'static str, error: impl std::fmt::Display) -> LedgerError {
    LedgerError::Io { path: path.into(), action, reason: error.to_string() }
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    // An assertion's text has several lines.
    text.unwrap_or_default().lines().next().unwrap_or("no reason").to_owned()
}
