//! Remote snapshots: layers of images that are in the node's cache instead, most of them pulled
//! lazily.
//!
//! containerd asks for a snapshot to unpack a layer into, and says by labels which layer of which
//! image that is. If the image is in the cache, or can be pulled lazily into it, the answer is a
//! layer that is finished, and containerd fetches nothing ("remote snapshotter"). Its directory has
//! `image.json` beside `fs`, by which Slipway's shim finds the image. `fs` is empty, but for the
//! files of a root that containerd itself reads on the host, in the topmost layer.
//!
//! Labels come from registries and from pods: [`LayerRequest::of`] takes only those of containerd's
//! own calls to unpack, whose keys nobody else makes.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;

use slipway_image::{Digest, Reference};

use crate::holds::Hold;
use crate::images::{Images, Pulled};
use crate::pulls::Pulls;
use crate::record::{NewSnapshot, Record, RemoteImage, SnapshotKind};
use crate::refusal::{Refusal, Result, shown};
use crate::staging::{Staged, Staging};
use crate::store::{Store, TARGET, blocking};

/// Labels that containerd's CRI plugin and its transfer service make, if the settings say so.
const REFERENCE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
const LAYER: &str = "containerd.io/snapshot/cri.layer-digest";
const LAYERS: &str = "containerd.io/snapshot/cri.image-layers";
/// The beginning of the keys of snapshots that containerd unpacks layers into.
const EXTRACT: &str = "extract-";
/// The most volumes of an image that is pulled lazily.
const MOST_VOLUMES: usize = 64;

/// A layer that containerd is about to fetch and unpack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRequest {
    /// The name of the layer's snapshot in containerd, which follows from the content.
    target: String,
    /// The image, as `name@digest`.
    reference: Reference,
    /// The digest of the image's manifest.
    manifest: Digest,
    /// The digest of the layer.
    layer: Digest,
    /// Set if no layer is above it.
    is_top: bool,
}

impl LayerRequest {
    /// Finds the layer in the key and the labels of a call. Returns `None` if it is another call:
    /// pods choose labels of their snapshots, but not keys.
    pub fn of(key: &str, labels: &BTreeMap<String, String>) -> Option<Self> {
        let label = |name: &str| labels.get(name).map(String::as_str);
        let target = label(TARGET).filter(|target| !target.is_empty())?;
        // NAMESPACE/NUMBER/extract-TIME-RANDOM TARGET
        let own = key.splitn(3, '/').last()?;
        let unique = own.strip_prefix(EXTRACT)?.strip_suffix(target)?.strip_suffix(' ')?;
        if unique.is_empty() || unique.contains([' ', '/']) {
            return None;
        }
        let layer = Digest::from_str(label(LAYER)?).ok()?;
        let mut above = label(LAYERS)?.split(',');
        if above.next()?.parse::<Digest>().ok() != Some(layer) {
            return None;
        }
        let manifest = Digest::from_str(label(MANIFEST)?).ok()?;
        let reference = pinned(&label(REFERENCE)?.parse::<Reference>().ok()?, &manifest)?;
        let (target, is_top) = (target.to_owned(), above.next().is_none());
        Some(Self { target, reference, manifest, layer, is_top })
    }
}

/// Returns `name@digest` for an image.
fn pinned(reference: &Reference, digest: &Digest) -> Option<Reference> {
    format!("{}/{}@{digest}", reference.registry(), reference.repository()).parse().ok()
}

/// Remote snapshots of a store.
pub struct RemoteSnapshots {
    store: Arc<Store>,
    images: Arc<dyn Images>,
    staging: Staging,
    pulls: Pulls,
}

impl RemoteSnapshots {
    /// Makes remote snapshots of images from `images` in `store`.
    pub fn new(store: Arc<Store>, images: Arc<dyn Images>) -> Self {
        let staging = Staging::new(Arc::clone(&store), Arc::clone(&images));
        let pulls = Pulls::new(Arc::clone(&images));
        Self { store, images, staging, pulls }
    }

    /// Adds a layer as a remote snapshot on `parent`, if that is possible. Returns whether
    /// containerd finds it.
    ///
    /// # Errors
    /// The layer below is remote, so that this one has to be, and the image cannot be had.
    pub async fn add(
        &self,
        key: &str,
        parent: &str,
        labels: &BTreeMap<String, String>,
        wanted: &LayerRequest,
    ) -> Result<bool> {
        let below = match parent {
            "" => None,
            parent => match self.get(parent).await?.remote {
                // The layer below was unpacked, and this one is unpacked on it.
                None => return Ok(false),
                below => below,
            },
        };
        // Until the snapshot's record has the image.
        let hold = self.pulls.hold(&wanted.reference).await;
        let Some(pulled) = self.pull(wanted, below.is_some()).await? else { return Ok(false) };
        let mut layers = below.map(|below| below.layers).unwrap_or_default();
        layers.push(wanted.layer.to_string());
        let remote = RemoteImage {
            reference: wanted.reference.to_string(),
            digest: pulled.digest.to_string(),
            layers,
            is_top: wanted.is_top,
        };
        if self.has(wanted, parent, &remote).await? {
            return Ok(true);
        }
        let staged = match self.staging.stage(&remote, &wanted.reference, &pulled).await {
            Ok(staged) => staged,
            Err(why) if parent.is_empty() => {
                let image = shown(&remote.reference);
                tracing::warn!(image, why, "a lazily pulled image is unpacked all the same");
                return Ok(false);
            }
            Err(why) => {
                let image = shown(&remote.reference);
                return Err(Refusal::Unavailable(format!("image {image}: {why}")));
            }
        };
        let new = NewSnapshot {
            key: key.to_owned(),
            kind: SnapshotKind::Committed,
            parent: parent.to_owned(),
            labels: labels.clone(),
            usage: Default::default(),
            remote: Some(remote),
        };
        self.commit(new, staged, hold).await?;
        tracing::info!(image = %wanted.reference, layer = %wanted.layer, "a layer is not fetched");
        Ok(true)
    }

    /// Has the image in the cache. Returns `None` if the layer has to be unpacked.
    async fn pull(&self, wanted: &LayerRequest, is_on_remote: bool) -> Result<Option<Pulled>> {
        let name = shown(&wanted.reference.to_string());
        match self.pull_lazily(wanted).await {
            Ok(Some(pulled)) => return Ok(Some(pulled)),
            Ok(None) => tracing::info!(image = name, "not an image that can be pulled lazily"),
            Err(why) => tracing::warn!(image = name, why, "an image is not pulled lazily"),
        }
        if !is_on_remote {
            return Ok(None);
        }
        // The layer below has no files to unpack this one on.
        let whole = self.pulls.pull(&wanted.reference, true).await;
        let pulled = whole.and_then(|pulled| pulled.ok_or_else(|| "there is none".to_owned()));
        let pulled = pulled.and_then(|pulled| check(wanted, &pulled).map(|()| pulled));
        pulled.map(Some).map_err(|why| {
            Refusal::Unavailable(format!(
                "image {name}: a layer below is of a lazily pulled image, and this image cannot \
                 be pulled by Slipway: {why}"
            ))
        })
    }

    async fn pull_lazily(&self, wanted: &LayerRequest) -> Result<Option<Pulled>, String> {
        self.own(&wanted.reference).await?;
        let pulled = self.pulls.pull(&wanted.reference, false).await?;
        if let Some(pulled) = &pulled {
            check(wanted, pulled)?;
        }
        Ok(pulled)
    }

    /// Notes that the image will be in the cache for the sake of snapshots, unless it is there: a
    /// user pulled it, or it was noted before.
    async fn own(&self, reference: &Reference) -> Result<(), String> {
        if self.images.has(reference).await? {
            return Ok(());
        }
        let (store, reference) = (Arc::clone(&self.store), reference.to_string());
        blocking(move || store.own_image(&reference)).await.map_err(|error| error.to_string())
    }

    /// Adds a snapshot, which goes on, and holds the image, if the call ends meanwhile.
    async fn commit(&self, new: NewSnapshot, staged: Staged, hold: Hold) -> Result<()> {
        let store = Arc::clone(&self.store);
        blocking(move || {
            let _until_it_is_added = hold;
            let written = new.remote.as_ref().map_or(Ok(()), |remote| staged.write_image(remote));
            let added = written.and_then(|()| store.add_remote(new, staged.path()));
            // Nothing is left of it if it was added.
            staged.remove_now();
            added
        })
        .await
    }

    async fn get(&self, key: &str) -> Result<Record> {
        let (store, key) = (Arc::clone(&self.store), key.to_owned());
        blocking(move || store.get(&key)).await
    }

    async fn has(&self, wanted: &LayerRequest, parent: &str, remote: &RemoteImage) -> Result<bool> {
        let (store, target) = (Arc::clone(&self.store), wanted.target.clone());
        let (parent, remote) = (parent.to_owned(), remote.clone());
        blocking(move || store.has_remote(&target, &parent, &remote)).await
    }

    /// Removes images from the cache that were pulled for snapshots of which none is left. Those
    /// that sandboxes use, and those that are being pulled, stay until the next time.
    pub async fn forget_unused(&self) {
        let unused = match self.unused().await {
            Ok(unused) => unused,
            Err(error) => return tracing::warn!(%error, "images without snapshots stay"),
        };
        for reference in unused {
            if let Err(why) = self.forget(&reference).await {
                let image = shown(&reference);
                tracing::warn!(image, why, "an image without snapshots is not forgotten");
            }
        }
    }

    async fn unused(&self) -> Result<Vec<String>> {
        let store = Arc::clone(&self.store);
        blocking(move || store.unused_images()).await
    }

    async fn forget(&self, reference: &str) -> Result<(), String> {
        let parsed = reference.parse::<Reference>().map_err(|e| e.to_string())?;
        let Some(removal) = self.pulls.remove(&parsed) else { return Ok(()) };
        // A snapshot may have come before the removal began.
        let unused = self.unused().await.map_err(|error| error.to_string())?;
        if !unused.iter().any(|unused| unused == reference) {
            return Ok(());
        }
        self.pulls.forget(&parsed);
        let (store, images) = (Arc::clone(&self.store), Arc::clone(&self.images));
        let noted = reference.to_owned();
        // In a task of its own: if this call is dropped, the removal goes on, and no snapshot may
        // be made of its image meanwhile.
        let task = tokio::spawn(async move {
            let _until_it_ends = removal;
            remove(store, &*images, &parsed, noted).await
        });
        task.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

/// Removes an image from the cache unless a sandbox uses it, and forgets it in the store, where it
/// is `noted`.
async fn remove(
    store: Arc<Store>,
    images: &dyn Images,
    reference: &Reference,
    noted: String,
) -> Result<(), String> {
    if !images.forget(reference).await? {
        return Ok(());
    }
    let image = shown(&noted);
    let forgotten = blocking(move || store.forget_image(&noted)).await;
    forgotten.map_err(|error| format!("it is no longer in the cache, but noted: {error}"))?;
    tracing::info!(image, "removed: no snapshot has it any more");
    Ok(())
}

/// Checks that an image is the one that containerd has, and that its volumes can be copied.
fn check(wanted: &LayerRequest, pulled: &Pulled) -> Result<(), String> {
    if wanted.manifest != pulled.digest {
        return Err("the registry has another manifest for this platform".to_owned());
    }
    if pulled.volumes.len() > MOST_VOLUMES {
        return Err(format!("it has more than {MOST_VOLUMES} volumes"));
    }
    let is_odd = |volume: &&String| {
        let mut parts = volume.split('/').filter(|part| !matches!(*part, "" | "."));
        let is_root = parts.clone().next().is_none();
        is_root || parts.any(|part| part == "..")
    };
    match pulled.volumes.iter().find(is_odd) {
        Some(volume) => Err(format!("its volume {:?} is not copied", shown(volume))),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "tests/remote.rs"]
pub mod tests;
