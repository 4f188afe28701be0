//! Images as files, kept by digest.
//!
//! The cache's folder has `index.json` (see [`index`]), one `HEX.erofs` per image, `index.lock`,
//! and `work/` for images that are being made: `HEX-PLACE.fetch`, held while that image is fetched
//! from a repository (`turn`), `HEX.lock`, held while it is built, and the unfinished
//! `HEX-RANDOM.erofs`. Layers are in unnamed files. So a crash leaves unfinished files in `work/`
//! whose lock is free; the next [`Cache::open`] removes them. An image that was pulled lazily has a
//! `HEX.map` (`lazy`) and a `HEX.origins` beside its file until the file is complete.
//!
//! Only the owner has access to any of it, with folders of mode 0700 and files of 0600 (`private`):
//! images hold secrets of the users who built them, and a lock that others can open is a lock that
//! others can hold. Nobody else needs to open an image: the plane opens the file as the cache's
//! owner and serves it as a disk.
//!
//! Lookups take no lock; changes do. A change blocks for up to half a minute while another process
//! makes one.

mod index;
mod lock;
mod make;
pub(crate) mod origins;
mod private;
mod turn;

pub(crate) use make::Files;
pub use make::PullPolicy;
pub use turn::NameConflict;
pub(crate) use turn::{ImagePart, WorkRight};

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{Digest, Error, ImageConfig, Limits, Reference, Result};
use index::{Index, Latest, LockedIndex, Record};
use lock::WorkLock;

/// The shortest time between two uses of an image that are both written to the index, which takes
/// a write to the disk.
const MOMENT: Duration = Duration::from_secs(60);

/// An image in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// The digest of the manifest for linux/amd64, which identifies the image.
    pub digest: Digest,
    /// The image's names; empty if a newer image took its name over ("dangling").
    pub references: Vec<Reference>,
    /// The file system image, which stays while it is listed. Only the cache's owner may open it.
    pub erofs_path: PathBuf,
    /// The size of the file system image in bytes.
    pub size_bytes: u64,
    /// The settings with which a container of the image runs.
    pub config: ImageConfig,
    /// The time when the image was made, as its maker wrote it (RFC 3339).
    pub created: Option<String>,
    /// The time when the image was added to the cache, in seconds since the epoch.
    pub added: u64,
    /// The time when the image was last requested by [`Cache::ensure`] or marked by
    /// [`Cache::touch`], in seconds since the epoch.
    pub last_used: u64,
    /// Set if parts of the image's file may be missing, so that it cannot be read without a process
    /// that fetches them (see [`Cache::pull_lazy`]).
    #[serde(default)]
    pub lazy: bool,
}

/// The result of [`Cache::remove`] or [`Cache::prune`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// Names that no longer stand for an image.
    pub untagged: Vec<Reference>,
    /// Images that were deleted.
    pub deleted: Vec<Digest>,
    /// The total size of the deleted images' files in bytes.
    pub freed_bytes: u64,
}

/// The choice of images that [`Cache::prune`] removes, of those that are not in use.
#[derive(Debug, Clone, Default)]
pub struct Prune {
    /// The names of an image to be removed.
    pub which: Selection,
    /// The least time since the last use of an image to be removed.
    pub unused_for: Option<Duration>,
    /// Images of running or stopped sandboxes, which are never removed. They are marked as used
    /// now.
    pub in_use: BTreeSet<Digest>,
}

/// A choice of images by their names and their origin.
#[derive(Debug, Clone, Default)]
pub enum Selection {
    /// Images without a name.
    #[default]
    Unnamed,
    /// All images.
    All,
    /// Images that were made of a plain folder ([`Source::Folder`](crate::Source::Folder)), and so
    /// have neither a configuration nor a time of creation. They have names, and the function
    /// returns `true` for all of them.
    OfFolder(fn(&Reference) -> bool),
}

impl Selection {
    /// Returns whether an image with these names is chosen.
    fn has(&self, record: &Record, names: &[Reference]) -> bool {
        match self {
            Self::Unnamed => names.is_empty(),
            Self::All => true,
            Self::OfFolder(chooses) => {
                let is_plain = record.created.is_none() && record.config == ImageConfig::default();
                is_plain && !names.is_empty() && names.iter().all(chooses)
            }
        }
    }
}

/// A folder with images. A handle is cheap to clone, and any number of handles in any number of
/// processes may use the same folder.
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    limits: Limits,
    latest: Arc<Latest>,
}

impl Cache {
    /// Opens the cache in `dir` (`/var/lib/slipway/images` on a node), creates the folder if it is
    /// missing, and removes files that crashed processes left.
    ///
    /// # Errors
    /// [`Error::Io`] if the folder cannot be created or written, [`Error::ForeignCache`] if it
    /// belongs to another user, [`Error::BadIndex`].
    pub fn open(dir: impl Into<PathBuf>, limits: Limits) -> Result<Self> {
        let inner = Inner { dir: dir.into(), limits, latest: Arc::default() };
        let cache = Self { inner: Arc::new(inner) };
        let work = cache.work_dir();
        private::make(&cache.inner.dir)?;
        private::make(&work)?;
        private::close_files(&cache.inner.dir)?;
        cache.clear_work()?;
        cache.clear_images()?;
        Ok(cache)
    }

    /// Returns a handle of the same folder with other limits.
    pub fn with_limits(&self, limits: Limits) -> Self {
        let (dir, latest) = (self.inner.dir.clone(), Arc::clone(&self.inner.latest));
        Self { inner: Arc::new(Inner { dir, limits, latest }) }
    }

    /// Returns the cache's folder.
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// Returns the image called `name`: a reference, a digest, or the first four or more digits of
    /// one. Returns `None` if there is none. Reads files and takes no lock.
    ///
    /// # Errors
    /// [`Error::Ambiguous`]; [`Error::BadReference`] if `name` cannot be a name; [`Error::Io`],
    /// [`Error::BadIndex`].
    pub fn get(&self, name: &str) -> Result<Option<Image>> {
        let index = self.inner.latest.read(&self.inner.dir)?;
        let found = find(&index, name)?;
        Ok(found.and_then(|digest| self.image(&index, &digest)))
    }

    /// Returns all images, sorted by name, those without a name last. Reads files and takes no
    /// lock.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadIndex`].
    pub fn list(&self) -> Result<Vec<Image>> {
        let index = self.inner.latest.read(&self.inner.dir)?;
        let digests = index.images.keys();
        let mut images: Vec<_> = digests.filter_map(|d| self.image(&index, d)).collect();
        images.sort_by_key(|i| (i.references.is_empty(), i.references.first().cloned(), i.digest));
        Ok(images)
    }

    /// Marks an image as used now. The index is not written if it was used a moment ago.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the image is gone.
    pub fn touch(&self, digest: &Digest) -> Result<()> {
        let mut locked = self.lock_index()?;
        locked.index.images.get(digest).ok_or_else(|| Error::Unknown(digest.to_string()))?;
        let is_stale = mark(&mut locked.index, digest, now());
        if is_stale { locked.save() } else { Ok(()) }
    }

    /// Marks the image called `name` as used now, and returns its digest. Returns `None` if there
    /// is none.
    ///
    /// # Errors
    /// As for [`Cache::get`].
    pub fn touch_named(&self, name: &str) -> Result<Option<Digest>> {
        let mut locked = self.lock_index()?;
        let found = find(&locked.index, name)?;
        let found = found.filter(|digest| self.image_path(digest).exists());
        if found.is_some_and(|digest| mark(&mut locked.index, &digest, now())) {
            locked.save()?;
        }
        Ok(found)
    }

    /// Gives the image called `name` another name, and takes it from the image that had it.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such image.
    pub fn tag(&self, name: &str, reference: &Reference) -> Result<()> {
        let mut locked = self.lock_index()?;
        let digest = find(&locked.index, name)?.ok_or_else(|| Error::Unknown(name.to_owned()))?;
        locked.index.references.insert(reference.clone(), digest);
        locked.save()
    }

    /// Removes a name, and with its last name the image, as docker does. An image given by digest
    /// is removed with its name; if it has several names, only with `force`.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Ambiguous`], [`Error::InUse`] (even with `force`),
    /// [`Error::SeveralNames`].
    pub fn remove(&self, name: &str, in_use: &BTreeSet<Digest>, force: bool) -> Result<Removed> {
        let mut locked = self.lock_index()?;
        let unknown = || Error::Unknown(name.to_owned());
        let digest = find(&locked.index, name)?.ok_or_else(unknown)?;
        let names = locked.index.names(&digest);
        let by_name = name.parse().ok().filter(|reference| names.contains(reference));
        let mut removed = Removed::default();
        match by_name {
            Some(reference) if names.len() > 1 => {
                locked.index.references.remove(&reference);
                removed.untagged.push(reference);
                locked.save()?;
            }
            None if names.len() > 1 && !force => {
                let names = names.iter().map(Reference::familiar).collect::<Vec<_>>().join(", ");
                return Err(Error::SeveralNames { digest, names });
            }
            _ if in_use.contains(&digest) => return Err(Error::InUse(name.to_owned())),
            _ => self.delete(&mut locked, &[digest], &mut removed)?,
        }
        Ok(removed)
    }

    /// Removes the images that `prune` selects.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadIndex`].
    pub fn prune(&self, prune: &Prune) -> Result<Removed> {
        let mut locked = self.lock_index()?;
        let now = now();
        let mut marked = false;
        for digest in &prune.in_use {
            marked |= mark(&mut locked.index, digest, now);
        }
        if marked {
            locked.save()?;
        }
        let old = |record: &Record| match prune.unused_for {
            Some(age) => now.saturating_sub(record.last_used) >= age.as_secs(),
            None => true,
        };
        let index = &locked.index;
        let digests: Vec<_> = index
            .images
            .iter()
            .filter(|(digest, record)| {
                !prune.in_use.contains(*digest)
                    && old(record)
                    && prune.which.has(record, &index.names(digest))
            })
            .map(|(digest, _)| *digest)
            .collect();
        let mut removed = Removed::default();
        self.delete(&mut locked, &digests, &mut removed)?;
        Ok(removed)
    }

    /// Removes images from the index, then their files. In this order, a crash leaves a file that
    /// the next [`open`](Self::open) removes, and never an entry without its file.
    fn delete(
        &self,
        locked: &mut LockedIndex,
        digests: &[Digest],
        out: &mut Removed,
    ) -> Result<()> {
        if digests.is_empty() {
            return Ok(());
        }
        for digest in digests {
            let names = locked.index.names(digest);
            locked.index.references.retain(|_, d| d != digest);
            if let Some(record) = locked.index.images.remove(digest) {
                out.freed_bytes += record.size_bytes;
            }
            out.untagged.extend(names);
            out.deleted.push(*digest);
        }
        locked.save()?;
        for digest in digests {
            remove_file(&self.image_path(digest))?;
            remove_file(&self.map_path(digest))?;
            remove_file(&self.origins_path(digest))?;
        }
        Ok(())
    }

    /// Lists a lazily pulled image as an ordinary one. `file` is the image's file, complete and on
    /// disk.
    ///
    /// # Errors
    /// [`Error::Unknown`] if the image is gone, or is one that was pulled again meanwhile, with
    /// another file.
    pub(crate) fn become_whole(&self, digest: &Digest, file: &File) -> Result<()> {
        let mut locked = self.lock_index()?;
        let path = self.image_path(digest);
        let identity = |meta: Metadata| (meta.dev(), meta.ino());
        let failed = |e| Error::io("read", &path, e);
        let ours = identity(file.metadata().map_err(failed)?);
        let is_ours = std::fs::metadata(&path).is_ok_and(|meta| identity(meta) == ours);
        let record = locked.index.images.get_mut(digest).filter(|_| is_ours);
        record.ok_or_else(|| Error::Unknown(digest.to_string()))?.lazy = false;
        locked.save()?;
        remove_file(&self.map_path(digest))?;
        remove_file(&self.origins_path(digest))
    }

    fn image(&self, index: &Index, digest: &Digest) -> Option<Image> {
        let record = index.images.get(digest)?.clone();
        let erofs_path = self.image_path(digest);
        // If the file was removed by hand, there is no image.
        erofs_path.exists().then(|| Image {
            digest: *digest,
            references: index.names(digest),
            erofs_path,
            size_bytes: record.size_bytes,
            config: record.config,
            created: record.created,
            added: record.added,
            last_used: record.last_used,
            lazy: record.lazy,
        })
    }

    /// Returns whether a file that a listed image needs is missing. The caller holds the lock of
    /// the index, since an image that becomes complete loses its map.
    fn is_lost(&self, digest: &Digest, record: &Record) -> bool {
        !self.image_path(digest).exists() || record.lazy && !self.map_path(digest).exists()
    }

    fn lock_index(&self) -> Result<LockedIndex> {
        LockedIndex::open(&self.inner.dir)
    }

    fn image_path(&self, digest: &Digest) -> PathBuf {
        self.inner.dir.join(format!("{}.erofs", digest.hex()))
    }

    /// Returns the path of the map of a lazily pulled image.
    pub(crate) fn map_path(&self, digest: &Digest) -> PathBuf {
        self.inner.dir.join(format!("{}.map", digest.hex()))
    }

    /// Returns the path of the list of repositories that have a lazily pulled image.
    pub(crate) fn origins_path(&self, digest: &Digest) -> PathBuf {
        self.inner.dir.join(format!("{}.origins", digest.hex()))
    }

    fn work_dir(&self) -> PathBuf {
        self.inner.dir.join("work")
    }

    fn work_lock_path(&self, digest: &Digest) -> PathBuf {
        self.work_dir().join(format!("{}.lock", digest.hex()))
    }

    /// Removes everything in `work/` that belongs to an image that nobody is making.
    fn clear_work(&self) -> Result<()> {
        for path in listing(&self.work_dir())? {
            let name = path.file_name().and_then(|name| name.to_str());
            let hex = name.and_then(|name| name.split(['-', '.']).next());
            let is_lock = name.is_some_and(turn::is_fetch_lock);
            match hex.and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok()) {
                // A lock's file is removed with the lock, if that can be taken.
                Some(_) if is_lock => drop(WorkLock::try_take(&path)?),
                Some(digest) => {
                    let lock_path = self.work_lock_path(&digest);
                    let lock = WorkLock::try_take(&lock_path)?;
                    // The lock's own file is removed with the lock.
                    if lock.is_some() && path != lock_path {
                        remove_file(&path)?;
                    }
                }
                // Files with other names do not belong here.
                None => remove_file(&path)?,
            }
        }
        Ok(())
    }

    /// Removes image files and maps that the index does not list, and entries without their files.
    fn clear_images(&self) -> Result<()> {
        let mut locked = self.lock_index()?;
        locked.clear()?;
        for path in listing(&self.inner.dir)? {
            let name = path.file_name().and_then(|name| name.to_str());
            let Some((hex, kind)) = name.and_then(|name| name.split_once('.')) else { continue };
            let Ok(digest) = format!("sha256:{hex}").parse::<Digest>() else { continue };
            let record = locked.index.images.get(&digest);
            let is_leftover = match kind {
                "erofs" => record.is_none(),
                "map" | "origins" => !record.is_some_and(|record| record.lazy),
                "origins-new" => true,
                _ => false,
            };
            if is_leftover {
                remove_file(&path)?;
            }
        }
        let images = locked.index.images.iter();
        let lost = images.filter(|(digest, record)| self.is_lost(digest, record));
        let lost: Vec<_> = lost.map(|(digest, _)| *digest).collect();
        self.delete(&mut locked, &lost, &mut Removed::default())
    }
}

/// Marks an image as used at `now`, in seconds since the epoch. Returns whether the index has
/// changed, which it has not if there is no such image, or its last use was a moment ago.
fn mark(index: &mut Index, digest: &Digest, now: u64) -> bool {
    let record = index.images.get_mut(digest);
    let record = record.filter(|record| now.abs_diff(record.last_used) >= MOMENT.as_secs());
    let is_stale = record.is_some();
    if let Some(record) = record {
        record.last_used = now;
    }
    is_stale
}

/// Returns the digest of the image called `name`. Names take precedence over digits. Returns `None`
/// if there is none.
fn find(index: &Index, name: &str) -> Result<Option<Digest>> {
    let reference = name.parse::<Reference>();
    if let Some(digest) = reference.as_ref().ok().and_then(|r| index.references.get(r)) {
        return Ok(Some(*digest));
    }
    // `name@digest` of an image that was pulled under another name.
    let pinned = reference.as_ref().ok().and_then(|r| r.digest()).copied();
    if let Some(digest) = pinned.or_else(|| name.parse().ok()) {
        return Ok(index.images.contains_key(&digest).then_some(digest));
    }
    let digits = name.strip_prefix("sha256:").unwrap_or(name);
    if digits.len() >= 4 && digits.len() <= 64 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        let mut fitting = index.images.keys().filter(|digest| digest.hex().starts_with(digits));
        return match (fitting.next(), fitting.next()) {
            (Some(_), Some(_)) => Err(Error::Ambiguous(name.to_owned())),
            (found, _) => Ok(found.copied()),
        };
    }
    reference.map(|_| None)
}

fn listing(dir: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<_> {
        std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect()
    };
    read().map_err(|e| Error::io("list", dir, e))
}

/// Removes a file. A missing file is no error.
fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Returns the current time in seconds since the epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
