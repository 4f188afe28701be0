//! Turns at making an image: of pulls that want the same one at the same time, one makes it, and
//! the others wait and find it in the cache.
//!
//! A registry may take as long as it likes, and any registry can offer the manifest of another
//! one's image. So a pull waits only for pulls from its own repository before it fetches. Pulls
//! from different repositories fetch side by side, and only build the image in turn, which takes as
//! long as this machine takes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::index::Index;
use super::lock::WorkLock;
use super::{Cache, Image, now, origins};
use crate::source::blocking;
use crate::source::registry::Origin;
use crate::{Digest, Error, Event, Progress, Reference, Result};

/// The interval for checking whether another process has finished the same image.
const LOCK_POLL: Duration = Duration::from_millis(100);
/// The end of the name of a lock for fetching.
const FETCH: &str = ".fetch";

/// The behaviour of [`Cache::import`] for a name that another image has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NameConflict {
    /// Refuses the import, since the maker of an archive chose the names in it.
    #[default]
    Refuse,
    /// Takes the name from the other image, which stays in the cache without it.
    Replace,
}

/// A part of making an image.
#[derive(Clone, Copy)]
pub(crate) enum ImagePart {
    /// The data is fetched.
    Fetch,
    /// The image's file is built, of data that is here.
    Build,
}

/// The outcome of asking for the right to do a part of making an image.
pub(crate) enum WorkRight {
    /// The image is in the cache already.
    There(Box<Image>),
    /// Nobody else does this part while this lock is held.
    Ours(WorkLock),
}

impl Cache {
    /// Returns the image if it is in the cache, and adds `names` and the repository `origin` to it.
    /// Otherwise takes the lock for `work` on it. An image that is not from a registry has no
    /// origin.
    pub(crate) async fn turn(
        &self,
        work: ImagePart,
        digest: &Digest,
        origin: Option<&Origin>,
        names: &(Vec<Reference>, NameConflict),
        progress: &dyn Progress,
    ) -> Result<WorkRight> {
        let there = |image| {
            progress.event(Event::Finished(digest));
            WorkRight::There(Box::new(image))
        };
        if let Some(image) = self.adopt(digest, origin, names).await? {
            return Ok(there(image));
        }
        let path = match work {
            ImagePart::Fetch => self.fetch_lock_path(digest, origin),
            ImagePart::Build => self.work_lock_path(digest),
        };
        let lock = self.lock_work(&path, digest, progress).await?;
        // The previous holder of the lock may have made the image.
        Ok(self.adopt(digest, origin, names).await?.map_or(WorkRight::Ours(lock), there))
    }

    /// Adds `names` and `origin` to the image and returns it. Returns `None` if the image is not in
    /// the cache. Names that must not be taken are an error in any case, so that they are refused
    /// before layers are fetched.
    async fn adopt(
        &self,
        digest: &Digest,
        origin: Option<&Origin>,
        (names, taken): &(Vec<Reference>, NameConflict),
    ) -> Result<Option<Image>> {
        let (cache, digest, names, taken) = (self.clone(), *digest, names.clone(), *taken);
        let origin = origin.cloned();
        blocking(move || cache.adopt_now(&digest, origin.as_ref(), &names, taken)).await
    }

    fn adopt_now(
        &self,
        digest: &Digest,
        origin: Option<&Origin>,
        names: &[Reference],
        taken: NameConflict,
    ) -> Result<Option<Image>> {
        let mut locked = self.lock_index()?;
        check_names(&locked.index, digest, names, taken)?;
        let record = locked.index.images.get_mut(digest);
        let Some(record) = record.filter(|record| !self.is_lost(digest, record)) else {
            return Ok(None);
        };
        record.last_used = now();
        if let Some(origin) = origin.filter(|_| record.lazy) {
            origins::add(&self.origins_path(digest), origin)?;
        }
        for name in names {
            locked.index.references.insert(name.clone(), *digest);
        }
        locked.save()?;
        Ok(self.image(&locked.index, digest))
    }

    async fn lock_work(
        &self,
        path: &Path,
        digest: &Digest,
        progress: &dyn Progress,
    ) -> Result<WorkLock> {
        let mut told = false;
        loop {
            if let Some(lock) = WorkLock::try_take(path)? {
                return Ok(lock);
            }
            if !told {
                progress.event(Event::Waiting(digest));
                told = true;
            }
            tokio::time::sleep(LOCK_POLL).await;
        }
    }

    fn fetch_lock_path(&self, digest: &Digest, origin: Option<&Origin>) -> PathBuf {
        let place = origin.map(Origin::place).unwrap_or_default();
        let place = Digest::of(place.as_bytes()).hex();
        self.work_dir().join(format!("{}-{}{FETCH}", digest.hex(), &place[..16]))
    }
}

/// Returns whether a file in the folder for work is a lock for fetching.
pub(super) fn is_fetch_lock(name: &str) -> bool {
    name.ends_with(FETCH)
}

/// Refuses names that belong to other images than `digest`, unless `taken` allows to take them.
pub(super) fn check_names(
    index: &Index,
    digest: &Digest,
    names: &[Reference],
    taken: NameConflict,
) -> Result<()> {
    let of_others = |name: &&Reference| index.references.get(name).is_some_and(|d| d != digest);
    let lost: Vec<_> = names.iter().filter(of_others).map(Reference::familiar).collect();
    match taken == NameConflict::Replace || lost.is_empty() {
        true => Ok(()),
        false => Err(Error::NamesTaken { names: lost.join(", ") }),
    }
}
