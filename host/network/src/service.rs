//! The gRPC service of the networks: translates requests into calls of [`Networks`].

use std::sync::Arc;
use std::time::Instant;

use slipway_plane_api::{network_v1 as v1, trace};
use slipway_telemetry::trace::{Call, Tracer};
use tonic::{Request, Response, Status};

use crate::operations::{Command, Operations};
use crate::{Networks, Result};

/// The outcome of a call.
type Reply<T> = Result<Response<T>, Status>;

/// The implementation of `network.proto`.
pub struct Service {
    networks: Arc<Networks>,
    tracer: Tracer,
    operations: Arc<Operations>,
}

impl Service {
    /// Makes a service for `networks`. `tracer` records the calls about containers' interfaces.
    pub fn new(networks: Arc<Networks>, tracer: Tracer) -> Self {
        Self { networks, tracer, operations: Arc::default() }
    }

    /// Runs `work` to its end even if the client hangs up meanwhile, so that no operation is left
    /// half done.
    async fn complete<T, F>(&self, work: impl FnOnce(Arc<Networks>) -> F) -> Reply<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let done = tokio::spawn(work(Arc::clone(&self.networks))).await;
        let done = done.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(done?))
    }

    /// Runs `work` as [`complete`](Self::complete) does, and counts it as an operation of CNI.
    async fn operate<T, F>(
        &self,
        command: Command,
        work: impl FnOnce(Arc<Networks>) -> F,
    ) -> Reply<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let operations = Arc::clone(&self.operations);
        self.complete(|networks| {
            let work = work(networks);
            async move {
                let begun = Instant::now();
                let done = work.await;
                operations.record(command, begun.elapsed(), done.is_ok());
                done
            }
        })
        .await
    }
}

impl Networks {
    /// Returns a channel to the service within this process.
    ///
    /// # Errors
    /// The connection within this process fails.
    pub async fn connect(
        self: &Arc<Self>,
    ) -> Result<tonic::transport::Channel, tonic::transport::Error> {
        // The callers of this channel record their own calls.
        let service = Service::new(Arc::clone(self), Tracer::default());
        let service = v1::networks_server::NetworksServer::new(service);
        let router = tonic::transport::Server::builder().add_service(service);
        slipway_plane_api::within(router).await
    }
}

/// Adds a container's names to the span of a call.
fn describe(call: &mut Call, container: Option<&v1::ContainerInterface>) {
    if let Some(container) = container {
        call.set("container.id", &container.container_id);
        call.set("network.interface.name", &container.interface);
    }
}

#[tonic::async_trait]
impl v1::networks_server::Networks for Service {
    async fn create_network(
        &self,
        request: Request<v1::CreateNetworkRequest>,
    ) -> Reply<v1::Network> {
        let request = request.into_inner();
        self.complete(|networks| async move { networks.create(&request).await }).await
    }

    async fn remove_network(
        &self,
        request: Request<v1::RemoveNetworkRequest>,
    ) -> Reply<v1::RemoveNetworkReply> {
        let name = request.into_inner().name;
        self.complete(|networks| async move {
            networks.remove(&name).await.map(|()| v1::RemoveNetworkReply {})
        })
        .await
    }

    async fn get_network(&self, request: Request<v1::GetNetworkRequest>) -> Reply<v1::Network> {
        Ok(Response::new(self.networks.get(&request.into_inner().name).await?))
    }

    async fn list_networks(
        &self,
        _: Request<v1::ListNetworksRequest>,
    ) -> Reply<v1::ListNetworksReply> {
        Ok(Response::new(v1::ListNetworksReply { networks: self.networks.list().await }))
    }

    async fn join(&self, request: Request<v1::JoinRequest>) -> Reply<v1::Attachment> {
        let request = request.into_inner();
        self.complete(|networks| async move { networks.join(&request).await }).await
    }

    async fn join_namespace(
        &self,
        request: Request<v1::JoinNamespaceRequest>,
    ) -> Reply<v1::JoinNamespaceReply> {
        let request = request.into_inner();
        self.complete(|networks| async move { networks.join_namespace(&request).await }).await
    }

    async fn leave(&self, request: Request<v1::LeaveRequest>) -> Reply<v1::LeaveReply> {
        let id = request.into_inner().sandbox_id;
        self.complete(
            |networks| async move { networks.leave(&id).await.map(|()| v1::LeaveReply {}) },
        )
        .await
    }

    async fn attach(&self, request: Request<v1::AttachRequest>) -> Reply<v1::Attachment> {
        let mut call = trace::call(&self.tracer, "slipway.network.v1.Networks/Attach", &request);
        let request = request.into_inner();
        describe(&mut call, request.container.as_ref());
        call.set("container.name", &request.name);
        let origin = call.origin();
        let attached = self
            .operate(Command::Add, |networks| async move {
                let attached = networks.attach(&request).await?;
                if let Some(origin) = origin {
                    networks.note_trace(request.container.as_ref(), origin).await;
                }
                Ok(attached)
            })
            .await;
        trace::end(&mut call, attached.as_ref().err());
        attached
    }

    async fn detach(&self, request: Request<v1::DetachRequest>) -> Reply<v1::DetachReply> {
        let mut call = trace::call(&self.tracer, "slipway.network.v1.Networks/Detach", &request);
        let container = request.into_inner().container;
        describe(&mut call, container.as_ref());
        let detached = self
            .operate(Command::Del, |networks| async move {
                networks.detach(container.as_ref()).await.map(|()| v1::DetachReply {})
            })
            .await;
        trace::end(&mut call, detached.as_ref().err());
        detached
    }

    async fn check_attachment(
        &self,
        request: Request<v1::CheckAttachmentRequest>,
    ) -> Reply<v1::Attachment> {
        let request = request.into_inner();
        self.operate(
            Command::Check,
            |networks| async move { networks.check_attachment(&request).await },
        )
        .await
    }

    async fn collect_attachments(
        &self,
        request: Request<v1::CollectAttachmentsRequest>,
    ) -> Reply<v1::CollectAttachmentsReply> {
        let request = request.into_inner();
        self.operate(Command::Gc, |networks| async move {
            let removed = networks.collect_attachments(&request).await?;
            Ok(v1::CollectAttachmentsReply { removed })
        })
        .await
    }

    async fn get_operations(&self, _: Request<v1::GetOperationsRequest>) -> Reply<v1::Operations> {
        Ok(Response::new(self.operations.describe()))
    }

    async fn create_port(&self, request: Request<v1::CreatePortRequest>) -> Reply<v1::HostPort> {
        let request = request.into_inner();
        self.complete(|networks| async move { networks.create_port(&request).await }).await
    }

    async fn remove_port(
        &self,
        request: Request<v1::RemovePortRequest>,
    ) -> Reply<v1::RemovePortReply> {
        let name = request.into_inner().name;
        self.complete(|networks| async move {
            networks.remove_port(&name).await.map(|()| v1::RemovePortReply {})
        })
        .await
    }

    async fn reconcile(&self, request: Request<v1::ReconcileRequest>) -> Reply<v1::ReconcileReply> {
        let live = request.into_inner().sandbox_ids.into_iter().collect();
        self.complete(|networks| async move {
            networks.reconcile(&live).await.map(|()| v1::ReconcileReply {})
        })
        .await
    }
}
