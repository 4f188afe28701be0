//! An image of which parts are missing: its files, and what is there of them.
//!
//! [`Partial::want`] waits until a range of the image's file is there. It does not fetch: `fill`
//! takes what is wanted ([`Partial::next_wanted`]), or what comes next in the layers
//! ([`Partial::next_ahead`]), and fetches it (`request`). The members are taken by the rules of
//! [`MembersState`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_lazy_spec::Extent;
use tokio::sync::Notify;

use super::budget::{Budget, Share};
use super::have::SpanBitmap;
use super::map::{Map, Span};
use super::members::Members;
use super::origins::Origins;
use super::stamp::Stamp;
use super::state::MembersState;
use crate::source::blocking;
use crate::source::registry::Origin;
use crate::{Access, Cache, Digest, Error, Image, Progress, Reference, Result};

/// The settings of [`Partial::open`].
pub(crate) struct Settings<'a> {
    /// The folder of the presence bitmap. Without one the bitmap is in memory alone.
    pub have_dir: Option<&'a Path>,
    /// Returns the access to a registry.
    pub access: &'a dyn Fn(&Reference) -> Access,
    pub budget: Arc<Budget>,
    pub progress: Arc<dyn Progress>,
}

/// An image of which parts are missing.
pub(crate) struct Partial {
    pub(crate) digest: Digest,
    pub(crate) cache: Cache,
    pub(crate) map: Map,
    pub(crate) members: Members,
    pub(crate) stamp: Stamp,
    /// Notified when members are wanted, and by those who change something that `fill` waits for.
    pub(crate) changed: Notify,
    pub(super) path: PathBuf,
    pub(super) file: File,
    have_path: Option<PathBuf>,
    pub(crate) origins: Origins,
    pub(super) share: Share,
    pub(super) progress: Arc<dyn Progress>,
    state: Mutex<MembersState>,
}

/// The folder of the presence bitmaps below a run directory.
pub(crate) fn have_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("lazy")
}

/// The file of an image's presence bitmap.
pub(crate) fn have_path(dir: &Path, digest: &Digest) -> PathBuf {
    dir.join(format!("{}.have", digest.hex()))
}

/// Removes the presence bitmaps in `dir` whose images are not in the cache any more, or are whole.
/// They are in memory, on a tmpfs. Blocks while the folder is read.
pub(crate) fn remove_leftovers(dir: &Path, cache: &Cache) {
    let of_image = |path: PathBuf| {
        let hex = path.file_name()?.to_str()?.strip_suffix(".have")?;
        let digest = format!("sha256:{hex}").parse::<Digest>().ok()?;
        Some((path, digest))
    };
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let all: Vec<_> = entries.filter_map(|entry| of_image(entry.path())).collect();
    for (path, digest) in all {
        // Looked for after the folder was read: an image is listed before it has a bitmap.
        let stays = match cache.get(&digest.to_string()) {
            Ok(image) => image.is_some_and(|image| image.lazy),
            Err(_) => true,
        };
        if !stays && let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "a file of a removed image stays");
        }
    }
}

impl Partial {
    /// Opens an image that is marked lazy. Blocks while files are read.
    ///
    /// # Errors
    /// A file is missing, cannot be read or is damaged.
    pub(crate) fn open(cache: &Cache, image: &Image, settings: Settings<'_>) -> Result<Self> {
        let (digest, path) = (image.digest, image.erofs_path.clone());
        let map_path = cache.map_path(&digest);
        let map = Map::read(&map_path, cache.limits())?;
        let bad = |reason: &str| {
            let next = format!("{reason}: remove image {} and pull it again", digest.short());
            Error::bad_document(map_path.display(), next)
        };
        let members = Members::of(&map).map_err(|reason| bad(&reason))?;
        let unreadable = |e| Error::io("open", &path, e);
        let file = File::options().read(true).write(true).open(&path).map_err(unreadable)?;
        let meta = file.metadata().map_err(unreadable)?;
        if meta.len() != map.bytes {
            return Err(bad("the image's file has another length"));
        }
        let stamp = Stamp::with(&meta, &map_path).map_err(unreadable)?;
        let have_path = settings.have_dir.map(|dir| have_path(dir, &digest));
        let have = match &have_path {
            Some(path) => {
                let open = || SpanBitmap::open(path, &stamp.identity(&map_path)?, map.spans.len());
                open().map_err(|e| Error::io("open", path, e))?
            }
            None => SpanBitmap::in_memory(map.spans.len()),
        };
        let first = Origin { reference: map.reference.clone(), plain_http: map.plain_http };
        let origins = cache.origins_path(&digest);
        let origins = Origins::open(&origins, first, settings.access, cache.limits())?;
        let share = settings.budget.share(&origins.registries());
        let state = Mutex::new(MembersState::new(have, &members, map.layers.len()));
        Ok(Self {
            digest,
            cache: cache.clone(),
            map,
            members,
            stamp,
            changed: Notify::new(),
            path,
            file,
            have_path,
            origins,
            share,
            progress: settings.progress,
            state,
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MembersState> {
        // No code that may panic leaves a half-made change under this lock.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn span(&self, number: u32) -> &Span {
        &self.map.spans[number as usize]
    }

    /// Returns whether the image can be fetched from the repositories that it has: they give data,
    /// or there are no others that have pulled it by now.
    pub(crate) fn has_origins(&self) -> bool {
        self.origins.work() || self.has_all_origins()
    }

    /// Returns whether all repositories that have pulled the image by now are asked for it.
    pub(crate) fn has_all_origins(&self) -> bool {
        self.origins.are_in(&self.cache.origins_path(&self.digest))
    }

    /// Returns the number of missing spans.
    pub(crate) fn missing(&self) -> usize {
        self.lock().have().missing()
    }

    /// Returns whether the file has everything.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing() == 0
    }

    /// Returns whether somebody waits for a member.
    pub(crate) fn is_wanted(&self) -> bool {
        self.lock().is_wanted()
    }

    /// Returns the bytes of each layer that are fetched so far.
    pub(crate) fn done(&self) -> Vec<u64> {
        self.lock().done().to_vec()
    }

    /// Returns the numbers of the spans that overlap a range of the image.
    pub(crate) fn overlapping(&self, extent: Extent) -> std::ops::Range<usize> {
        let spans = &self.map.spans;
        let first = spans.partition_point(|span| span.image + span.bytes <= extent.offset);
        let end = spans.partition_point(|span| span.image < extent.end());
        first..end.max(first)
    }

    /// Waits until the file has these bytes. Returns a range with them, all of which is there.
    /// Returns `None` if they cannot be fetched now.
    ///
    /// The caller must keep [`Filling::fill`](super::fill::Filling::fill) running; otherwise this
    /// future never ends. A future that is dropped wants nothing any more.
    pub(crate) async fn want(&self, extent: Extent) -> Option<Extent> {
        let (mut told, members) = self.lock().want(&self.members, self.overlapping(extent));
        self.changed.notify_one();
        for _ in 0..members {
            if told.recv().await != Some(true) {
                return None;
            }
        }
        Some(self.around(extent))
    }

    /// Returns the longest range around `extent`, which is there, that has no missing span. What
    /// belongs to no span is always there.
    fn around(&self, extent: Extent) -> Extent {
        let spans = self.overlapping(extent);
        let state = self.lock();
        let have = state.have();
        let before = have.missing_before(spans.start).map(|span| &self.map.spans[span]);
        let after = have.missing_from(spans.end).map(|span| &self.map.spans[span]);
        let begin = before.map_or(0, |span| span.image + span.bytes).min(extent.offset);
        let end = after.map_or(self.map.bytes, |span| span.image).max(extent.end());
        Extent { offset: begin, bytes: end - begin }
    }

    /// Takes the members of the next request for what is wanted. Returns `None` if nothing is, or a
    /// request has it already.
    pub(crate) fn next_wanted(&self) -> Option<Vec<u32>> {
        self.lock().take_wanted(&self.members)
    }

    /// Takes the members of the next request for what nobody waits for: first those that the
    /// layers' makers marked, then all, in the order of the layers. Returns `None` at the end,
    /// where it begins again.
    pub(crate) fn next_ahead(&self) -> Option<Vec<u32>> {
        self.lock().take_ahead(&self.members)
    }

    /// Takes these members, in ascending order, which a caller fetches by itself. Returns those
    /// that are missing and that no request has, in requests.
    pub(crate) fn batches(&self, members: &[u32]) -> Vec<Vec<u32>> {
        self.lock().take_chosen(&self.members, members)
    }

    /// Ends all waiting: nothing is fetched any more.
    pub(crate) fn close(&self) {
        self.lock().close();
    }

    /// Returns whether nothing is fetched any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.lock().is_closed()
    }

    /// Marks everything as missing, after the disk failed: the kernel tells of data that it could
    /// not write only once.
    pub(crate) fn forget(&self) {
        if let Some(path) = &self.have_path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::error!(path = %path.display(), %error, "cannot remove a file: remove it");
        }
        self.lock().forget(self.map.spans.len());
    }

    /// Makes a complete image an ordinary one.
    ///
    /// # Errors
    /// The disk failed, the image was removed, or parts of it are missing.
    pub(crate) async fn finish(self: &Arc<Self>) -> Result<()> {
        if !self.is_complete() {
            let next = format!("parts of image {} are missing: pull it again", self.digest.short());
            return Err(Error::bad_document(self.path.display(), next));
        }
        let partial = Arc::clone(self);
        blocking(move || {
            let path = &partial.path;
            if let Err(e) = partial.file.sync_all() {
                partial.forget();
                return Err(Error::io("write", path, e));
            }
            partial.cache.become_whole(&partial.digest, &partial.file)?;
            if let Some(path) = &partial.have_path {
                // A file that stays is of no image.
                let _ = std::fs::remove_file(path);
            }
            Ok(())
        })
        .await
    }
}
