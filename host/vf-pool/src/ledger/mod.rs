//! The ledger: which VF has which owner, in a file that outlives the process.

mod commit;
mod file;
mod record;

use std::path::{Path, PathBuf};

pub use record::{Record, Standing};

use commit::Commits;

/// The reason why the ledger cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file is damaged: cut off, overwritten, not a ledger at all.
    #[error(
        "the ledger {} is damaged ({reason}); stop what uses its VFs and start with an empty one: \
         slipway vf rebuild", path.display()
    )]
    Damaged {
        /// The ledger's file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// The file is one of another version of Slipway.
    #[error(
        "the ledger {} has format {found} and this slipway reads format {known}; run the version \
         that wrote it, or stop what uses its VFs and start with an empty one: slipway vf rebuild",
        path.display()
    )]
    Foreign {
        /// The ledger's file.
        path: PathBuf,
        /// The format in the file.
        found: u32,
        /// The format of this build.
        known: u32,
    },
    /// Another process has the ledger open.
    #[error("the ledger {} is in use by another process; one daemon may use it", path.display())]
    InUse {
        /// The ledger's file.
        path: PathBuf,
    },
    /// A system call failed, or an earlier one that the store has not got over.
    #[error("the ledger {} cannot be {action}: {reason}", path.display())]
    Io {
        /// The ledger's file.
        path: PathBuf,
        /// The failed action: "opened", "read", "written", "moved away".
        action: &'static str,
        /// The error.
        reason: String,
    },
}

/// The records and the drains of all VFs of all pools, and the pools' templates. Clones share it.
///
/// One process has a ledger open at a time. Methods may be called from any thread; each blocks
/// until its change is as durable as the file system makes it.
#[derive(Clone)]
pub struct Ledger {
    commits: std::sync::Arc<Commits>,
}

impl Ledger {
    /// The version of the file's content.
    pub const FORMAT: u32 = 1;

    /// Opens the ledger at `path`, and makes an empty one if there is no file. Each page of the
    /// file is checked.
    ///
    /// # Errors
    /// [`LedgerError`]; the file is as it was, and nothing is held.
    pub fn open(path: &Path) -> Result<Self, LedgerError> {
        Self::open_locked(path, file::lock(path)?)
    }

    fn open_locked(path: &Path, lock: slipway_lock::Lock) -> Result<Self, LedgerError> {
        let commits = Commits::new(path.to_owned(), file::open(path)?, lock);
        let ledger = Self { commits: std::sync::Arc::new(commits) };
        // Records that cannot be read are damage that the store cannot see.
        ledger.check()?;
        Ok(ledger)
    }

    /// Moves a damaged file away and opens an empty ledger in its place. Returns the path of the
    /// file that was moved, or `None` if there was none. No pool may use VFs that were recorded in
    /// it before somebody has made sure that their owners are gone.
    ///
    /// # Errors
    /// [`LedgerError`]: the file is in use, or it cannot be moved.
    pub fn rebuild(path: &Path) -> Result<(Self, Option<PathBuf>), LedgerError> {
        let lock = file::lock(path)?;
        let aside = file::move_away(path)?;
        Ok((Self::open_locked(path, lock)?, aside))
    }

    /// Writes the record of a VF, or removes it.
    ///
    /// # Errors
    /// [`LedgerError::Io`]: the record may or may not be there after a restart.
    pub fn write(&self, pool: &str, vf: u32, record: Option<&Record>) -> Result<(), LedgerError> {
        let value = record.map(Record::encode);
        self.commits.commit(commit::Change::Vf { pool: pool.to_owned(), vf, value })
    }

    /// Returns the records of a pool's VFs, ascending by VF.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn records(&self, pool: &str) -> Result<Vec<(u32, Record)>, LedgerError> {
        let decode = |(vf, value): (u32, Vec<u8>)| {
            let record = Record::decode(&value).map_err(|reason| {
                let reason = format!("record of VF {vf} of pool {pool}: {reason}");
                LedgerError::Damaged { path: self.commits.path().to_owned(), reason }
            })?;
            Ok((vf, record))
        };
        self.commits.vfs(pool)?.into_iter().map(decode).collect()
    }

    /// Notes that a VF is to be closed as soon as nobody has it, or that it is not any more.
    ///
    /// # Errors
    /// [`LedgerError::Io`]: either may hold after a restart.
    pub fn set_drain(&self, pool: &str, vf: u32, is_wanted: bool) -> Result<(), LedgerError> {
        self.commits.commit(commit::Change::Drain { pool: pool.to_owned(), vf, is_wanted })
    }

    /// Returns the VFs of a pool that are to be closed as soon as nobody has them, ascending.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn drains(&self, pool: &str) -> Result<Vec<u32>, LedgerError> {
        self.commits.drains(pool)
    }

    /// Stores the template of a pool, from which the next process makes the pool again, or removes
    /// it together with the records and the drains of the pool's VFs.
    ///
    /// # Errors
    /// [`LedgerError::Io`].
    pub fn set_template(&self, pool: &str, template: Option<&[u8]>) -> Result<(), LedgerError> {
        let value = template.map(<[u8]>::to_vec);
        self.commits.commit(commit::Change::Pool { pool: pool.to_owned(), value })
    }

    /// Returns the pools with their templates, ascending by name.
    ///
    /// # Errors
    /// [`LedgerError`].
    pub fn templates(&self) -> Result<Vec<(String, Vec<u8>)>, LedgerError> {
        self.commits.pools()
    }

    fn check(&self) -> Result<(), LedgerError> {
        for pool in self.commits.pools_with_records()? {
            self.records(&pool)?;
        }
        Ok(())
    }
}
