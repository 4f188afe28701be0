//! A container's root as an image of Slipway's.
//!
//! containerd gives a root as mounts: most often an overlay of read-only layers below an empty
//! writable one, which no guest needs, since each sandbox has a writable layer of its own. So an
//! image is made of the layers alone, once for each chain of layers, and found again by a key of
//! their identities ([`crate::content`]). A root with content of its own becomes an image for its
//! container alone, which goes with it. Layers of a lazily pulled image, which are not here, are an
//! image already ([`crate::lazy`]).
//!
//! The program `slipway` makes the images ([`crate::tool`]). What must be mounted for it is mounted
//! read-only in a mount namespace of the importer's own ([`crate::mount`]), which goes with that
//! process: nothing stays mounted, whoever is killed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use slipway_lock::Lock;
use slipway_sandbox_api::{images, v1};

use crate::containerd::Mount;
use crate::content::content;
use crate::daemon::Daemon;
use crate::layers::Source;
use crate::lazy::{self, Image};
use crate::tool::{Input, LIMIT, Tool, folder_source, layer_source};
use crate::ttrpc::Failure;

/// The file in a bundle with the name of the image that is its container's alone.
const PRIVATE: &str = "slipway-image";
/// The longest time that a root waits for another container's import of the same layers: longer
/// than [`LIMIT`], after which the next one tries.
const PATIENCE: Duration = Duration::from_secs(LIMIT.as_secs() + 60);

/// A root that is wanted.
pub struct RootRequest<'a> {
    /// Its mounts.
    pub mounts: &'a [Mount],
    /// Its path in the container's configuration, which counts without mounts.
    pub path: Option<&'a str>,
    /// The bundle.
    pub bundle: &'a Path,
    /// A name that no other container of the node has.
    pub owner: &'a str,
    /// The name of the container's image, as CRI tells it.
    pub image_name: Option<&'a str>,
}

/// A root that is in the cache of images.
#[derive(Debug)]
pub struct Root {
    /// The image's name.
    pub image: String,
    /// The image's digest.
    pub digest: String,
    /// Set if it is this container's alone.
    pub is_private: bool,
}

/// Makes an image of a root, or finds it.
///
/// # Errors
/// The root is of a kind that cannot be read, or `slipway` failed.
pub async fn prepare(daemon: &Daemon, wanted: &RootRequest<'_>) -> Result<Root, Failure> {
    let path = wanted.path.filter(|path| !path.is_empty());
    let content = content(wanted.mounts, path.map(|path| wanted.bundle.join(path)))?;
    let tool = Tool::new(daemon, &daemon.status().await?.data_dir);
    let input = match &content.source {
        Source::Lazy(layers) => {
            let (image, digest) = find_or_pull(&tool, layers, wanted.image_name).await?;
            return Ok(Root { image, digest, is_private: false });
        }
        Source::Folder(path) => Input::Named(folder_source(path)?),
        Source::Erofs(layers) => Input::Named(layer_source(layers)?),
        Source::Layers(layers, options) => Input::Overlay(layers, options),
        Source::Device(mount) => Input::Device(mount),
    };
    let Some(key) = &content.key else {
        let image = images::of_container(&short_digest(wanted.owner));
        std::fs::write(wanted.bundle.join(PRIVATE), &image).map_err(|error| error.to_string())?;
        let digest = tool.import(&input, &image, wanted.bundle).await?;
        return Ok(Root { image, digest, is_private: true });
    };
    let image = images::of_layers(key);
    let lock = daemon.run_dir().join("containerd").join(format!("{key}.lock"));
    let digest = find_or_import(&tool, &input, &image, wanted.bundle, lock).await?;
    Ok(Root { image, digest, is_private: false })
}

/// Returns the name of the image that is a container's alone, from its bundle.
pub fn private_of(bundle: &Path) -> Option<String> {
    std::fs::read_to_string(bundle.join(PRIVATE)).ok().filter(|name| !name.is_empty())
}

/// Removes an image that was a container's alone. A refusal, because a user's snapshot has the
/// image, keeps no container from being deleted: the daemon removes the image once nothing uses it.
///
/// # Errors
/// `slipway` cannot say whether there is such an image. That there is none is no error.
pub async fn remove_private(daemon: &Daemon, image: &str) -> Result<(), String> {
    let mut client = daemon.connect().await.map_err(|failure| failure.message)?;
    let status = client.status(v1::Empty {}).await.map_err(|s| s.message().to_owned())?;
    let tool = Tool::new(daemon, &status.get_ref().data_dir);
    if tool.find(image).await?.is_some()
        && let Err(reason) = tool.remove(image).await
    {
        crate::log::warn(&format!("image {image} stays until nothing uses it: {reason}"));
    }
    Ok(())
}

fn short_digest(text: impl AsRef<[u8]>) -> String {
    hex::encode(&Sha256::digest(text)[..16])
}

/// The lock of the image of one key. Its file is removed when the image is there, or could not be
/// made.
struct ImageLock {
    path: PathBuf,
    /// Released after the file was removed: who waits for it finds that it is not at its path any
    /// more, and makes another one.
    _lock: Lock,
}

impl ImageLock {
    /// Takes the lock at `path`, whose directory is made if it is missing.
    async fn take(path: PathBuf) -> Result<Self, String> {
        let taken = tokio::task::spawn_blocking(move || -> Result<Self, String> {
            let dir = path.parent().unwrap_or(Path::new("/"));
            std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
            let lock = Lock::within(&path, PATIENCE).map_err(|error| error.to_string())?;
            Ok(Self { path, _lock: lock })
        });
        taken.await.map_err(|error| error.to_string())?
    }
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        // A lock file that cannot be removed is used by the next import of the image.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Returns the digest of an image. An image that is not there is made, under the lock at `lock`.
async fn find_or_import(
    tool: &Tool,
    input: &Input<'_>,
    image: &str,
    bundle: &Path,
    lock: PathBuf,
) -> Result<String, String> {
    if let Some(digest) = tool.find(image).await? {
        return Ok(digest);
    }
    let _lock = ImageLock::take(lock).await?;
    match tool.find(image).await? {
        Some(digest) => Ok(digest),
        None => tool.import(input, image, bundle).await,
    }
}

/// Finds the image of layers that are not on the host, or has it pulled. Returns its name and its
/// digest.
async fn find_or_pull(
    tool: &Tool,
    layers: &Image,
    name: Option<&str>,
) -> Result<(String, String), String> {
    let reference = lazy::reference(layers, name)?;
    // A tag is asked for again: the node's image by this name may be an earlier one.
    if reference.contains('@')
        && let Some(digest) = tool.find(reference).await?
    {
        return Ok((reference.to_owned(), digest));
    }
    let digest = tool.pull_lazily(reference).await?;
    lazy::check_pulled(layers, reference, &digest)?;
    Ok((reference.to_owned(), digest))
}

#[cfg(test)]
#[path = "tests/rootfs.rs"]
mod tests;
