//! The rest of a lazily pulled image, fetched at once, and how much of an image is there.

use std::path::Path;
use std::sync::Arc;

use futures_util::{StreamExt, TryStreamExt, stream};

use super::budget::{Budget, Urgency};
use super::have::SpanBitmap;
use super::map::Map;
use super::partial::{Partial, Settings, have_dir, have_path};
use super::stamp::Stamp;
use crate::source::blocking;
use crate::{Access, Cache, Digest, Error, Event, Image, Progress, Reference, Result};

/// The number of requests at once.
const REQUESTS: usize = 4;

impl Partial {
    /// Fetches these members, which are in ascending order.
    ///
    /// # Errors
    /// The first request that failed more often than it is repeated.
    pub(crate) async fn fetch_all(self: &Arc<Self>, members: &[u32]) -> Result<()> {
        stream::iter(self.batches(members))
            .map(|batch| Arc::clone(self).fetch(batch, Urgency::Wanted))
            .buffer_unordered(REQUESTS)
            .try_collect()
            .await
    }
}

impl Cache {
    /// Fetches what is missing of a lazily pulled image, which is an ordinary one then. `run_dir`
    /// is the directory in which the node's fetcher keeps what it has. The fetcher may run
    /// meanwhile: both write the same. `access` returns the access to the registry that the image
    /// was pulled from.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such image; the errors of [`pull`](Self::pull). What was
    /// fetched stays.
    pub async fn fetch_rest(
        &self,
        digest: &Digest,
        run_dir: &Path,
        access: impl Fn(&Reference) -> Access + Send + 'static,
        progress: Arc<dyn Progress>,
    ) -> Result<Image> {
        let unknown = || Error::Unknown(digest.to_string());
        let image = self.get_aside(&digest.to_string()).await?.ok_or_else(unknown)?;
        if !image.lazy {
            return Ok(image);
        }
        let (cache, dir) = (self.clone(), have_dir(run_dir));
        let meter = progress.clone();
        let partial = blocking(move || {
            slipway_private::make_folder(&dir)?;
            let budget = Budget::of_one();
            let (have_dir, access) = (Some(dir.as_path()), &access);
            let settings = Settings { have_dir, access, budget, progress: meter };
            Partial::open(&cache, &image, settings)
        });
        let partial = Arc::new(partial.await?);
        tell_layers(&partial, &*progress);
        let members: Vec<u32> = (0..partial.members.len()).collect();
        partial.fetch_all(&members).await?;
        for index in 0..partial.map.layers.len() {
            progress.event(Event::LayerFinished { index });
        }
        partial.finish().await?;
        progress.event(Event::Finished(digest));
        self.get_aside(&digest.to_string()).await?.ok_or_else(unknown)
    }

    /// Returns how many bytes of an image's file are there. `run_dir` is the directory in which the
    /// node's fetcher keeps what it has of lazily pulled images.
    ///
    /// # Errors
    /// [`Error::Io`], and the image's map is damaged.
    pub fn fetched_bytes(&self, image: &Image, run_dir: &Path) -> Result<u64> {
        if !image.lazy {
            return Ok(image.size_bytes);
        }
        let map_path = self.map_path(&image.digest);
        let map = Map::read(&map_path, self.limits())?;
        let path = have_path(&have_dir(run_dir), &image.digest);
        let read = || {
            let identity = Stamp::of(&image.erofs_path, &map_path)?.identity(&map_path)?;
            SpanBitmap::read(&path, &identity, map.spans.len())
        };
        let have = read().map_err(|e| Error::io("read", &path, e))?;
        let missing = map.spans.iter().enumerate().filter(|(number, _)| !have.has(*number));
        let missing: u64 = missing.map(|(_, span)| span.bytes).sum();
        Ok(image.size_bytes.saturating_sub(missing))
    }
}

fn tell_layers(partial: &Partial, progress: &dyn Progress) {
    let layers = &partial.map.layers;
    let bytes = layers.iter().map(|layer| layer.bytes).sum();
    progress.event(Event::Layers { count: layers.len(), bytes });
    for (index, (layer, done)) in layers.iter().zip(partial.done()).enumerate() {
        progress.event(Event::LayerStarted { index, digest: &layer.digest, bytes: layer.bytes });
        progress.event(Event::LayerBytes { index, done });
    }
}
