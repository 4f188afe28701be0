//! Roots that sandboxes share: an image in memory once, whose pages its guests read in place.
//!
//! A root is copied when the first sandbox of its image starts, and freed when the last one has
//! ended. Each counts against the node's limit, `shared_root_bytes`. A sandbox whose root cannot be
//! shared has its image as a disk, like all sandboxes of a node without shared roots.
//!
//! The next daemon finds a root that is in use by the descriptor of a VMM that it adopts, so that
//! new sandboxes share it as well.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use slipway_hypervisor::SharedPages;

use crate::files::Lane;
use crate::lock::lock;
use crate::{Error, Result};

/// The root of one image, shared by sandboxes. It is freed with the last reference.
pub(crate) struct SharedRoot {
    pages: SharedPages,
    _space: Space,
}

impl SharedRoot {
    /// Returns the pages.
    pub(crate) fn pages(&self) -> &SharedPages {
        &self.pages
    }
}

/// Bytes that count against the node's limit until this is dropped.
struct Space {
    used: Arc<Mutex<u64>>,
    bytes: u64,
}

impl Space {
    fn take(used: &Arc<Mutex<u64>>, bytes: u64, limit: u64) -> Result<Self> {
        let mut now = lock(used);
        let free = limit.saturating_sub(*now);
        if bytes > free {
            return Err(Error::SharedRoot(format!(
                "its {} MiB do not fit: {} MiB of shared_root_bytes are free",
                bytes >> 20,
                free >> 20
            )));
        }
        *now += bytes;
        Ok(Self { used: Arc::clone(used), bytes })
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        *lock(&self.used) -= self.bytes;
    }
}

/// The root of one image. The lock is held while the root is made.
type RootCell = tokio::sync::Mutex<Weak<SharedRoot>>;

/// The shared roots of a node.
pub(crate) struct SharedRoots {
    limit: u64,
    used: Arc<Mutex<u64>>,
    /// The places of the roots, by the digest of the image.
    places: Mutex<BTreeMap<String, Arc<RootCell>>>,
}

impl SharedRoots {
    /// Makes a table of roots that have at most `limit` bytes together.
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, used: Arc::default(), places: Mutex::default() }
    }

    /// Returns the root of the image with this digest. Copies the file at `path` if no sandbox has
    /// the root.
    ///
    /// # Errors
    /// [`Error::SharedRoot`] if the limit does not permit the root; errors of reading the file.
    pub(crate) async fn of_image(
        &self,
        digest: &str,
        path: &Path,
        lane: &Lane,
    ) -> Result<Arc<SharedRoot>> {
        let place = self.place(digest);
        let mut root = place.lock().await;
        if let Some(root) = root.upgrade() {
            return Ok(root);
        }
        let (path, used, limit) = (path.to_owned(), Arc::clone(&self.used), self.limit);
        let made = lane.run(move || copy(&path, &used, limit)).await.map(Arc::new)?;
        *root = Arc::downgrade(&made);
        Ok(made)
    }

    /// Returns the root with this identity, which process `pid` has: the VMM of a sandbox of an
    /// earlier daemon. The root counts even where it is more than the limit permits.
    ///
    /// # Errors
    /// [`Error::SharedRoot`] if the process has no such pages.
    pub(crate) async fn adopt(
        &self,
        digest: &str,
        identity: (u64, u64),
        pid: i32,
        lane: &Lane,
    ) -> Result<Arc<SharedRoot>> {
        let place = self.place(digest);
        let is_it = |root: &Arc<SharedRoot>| root.pages.identity() == identity;
        let known = place.lock().await.upgrade();
        if let Some(known) = known.filter(is_it) {
            return Ok(known);
        }
        // Without the lock: the process has as many descriptors as it likes, and no other sandbox
        // of the image waits for it.
        let pages = lane.run(move || SharedPages::of_process(pid, identity)).await?;
        let pages = pages.ok_or_else(|| Error::SharedRoot("its VMM has lost it".to_owned()))?;
        let mut root = place.lock().await;
        let known = root.upgrade();
        if let Some(known) = known.as_ref().filter(|root| is_it(root)) {
            return Ok(Arc::clone(known));
        }
        let space = Space::take(&self.used, pages.bytes(), u64::MAX)?;
        let found = Arc::new(SharedRoot { pages, _space: space });
        if known.is_none() {
            *root = Arc::downgrade(&found);
        }
        Ok(found)
    }

    /// Returns the place of an image's root, and forgets those that nobody has or makes.
    fn place(&self, digest: &str) -> Arc<RootCell> {
        let mut places = lock(&self.places);
        places.retain(|_, place| {
            let free = place.try_lock().is_ok_and(|root| root.strong_count() == 0);
            Arc::strong_count(place) > 1 || !free
        });
        Arc::clone(places.entry(digest.to_owned()).or_default())
    }
}

/// Copies the file at `path` into shared pages.
fn copy(path: &Path, used: &Arc<Mutex<u64>>, limit: u64) -> Result<SharedRoot> {
    let failed = Error::file("cannot read the image", path);
    let (file, len) = match File::open(path).and_then(|file| Ok((file.metadata()?.len(), file))) {
        Ok((len, file)) => (file, len),
        Err(error) => return Err(failed(error)),
    };
    let space = Space::take(used, SharedPages::space(len), limit)?;
    Ok(SharedRoot { pages: SharedPages::copy_of(&file, len)?, _space: space })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::files::Files;

    const MIB: u64 = 1 << 20;

    /// Makes an image of one byte, whose root has 2 MiB.
    fn image(dir: &Path, name: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, name).unwrap();
        path
    }

    fn used(roots: &SharedRoots) -> u64 {
        *lock(&roots.used)
    }

    #[tokio::test]
    async fn sandboxes_of_one_image_share_a_root_until_the_last_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let (path, lane) = (image(dir.path(), "a"), Files::start().unwrap().lane());
        let roots = SharedRoots::new(4 * MIB);
        let asked = || roots.of_image("a", &path, &lane);
        let (one, two) = tokio::join!(asked(), asked());
        let (one, two) = (one.unwrap(), two.unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        assert_eq!((one.pages().bytes(), used(&roots)), (2 * MIB, 2 * MIB));
        drop(one);
        assert_eq!(used(&roots), 2 * MIB);
        let identity = two.pages().identity();
        drop(two);
        assert_eq!(used(&roots), 0);
        let another = image(dir.path(), "b");
        let third = roots.of_image("b", &another, &lane).await.unwrap();
        assert_ne!(third.pages().identity(), identity);
        assert_eq!(lock(&roots.places).keys().collect::<Vec<_>>(), ["b"]);
    }

    #[tokio::test]
    async fn a_root_beyond_the_limit_is_refused_and_one_that_failed_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let lane = Files::start().unwrap().lane();
        let roots = SharedRoots::new(3 * MIB);
        let [a, b] = ["a", "b"].map(|name| image(dir.path(), name));
        let absent = roots.of_image("a", &dir.path().join("c"), &lane).await;
        assert!(absent.err().unwrap().to_string().contains("cannot read the image"));
        let one = roots.of_image("a", &a, &lane).await.unwrap();
        let refused = roots.of_image("b", &b, &lane).await.err().unwrap().to_string();
        assert!(refused.contains("its 2 MiB do not fit: 1 MiB"), "{refused}");
        drop(one);
        roots.of_image("b", &b, &lane).await.unwrap();
    }

    /// This process stands in for the VMMs: it has the descriptors.
    #[tokio::test]
    async fn the_next_daemon_finds_counts_and_shares_a_root() {
        let dir = tempfile::tempdir().unwrap();
        let (path, lane) = (image(dir.path(), "a"), Files::start().unwrap().lane());
        let earlier = SharedRoots::new(2 * MIB).of_image("a", &path, &lane).await.unwrap();
        let (pid, identity) = (std::process::id().cast_signed(), earlier.pages().identity());
        let roots = SharedRoots::new(0);
        let lost = roots.adopt("a", (0, 0), pid, &lane).await.err().unwrap().to_string();
        assert!(lost.contains("its VMM has lost it"), "{lost}");
        let one = roots.adopt("a", identity, pid, &lane).await.unwrap();
        let two = roots.adopt("a", identity, pid, &lane).await.unwrap();
        let new = roots.of_image("a", &path, &lane).await.unwrap();
        assert!(Arc::ptr_eq(&one, &two) && Arc::ptr_eq(&one, &new));
        assert_eq!(used(&roots), 2 * MIB);
    }
}
