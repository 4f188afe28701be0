//! Tests of the service, by a client on its socket as containerd is one.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use slipway_lock::Lock;
use tonic::Code;
use tonic::transport::{Channel, Server};

use super::*;
use crate::remote::tests::{Shelf, labels_of};
use crate::v1::snapshots_client::SnapshotsClient;
use crate::v1::snapshots_server::SnapshotsServer;

/// A snapshotter that serves, and its client.
pub struct Served {
    pub root: tempfile::TempDir,
    pub shelf: Arc<Shelf>,
    pub client: SnapshotsClient<Channel>,
    server: tokio::task::JoinHandle<()>,
}

impl Served {
    pub async fn new() -> Self {
        Self::on(tempfile::tempdir().unwrap(), Arc::default()).await
    }

    async fn on(root: tempfile::TempDir, shelf: Arc<Shelf>) -> Self {
        let store = Arc::new(Store::open(&root.path().join("root")).unwrap());
        let service = Service::new(store, Arc::clone(&shelf) as Arc<dyn Images>);
        service.begin().await;
        let socket = root.path().join("socket");
        let listener = crate::listen(&socket).unwrap();
        let router = Server::builder().add_service(SnapshotsServer::new(service));
        let connections = tokio_stream::wrappers::UnixListenerStream::new(listener);
        let server = tokio::spawn(async move {
            router.serve_with_incoming(connections).await.unwrap();
        });
        let client = SnapshotsClient::new(slipway_sandbox_api::connect(&socket).await.unwrap());
        Self { root, shelf, client, server }
    }

    /// Ends the process, as a kill would, and starts the next one.
    pub async fn restart(self) -> Self {
        let Self { root, shelf, client, server } = self;
        drop(client);
        server.abort();
        let _ = server.await;
        // Connections end a moment later, and the store with the last of them.
        while Lock::try_take(&root.path().join("root/lock")).is_err() {
            tokio::task::yield_now().await;
        }
        Self::on(root, shelf).await
    }

    pub fn snapshots(&self) -> PathBuf {
        self.root.path().join("root/snapshots")
    }

    fn directories(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.snapshots()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub async fn prepare(
        &mut self,
        key: &str,
        parent: &str,
        labels: &[(&str, &str)],
    ) -> Result<v1::Mount, Status> {
        let wanted = v1::CreateRequest {
            snapshotter: "slipway".into(),
            key: key.into(),
            parent: parent.into(),
            labels: map(labels),
        };
        let mut mounts = self.client.prepare(wanted).await?.into_inner().mounts;
        assert_eq!(mounts.len(), 1);
        Ok(mounts.remove(0))
    }

    async fn view(&mut self, key: &str, parent: &str) -> Result<v1::Mount, Status> {
        let (key, parent) = (key.into(), parent.into());
        let wanted = v1::CreateRequest { key, parent, ..Default::default() };
        Ok(self.client.view(wanted).await?.into_inner().mounts.remove(0))
    }

    async fn commit(&mut self, name: &str, key: &str, parent: &str) -> Result<(), Status> {
        let (name, key, parent) = (name.into(), key.into(), parent.into());
        let labels = map(&[("containerd.io/snapshot/x", "y")]);
        let commit = v1::CommitRequest { name, key, parent, labels, ..Default::default() };
        self.client.commit(commit).await.map(drop)
    }

    pub async fn remove(&mut self, name: &str) -> Result<(), Status> {
        self.client.remove(key(name)).await.map(drop)
    }

    pub async fn stat(&mut self, name: &str) -> Result<v1::Info, Status> {
        Ok(self.client.stat(key(name)).await?.into_inner().info.unwrap())
    }

    pub async fn names(&mut self, filters: &[&str]) -> Result<Vec<String>, Status> {
        let filters = filters.iter().map(|filter| (*filter).to_owned()).collect();
        let list = v1::ListRequest { filters, ..Default::default() };
        let mut messages = self.client.list(list).await?.into_inner();
        let mut names = Vec::new();
        while let Some(message) = messages.message().await? {
            assert!(message.info.len() <= CHUNK);
            names.extend(message.info.into_iter().map(|info| info.name));
        }
        Ok(names)
    }
}

fn key(name: &str) -> v1::KeyRequest {
    v1::KeyRequest { key: name.into(), ..Default::default() }
}

fn map(labels: &[(&str, &str)]) -> HashMap<String, String> {
    labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
}

fn code<T: std::fmt::Debug>(result: Result<T, Status>) -> Code {
    let status = result.unwrap_err();
    assert!(!status.message().is_empty() && !status.message().contains('\n'), "{status}");
    status.code()
}

#[tokio::test]
async fn the_life_of_layers_and_of_a_container() {
    let mut served = Served::new().await;
    let first = served.prepare("k/1/a", "", &[]).await.unwrap();
    assert_eq!((first.r#type.as_str(), &first.options[0][..]), ("bind", "rw"));
    let owner = |path: &Path| {
        let found = std::fs::metadata(path).unwrap();
        (found.uid(), found.gid(), found.permissions().mode() & 0o7777)
    };
    let root = served.root.path().join("root");
    assert_eq!(owner(&root).2, 0o700);
    std::fs::write(Path::new(&first.source).join("file"), vec![7; 5000]).unwrap();
    served.commit("k/2/layer", "k/1/a", "").await.unwrap();
    let layer = served.stat("k/2/layer").await.unwrap();
    assert_eq!((layer.kind(), layer.labels.len()), (v1::Kind::Committed, 1));
    assert!(layer.created_at.unwrap().seconds > 1_600_000_000);
    let usage = served.client.usage(key("k/2/layer")).await.unwrap().into_inner();
    assert!(usage.inodes == 2 && usage.size >= 5000, "{usage:?}");

    let second = served.prepare("k/3/b", "k/2/layer", &[]).await.unwrap();
    let lower = format!("lowerdir={}", first.source);
    assert!(second.r#type == "overlay" && second.options.contains(&lower), "{second:?}");
    let upper = second.options.iter().find_map(|option| option.strip_prefix("upperdir="));
    let upper = PathBuf::from(upper.unwrap());
    assert_eq!(owner(&upper), owner(Path::new(&first.source)));
    served.commit("k/4/top", "k/3/b", "").await.unwrap();
    let container = served.prepare("k/5/c", "k/4/top", &[("l", "v")]).await.unwrap();
    let lower = format!("lowerdir={}:{}", upper.display(), first.source);
    assert!(container.options.contains(&lower), "{container:?}");
    let again = served.client.mounts(key("k/5/c")).await.unwrap().into_inner();
    assert_eq!(again.mounts, [container]);
    let view = served.view("k/6/v", "k/2/layer").await.unwrap();
    assert_eq!((&view.source, &view.options[0][..]), (&first.source, "ro"));

    // All of it is there after a kill, and goes from the top.
    let mut served = served.restart().await;
    let all = ["k/2/layer", "k/4/top", "k/5/c", "k/6/v"];
    assert_eq!(served.names(&[]).await.unwrap(), all);
    let again = served.client.mounts(key("k/5/c")).await.unwrap().into_inner();
    assert!(again.mounts[0].options.contains(&lower));
    assert_eq!(code(served.remove("k/4/top").await), Code::FailedPrecondition);
    for name in ["k/5/c", "k/4/top", "k/6/v"] {
        served.remove(name).await.unwrap();
    }
    assert_eq!(served.directories(), ["1"]);
    served.remove("k/2/layer").await.unwrap();
    assert!(served.directories().is_empty());
}

#[tokio::test]
async fn errors_have_the_codes_that_containerd_tells_apart() {
    let mut served = Served::new().await;
    served.prepare("a", "", &[]).await.unwrap();
    assert_eq!(code(served.prepare("a", "", &[]).await), Code::AlreadyExists);
    assert_eq!(code(served.prepare("b", "none", &[]).await), Code::NotFound);
    assert_eq!(code(served.prepare("b", "a", &[]).await), Code::InvalidArgument);
    assert_eq!(code(served.prepare("", "", &[]).await), Code::InvalidArgument);
    assert_eq!(code(served.prepare(&"k".repeat(2000), "", &[]).await), Code::InvalidArgument);
    let long = "v".repeat(LONGEST_LABEL);
    let refused = served.prepare("b", "", &[("l", &long)]).await;
    assert_eq!(code(refused), Code::InvalidArgument);
    for what in [
        served.stat("none").await.map(drop),
        served.remove("none").await,
        served.commit("c", "none", "").await,
        served.client.mounts(key("none")).await.map(drop),
        served.client.usage(key("none")).await.map(drop),
    ] {
        assert_eq!(code(what), Code::NotFound);
    }
    served.commit("layer", "a", "").await.unwrap();
    let mounts = served.client.mounts(key("layer")).await.map(drop);
    assert_eq!(code(mounts), Code::FailedPrecondition);
    served.view("v", "layer").await.unwrap();
    assert_eq!(code(served.commit("c", "v", "").await), Code::FailedPrecondition);
    served.prepare("b", "", &[]).await.unwrap();
    assert_eq!(code(served.commit("layer", "b", "").await), Code::AlreadyExists);
    assert_eq!(code(served.names(&["size==1"]).await), Code::InvalidArgument);
    // Nothing of what was refused has left a directory.
    assert_eq!(served.directories(), ["1", "2", "3"]);
}

#[tokio::test]
async fn a_parent_can_be_named_at_the_commit() {
    let mut served = Served::new().await;
    for key in ["a", "b", "c"] {
        served.prepare(key, "", &[]).await.unwrap();
    }
    served.commit("layer", "a", "").await.unwrap();
    assert_eq!(code(served.commit("top", "b", "c").await), Code::FailedPrecondition);
    served.commit("top", "b", "layer").await.unwrap();
    assert_eq!(served.stat("top").await.unwrap().parent, "layer");
    assert_eq!(code(served.remove("layer").await), Code::FailedPrecondition);
    served.prepare("d", "layer", &[]).await.unwrap();
    assert_eq!(code(served.commit("e", "d", "top").await), Code::InvalidArgument);
    served.commit("e", "d", "layer").await.unwrap();
    for name in ["e", "top", "layer"] {
        served.remove(name).await.unwrap();
    }
}

#[tokio::test]
async fn labels_change_by_a_mask() {
    let mut served = Served::new().await;
    served.prepare("a", "", &[("one", "1"), ("two", "2")]).await.unwrap();
    let mut update = async |labels: &[(&str, &str)], paths: &[&str]| {
        let info = v1::Info { name: "a".into(), labels: map(labels), ..Default::default() };
        let paths = paths.iter().map(|path| (*path).to_owned()).collect();
        let update_mask = Some(v1::FieldMask { paths });
        let request = v1::UpdateRequest { info: Some(info), update_mask, ..Default::default() };
        let updated = served.client.update(request).await?;
        Ok::<_, Status>(updated.into_inner().info.unwrap().labels)
    };
    let one = update(&[("one", "x"), ("two", "x")], &["labels.one"]).await.unwrap();
    assert_eq!(one, map(&[("one", "x"), ("two", "2")]));
    let all = update(&[("three", "3")], &["labels"]).await.unwrap();
    assert_eq!(all, map(&[("three", "3")]));
    assert_eq!(update(&[], &[]).await.unwrap(), map(&[]));
    assert_eq!(code(update(&[], &["parent"]).await), Code::InvalidArgument);
}

#[tokio::test]
async fn leftovers_of_a_crash_go_at_the_start_and_by_cleanup() {
    let mut served = Served::new().await;
    served.prepare("a", "", &[]).await.unwrap();
    // Made for a record that was never written, and left of one that was removed.
    for name in ["2", "17"] {
        std::fs::create_dir_all(served.snapshots().join(name).join("fs/dir")).unwrap();
    }
    let cleanup = v1::CleanupRequest::default();
    served.client.cleanup(cleanup).await.unwrap();
    assert_eq!(served.directories(), ["1"]);
    std::fs::create_dir_all(served.snapshots().join("2/fs/dir")).unwrap();
    let mut served = served.restart().await;
    assert_eq!(served.directories(), ["1"]);
    served.prepare("b", "", &[]).await.unwrap();
    assert_eq!(served.directories(), ["1", "2"]);
}

#[tokio::test]
async fn a_list_has_many_messages_and_filters() {
    let mut served = Served::new().await;
    served.prepare("a", "", &[]).await.unwrap();
    served.commit("layer", "a", "").await.unwrap();
    for number in 0..CHUNK + 1 {
        served.prepare(&format!("c{number}"), "layer", &[("even", "x")]).await.unwrap();
    }
    assert_eq!(served.names(&[]).await.unwrap().len(), CHUNK + 2);
    assert_eq!(served.names(&["kind==committed"]).await.unwrap(), ["layer"]);
    assert_eq!(served.names(&["parent==layer"]).await.unwrap().len(), CHUNK + 1);
    let two = served.names(&["name==c1", "name==c2,labels.even==x"]).await.unwrap();
    assert_eq!(two, ["c1", "c2"]);
    assert!(served.names(&["labels.odd"]).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_root_has_one_process() {
    let served = Served::new().await;
    let Err(refused) = Store::open(&served.root.path().join("root")) else { panic!() };
    assert!(refused.to_string().contains("another slipway-snapshotter"), "{refused}");
    let Err(refused) = crate::listen(&served.root.path().join("socket")) else { panic!() };
    assert!(refused.contains("--socket"), "{refused}");
}

#[tokio::test]
async fn a_layer_of_an_image_that_is_not_lazy_is_unpacked() {
    let mut served = Served::new().await;
    let labels = labels_of("target", "registry.test/app:1", 1, &[1, 2]);
    let labels: Vec<_> = labels.iter().map(|(name, value)| (&**name, &**value)).collect();
    let mount = served.prepare("k/1/extract-1-x target", "", &labels).await.unwrap();
    assert_eq!(mount.r#type, "bind");
    assert_eq!(served.shelf.asked(), ["registry.test/app lazily"]);
}
