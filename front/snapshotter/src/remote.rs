//! Remote snapshots: layers of images that are in the node's cache instead, most of them pulled
//! lazily.
//!
//! containerd asks for a snapshot to unpack a layer into, and says by labels which layer of which
//! image that is. If the image is in the cache, or can be pulled lazily into it, the answer is a
//! layer that is finished, and containerd fetches nothing ("remote snapshotter"). Its directory has
//! `image.json` beside `fs`, by which Slipway's shim finds the image. `fs` is empty, but for the
//! files of a root that containerd itself reads on the host, in the topmost layer.
//!
//! Labels come from registries and from pods: [`Wanted::of`] takes only those of containerd's own
//! calls to unpack, whose keys nobody else makes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use slipway_image::{Digest, Reference};
use tokio::sync::RwLock;

use crate::folders::{self, FILES};
use crate::images::{Images, Pulled};
use crate::pulls::Pulls;
use crate::record::{Kind, New, Record, Remote};
use crate::refusal::{Refusal, Result, shown};
use crate::store::{Store, TARGET};

/// The file with the image of a remote snapshot (`slipway-shim` reads it).
const IMAGE: &str = "image.json";
/// Labels that containerd's CRI plugin and its transfer service make, if the settings say so.
const REFERENCE: &str = "containerd.io/snapshot/cri.image-ref";
const MANIFEST: &str = "containerd.io/snapshot/cri.manifest-digest";
const LAYER: &str = "containerd.io/snapshot/cri.layer-digest";
const LAYERS: &str = "containerd.io/snapshot/cri.image-layers";
/// The beginning of the keys of snapshots that containerd unpacks layers into.
const EXTRACT: &str = "extract-";
/// Files of a root by which containerd resolves users.
const USERS: [&str; 2] = ["/etc/passwd", "/etc/group"];
/// The most volumes of an image that is pulled lazily.
const MOST_VOLUMES: usize = 64;
/// The longest time of fetching the files that containerd reads itself.
const FETCH: Duration = Duration::from_secs(300);

/// A layer that containerd is about to fetch and unpack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
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

impl Wanted {
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
pub struct Remotes {
    store: Arc<Store>,
    images: Arc<dyn Images>,
    pulls: Pulls,
    /// Held for reading from a pull until the snapshot's record has the image, and for writing
    /// while images without snapshots are removed.
    images_change: RwLock<()>,
}

impl Remotes {
    /// Makes remote snapshots of images from `images` in `store`.
    pub fn new(store: Arc<Store>, images: Arc<dyn Images>) -> Self {
        let pulls = Pulls::new(Arc::clone(&images));
        Self { store, images, pulls, images_change: RwLock::new(()) }
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
        wanted: &Wanted,
    ) -> Result<bool> {
        let below = match parent {
            "" => None,
            parent => match self.get(parent).await?.remote {
                // The layer below was unpacked, and this one is unpacked on it.
                None => return Ok(false),
                below => below,
            },
        };
        let _held = self.images_change.read().await;
        let Some(pulled) = self.pull(wanted, below.is_some()).await? else { return Ok(false) };
        let mut layers = below.map(|below| below.layers).unwrap_or_default();
        layers.push(wanted.layer.to_string());
        let remote = Remote {
            reference: wanted.reference.to_string(),
            digest: pulled.digest.to_string(),
            layers,
            whole: wanted.is_top,
        };
        if self.has(wanted, parent, &remote).await? {
            return Ok(true);
        }
        let staged = match self.stage(&remote, &wanted.reference, &pulled).await {
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
        self.commit(key, parent, labels, remote, staged).await?;
        tracing::info!(image = %wanted.reference, layer = %wanted.layer, "a layer is not fetched");
        Ok(true)
    }

    /// Has the image in the cache. Returns `None` if the layer has to be unpacked.
    async fn pull(&self, wanted: &Wanted, is_on_remote: bool) -> Result<Option<Pulled>> {
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

    async fn pull_lazily(&self, wanted: &Wanted) -> Result<Option<Pulled>, String> {
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

    /// Makes the directory of a layer, aside. The topmost one has the files that containerd reads
    /// itself. They are tried for the lowest one already, with which all others can still be
    /// unpacked.
    ///
    /// # Errors
    /// One line.
    async fn stage(
        &self,
        remote: &Remote,
        reference: &Reference,
        pulled: &Pulled,
    ) -> Result<tempfile::TempDir, String> {
        if remote.layers.len() == 1 && !remote.whole {
            self.stage_with(Some((reference, pulled))).await?;
        }
        self.stage_with(remote.whole.then_some((reference, pulled))).await
    }

    async fn stage_with(
        &self,
        files: Option<(&Reference, &Pulled)>,
    ) -> Result<tempfile::TempDir, String> {
        let store = Arc::clone(&self.store);
        let staged = blocking(move || store.stage()).await.map_err(|error| error.to_string())?;
        let Some((reference, pulled)) = files else { return Ok(staged) };
        let paths: Vec<_> = USERS.map(str::to_owned).into_iter().collect();
        let paths = [paths, pulled.volumes.clone()].concat();
        let into = staged.path().join(FILES);
        let fetch = self.images.extract(&pulled.digest, reference, &paths, &into);
        let late = |_| Err(format!("they did not come within {} s", FETCH.as_secs()));
        let fetched = tokio::time::timeout(FETCH, fetch).await.unwrap_or_else(late);
        fetched.map_err(|why| {
            format!("its files of users and volumes, which containerd copies: {why}")
        })?;
        // Before the ledger knows of the layer. The ledger's transactions must not wait for it.
        let synced = blocking(move || {
            folders::sync(staged.path()).map_err(|error| Refusal::Failed(error.to_string()))?;
            Ok(staged)
        });
        synced.await.map_err(|error| error.to_string())
    }

    async fn commit(
        &self,
        key: &str,
        parent: &str,
        labels: &BTreeMap<String, String>,
        remote: Remote,
        staged: tempfile::TempDir,
    ) -> Result<()> {
        let new = New {
            key: key.to_owned(),
            kind: Kind::Committed,
            parent: parent.to_owned(),
            labels: labels.clone(),
            usage: Default::default(),
            remote: Some(remote),
        };
        let store = Arc::clone(&self.store);
        blocking(move || {
            if let Some(remote) = &new.remote {
                let written = write_image(&staged.path().join(IMAGE), remote);
                written.map_err(|error| Refusal::Failed(error.to_string()))?;
            }
            store.add_remote(new, staged.path())
        })
        .await
    }

    async fn get(&self, key: &str) -> Result<Record> {
        let (store, key) = (Arc::clone(&self.store), key.to_owned());
        blocking(move || store.get(&key)).await
    }

    async fn has(&self, wanted: &Wanted, parent: &str, remote: &Remote) -> Result<bool> {
        let (store, target) = (Arc::clone(&self.store), wanted.target.clone());
        let (parent, remote) = (parent.to_owned(), remote.clone());
        blocking(move || store.has_remote(&target, &parent, &remote)).await
    }

    /// Removes images from the cache that were pulled for snapshots of which none is left. Those
    /// that sandboxes use stay until the next time, and all while an image is being pulled.
    pub async fn forget_unused(&self) {
        let Ok(_held) = self.images_change.try_write() else { return };
        let store = Arc::clone(&self.store);
        let unused = match blocking(move || store.unused_images()).await {
            Ok(unused) => unused,
            Err(error) => return tracing::warn!(%error, "images without snapshots stay"),
        };
        for reference in unused {
            if let Err(why) = self.forget(&reference).await {
                tracing::warn!(image = shown(&reference), why, "an image without snapshots stays");
            }
        }
    }

    async fn forget(&self, reference: &str) -> Result<(), String> {
        let parsed = reference.parse::<Reference>().map_err(|e| e.to_string())?;
        self.pulls.forget(&parsed);
        if !self.images.forget(&parsed).await? {
            return Ok(());
        }
        let (store, reference) = (Arc::clone(&self.store), reference.to_owned());
        let name = shown(&reference);
        let forgotten = blocking(move || store.forget_image(&reference)).await;
        tracing::info!(image = name, "removed: no snapshot has it any more");
        forgotten.map_err(|error| error.to_string())
    }
}

/// Checks that an image is the one that containerd has, and that its volumes can be copied.
fn check(wanted: &Wanted, pulled: &Pulled) -> Result<(), String> {
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

/// Writes the image of a remote snapshot durably.
fn write_image(path: &Path, remote: &Remote) -> io::Result<()> {
    let bytes = serde_json::to_vec_pretty(remote)?;
    let mut file = File::create_new(path)?;
    file.write_all(&bytes)?;
    file.sync_all()
}

/// Does what blocks on another thread.
///
/// # Errors
/// The errors of the work.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::Failed(error.to_string()))?
}

#[cfg(test)]
#[path = "tests/remote.rs"]
pub mod tests;
