//! Directories of remote snapshots while they are made, beside those of snapshots.
//!
//! Such a directory may have the files of an image's volumes: up to 10,000. So it is removed by a
//! thread that may block, also if the call that makes it is given up.
//!
//! The files are copied with the image's map in memory, which takes up to a gigabyte, and for as
//! long as its registry takes. So few copies are made at once, and one registry has half of them.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slipway_image::Reference;
use tempfile::TempDir;
use tokio::runtime::Handle;

use crate::folders::{self, FILES};
use crate::images::{FETCH, Images, NotPulled, Pulled};
use crate::pulls::PullLimits;
use crate::record::RemoteImage;
use crate::refusal::{Refusal, Result};
use crate::store::{Store, blocking};

/// The file with the image of a remote snapshot (`slipway-shim` reads it).
pub const IMAGE: &str = "image.json";
/// Files of a root by which containerd resolves users.
const USERS: [&str; 2] = ["/etc/passwd", "/etc/group"];
/// The most images out of which files are copied at once. Others wait for a minute.
const COPIES: usize = 4;

/// Makes directories of remote snapshots of a store.
pub struct Staging {
    store: Arc<Store>,
    images: Arc<dyn Images>,
    copies: PullLimits,
}

impl Staging {
    /// Makes directories for `store`, with files from `images`.
    pub fn new(store: Arc<Store>, images: Arc<dyn Images>) -> Self {
        Self { store, images, copies: PullLimits::new(COPIES) }
    }

    /// Makes the directory of a layer. That of the topmost layer has /etc/passwd, /etc/group and
    /// the image's volumes, which containerd reads itself.
    ///
    /// For the lowest layer these files are extracted as a trial, and removed, while the image can
    /// still be unpacked by containerd. The trial costs a second extraction for the topmost layer:
    /// up to 64 MiB are read and copied once more. They are not fetched again, since the cache has
    /// them by then.
    ///
    /// # Errors
    /// One line.
    pub async fn stage(
        &self,
        remote: &RemoteImage,
        reference: &Reference,
        pulled: &Pulled,
    ) -> Result<Staged, String> {
        if remote.layers.len() == 1 && !remote.is_top {
            self.stage_with(Some((reference, pulled))).await?.remove().await;
        }
        self.stage_with(remote.is_top.then_some((reference, pulled))).await
    }

    async fn stage_with(&self, files: Option<(&Reference, &Pulled)>) -> Result<Staged, String> {
        let store = Arc::clone(&self.store);
        let staged = blocking(move || store.stage()).await.map_err(|error| error.to_string())?;
        let staged = Staged::new(staged);
        if let Some((reference, pulled)) = files
            && let Err(why) = self.fill(staged.path(), reference, pulled).await
        {
            staged.remove().await;
            return Err(why);
        }
        Ok(staged)
    }

    /// Extracts the files that containerd reads itself into the directory `staged`, durably.
    async fn fill(
        &self,
        staged: &Path,
        reference: &Reference,
        pulled: &Pulled,
    ) -> Result<(), String> {
        let copied = self.copy(&staged.join(FILES), reference, pulled).await;
        copied.map_err(|why| {
            format!("its files of users and volumes, which containerd copies: {why}")
        })?;
        // Before the ledger knows of the layer. The ledger's transactions must not wait for it.
        let dir = staged.to_owned();
        let synced = blocking(move || folders::sync(&dir).map_err(failed));
        synced.await.map_err(|error| error.to_string())
    }

    /// Copies the files that containerd reads itself below the directory `into`.
    async fn copy(
        &self,
        into: &Path,
        reference: &Reference,
        pulled: &Pulled,
    ) -> Result<(), String> {
        let place = self.copies.take(reference.registry()).await.map_err(NotPulled::reason)?;
        let paths: Vec<_> = USERS.map(str::to_owned).into_iter().collect();
        let paths = [paths, pulled.volumes.clone()].concat();
        let (images, digest) = (Arc::clone(&self.images), pulled.digest);
        let (into, reference) = (into.to_owned(), reference.clone());
        // In a task of its own: if this call is dropped, the copy keeps its place until it ends.
        let copy = tokio::spawn(async move {
            let _place = place;
            images.extract(&digest, &reference, &paths, &into).await
        });
        let late = |_| Ok(Err(format!("they did not come within {} s", FETCH.as_secs())));
        let copied = tokio::time::timeout(FETCH, copy).await.unwrap_or_else(late);
        copied.unwrap_or_else(|error| Err(error.to_string()))
    }
}

/// A directory that is being made. It is removed unless a snapshot takes it.
pub struct Staged {
    path: PathBuf,
    /// Taken when the directory is removed.
    dir: Option<TempDir>,
}

impl Staged {
    fn new(dir: TempDir) -> Self {
        Self { path: dir.path().to_owned(), dir: Some(dir) }
    }

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the image that the layer is of, durably. Blocks.
    ///
    /// # Errors
    /// [`Refusal::Failed`].
    pub fn write_image(&self, remote: &RemoteImage) -> Result<()> {
        let write = || -> io::Result<()> {
            let bytes = serde_json::to_vec_pretty(remote)?;
            let mut file = File::create_new(self.path.join(IMAGE))?;
            file.write_all(&bytes)?;
            file.sync_all()
        };
        write().map_err(failed)
    }

    /// Removes the directory. What cannot be removed is removed when the next process begins.
    pub async fn remove(self) {
        // Without a thread for it, it is removed as if it was dropped.
        let _ = blocking(move || {
            self.remove_now();
            Ok(())
        })
        .await;
    }

    /// Removes the directory as [`Staged::remove`] does. Blocks.
    pub fn remove_now(mut self) {
        drop(self.dir.take());
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        // The call was given up. This thread serves others.
        match Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(move || drop(dir))),
            Err(_) => drop(dir),
        }
    }
}

fn failed(error: io::Error) -> Refusal {
    Refusal::Failed(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_directory_is_removed_by_a_thread_that_may_block() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).build().unwrap();
        let staged = || {
            let dir = tempfile::tempdir().unwrap();
            std::fs::create_dir(dir.path().join(FILES)).unwrap();
            Staged::new(dir)
        };
        runtime.block_on(async {
            // The only such thread is busy until it is told to go on.
            let (go_on, told) = mpsc::channel();
            let busy = tokio::task::spawn_blocking(move || told.recv().unwrap());
            let given_up = staged();
            let path = given_up.path().to_owned();
            drop(given_up);
            assert!(path.exists(), "removed by the thread that serves calls");
            go_on.send(()).unwrap();
            busy.await.unwrap();
            let other = staged();
            let other_path = other.path().to_owned();
            other.remove().await;
            // One after the other.
            assert!(!path.exists() && !other_path.exists());
        });
    }
}
