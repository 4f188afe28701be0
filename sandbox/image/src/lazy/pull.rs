//! The lazy pull: from a registry's indexes to an image without its data.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::{StreamExt, TryStreamExt, stream};

use super::budget::MOST_CHUNKS_OF_IMAGE;
use super::index::{Index, MOST_FOOTER, Toc, footer};
use super::map::{Map, MapLayer, Span, spans};
use super::members::{BYTES_PER_SPAN, Members};
use crate::cache::{Files, ImagePart, WorkRight};
use crate::manifest::{Layer, Plan};
use crate::root::layout::Layout;
use crate::root::merge::{MergeError, Merger};
use crate::source::blocking;
use crate::source::registry::{Access, Origin, Registry};
use crate::{Cache, Error, Event, Image, Limits, NameConflict, Progress, Reference, Result};

/// The number of indexes that are fetched at once.
const CONCURRENT_INDEXES: usize = 3;
/// The memory that a chunk takes in the image's map and in the lists of members.
const MAPPED: usize = size_of::<Span>() + BYTES_PER_SPAN;

impl Cache {
    /// Pulls the image that `reference` names now without the data of its files, which a process
    /// that fetches brings later, and gives it that name. Returns the image as it is if it is in
    /// the cache. Returns `None` if it cannot be pulled so, because a layer is no eStargz layer
    /// with digests for all of its data, or because the registry does not send parts of layers, or
    /// not in time: [`pull`](Self::pull) may do then.
    ///
    /// If another task or process fetches the same image from the same repository, this waits for
    /// it.
    ///
    /// # Errors
    /// Most of [`Error`]. Nothing is left in the cache then.
    pub async fn pull_lazy(
        &self,
        reference: &Reference,
        access: &Access,
        progress: Arc<dyn Progress>,
    ) -> Result<Option<Image>> {
        let (plan, registry) = self.resolve(reference, access, &*progress).await?;
        // The registry decides which image a tag stands for, and the user asked this registry.
        let names = (vec![reference.clone()], NameConflict::Replace);
        let (digest, origin) = (plan.digest, registry.origin());
        let turn = |work| self.turn(work, &digest, Some(&origin), &names, &*progress);
        let fetching = match turn(ImagePart::Fetch).await? {
            WorkRight::There(image) => return Ok(Some(*image)),
            WorkRight::Ours(lock) => lock,
        };
        let Some(tocs) = fetch(&registry, &plan.layers, self.limits()).await? else {
            return Ok(None);
        };
        let building = match turn(ImagePart::Build).await? {
            WorkRight::There(image) => return Ok(Some(*image)),
            WorkRight::Ours(lock) => lock,
        };
        let cache = self.clone();
        blocking(move || {
            // The locks are held to the end, even if the caller stops waiting.
            let _locks = (fetching, building);
            cache.build_without_data(&plan, tocs, origin, &*progress)
        })
        .await
    }

    /// Merges the layers by their indexes, writes the image without data and its map, and lists it.
    fn build_without_data(
        &self,
        plan: &Plan,
        tocs: Vec<Toc>,
        origin: Origin,
        progress: &dyn Progress,
    ) -> Result<Option<Image>> {
        progress.event(Event::Merging);
        let name = origin.reference.clone();
        let mut merger = Merger::new(self.limits());
        let (mut indexes, mut layers) = (Vec::new(), Vec::new());
        for (layer, toc) in plan.layers.iter().zip(tocs) {
            let index = Index::read(layer, &toc, self.limits(), merger.budget())?;
            let Some(mut index) = index else { return Ok(None) };
            let mapped = merger.budget().take(index.chunks.len() * MAPPED);
            let mapped = mapped.map_err(MergeError::TooLarge);
            let merged = mapped.and_then(|()| merger.apply_index(&mut index, layer.size));
            merged.map_err(|e| e.of(&layer.digest))?;
            let (digest, bytes, prefetch) = (layer.digest, layer.size, index.prefetch);
            layers.push(MapLayer { digest, bytes, prefetch });
            indexes.push(index);
        }
        let tree = merger.finish();
        let layout = Layout::of(&tree, plan.digest.uuid());
        let layout = layout.map_err(|reason| Error::bad_document(name.familiar(), reason))?;
        let Origin { reference, plain_http } = origin.clone();
        let (bytes, spans) = (layout.bytes(), spans(&tree, layout.data(), &indexes));
        let content = Map { reference, plain_http, bytes, layers, spans };
        let has_too_many = content.spans.len() as u64 > MOST_CHUNKS_OF_IMAGE;
        if has_too_many || Members::of(&content).is_err() || !content.fits(self.limits()) {
            // Chunks overlap or are too many, and a process that fetches would refuse the map.
            return Ok(None);
        }
        let image = self.work_file(&plan.digest, ".erofs")?;
        let written = layout.write_metadata(&tree, image.as_file());
        let written = written.and_then(|()| image.as_file().sync_all());
        written.map_err(|e| Error::io("write", image.path(), e))?;
        let image = image.into_temp_path();
        let map = self.work_file(&plan.digest, ".map")?.into_temp_path();
        content.write(&map)?;
        let files = Files { image, size_bytes: bytes, map: Some((map, origin)) };
        let image = self.commit(files, plan, (&[name][..], NameConflict::Replace))?;
        progress.event(Event::Finished(&plan.digest));
        Ok(Some(image))
    }
}

/// The reason why there is no index of a layer.
enum Miss {
    /// The layer cannot be fetched lazily; as a whole it may be.
    Unfit,
    Failed(Error),
}

impl From<Error> for Miss {
    fn from(error: Error) -> Self {
        match error {
            // A registry may refuse parts of layers, and send whole ones.
            Error::Registry { .. } | Error::Unauthorized { .. } | Error::NotFound(_) => Self::Unfit,
            error => Self::Failed(error),
        }
    }
}

/// Fetches the indexes of `layers`. Returns `None` if the image cannot be fetched lazily, or its
/// indexes do not come in time.
async fn fetch(
    registry: &Arc<Registry>,
    layers: &[Layer],
    limits: &Limits,
) -> Result<Option<Vec<Toc>>> {
    let all = fetch_all(registry, layers, limits.index_bytes());
    tokio::time::timeout(limits.indexes_time, all).await.unwrap_or(Ok(None))
}

/// Fetches the indexes of `layers`, of at most `most` compressed bytes in all. Returns `None` if
/// the image cannot be fetched lazily.
async fn fetch_all(
    registry: &Arc<Registry>,
    layers: &[Layer],
    most: u64,
) -> Result<Option<Vec<Toc>>> {
    if layers.iter().any(|layer| layer.toc.is_none()) {
        return Ok(None);
    }
    let total = Arc::new(AtomicU64::new(0));
    let tocs: Result<Vec<_>, Miss> = stream::iter(layers.iter().copied())
        .map(|layer| fetch_toc(registry.clone(), layer, total.clone(), most))
        .buffered(CONCURRENT_INDEXES)
        .try_collect()
        .await;
    match tocs {
        Ok(tocs) => Ok(Some(tocs)),
        Err(Miss::Unfit) => Ok(None),
        Err(Miss::Failed(error)) => Err(error),
    }
}

async fn fetch_toc(
    registry: Arc<Registry>,
    layer: Layer,
    total: Arc<AtomicU64>,
    most: u64,
) -> Result<Toc, Miss> {
    let digest = layer.toc.ok_or(Miss::Unfit)?;
    let end = layer.size.min(MOST_FOOTER);
    let end = registry.blob_range(&layer.digest, layer.size - end, end).await?;
    let footer = footer(&end).ok_or(Miss::Unfit)?;
    // The footer is in the layer, so it is not longer.
    let bytes = (layer.size - footer.bytes).checked_sub(footer.toc).filter(|bytes| *bytes > 0);
    let misplaced = || Error::bad_layer(layer.digest, "its index is not before its footer");
    let bytes = bytes.ok_or_else(misplaced)?;
    let all = total.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
    if all > most {
        let reason = format!("the indexes of the image's layers have more than {most} bytes");
        return Err(Error::too_large(format!("layer {}", layer.digest), reason).into());
    }
    let member = registry.blob_range(&layer.digest, footer.toc, bytes).await?;
    Ok(Toc { offset: footer.toc, digest, member })
}
