//! The one file that says which images there are and what they are called.
//!
//! It is replaced as a whole (new file, fsync, rename), so a crash leaves the old or the new state
//! and never half of one. An image file that it does not list is a leftover.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use slipway_lock::Lock;

use super::lock;
use crate::{Digest, Error, ImageConfig, Reference, Result};

const VERSION: u32 = 1;
/// The index to be.
const NEW: &str = "index.json.new";
const NAME: &str = "index.json";

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    version: u32,
    pub images: BTreeMap<Digest, Record>,
    /// A name stands for one image; an image may have several names or none.
    pub references: BTreeMap<Reference, Digest>,
}

impl Default for Index {
    fn default() -> Self {
        Self { version: VERSION, images: BTreeMap::new(), references: BTreeMap::new() }
    }
}

/// What is kept of an image beside its file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub config: ImageConfig,
    pub size_bytes: u64,
    pub created: Option<String>,
    /// Seconds since the epoch.
    pub added: u64,
    /// Seconds since the epoch.
    pub last_used: u64,
}

impl Index {
    /// The index of the cache in `dir` as it is now. Takes no lock: the file is replaced as a whole,
    /// so this is the state before or after any change.
    pub(crate) fn read(dir: &Path) -> Result<Self> {
        read(&dir.join(NAME))
    }

    /// The names of an image.
    pub(crate) fn names(&self, digest: &Digest) -> Vec<Reference> {
        let of = self.references.iter().filter(|(_, d)| *d == digest);
        of.map(|(name, _)| name.clone()).collect()
    }
}

/// The index while nobody else can change it.
pub(crate) struct LockedIndex {
    pub index: Index,
    dir: PathBuf,
    _lock: Lock,
}

impl LockedIndex {
    /// Waits for others to be done with the index of the cache in `dir`, and reads it. Blocks: see
    /// [`lock::wait`].
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let lock = lock::wait(&dir.join("index.lock"))?;
        Ok(Self { index: Index::read(dir)?, dir: dir.to_owned(), _lock: lock })
    }

    /// Removes what a crash in [`save`](Self::save) has left.
    pub(crate) fn clear(&self) -> Result<()> {
        super::remove_file(&self.dir.join(NEW))
    }

    /// Writes the index so that it survives whatever happens next.
    pub(crate) fn save(&self) -> Result<()> {
        let path = self.dir.join(NAME);
        let new = self.dir.join(NEW);
        let failed = |e: io::Error| Error::io("write", &path, e);
        let bytes = serde_json::to_vec_pretty(&self.index).map_err(|e| failed(e.into()))?;
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&new).map_err(failed)?;
        let written = file.write_all(&bytes).and_then(|()| file.sync_all());
        if let Err(e) = written.and_then(|()| std::fs::rename(&new, &path)) {
            // The old index stays; what is left of the new one is in the way of nobody.
            let _ = std::fs::remove_file(&new);
            return Err(failed(e));
        }
        sync_dir(&self.dir)
    }
}

/// Makes renames in `dir` survive a power cut.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("write", dir, e))
}

fn read(path: &Path) -> Result<Index> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Index::default()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    let bad = |reason: String| Error::BadIndex { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    match index.version == VERSION {
        true => Ok(index),
        false => Err(bad(format!("version {} is not known here", index.version))),
    }
}
