//! The cache's book-keeping: names, removal, crashes.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::support::*;
use crate::{
    Cache, Digest, Error, Image, Limits, NameConflict, Prune, Reference, Selection, Silent, Source,
};

fn reference(name: &str) -> Reference {
    name.parse().unwrap()
}

async fn import(cache: &Cache, content: &str, name: Option<&str>) -> Image {
    let layout = Layout::of(&[gzip(&Tar::new().file("x", content).end())]);
    let source = Source::OciLayout(layout.path().to_owned(), None);
    cache
        .import(&source, name.map(reference), NameConflict::Replace, std::sync::Arc::new(Silent))
        .await
        .unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    tree_of(dir).into_keys().filter(|name| name != "work").collect()
}

fn open(dir: &Path) -> Cache {
    Cache::open(dir, Limits::default()).unwrap()
}

#[tokio::test]
async fn names_move_and_images_dangle() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let old = import(&cache, "old", Some("app:1")).await;
    assert_eq!(old.references, [reference("app:1")]);
    assert_eq!(old.config.cmd, ["sh"]);
    assert_eq!(old.created.as_deref(), Some("2024-05-06T07:08:09Z"));
    assert_eq!(old.size_bytes, std::fs::metadata(&old.erofs_path).unwrap().len());
    let new = import(&cache, "new", Some("app:1")).await;
    assert_ne!(old.digest, new.digest);
    let list = cache.list().unwrap();
    assert_eq!(list.iter().map(|i| i.digest).collect::<Vec<_>>(), [new.digest, old.digest]);
    assert!(list[1].references.is_empty());
    // Lookups by name, by digest, by some digits, by name and digest.
    let hex = old.digest.hex();
    assert_eq!(cache.get("app:1").unwrap().unwrap().digest, new.digest);
    assert_eq!(cache.get("docker.io/library/app:1").unwrap().unwrap().digest, new.digest);
    for name in
        [old.digest.to_string(), hex.clone(), hex[..8].to_owned(), format!("app@{}", old.digest)]
    {
        assert_eq!(cache.get(&name).unwrap().unwrap().digest, old.digest, "{name}");
    }
    assert!(cache.get("app:2").unwrap().is_none());
    assert!(cache.get("A B").is_err());
    // Pruning removes only the image without a name, and not while it is in use.
    let in_use = BTreeSet::from([old.digest]);
    let removed = cache.prune(&Prune { in_use, ..Prune::default() }).unwrap();
    assert!(removed.deleted.is_empty());
    let recent = Prune { unused_for: Some(Duration::from_secs(1000)), ..Prune::default() };
    assert!(cache.prune(&recent).unwrap().deleted.is_empty());
    let removed = cache.prune(&Prune::default()).unwrap();
    assert_eq!((removed.deleted, removed.freed_bytes), (vec![old.digest], old.size_bytes));
    assert!(!old.erofs_path.exists() && new.erofs_path.exists());
    let all = Prune { which: Selection::All, ..Prune::default() };
    let removed = cache.prune(&all).unwrap();
    assert_eq!((removed.deleted, removed.untagged), (vec![new.digest], vec![reference("app:1")]));
    assert_eq!(files(dir.path()), ["index.json", "index.lock"]);
}

/// Makes the last use of every image one in 1970.
fn age(dir: &Path) {
    let path = dir.join("index.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut index: serde_json::Value = serde_json::from_str(&text).unwrap();
    for image in index["images"].as_object_mut().unwrap().values_mut() {
        image["last_used"] = 1.into();
    }
    std::fs::write(&path, index.to_string()).unwrap();
}

#[tokio::test]
async fn an_image_counts_as_used_while_a_sandbox_has_it_and_when_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("x"), "x").unwrap();
    let (source, progress) = (Source::Folder(root.path().to_owned()), std::sync::Arc::new(Silent));
    let of_folder =
        cache.import(&source, Some(reference("made/x:1")), NameConflict::Refuse, progress);
    let image = of_folder.await.unwrap();
    import(&cache, "pulled", Some("made/pulled:1")).await;
    let old = |chooses: fn(&Reference) -> bool, in_use| {
        let which = Selection::OfFolder(chooses);
        let unused_for = Some(Duration::from_secs(1000));
        cache.prune(&Prune { which, unused_for, in_use }).unwrap().deleted
    };
    let (none, made) = (BTreeSet::new, |name: &Reference| name.repository().starts_with("made/"));
    age(dir.path());
    assert!(old(made, BTreeSet::from([image.digest])).is_empty());
    assert!(old(made, none()).is_empty(), "a sandbox had it a moment ago");
    age(dir.path());
    assert_eq!(cache.touch_named("made/x:1").unwrap(), Some(image.digest));
    assert!(old(made, none()).is_empty(), "it was asked for a moment ago");
    assert_eq!(cache.touch_named("made/y:1").unwrap(), None);
    age(dir.path());
    assert!(old(|_| false, none()).is_empty());
    cache.tag("made/x:1", &reference("x")).unwrap();
    assert!(old(made, none()).is_empty(), "it has a name elsewhere");
    cache.remove("x", &none(), false).unwrap();
    assert_eq!(old(made, none()), [image.digest], "and not the one with a configuration");
    assert_eq!(cache.touch_named("made/x:1").unwrap(), None);
}

#[tokio::test]
async fn removal_as_docker_does_it() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let none = BTreeSet::new();
    let image = import(&cache, "x", Some("app:1")).await;
    cache.tag("app:1", &reference("app:2")).unwrap();
    let digest = image.digest.to_string();
    let several = cache.remove(&digest, &none, false).unwrap_err();
    assert!(matches!(&several, Error::SeveralNames { names, .. } if names == "app:1, app:2"));
    let in_use = BTreeSet::from([image.digest]);
    // One of several names can be removed even while the image is in use.
    let removed = cache.remove("app:1", &in_use, false).unwrap();
    assert_eq!((removed.untagged, removed.deleted), (vec![reference("app:1")], vec![]));
    assert!(matches!(cache.remove("app:2", &in_use, true), Err(Error::InUse(_))));
    assert!(matches!(cache.remove("app:1", &none, false), Err(Error::Unknown(_))));
    let removed = cache.remove("app:2", &none, false).unwrap();
    assert_eq!(removed.deleted, [image.digest]);
    assert!(!image.erofs_path.exists() && cache.list().unwrap().is_empty());
    let image = import(&cache, "x", Some("app:1")).await;
    cache.tag("app:1", &reference("app:2")).unwrap();
    assert_eq!(cache.remove(&digest, &none, true).unwrap().untagged.len(), 2);
    assert!(!image.erofs_path.exists());
}

#[tokio::test]
async fn the_cache_outlives_its_handle_and_is_shared() {
    let dir = tempfile::tempdir().unwrap();
    let image = import(&open(dir.path()), "x", Some("app")).await;
    let (one, two) = (open(dir.path()), open(dir.path()));
    assert_eq!(one.get("app").unwrap().as_ref(), Some(&image));
    two.tag("app", &reference("other")).unwrap();
    assert_eq!(one.get("other").unwrap().unwrap().references.len(), 2);
    let json = serde_json::to_string(&image).unwrap();
    assert_eq!(serde_json::from_str::<Image>(&json).unwrap(), image);
}

#[tokio::test]
async fn concurrent_imports_of_one_image_build_once() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::of(&[gzip(&Tar::new().file("x", "1").end())]);
    let logs: Vec<_> = (0..4).map(|_| Log::new()).collect();
    let works =
        logs.iter().enumerate().map(|(i, log)| {
            // Each task has a handle of its own, as different processes have.
            let cache = open(dir.path());
            let source = Source::OciLayout(layout.path().to_owned(), None);
            let (name, log) = (reference(&format!("app:{i}")), log.clone());
            async move {
                cache.import(&source, Some(name), NameConflict::Refuse, log).await.unwrap().digest
            }
        });
    let digests = futures_util::future::join_all(works).await;
    assert!(digests.iter().all(|digest| *digest == digests[0]));
    assert_eq!(logs.iter().filter(|log| log.has("Building")).count(), 1);
    assert_eq!(open(dir.path()).list().unwrap()[0].references.len(), 4);
    assert!(tree_of(&dir.path().join("work")).is_empty());
}

#[tokio::test]
async fn leftovers_of_a_crash_go_and_those_of_the_living_stay() {
    let dir = tempfile::tempdir().unwrap();
    let image = import(&open(dir.path()), "x", Some("app")).await;
    let work = dir.path().join("work");
    let hex = |text: &str| Digest::of(text.as_bytes()).hex();
    let (dead, alive, unlisted) = (hex("dead"), hex("alive"), hex("unlisted"));
    std::fs::write(work.join(format!("{dead}-aB3.erofs")), "half").unwrap();
    std::fs::write(work.join(format!("{dead}.lock")), "").unwrap();
    std::fs::write(work.join("something"), "").unwrap();
    std::fs::write(dir.path().join(format!("{unlisted}.erofs")), "whole").unwrap();
    std::fs::write(dir.path().join("index.json.new"), "{").unwrap();
    std::fs::write(work.join(format!("{alive}-aB3.erofs")), "half").unwrap();
    let (dead_fetch, fetch) = (format!("{dead}-01ef.fetch"), format!("{alive}-01ef.fetch"));
    std::fs::write(work.join(dead_fetch), "").unwrap();
    let lock = |name: &str| slipway_lock::Lock::try_take(&work.join(name)).unwrap();
    let lock = (lock(&format!("{alive}.lock")), lock(&fetch));
    let cache = open(dir.path());
    let living = [fetch, format!("{alive}-aB3.erofs"), format!("{alive}.lock")];
    assert_eq!(files(&work), living);
    assert!(!dir.path().join("index.json.new").exists());
    assert!(!dir.path().join(format!("{unlisted}.erofs")).exists());
    assert_eq!(cache.list().unwrap(), std::slice::from_ref(&image));
    drop(lock);
    std::fs::remove_file(&image.erofs_path).unwrap();
    let cache = open(dir.path());
    assert!(files(&work).is_empty());
    assert!(cache.list().unwrap().is_empty(), "an entry without a file is none");
}

#[tokio::test]
async fn failures_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let broken = [
        gzip(&Tar::new().file("../x", "").end()),
        Blob { diff_id: Digest::of(b"other"), ..gzip(&Tar::new().end()) },
        gzip(b"garbage"),
    ];
    for blob in broken {
        let layout = Layout::of(&[blob]);
        let source = Source::OciLayout(layout.path().to_owned(), None);
        let result =
            cache.import(&source, None, NameConflict::Refuse, std::sync::Arc::new(Silent)).await;
        let text = result.unwrap_err().to_string();
        assert!(text.contains("sha256:") && !text.contains('\n'), "{text}");
    }
    // The layer is whole, but an image has no room for the device's numbers.
    let mut device = tar::Header::new_gnu();
    device.set_entry_type(tar::EntryType::Char);
    device.set_path("device").unwrap();
    device.set_mode(0o644);
    device.set_uid(0);
    device.set_gid(0);
    device.set_mtime(0);
    device.set_size(0);
    device.set_device_major(4096).unwrap();
    device.set_device_minor(0).unwrap();
    device.set_cksum();
    let layout = Layout::of(&[gzip(&Tar::new().header(&device).end())]);
    let source = Source::OciLayout(layout.path().to_owned(), None);
    let error = cache
        .import(&source, None, NameConflict::Refuse, std::sync::Arc::new(Silent))
        .await
        .unwrap_err();
    let refused = "'device': a device with the numbers 4096 and 0";
    assert!(
        matches!(&error, Error::TooLarge { reason, .. } if reason.starts_with(refused)),
        "{error}"
    );
    assert!(cache.list().unwrap().is_empty());
    assert!(
        !files(dir.path()).iter().any(|name| name.ends_with(".erofs") || name.ends_with(".new"))
    );
    assert!(tree_of(&dir.path().join("work")).is_empty());
}

#[test]
fn a_damaged_index_is_said_to_be_damaged() {
    let dir = tempfile::tempdir().unwrap();
    for text in ["{", "{}", r#"{"version":99,"images":{},"references":{}}"#] {
        std::fs::write(dir.path().join("index.json"), text).unwrap();
        let error = Cache::open(dir.path(), Limits::default()).unwrap_err();
        assert!(matches!(error, Error::BadIndex { .. }), "{error}");
    }
}

/// The disk, a small tmpfs that root mounts, fills up in mid-build.
#[tokio::test]
async fn root_full_disk_is_told_and_leaves_nothing() {
    const NAME: &str = "root_full_disk_is_told_and_leaves_nothing";
    let dir = tempfile::tempdir().unwrap();
    let flags = rustix::mount::MountFlags::empty();
    if rustix::mount::mount("slipway-test", dir.path(), "tmpfs", flags, c"size=3m").is_err() {
        skip(NAME, "root to mount a tmpfs");
        return;
    }
    // The data is not compressible. The larger file does not fit as a layer; the smaller one fits
    // as a layer, but not as an image beside it.
    let result = async {
        let cache = open(dir.path());
        for size in [4 << 20, 2 << 20] {
            let mut seed = 1_u64;
            let noise = (0..size / 8).flat_map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed ^ (seed >> 29)).to_le_bytes()
            });
            let noise: Vec<u8> = noise.collect();
            let layer = Tar::new().raw(tar::EntryType::Regular, b"x", b"", &noise).end();
            let layout = Layout::of(&[gzip(&layer)]);
            let source = Source::OciLayout(layout.path().to_owned(), None);
            let error = cache
                .import(&source, None, NameConflict::Refuse, std::sync::Arc::new(Silent))
                .await
                .unwrap_err();
            assert!(matches!(error, Error::NoSpace { .. }), "{size}: {error}");
            assert!(tree_of(&dir.path().join("work")).is_empty());
        }
        assert_eq!(files(dir.path()), ["index.lock"]);
    };
    let result = std::panic::AssertUnwindSafe(result);
    let result = futures_util::FutureExt::catch_unwind(result).await;
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}
