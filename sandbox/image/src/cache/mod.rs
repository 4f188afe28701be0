//! Images as files, kept by digest.
//!
//! In the cache's folder: `index.json` (see [`index`]), one `HEX.erofs` per image, `index.lock`,
//! and in `work/` what is being made: `HEX.lock`, held by whoever makes that image, and its
//! unfinished `HEX-RANDOM.erofs`. Layers lie in nameless files. So a crash leaves unfinished files in
//! `work/` whose lock nobody holds; the next [`Cache::open`] removes them.
//!
//! All of it is its owner's alone, folders 0700 and files 0600 (`private`): images hold secrets of who
//! built them, and a lock that others can open is a lock that others can hold. Nobody else needs to
//! open an image: the plane opens the file as the cache's owner and serves it as a disk.
//!
//! Looking something up takes no lock, changing something does: a change blocks for up to half a minute
//! while another process makes one.

mod index;
mod lock;
mod make;
mod private;

pub use make::{PullPolicy, Taken};

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::erofs::Tools;
use crate::{Digest, Error, ImageConfig, Limits, Reference, Result};
use index::{Index, LockedIndex, Record};
use lock::WorkLock;

/// An image in the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Of the manifest for linux/amd64: what identifies the image.
    pub digest: Digest,
    /// Its names; none if a newer image took its name over ("dangling").
    pub references: Vec<Reference>,
    /// The file system; only the cache's owner may open it. Stays while it is listed.
    pub erofs_path: PathBuf,
    /// Bytes of that file.
    pub size_bytes: u64,
    /// How a container of the image runs.
    pub config: ImageConfig,
    /// When the image was made, in its maker's words (RFC 3339).
    pub created: Option<String>,
    /// When it came into the cache, seconds since the epoch.
    pub added: u64,
    /// When it was last asked for by [`Cache::ensure`] or marked by [`Cache::touch`], seconds since
    /// the epoch.
    pub last_used: u64,
}

/// What [`Cache::remove`] or [`Cache::prune`] did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// Names that stand for nothing now.
    pub untagged: Vec<Reference>,
    /// Images that are gone.
    pub deleted: Vec<Digest>,
    /// Bytes that their files had.
    pub freed_bytes: u64,
}

/// Which images [`Cache::prune`] removes, of those that nobody uses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prune {
    /// Also images that have a name. Otherwise only those that lost theirs.
    pub all: bool,
    /// Only images not used for at least this long.
    pub unused_for: Option<Duration>,
    /// Images of running or stopped sandboxes: never removed.
    pub in_use: BTreeSet<Digest>,
}

/// A folder with images. Cheap to clone; any number of handles, in any number of processes, may
/// work on the same folder.
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    tools: Tools,
    limits: Limits,
}

impl Cache {
    /// Opens the cache in `dir` (`/var/lib/slipway/images` on a node), makes the folder where it is
    /// missing, and removes what crashed processes have left.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be made or written, [`Error::ForeignCache`] where it is
    /// another user's, [`Error::BadIndex`].
    pub fn open(dir: impl Into<PathBuf>, tools: Tools, limits: Limits) -> Result<Self> {
        let cache = Self { inner: Arc::new(Inner { dir: dir.into(), tools, limits }) };
        let work = cache.work_dir();
        private::make(&cache.inner.dir)?;
        private::make(&work)?;
        private::close_files(&cache.inner.dir)?;
        cache.clear_work()?;
        cache.clear_images()?;
        Ok(cache)
    }

    /// The programs that this cache builds with.
    pub fn tools(&self) -> &Tools {
        &self.inner.tools
    }

    /// The image called `name`: a reference, a digest, or the first four or more digits of one. Reads
    /// files and waits for nobody.
    ///
    /// # Errors
    /// [`Error::Ambiguous`], or [`Error::BadReference`] for what cannot be a name at all.
    pub fn get(&self, name: &str) -> Result<Option<Image>> {
        let index = Index::read(&self.inner.dir)?;
        let found = find(&index, name)?;
        Ok(found.and_then(|digest| self.image(&index, &digest)))
    }

    /// All images, by name, the nameless last. Reads files and waits for nobody.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadIndex`].
    pub fn list(&self) -> Result<Vec<Image>> {
        let index = Index::read(&self.inner.dir)?;
        let digests = index.images.keys();
        let mut images: Vec<_> = digests.filter_map(|d| self.image(&index, d)).collect();
        images.sort_by_key(|i| (i.references.is_empty(), i.references.first().cloned(), i.digest));
        Ok(images)
    }

    /// Notes that an image is used now.
    ///
    /// # Errors
    /// [`Error::Unknown`] where it is gone.
    pub fn touch(&self, digest: &Digest) -> Result<()> {
        let mut locked = self.lock_index()?;
        let record = locked.index.images.get_mut(digest);
        record.ok_or_else(|| Error::Unknown(digest.to_string()))?.last_used = now();
        locked.save()
    }

    /// Gives the image called `name` one more name, which another image may lose by that.
    ///
    /// # Errors
    /// [`Error::Unknown`] where there is no such image.
    pub fn tag(&self, name: &str, reference: &Reference) -> Result<()> {
        let mut locked = self.lock_index()?;
        let digest = find(&locked.index, name)?.ok_or_else(|| Error::Unknown(name.to_owned()))?;
        locked.index.references.insert(reference.clone(), digest);
        locked.save()
    }

    /// Removes as docker does: a name goes, and with its last name the image. An image named by
    /// digest goes with its name; if it has several, only with `force`.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Ambiguous`], [`Error::InUse`] (in spite of `force`),
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

    /// Removes images that nobody uses.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::BadIndex`].
    pub fn prune(&self, prune: &Prune) -> Result<Removed> {
        let mut locked = self.lock_index()?;
        let now = now();
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
                    && (prune.all || index.names(digest).is_empty())
            })
            .map(|(digest, _)| *digest)
            .collect();
        let mut removed = Removed::default();
        self.delete(&mut locked, &digests, &mut removed)?;
        Ok(removed)
    }

    /// Takes images out of the index, then off the disk: in this order a crash leaves a file that
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
        }
        Ok(())
    }

    fn image(&self, index: &Index, digest: &Digest) -> Option<Image> {
        let record = index.images.get(digest)?.clone();
        let erofs_path = self.image_path(digest);
        // Somebody may have removed the file by hand: then there is no image.
        erofs_path.exists().then(|| Image {
            digest: *digest,
            references: index.names(digest),
            erofs_path,
            size_bytes: record.size_bytes,
            config: record.config,
            created: record.created,
            added: record.added,
            last_used: record.last_used,
        })
    }

    fn lock_index(&self) -> Result<LockedIndex> {
        LockedIndex::open(&self.inner.dir)
    }

    fn image_path(&self, digest: &Digest) -> PathBuf {
        self.inner.dir.join(format!("{}.erofs", digest.hex()))
    }

    fn work_dir(&self) -> PathBuf {
        self.inner.dir.join("work")
    }

    fn work_lock_path(&self, digest: &Digest) -> PathBuf {
        self.work_dir().join(format!("{}.lock", digest.hex()))
    }

    /// Removes everything in `work/` that belongs to an image which nobody is making.
    fn clear_work(&self) -> Result<()> {
        for path in listing(&self.work_dir())? {
            let name = path.file_name().and_then(|name| name.to_str());
            let hex = name.and_then(|name| name.split(['-', '.']).next());
            match hex.and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok()) {
                Some(digest) => {
                    let lock_path = self.work_lock_path(&digest);
                    let lock = WorkLock::try_take(&lock_path)?;
                    // The lock's own file goes with the lock, and not before.
                    if lock.is_some() && path != lock_path {
                        remove_file(&path)?;
                    }
                }
                // Nothing else has a name here.
                None => remove_file(&path)?,
            }
        }
        Ok(())
    }

    /// Removes image files that the index does not list, and entries whose file is gone.
    fn clear_images(&self) -> Result<()> {
        let mut locked = self.lock_index()?;
        locked.clear()?;
        for path in listing(&self.inner.dir)? {
            let hex = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".erofs"));
            let digest = hex.and_then(|hex| format!("sha256:{hex}").parse::<Digest>().ok());
            if digest.is_some_and(|digest| !locked.index.images.contains_key(&digest)) {
                remove_file(&path)?;
            }
        }
        let lost: Vec<_> = locked.index.images.keys().copied().collect();
        let lost: Vec<_> =
            lost.into_iter().filter(|digest| !self.image_path(digest).exists()).collect();
        self.delete(&mut locked, &lost, &mut Removed::default())
    }
}

/// The image that `name` stands for: names come before digits.
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

/// Removes a file; one that is gone already is as good.
fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", path, e)),
        _ => Ok(()),
    }
}

/// Seconds since the epoch.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
