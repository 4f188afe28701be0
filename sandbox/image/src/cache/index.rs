//! The index of the cache: the file that lists the images and their names.
//!
//! It is replaced as a whole (new file, fsync, rename), so a crash leaves either the old or the new
//! state. An image file that it does not list is a leftover.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use slipway_lock::Lock;

use super::lock;
use crate::{Digest, Error, ImageConfig, Reference, Result};

/// The version of an index without lazily pulled images.
const VERSION: u32 = 1;
/// The version of an index with such images. Programs that read version 1 alone would take their
/// files for whole ones.
const LAZY_VERSION: u32 = 2;
/// The name of the next index while it is being written.
const NEW: &str = "index.json.new";
const NAME: &str = "index.json";

#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    version: u32,
    pub images: BTreeMap<Digest, Record>,
    /// The names of images. A name stands for one image; an image may have several names or none.
    pub references: BTreeMap<Reference, Digest>,
}

impl Default for Index {
    fn default() -> Self {
        Self { version: VERSION, images: BTreeMap::new(), references: BTreeMap::new() }
    }
}

/// The form in which an index is written.
#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    images: &'a BTreeMap<Digest, Record>,
    references: &'a BTreeMap<Reference, Digest>,
}

impl<'a> Written<'a> {
    fn of(index: &'a Index) -> Self {
        let Index { images, references, .. } = index;
        let is_lazy = images.values().any(|record| record.lazy);
        Self { version: if is_lazy { LAZY_VERSION } else { VERSION }, images, references }
    }
}

/// The data of an image that are kept beside its file.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub config: ImageConfig,
    pub size_bytes: u64,
    pub created: Option<String>,
    /// The time when the image was added, in seconds since the epoch.
    pub added: u64,
    /// The time when the image was last used, in seconds since the epoch.
    pub last_used: u64,
    /// Set while parts of the image's file are missing; the image then has a map.
    #[serde(default)]
    pub lazy: bool,
}

impl Index {
    /// Returns the names of an image.
    pub(crate) fn names(&self, digest: &Digest) -> Vec<Reference> {
        let of = self.references.iter().filter(|(_, d)| *d == digest);
        of.map(|(name, _)| name.clone()).collect()
    }
}

/// The index of a cache as it was read last. A large one takes long to parse, and lookups are
/// frequent.
#[derive(Debug, Default)]
pub(crate) struct Latest(Mutex<Option<Known>>);

#[derive(Debug)]
struct Known {
    /// Open, so that the inode is of no later file.
    _file: File,
    stamp: Stamp,
    index: Arc<Index>,
}

/// Device, inode, length and time of change of a file.
type Stamp = (u64, u64, u64, i64, i64);

fn stamp(meta: &Metadata) -> Stamp {
    (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec())
}

impl Latest {
    /// Returns the current index of the cache in `dir`, and parses it only if it has changed. Takes
    /// no lock of the cache: the file is replaced as a whole, so this reads the state before or
    /// after any change.
    pub(crate) fn read(&self, dir: &Path) -> Result<Arc<Index>> {
        let path = dir.join(NAME);
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(file) = open(&path)? else {
            *latest = None;
            return Ok(Arc::default());
        };
        let meta = file.metadata().map_err(|e| Error::io("read", &path, e))?;
        let stamp = stamp(&meta);
        if let Some(known) = latest.as_ref().filter(|known| known.stamp == stamp) {
            return Ok(Arc::clone(&known.index));
        }
        let index = Arc::new(parse(&path, &file)?);
        *latest = Some(Known { _file: file, stamp, index: Arc::clone(&index) });
        Ok(index)
    }
}

/// The index with its lock, so that no other process can change it.
pub(crate) struct LockedIndex {
    pub index: Index,
    dir: PathBuf,
    _lock: Lock,
}

impl LockedIndex {
    /// Waits for the lock of the cache in `dir`, and reads the index. Blocks: see [`lock::wait`].
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let lock = lock::wait(&dir.join("index.lock"))?;
        let path = dir.join(NAME);
        let index = open(&path)?.map(|file| parse(&path, &file)).transpose()?;
        Ok(Self { index: index.unwrap_or_default(), dir: dir.to_owned(), _lock: lock })
    }

    /// Removes the file that a crash in [`save`](Self::save) leaves.
    pub(crate) fn clear(&self) -> Result<()> {
        super::remove_file(&self.dir.join(NEW))
    }

    /// Writes the index durably.
    pub(crate) fn save(&self) -> Result<()> {
        let path = self.dir.join(NAME);
        let new = self.dir.join(NEW);
        let failed = |e: io::Error| Error::io("write", &path, e);
        let bytes =
            serde_json::to_vec_pretty(&Written::of(&self.index)).map_err(|e| failed(e.into()))?;
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&new).map_err(failed)?;
        let written = file.write_all(&bytes).and_then(|()| file.sync_all());
        if let Err(e) = written.and_then(|()| std::fs::rename(&new, &path)) {
            // The old index stays. If the new file cannot be removed, it does no harm.
            let _ = std::fs::remove_file(&new);
            return Err(failed(e));
        }
        sync_dir(&self.dir)
    }
}

/// Makes renames in `dir` durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| Error::io("write", dir, e))
}

/// Opens the index at `path`. Returns `None` if the cache has none yet.
fn open(path: &Path) -> Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io("read", path, e)),
    }
}

fn parse(path: &Path, mut file: &File) -> Result<Index> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|e| Error::io("read", path, e))?;
    let bad = |reason: String| Error::BadIndex { path: path.to_owned(), reason };
    let index: Index = serde_json::from_slice(&bytes).map_err(|e| bad(e.to_string()))?;
    match matches!(index.version, VERSION | LAZY_VERSION) {
        true => Ok(index),
        false => Err(bad(format!("version {} is not known here", index.version))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_parsed_once_and_after_each_change() {
        let dir = tempfile::tempdir().unwrap();
        let (latest, path) = (Latest::default(), dir.path().join(NAME));
        let read = || latest.read(dir.path());
        assert!(read().unwrap().references.is_empty());
        let reference = |name: &str| name.parse::<Reference>().unwrap();
        // Of one length, and within a tick of the clock of files.
        for name in ["app:1", "app:2", "app:3", "app:4"] {
            let mut locked = LockedIndex::open(dir.path()).unwrap();
            locked.index.references = [(reference(name), Digest::of(b"x"))].into();
            locked.save().unwrap();
            let index = read().unwrap();
            assert!(index.references.contains_key(&reference(name)), "{name}");
            assert!(Arc::ptr_eq(&index, &read().unwrap()), "{name}");
        }
        std::fs::write(&path, r#"{"version":1,"images":{},"references":{}}"#).unwrap();
        assert!(read().unwrap().references.is_empty());
        std::fs::write(&path, "{").unwrap();
        assert!(matches!(read(), Err(Error::BadIndex { .. })));
        std::fs::remove_file(&path).unwrap();
        assert!(read().unwrap().references.is_empty());
    }
}
