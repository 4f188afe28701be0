//! containerd's service for snapshots, in front of a store.
//!
//! The keys of snapshots are those of containerd's metadata, which begin with their namespace, so
//! that the namespace of a call (`containerd-namespace`) is of no account here.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use crate::filter::Filters;
use crate::images::Images;
use crate::record::{Commit, Record, SnapshotKind};
use crate::refusal::{Refusal, Result as Checked, shown};
use crate::remote::{LayerRequest, RemoteSnapshots};
use crate::store::{Store, blocking};
use crate::v1;

/// The longest key or name of a snapshot, bytes. containerd makes them of ids and digests.
const LONGEST_KEY: usize = 1024;
/// The most bytes of a label, its name included, as in containerd.
const LONGEST_LABEL: usize = 4096;
/// The most labels of a snapshot.
const MOST_LABELS: usize = 64;
/// The number of snapshots in one message of a list.
const CHUNK: usize = 100;

type Reply<T> = Result<Response<T>, Status>;

/// The service.
pub struct Service {
    store: Arc<Store>,
    remotes: RemoteSnapshots,
}

impl Service {
    /// Makes the service of a store, whose remote snapshots are of images from `images`.
    pub fn new(store: Arc<Store>, images: Arc<dyn Images>) -> Self {
        let remotes = RemoteSnapshots::new(Arc::clone(&store), images);
        Self { store, remotes }
    }

    /// Removes what earlier processes have left in the node's cache of images.
    pub async fn begin(&self) {
        self.remotes.forget_unused().await;
    }

    /// Does what blocks on another thread.
    async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Store) -> Checked<T> + Send + 'static,
    ) -> Result<T, Status> {
        let store = Arc::clone(&self.store);
        Ok(blocking(move || work(&store)).await?)
    }

    async fn create(
        &self,
        kind: SnapshotKind,
        wanted: v1::CreateRequest,
    ) -> Reply<v1::MountsResponse> {
        let v1::CreateRequest { key, parent, labels, .. } = wanted;
        let labels = checked(&[&key, &parent], labels)?;
        if key.is_empty() {
            return Err(Refusal::Invalid("the snapshot has no key".to_owned()).into());
        }
        if kind == SnapshotKind::Active
            && let Some(wanted) = LayerRequest::of(&key, &labels)
            && self.remotes.add(&key, &parent, &labels, &wanted).await?
        {
            // containerd looks for the layer by its labels then.
            return Err(Refusal::Exists(format!("the layer of snapshot {}", shown(&key))).into());
        }
        let mounts = self.with_store(move |store| store.create(kind, key, parent, labels)).await?;
        Ok(Response::new(v1::MountsResponse { mounts }))
    }
}

/// Checks names and labels of a request, and returns the labels sorted.
fn checked(names: &[&str], labels: HashMap<String, String>) -> Checked<BTreeMap<String, String>> {
    if names.iter().any(|name| name.len() > LONGEST_KEY) {
        let why = format!("a snapshot's name is longer than {LONGEST_KEY} bytes");
        return Err(Refusal::Invalid(why));
    }
    if labels.len() > MOST_LABELS {
        return Err(Refusal::Invalid(format!("a snapshot has more than {MOST_LABELS} labels")));
    }
    match labels.iter().find(|(name, value)| name.len() + value.len() > LONGEST_LABEL) {
        None => Ok(labels.into_iter().collect()),
        Some((name, _)) => {
            let name = shown(name);
            Err(Refusal::Invalid(format!("label {name:?} has more than {LONGEST_LABEL} bytes")))
        }
    }
}

fn info(name: String, record: Record) -> v1::Info {
    let kind = match record.kind {
        SnapshotKind::View => v1::Kind::View,
        SnapshotKind::Active => v1::Kind::Active,
        SnapshotKind::Committed => v1::Kind::Committed,
    };
    v1::Info {
        name,
        parent: record.parent,
        kind: kind.into(),
        created_at: Some(time(record.created_ns)),
        updated_at: Some(time(record.updated_ns)),
        labels: record.labels.into_iter().collect(),
    }
}

fn time(ns: u64) -> v1::Timestamp {
    let (seconds, nanos) = (ns / 1_000_000_000, ns % 1_000_000_000);
    v1::Timestamp { seconds: seconds as i64, nanos: nanos as i32 }
}

#[tonic::async_trait]
impl v1::snapshots_server::Snapshots for Service {
    type ListStream = Pin<Box<dyn Stream<Item = Result<v1::ListResponse, Status>> + Send>>;

    async fn prepare(&self, request: Request<v1::CreateRequest>) -> Reply<v1::MountsResponse> {
        self.create(SnapshotKind::Active, request.into_inner()).await
    }

    async fn view(&self, request: Request<v1::CreateRequest>) -> Reply<v1::MountsResponse> {
        self.create(SnapshotKind::View, request.into_inner()).await
    }

    async fn mounts(&self, request: Request<v1::KeyRequest>) -> Reply<v1::MountsResponse> {
        let key = request.into_inner().key;
        let mounts = self.with_store(move |store| store.mounts(&key)).await?;
        Ok(Response::new(v1::MountsResponse { mounts }))
    }

    async fn commit(&self, request: Request<v1::CommitRequest>) -> Reply<v1::Empty> {
        let v1::CommitRequest { name, key, labels, parent, .. } = request.into_inner();
        let labels = checked(&[&name, &key, &parent], labels)?;
        if name.is_empty() {
            return Err(Refusal::Invalid("the snapshot has no name".to_owned()).into());
        }
        let commit = Commit { key, name, parent, labels, usage: Default::default() };
        self.with_store(move |store| store.commit(commit)).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn remove(&self, request: Request<v1::KeyRequest>) -> Reply<v1::Empty> {
        let key = request.into_inner().key;
        let removed = self.with_store(move |store| store.remove(&key)).await?;
        if removed.remote.is_some() {
            self.remotes.forget_unused().await;
        }
        Ok(Response::new(v1::Empty {}))
    }

    async fn stat(&self, request: Request<v1::KeyRequest>) -> Reply<v1::InfoResponse> {
        let key = request.into_inner().key;
        let stat = move |store: &Store| store.get(&key).map(|record| info(key, record));
        let info = Some(self.with_store(stat).await?);
        Ok(Response::new(v1::InfoResponse { info }))
    }

    async fn update(&self, request: Request<v1::UpdateRequest>) -> Reply<v1::InfoResponse> {
        let v1::UpdateRequest { info: wanted, update_mask, .. } = request.into_inner();
        let nothing = || Refusal::Invalid("the call names no snapshot".to_owned());
        let v1::Info { name, labels, .. } = wanted.ok_or_else(nothing)?;
        let labels = checked(&[&name], labels)?;
        let paths = update_mask.map(|mask| mask.paths).unwrap_or_default();
        if paths.len() > MOST_LABELS || paths.iter().any(|path| path.len() > LONGEST_LABEL) {
            return Err(Refusal::Invalid("the mask of fields is too long".to_owned()).into());
        }
        let update = move |store: &Store| {
            store.update(&name, &labels, &paths).map(|record| info(name, record))
        };
        let info = Some(self.with_store(update).await?);
        Ok(Response::new(v1::InfoResponse { info }))
    }

    async fn list(&self, request: Request<v1::ListRequest>) -> Reply<Self::ListStream> {
        let filters = Filters::parse(&request.into_inner().filters)?;
        let found = self.with_store(move |store| store.list(&filters)).await?;
        let infos: Vec<_> = found.into_iter().map(|(name, record)| info(name, record)).collect();
        let message =
            |chunk: &[v1::Info]| Ok::<_, Status>(v1::ListResponse { info: chunk.to_vec() });
        let messages: Vec<_> = infos.chunks(CHUNK).map(message).collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(messages))))
    }

    async fn usage(&self, request: Request<v1::KeyRequest>) -> Reply<v1::UsageResponse> {
        let key = request.into_inner().key;
        let usage = self.with_store(move |store| store.usage(&key)).await?;
        let (size, inodes) = (usage.bytes as i64, usage.inodes as i64);
        Ok(Response::new(v1::UsageResponse { size, inodes }))
    }

    async fn cleanup(&self, _: Request<v1::CleanupRequest>) -> Reply<v1::Empty> {
        self.with_store(Store::sweep).await?;
        self.remotes.forget_unused().await;
        Ok(Response::new(v1::Empty {}))
    }
}

#[cfg(test)]
#[path = "tests/service.rs"]
pub mod tests;
