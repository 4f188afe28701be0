//! The daemon's gRPC service for snapshots.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::{Reply, to_its_end};
use crate::node::Node;
use crate::snapshot::moved;
use crate::templates::{Manifest, Snapshot};
use crate::{Error, Result, name, snapshot, v1};

/// The gRPC service for snapshots.
pub struct SnapshotService(
    /// The node that has the snapshots.
    pub Arc<Node>,
);

#[tonic::async_trait]
impl v1::snapshots_server::Snapshots for SnapshotService {
    async fn create(&self, request: Request<v1::CreateSnapshotRequest>) -> Reply<v1::Snapshot> {
        let v1::CreateSnapshotRequest { sandbox, name } = request.into_inner();
        let name = match name.is_empty() {
            true => format!("snapshot-{}", name::new_id()),
            false => name,
        };
        // A task of its own: a client that leaves early leaves no sandbox that stands still.
        let node = Arc::clone(&self.0);
        let made = async move { snapshot::create(&node, &sandbox, &name).await };
        described(&to_its_end(made).await?)
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::SnapshotList> {
        let snapshots = self.0.templates.list().await.iter().filter_map(describe).collect();
        Ok(Response::new(v1::SnapshotList { snapshots }))
    }

    async fn remove(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        // A task of its own: if the client leaves early, what is loaded is forgotten even so. What
        // is made later under the name would not be used otherwise.
        let (node, name) = (Arc::clone(&self.0), request.into_inner().name);
        to_its_end(async move { remove(&node, &name).await }).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn export(&self, request: Request<v1::ExportSnapshotRequest>) -> Reply<v1::Empty> {
        let v1::ExportSnapshotRequest { name, path } = request.into_inner();
        moved::export(&self.0, &name, &path).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn import(&self, request: Request<v1::ImportSnapshotRequest>) -> Reply<v1::Snapshot> {
        let request = request.into_inner();
        described(&moved::import(&self.0, &request).await?)
    }
}

fn described(manifest: &Manifest) -> Reply<v1::Snapshot> {
    let described = describe(manifest).map(Response::new);
    described.ok_or_else(|| Status::internal("it is no snapshot"))
}

async fn remove(node: &Node, name: &str) -> Result<()> {
    if node.templates.is_other(name, true).await? {
        let what = format!("{name} is a template: `slipway template rm {name}` removes it");
        return Err(Error::Invalid(what));
    }
    node.templates.remove(name).await
}

/// Describes a snapshot. Returns `None` for a template.
fn describe(manifest: &Manifest) -> Option<v1::Snapshot> {
    let snapshot: &Snapshot = manifest.snapshot.as_ref()?;
    let nic = manifest.shape.interface.as_ref().map(|interface| interface.nic.as_str());
    Some(v1::Snapshot {
        name: manifest.name.clone(),
        sandbox: snapshot.sandbox.clone(),
        image: snapshot.settings.image.clone(),
        created_ns: manifest.created_ns,
        memory_bytes: manifest.shape.memory_bytes.saturating_add(snapshot.plugged_bytes),
        touched_bytes: manifest.touched_bytes,
        disk_bytes: snapshot.files.iter().map(|file| file.data_bytes).sum(),
        cpus: snapshot.cpus,
        paused_ns: snapshot.paused_ns,
        nic: nic.unwrap_or_default().to_owned(),
        volumes: snapshot.volumes.iter().map(|volume| volume.name.clone()).collect(),
        image_digest: snapshot.settings.image_digest.clone(),
    })
}
