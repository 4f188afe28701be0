//! Tests of remote snapshots, with images that a list has in place of a registry.

mod pulls;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tonic::Code;

use super::*;
use crate::images::{NotPulled, Size};
use crate::service::tests::Served;
use crate::staging::IMAGE;

/// A cache of images without content. `slipway-image`'s own tests have a registry.
#[derive(Default)]
pub struct Shelf {
    /// Names of images in the cache.
    names: Mutex<HashSet<String>>,
    /// The requests, in order.
    asked: Mutex<Vec<String>>,
    /// Set if images can be pulled lazily.
    is_lazy: AtomicBool,
    /// Set if no registry answers.
    is_away: AtomicBool,
    /// Set if images need the memory of large ones.
    needs_memory: AtomicBool,
    /// The pulls at work, of usual and of large images, and the most of them so far.
    at_work: [AtomicUsize; 2],
    most: [AtomicUsize; 2],
    /// Set if files of images cannot be copied.
    is_large: AtomicBool,
    /// Set if a sandbox uses all images.
    is_used: AtomicBool,
    /// Registries whose pulls, copies and removals do not end, unless the images need the memory of
    /// large ones and do not have it.
    stuck: Mutex<HashSet<String>>,
    /// Notified when they are others.
    released: Notify,
}

impl Shelf {
    /// Returns the requests since the last call.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }

    /// Keeps the pulls from these registries from ending, and has all others end.
    fn stick(&self, registries: &[&str]) {
        *self.stuck.lock().unwrap() = registries.iter().map(|name| (*name).to_owned()).collect();
        self.released.notify_waiters();
    }

    fn is_stuck(&self, reference: &Reference) -> bool {
        self.stuck.lock().unwrap().contains(reference.registry())
    }

    fn has_asked(&self, request: &str) -> bool {
        self.asked.lock().unwrap().iter().any(|asked| asked == request)
    }

    fn ask(&self, reference: &Reference, what: &str) {
        let image = format!("{}/{}", reference.registry(), reference.repository());
        self.asked.lock().unwrap().push(format!("{image} {what}"));
    }

    fn names(&self) -> usize {
        self.names.lock().unwrap().len()
    }
}

#[tonic::async_trait]
impl Images for Shelf {
    async fn has(&self, reference: &Reference) -> Result<bool, String> {
        Ok(self.names.lock().unwrap().contains(&reference.to_string()))
    }

    async fn pull(
        &self,
        reference: &Reference,
        whole: bool,
        size: Size,
    ) -> Result<Option<Pulled>, NotPulled> {
        self.ask(reference, if whole { "whole" } else { "lazily" });
        let kind = usize::from(size == Size::Large);
        let at_work = self.at_work[kind].fetch_add(1, Ordering::SeqCst) + 1;
        self.most[kind].fetch_max(at_work, Ordering::SeqCst);
        // Other calls may come meanwhile.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        self.at_work[kind].fetch_sub(1, Ordering::SeqCst);
        if self.is_away.load(Ordering::SeqCst) {
            return Err(NotPulled::Failed("the registry does not answer".to_owned()));
        }
        if size == Size::Usual && self.needs_memory.load(Ordering::SeqCst) {
            return Err(NotPulled::TooLarge("more than 256 MiB".to_owned()));
        }
        while self.is_stuck(reference) {
            self.released.notified().await;
        }
        if !whole && !self.is_lazy.load(Ordering::SeqCst) {
            return Ok(None);
        }
        self.names.lock().unwrap().insert(reference.to_string());
        let digest = *reference.digest().unwrap();
        Ok(Some(Pulled { digest, volumes: vec!["/data".to_owned()] }))
    }

    async fn extract(
        &self,
        _: &Digest,
        reference: &Reference,
        paths: &[String],
        into: &Path,
    ) -> Result<(), String> {
        self.ask(reference, &paths.join(" "));
        while self.is_stuck(reference) {
            self.released.notified().await;
        }
        if self.is_large.load(Ordering::SeqCst) {
            return Err("more than 64 MiB".to_owned());
        }
        std::fs::create_dir(into.join("etc")).unwrap();
        std::fs::write(into.join("etc/passwd"), "root:x:0:0::/:\n").unwrap();
        Ok(())
    }

    async fn forget(&self, reference: &Reference) -> Result<bool, String> {
        self.ask(reference, "forget");
        while self.is_stuck(reference) {
            self.released.notified().await;
        }
        if self.is_used.load(Ordering::SeqCst) {
            return Ok(false);
        }
        self.names.lock().unwrap().remove(&reference.to_string());
        Ok(true)
    }
}

fn digest(number: u8) -> Digest {
    Digest::of(&[number])
}

/// Returns the labels with which containerd has a layer unpacked: of the image called `reference`
/// with the manifest `manifest`, which has the layers `layers` from this one up.
pub fn labels_of(
    target: &str,
    reference: &str,
    manifest: u8,
    layers: &[u8],
) -> Vec<(String, String)> {
    let above: Vec<_> = layers.iter().map(|layer| digest(*layer).to_string()).collect();
    [
        (TARGET, target.to_owned()),
        (REFERENCE, reference.to_owned()),
        (MANIFEST, digest(manifest).to_string()),
        (LAYER, above[0].clone()),
        (LAYERS, above.join(",")),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

/// An image of two layers, whose targets are `NAME/0` and `NAME/1`.
struct Image {
    reference: String,
    manifest: u8,
    layers: [u8; 2],
    targets: [&'static str; 2],
}

const APP: &str = "registry.test/app:1";

fn app() -> Image {
    let (layers, targets) = ([1, 2], ["base", "app"]);
    Image { reference: APP.to_owned(), manifest: 100, layers, targets }
}

impl Served {
    /// Asks for a layer as containerd does, and returns the name of its snapshot if it is there.
    async fn unpack(
        &mut self,
        image: &Image,
        layer: usize,
        parent: &str,
    ) -> Result<Option<String>, tonic::Status> {
        let target = image.targets[layer];
        let labels = labels_of(target, &image.reference, image.manifest, &image.layers[layer..]);
        let labels: Vec<_> = labels.iter().map(|(name, value)| (&**name, &**value)).collect();
        let key = format!("k8s.io/{}/extract-{layer}-ab_c {target}", image.manifest);
        match self.prepare(&key, parent, &labels).await {
            Ok(_) => return Ok(None),
            Err(status) if status.code() == Code::AlreadyExists => {}
            Err(status) => return Err(status),
        }
        // As containerd's metadata finds the snapshot.
        let filter = format!(
            "labels.\"containerd.io/snapshot.ref\"=={target},parent==\"{parent}\",kind==committed"
        );
        let names = self.names(&[&filter]).await?;
        assert_eq!(names.len(), 1, "{names:?}");
        Ok(names.into_iter().next())
    }
}

fn image_json(served: &Served, id: u64) -> RemoteImage {
    let path = served.snapshots().join(id.to_string()).join(IMAGE);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[tokio::test]
async fn layers_of_a_lazy_image_are_there_without_files() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    let files = "registry.test/app /etc/passwd /etc/group /data";
    assert_eq!(served.shelf.asked(), ["registry.test/app lazily", files]);
    let top = served.unpack(&app(), 1, &base).await.unwrap().unwrap();
    // The pull's result is known. Users and volumes are of the topmost layer.
    assert_eq!(served.shelf.asked(), [files]);
    let reference = format!("registry.test/app@{}", digest(100));
    let mut image = RemoteImage {
        reference,
        digest: digest(100).to_string(),
        layers: vec![digest(1).to_string()],
        is_top: false,
    };
    assert_eq!(image_json(&served, 1), image);
    image.layers.push(digest(2).to_string());
    image.is_top = true;
    assert_eq!(image_json(&served, 2), image);
    // The name that the shim, and ledgers of earlier builds, have for it.
    assert_eq!(serde_json::to_value(&image).unwrap()["whole"], true);
    assert!(!served.snapshots().join("1/fs/etc").exists());
    assert!(served.snapshots().join("2/fs/etc/passwd").is_file());

    // A container's root is an overlay of them, also after a kill.
    let mut served = served.restart().await;
    let mount = served.prepare("k8s.io/9/c", &top, &[]).await.unwrap();
    let dirs = served.snapshots();
    let lower = format!("lowerdir={0}/2/fs:{0}/1/fs", dirs.display());
    assert!(mount.options.contains(&lower), "{mount:?}");
    // Another namespace gets the same snapshots.
    assert_eq!(served.unpack(&app(), 0, "").await.unwrap().unwrap(), base);
    assert_eq!(served.shelf.names(), 1);
}

#[tokio::test]
async fn an_image_goes_with_its_last_snapshot() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    let top = served.unpack(&app(), 1, &base).await.unwrap().unwrap();
    served.remove(&top).await.unwrap();
    assert_eq!(served.shelf.names(), 1);
    served.shelf.is_used.store(true, Ordering::SeqCst);
    served.remove(&base).await.unwrap();
    assert_eq!(served.shelf.names(), 1, "a sandbox uses it");
    served.shelf.is_used.store(false, Ordering::SeqCst);
    let served = served.restart().await;
    assert_eq!(served.shelf.names(), 0);
    // One that a user pulled before stays.
    let user = format!("registry.test/app@{}", digest(100));
    served.shelf.names.lock().unwrap().insert(user);
    let mut served = served;
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    served.remove(&base).await.unwrap();
    assert_eq!(served.shelf.names(), 1);
}

#[tokio::test]
async fn an_image_on_a_remote_layer_is_pulled_by_slipway_in_any_case() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    served.shelf.is_lazy.store(false, Ordering::SeqCst);
    let derived = Image {
        reference: "registry.test/derived".into(),
        manifest: 101,
        layers: [1, 3],
        targets: ["base", "derived"],
    };
    served.shelf.asked();
    let top = served.unpack(&derived, 1, &base).await.unwrap();
    assert!(top.is_some());
    let asked = served.shelf.asked();
    assert_eq!(asked[..2], ["registry.test/derived lazily", "registry.test/derived whole"]);
    // A registry that does not answer: an error, and no layer without its parent's files.
    served.shelf.is_away.store(true, Ordering::SeqCst);
    let other = Image { reference: "registry.test/other".into(), manifest: 102, ..derived };
    let refused = served.unpack(&other, 1, &base).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("does not answer"), "{refused}");
    // Below it, containerd fetches the layer itself. The failure is known for a while.
    assert_eq!(served.unpack(&other, 0, "").await.unwrap(), None);
    let asked = served.shelf.asked();
    assert_eq!(asked, ["registry.test/other lazily", "registry.test/other whole"]);
}

#[tokio::test]
async fn an_image_whose_files_cannot_be_copied_is_unpacked() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    served.shelf.is_large.store(true, Ordering::SeqCst);
    assert_eq!(served.unpack(&app(), 0, "").await.unwrap(), None);
    let single = Image { reference: "registry.test/single".into(), layers: [5, 6], ..app() };
    assert_eq!(served.unpack(&single, 1, "").await.unwrap(), None);
    // With a layer that is there already, it cannot be unpacked any more.
    served.shelf.is_large.store(false, Ordering::SeqCst);
    let other = Image { reference: "registry.test/other".into(), manifest: 103, ..app() };
    let base = served.unpack(&other, 0, "").await.unwrap().unwrap();
    served.shelf.is_large.store(true, Ordering::SeqCst);
    let refused = served.unpack(&other, 1, &base).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("64 MiB"), "{refused}");
}

#[tokio::test]
async fn what_is_on_unpacked_layers_is_unpacked_too() {
    let mut served = Served::new().await;
    assert_eq!(served.unpack(&app(), 0, "").await.unwrap(), None);
    let commit = crate::v1::CommitRequest {
        name: "base".into(),
        key: "k8s.io/100/extract-0-ab_c base".into(),
        ..Default::default()
    };
    served.client.commit(commit).await.unwrap();
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    served.shelf.asked();
    assert_eq!(served.unpack(&app(), 1, "base").await.unwrap(), None);
    assert!(served.shelf.asked().is_empty());
}

#[tokio::test]
async fn an_unused_image_is_removed_while_another_one_is_pulled() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    served.shelf.stick(&["slow.test"]);
    let labels = labels_of("slow", "slow.test/app", 104, &[5, 6]).into_iter().collect();
    let wanted = crate::v1::CreateRequest {
        key: "k8s.io/104/extract-0-ab_c slow".into(),
        labels,
        ..Default::default()
    };
    let mut client = served.client.clone();
    let unpacked = tokio::spawn(async move { client.prepare(wanted).await.map(drop) });
    while !served.shelf.has_asked("slow.test/app lazily") {
        tokio::task::yield_now().await;
    }
    served.remove(&base).await.unwrap();
    assert!(served.shelf.has_asked("registry.test/app forget"));
    assert!(!served.shelf.has_asked("slow.test/app forget"), "its snapshot is about to be there");
    assert_eq!(served.shelf.names(), 0);
    served.shelf.stick(&[]);
    let unpacked = unpacked.await.unwrap().unwrap_err();
    assert_eq!(unpacked.code(), Code::AlreadyExists, "{unpacked}");
    assert_eq!(served.shelf.names(), 1);
}

#[tokio::test]
async fn a_removal_goes_on_without_its_call_and_only_its_own_image_waits() {
    let mut served = Served::new().await;
    served.shelf.is_lazy.store(true, Ordering::SeqCst);
    let base = served.unpack(&app(), 0, "").await.unwrap().unwrap();
    served.shelf.stick(&["registry.test"]);
    let mut client = served.client.clone();
    let wanted = crate::v1::KeyRequest { key: base, ..Default::default() };
    let removed = tokio::spawn(async move { client.remove(wanted).await.map(drop) });
    while !served.shelf.has_asked("registry.test/app forget") {
        tokio::task::yield_now().await;
    }
    removed.abort();
    served.shelf.asked();
    let other = Image { reference: "other.test/app".into(), manifest: 105, ..app() };
    let other = Image { targets: ["other", "app"], layers: [7, 8], ..other };
    assert!(served.unpack(&other, 0, "").await.unwrap().is_some());
    let wanted = crate::v1::CreateRequest {
        key: "k8s.io/100/extract-0-ab_c base".into(),
        labels: labels_of("base", APP, 100, &[1, 2]).into_iter().collect(),
        ..Default::default()
    };
    let mut client = served.client.clone();
    let unpacked = tokio::spawn(async move { client.prepare(wanted).await.map(drop) });
    // By now it would have been pulled while it is removed.
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!served.shelf.has_asked("registry.test/app lazily"));
    served.shelf.stick(&[]);
    let unpacked = unpacked.await.unwrap().unwrap_err();
    assert_eq!(unpacked.code(), Code::AlreadyExists, "{unpacked}");
    assert!(served.shelf.has_asked("registry.test/app lazily"));
    assert_eq!(served.shelf.names(), 2);
}

#[test]
fn only_containerds_own_calls_to_unpack_have_images_pulled() {
    let labels: BTreeMap<_, _> = labels_of("sha256:ab", APP, 9, &[1, 2]).into_iter().collect();
    let key = "k8s.io/7/extract-123-x_-Y sha256:ab";
    let wanted = LayerRequest::of(key, &labels).unwrap();
    assert_eq!(wanted.reference.to_string(), format!("registry.test/app@{}", digest(9)));
    assert_eq!((wanted.layer, wanted.is_top), (digest(1), false));
    let top = labels_of("sha256:ab", APP, 9, &[2]).into_iter().collect();
    assert!(LayerRequest::of(key, &top).unwrap().is_top);
    // A pod's annotations become labels of its sandbox's snapshot, whose key is an id.
    let ids = [
        "k8s.io/7/0123456789abcdef",
        "k8s.io/7/extract-1-x sha256:cd",
        "k8s.io/7/extract- sha256:ab",
        "k8s.io/7/extract-1 x sha256:ab",
        "k8s.io/7/sha256:ab",
        "sha256:ab",
        "",
    ];
    for id in ids {
        assert_eq!(LayerRequest::of(id, &labels), None, "{id}");
    }
    let bad = [
        (TARGET, ""),
        (REFERENCE, "--option"),
        (REFERENCE, "a b"),
        (MANIFEST, "latest"),
        (LAYER, "sha256:ab"),
        (LAYERS, ""),
        (LAYERS, "sha256:ab"),
    ];
    for (name, value) in bad {
        let mut labels = labels.clone();
        labels.insert(name.to_owned(), value.to_owned());
        assert_eq!(LayerRequest::of(key, &labels), None, "{name}={value}");
        labels.remove(name);
        assert_eq!(LayerRequest::of(key, &labels), None, "without {name}");
    }
}

#[test]
fn images_whose_volumes_cannot_be_copied_are_unpacked() {
    let labels = labels_of("t", APP, 9, &[1]).into_iter().collect();
    let wanted = LayerRequest::of("k/1/extract-1-x t", &labels).unwrap();
    let pulled = |volumes: &[&str]| Pulled {
        digest: digest(9),
        volumes: volumes.iter().map(|volume| (*volume).to_owned()).collect(),
    };
    assert_eq!(check(&wanted, &pulled(&["/var/lib/x", "data/", "/a/./b"])), Ok(()));
    for bad in ["/", "", "/a/../..", "..", "/."] {
        assert!(check(&wanted, &pulled(&[bad])).is_err(), "{bad:?}");
    }
    assert!(check(&wanted, &pulled(&["/x"; MOST_VOLUMES + 1])).is_err());
    let other = Pulled { digest: digest(8), volumes: Vec::new() };
    assert!(check(&wanted, &other).unwrap_err().contains("another manifest"));
}
