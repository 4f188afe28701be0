//! The node's cache of images, as snapshots need it: [`Images`] has the calls, and [`NodeImages`]
//! carries them out. Tests have another implementation, without registries.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipway_image::{Access, Cache, Digest, Limits, Reference, Silent};
use slipway_runtime::{Config, images_in_use};
use tokio::runtime::Handle;

/// The longest time for fetching the files that containerd reads itself.
pub(crate) const FETCH: Duration = Duration::from_secs(300);
/// The bytes of memory for the names and attributes of an image of usual size, which has half a
/// million files or fewer.
const USUAL: u64 = 256 << 20;

/// An image that is in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The digest of its manifest for this platform.
    pub digest: Digest,
    /// The directories that the image keeps apart from its root, as its configuration names them.
    pub volumes: Vec<String>,
}

/// The memory that a pull may take for the names and attributes of an image's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 256 MiB at most.
    Usual,
    /// As much as [`Limits`] allow by default, 2 GiB.
    Large,
}

/// The reason why an image was not pulled, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotPulled {
    /// The image is larger than a limit.
    TooLarge(String),
    /// Anything else.
    Failed(String),
}

impl NotPulled {
    /// Returns the line.
    pub fn reason(self) -> String {
        match self {
            Self::TooLarge(reason) | Self::Failed(reason) => reason,
        }
    }
}

impl From<slipway_image::Error> for NotPulled {
    fn from(error: slipway_image::Error) -> Self {
        match error {
            slipway_image::Error::TooLarge { .. } => Self::TooLarge(line(error)),
            error => Self::Failed(line(error)),
        }
    }
}

/// The images of a node. Each call's error is one line.
#[tonic::async_trait]
pub trait Images: Send + Sync + 'static {
    /// Returns whether the cache has an image with exactly this name.
    ///
    /// # Errors
    /// The cache cannot be read.
    async fn has(&self, reference: &Reference) -> Result<bool, String>;

    /// Puts the image that `reference` names into the cache, lazily, or with `whole` in any case.
    /// Returns `None` if it cannot be pulled lazily. `size` bounds the memory.
    ///
    /// # Errors
    /// The registry does not answer or has no such image; its content is bad; the disk is full. The
    /// image is larger than `size`, or than other limits.
    async fn pull(
        &self,
        reference: &Reference,
        whole: bool,
        size: Size,
    ) -> Result<Option<Pulled>, NotPulled>;

    /// Copies files of an image below the directory `into`: those at `paths`, and all below them.
    /// Paths that are not in the image are left out. `reference` is the name by which the image was
    /// pulled; its digest alone decides what is copied.
    ///
    /// # Errors
    /// The files cannot be fetched or written.
    async fn extract(
        &self,
        digest: &Digest,
        reference: &Reference,
        paths: &[String],
        into: &Path,
    ) -> Result<(), String>;

    /// Takes the name `reference` from its image, and removes the image with its last name.
    /// Returns whether the image has the name no more.
    ///
    /// # Errors
    /// The cache cannot be changed.
    async fn forget(&self, reference: &Reference) -> Result<bool, String>;
}

/// The cache of this node.
pub struct NodeImages {
    /// The cache.
    pub cache: Cache,
    /// The node's settings, by which images in use are found.
    pub config: Config,
}

impl NodeImages {
    /// Does `work` with the cache on another thread, since it waits for disks and registries. The
    /// work goes on if the caller is dropped.
    async fn apart<T: Send + 'static, F: Future<Output = Result<T, String>>>(
        &self,
        work: impl FnOnce(Cache) -> F + Send + 'static,
    ) -> Result<T, String> {
        let (cache, handle) = (self.cache.clone(), Handle::current());
        let done = tokio::task::spawn_blocking(move || handle.block_on(work(cache))).await;
        done.map_err(line)?
    }
}

/// Returns the text of an error, which is one line.
fn line(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Returns whether the cache has an image with exactly this name, and not only its digest.
fn has(cache: &Cache, reference: &Reference) -> Result<bool, String> {
    let found = cache.get(&reference.to_string()).map_err(line)?;
    Ok(found.is_some_and(|image| image.references.contains(reference)))
}

#[tonic::async_trait]
impl Images for NodeImages {
    async fn has(&self, reference: &Reference) -> Result<bool, String> {
        let named = reference.clone();
        self.apart(move |cache: Cache| async move { has(&cache, &named) }).await
    }

    async fn pull(
        &self,
        reference: &Reference,
        whole: bool,
        size: Size,
    ) -> Result<Option<Pulled>, NotPulled> {
        let named = reference.clone();
        let pull = move |cache: Cache| async move {
            let usual = Limits { metadata_bytes: USUAL, ..Limits::default() };
            let cache = if size == Size::Usual { cache.with_limits(usual) } else { cache };
            let (access, silent) = (Access::from_docker_config(&named), Arc::new(Silent));
            let image = match whole {
                true => cache.pull(&named, &access, silent).await.map(Some),
                false => cache.pull_lazy(&named, &access, silent).await,
            };
            Ok(image.map_err(NotPulled::from))
        };
        let image = self.apart(pull).await.map_err(NotPulled::Failed)??;
        Ok(image.map(|image| Pulled { digest: image.digest, volumes: image.config.volumes }))
    }

    async fn extract(
        &self,
        digest: &Digest,
        _: &Reference,
        paths: &[String],
        into: &Path,
    ) -> Result<(), String> {
        let (digest, paths, into) = (*digest, paths.to_vec(), into.to_owned());
        let extract = move |cache: Cache| async move {
            let paths: Vec<_> = paths.iter().map(String::as_str).collect();
            // Each registry gets its own login: the image may be of another one than its name.
            let access = Access::from_docker_config;
            let extract = cache.extract(&digest, &paths, &into, access);
            // The caller's own limit does not end this work, which has the image's map in memory.
            match tokio::time::timeout(FETCH, extract).await {
                Ok(extracted) => extracted.map_err(line),
                Err(_) => Err(format!("they did not come within {} s", FETCH.as_secs())),
            }
        };
        self.apart(extract).await
    }

    async fn forget(&self, reference: &Reference) -> Result<bool, String> {
        let (named, config) = (reference.clone(), self.config.clone());
        let forget = move |cache: Cache| async move {
            // A name that is gone, or an image that is found by its digest alone, is not ours.
            if !has(&cache, &named)? {
                return Ok(true);
            }
            let in_use = images_in_use(&config).map_err(line)?;
            match cache.remove(&named.to_string(), &in_use, false) {
                Ok(_) => Ok(true),
                Err(slipway_image::Error::InUse(_)) => Ok(false),
                Err(error) => Err(line(error)),
            }
        };
        self.apart(forget).await
    }
}
