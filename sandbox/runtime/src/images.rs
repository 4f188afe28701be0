//! The removal of images that were made for containerd and that nothing uses any more.
//!
//! containerd's shim makes an image of each chain of layers. containerd and the kubelet do not know
//! of these images, so the node removes them itself. An image is used while the record of a sandbox
//! names it, or a snapshot's description, and at the moment at which the shim finds it for a new
//! container. Templates have no images.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_image::{Cache, Digest, Prune, Reference, Removed, Selection};
use slipway_sandbox_api::images::is_of_containerd;

use crate::config::Config;
use crate::node::Node;
use crate::record::{Record, Store};
use crate::templates::{apart, images_of_snapshots};
use crate::{Error, Result};

/// The time between two looks for images that nothing uses.
const LOOK: Duration = Duration::from_secs(3600);
/// The longest wait for the records of sandboxes that are being created, which come once these have
/// joined their networks.
const PATIENCE: Duration = Duration::from_secs(10);
/// The age from which a directory without a record is one that a killed daemon has left: no sandbox
/// is created for as long.
const LEFT: Duration = Duration::from_secs(60);
/// The time between two looks for such a record.
const AGAIN: Duration = Duration::from_millis(20);

/// Returns the digests of the images of all sandboxes, running or not, and of all snapshots of the
/// node whose settings are `config`, whole or in the making. Needs no daemon. Waits for the records
/// of sandboxes that are being created, 10 s at most. What a killed daemon has left of such a
/// sandbox is not waited for once it is a minute old.
///
/// # Errors
/// [`Error::File`], also for a single record that cannot be read, and [`Error::Invalid`] for a
/// single snapshot whose image is not known: an image in use must not be removed.
pub fn in_use(config: &Config) -> Result<BTreeSet<Digest>> {
    let templates = config.templates_dir();
    let mut used = images_of_snapshots(&templates)?;
    used.extend(of_sandboxes(&config.sandboxes_dir())?);
    // A sandbox may have been saved and removed meanwhile, as a snapshot may have been removed
    // once a sandbox began with it.
    used.extend(images_of_snapshots(&templates)?);
    Ok(used)
}

fn of_sandboxes(sandboxes: &Path) -> Result<BTreeSet<Digest>> {
    let (mut used, mut known) = (BTreeSet::new(), BTreeSet::new());
    let until = Instant::now() + PATIENCE;
    loop {
        // Others may begin while the record of one is waited for.
        let all = ids(sandboxes)?.into_iter();
        let new: Vec<String> = all.filter(|id| known.insert(id.clone())).collect();
        if new.is_empty() {
            return Ok(used);
        }
        for id in new {
            let record = record_by(&Store::new(sandboxes, &id), until)?;
            let digests = record.iter().flat_map(Record::image_digests);
            used.extend(digests.filter_map(|digest| digest.parse::<Digest>().ok()));
        }
    }
}

/// Returns the ids of the sandboxes that have a directory in `sandboxes`.
///
/// # Errors
/// [`Error::File`] if the directory cannot be read.
fn ids(sandboxes: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(sandboxes) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(Error::file("cannot read", sandboxes))?,
    };
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// Returns the record of a sandbox. Waits for it, up to `until`, if the sandbox is being created.
/// Returns `None` if the sandbox is gone, or is one that a killed daemon did not finish.
///
/// # Errors
/// As for [`Store::load`].
fn record_by(store: &Store, until: Instant) -> Result<Option<Record>> {
    loop {
        let record = store.load()?;
        if record.is_some() || !is_young(store.dir()) || Instant::now() >= until {
            return Ok(record);
        }
        std::thread::sleep(AGAIN);
    }
}

/// Returns whether there is a directory that was changed less than [`LEFT`] ago.
fn is_young(directory: &Path) -> bool {
    let changed = std::fs::metadata(directory).and_then(|found| found.modified());
    // An error of `elapsed`: the host's clock was set back meanwhile.
    changed.is_ok_and(|changed| !changed.elapsed().is_ok_and(|age| age >= LEFT))
}

/// Removes images that were made for containerd and were not used for `unused_for`.
fn remove_unused(cache: &Cache, config: &Config, unused_for: Duration) -> Result<Removed> {
    // The shim makes its images of folders. A user's image that was pulled has a configuration.
    let which = Selection::OfFolder(|name: &Reference| is_of_containerd(&name.familiar()));
    let in_use = in_use(config)?;
    Ok(cache.prune(&Prune { which, unused_for: Some(unused_for), in_use })?)
}

impl Node {
    /// Removes images that were made for containerd once nothing has used them for as long as the
    /// settings say. Looks every hour, and returns only if the settings say that such images stay.
    pub async fn remove_unused_images(self: Arc<Self>) {
        let unused_for = Duration::from_secs(self.config.containerd_images_unused_s);
        while !unused_for.is_zero() {
            tokio::time::sleep(LOOK).await;
            let (cache, config) = (self.images.clone(), self.config.clone());
            match apart(move || remove_unused(&cache, &config, unused_for)).await {
                Ok(Removed { deleted, freed_bytes, .. }) if !deleted.is_empty() => {
                    let images = deleted.len();
                    tracing::info!(images, freed_bytes, "removed: nothing used them any more");
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "images that nothing uses stay"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use slipway_image::Limits;

    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    /// Lists images in the cache at `dir`, by their names and the times of their last use, in
    /// seconds since the epoch.
    fn list(dir: &Path, images: &[(&str, u64)]) {
        let digest = |name: &str| Digest::of(name.as_bytes());
        let record = |last_used: u64| {
            serde_json::json!({ "config": {}, "size_bytes": 1, "created": null, "added": 1,
                "last_used": last_used })
        };
        let records: serde_json::Map<_, _> =
            images.iter().map(|(name, used)| (digest(name).to_string(), record(*used))).collect();
        let names: serde_json::Map<_, _> = images
            .iter()
            .map(|(name, _)| ((*name).to_owned(), Value::from(digest(name).to_string())))
            .collect();
        let index = serde_json::json!({ "version": 1, "images": records, "references": names });
        std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
        for (name, _) in images {
            std::fs::write(dir.join(format!("{}.erofs", digest(name).hex())), "x").unwrap();
        }
    }

    #[test]
    fn images_of_containerds_that_nothing_uses_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
        let (images, sandboxes) = (dir.path().join("images"), config.sandboxes_dir());
        let cache = Cache::open(&images, Limits::default()).unwrap();
        let now = slipway_telemetry::realtime_ns() / 1_000_000_000;
        let key = |digit: &str| digit.repeat(32);
        let [unused, used, recent, pulled, users] = [
            format!("containerd/{}:1", key("a")),
            format!("containerd/{}:1", key("b")),
            format!("containerd/own-{}:1", key("c")),
            "library/debian:12".to_owned(),
            "containerd/busybox:1".to_owned(),
        ]
        .map(|name| format!("docker.io/{name}"));
        let all = [(&unused, 1), (&used, 1), (&recent, now), (&pulled, 1), (&users, 1)];
        list(&images, &all.map(|(name, used)| (name.as_str(), used)));
        let store = Store::new(&sandboxes, "0123456789ab");
        store.create().unwrap();
        let unclear = store.dir().join("record.json");
        std::fs::write(&unclear, "{\"of\": \"a later version\"}").unwrap();
        let day = Duration::from_secs(86_400);
        assert!(remove_unused(&cache, &config, day).is_err(), "its image is not known");
        assert_eq!(cache.list().unwrap().len(), 5);
        let mut record = record_of(SandboxState::Exited);
        record.settings.image_digest = Digest::of(used.as_bytes()).to_string();
        store.save(&record).unwrap();
        let removed = remove_unused(&cache, &config, day).unwrap();
        assert_eq!(removed.deleted, [Digest::of(unused.as_bytes())]);
        assert_eq!(cache.list().unwrap().len(), 4);
        store.remove().unwrap();
        let removed = remove_unused(&cache, &config, day).unwrap();
        assert!(removed.deleted.is_empty(), "a sandbox had the other one a moment ago");
    }

    /// A sandbox has its directory before it joins its network, and its record afterwards.
    #[test]
    fn the_image_of_a_sandbox_that_is_being_created_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        store.create().unwrap();
        let digest = Digest::of(b"image");
        let mut record = record_of(SandboxState::Created);
        record.settings.image_digest = digest.to_string();
        let joins = std::thread::spawn(move || {
            std::thread::sleep(AGAIN * 5);
            store.save(&record).unwrap();
        });
        let used = of_sandboxes(dir.path()).unwrap();
        joins.join().unwrap();
        assert!(used.contains(&digest));
    }

    #[test]
    fn a_sandbox_that_begins_while_another_is_waited_for_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let waited_for = Store::new(dir.path(), "0123456789ab");
        waited_for.create().unwrap();
        let later = Store::new(dir.path(), "0123456789ac");
        let digest = Digest::of(b"image");
        let mut record = record_of(SandboxState::Created);
        record.settings.image_digest = digest.to_string();
        let begins = std::thread::spawn(move || {
            std::thread::sleep(AGAIN * 5);
            later.create().unwrap();
            later.save(&record).unwrap();
            waited_for.remove().unwrap();
        });
        let used = of_sandboxes(dir.path()).unwrap();
        begins.join().unwrap();
        assert!(used.contains(&digest));
    }

    #[test]
    fn a_sandbox_that_is_gone_or_was_never_finished_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        let later = Instant::now() + Duration::from_secs(1 << 20);
        assert!(record_by(&store, later).unwrap().is_none());
        store.create().unwrap();
        assert!(record_by(&store, Instant::now()).unwrap().is_none());
        let directory = std::fs::File::open(store.dir()).unwrap();
        directory.set_modified(std::time::SystemTime::now() - LEFT).unwrap();
        assert!(record_by(&store, later).unwrap().is_none());
    }
}
