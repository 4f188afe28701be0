//! The node's cache of images, as snapshots need it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use slipway_image::{Access, Cache, Digest, Reference, Silent};
use slipway_runtime::images_in_use;
use tokio::runtime::Handle;

/// An image that is in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The digest of its manifest for this platform.
    pub digest: Digest,
    /// The directories that the image keeps apart from its root, as its configuration names them.
    pub volumes: Vec<String>,
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
    /// Returns `None` if it cannot be pulled lazily.
    ///
    /// # Errors
    /// The registry does not answer or has no such image; its content is bad; the disk is full.
    async fn pull(&self, reference: &Reference, whole: bool) -> Result<Option<Pulled>, String>;

    /// Copies files of an image below the directory `into`: those at `paths`, and all below them.
    /// Paths that are not in the image are left out.
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
    /// The directory of sandboxes' records, whose images are in use.
    pub sandboxes: PathBuf,
}

impl NodeImages {
    /// Does something with the cache on another thread. It goes on when nobody waits for it any
    /// more.
    async fn apart<T: Send + 'static, F: Future<Output = Result<T, String>>>(
        &self,
        work: impl FnOnce(Cache) -> F + Send + 'static,
    ) -> Result<T, String> {
        let (cache, handle) = (self.cache.clone(), Handle::current());
        let done = tokio::task::spawn_blocking(move || handle.block_on(work(cache))).await;
        done.map_err(line)?
    }
}

fn line(error: impl std::fmt::Display) -> String {
    error.to_string()
}

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

    async fn pull(&self, reference: &Reference, whole: bool) -> Result<Option<Pulled>, String> {
        let named = reference.clone();
        let pull = move |cache: Cache| async move {
            let (access, silent) = (Access::from_docker_config(&named), Arc::new(Silent));
            if whole {
                return cache.pull(&named, &access, silent).await.map(Some).map_err(line);
            }
            cache.pull_lazy(&named, &access, silent).await.map_err(line)
        };
        let image = self.apart(pull).await?;
        Ok(image.map(|image| Pulled { digest: image.digest, volumes: image.config.volumes }))
    }

    async fn extract(
        &self,
        digest: &Digest,
        reference: &Reference,
        paths: &[String],
        into: &Path,
    ) -> Result<(), String> {
        let (digest, named) = (*digest, reference.clone());
        let (paths, into) = (paths.to_vec(), into.to_owned());
        let extract = move |cache: Cache| async move {
            let access = Access::from_docker_config(&named);
            let paths: Vec<_> = paths.iter().map(String::as_str).collect();
            cache.extract(&digest, &paths, &into, &access).await.map_err(line)
        };
        self.apart(extract).await
    }

    async fn forget(&self, reference: &Reference) -> Result<bool, String> {
        let (named, sandboxes) = (reference.clone(), self.sandboxes.clone());
        let forget = move |cache: Cache| async move {
            // A name that is gone, or an image that is found by its digest alone, is not ours.
            if !has(&cache, &named)? {
                return Ok(true);
            }
            let in_use = images_in_use(&sandboxes).map_err(line)?;
            match cache.remove(&named.to_string(), &in_use, false) {
                Ok(_) => Ok(true),
                Err(slipway_image::Error::InUse(_)) => Ok(false),
                Err(error) => Err(line(error)),
            }
        };
        self.apart(forget).await
    }
}
