//! The plane's gRPC service.
//!
//! A new call is in `proto/plane.proto` of `host/plane-api`, with its errors, and here. Work that
//! may block is done in `blocking`; a change to what a reactor owns is a message to it. A call that
//! changes what outlives the daemon describes that first (`keep`). Callers have it by
//! `slipway_plane_api::PlaneClient`: `sandbox/runtime`, and `front/cli`, by a command of its own
//! file. Tests: a file of `host/plane/tests`, and a script of `tests/e2e` for the command.

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use slipway_disks::overlays;
use slipway_nvme::ChangeError;
use slipway_plane_api::v1;
use slipway_plane_api::v1::plane_server::PlaneServer;
use slipway_ram::GRANULE;

use crate::{Error, Plane, live, template};

/// The outcome of a call.
pub(crate) type Reply<T> = Result<Response<T>, Status>;

/// The server of `slipway-plane-api`'s calls.
pub struct Service {
    plane: Plane,
}

impl Plane {
    /// Returns the gRPC service for the plane.
    pub fn service(&self) -> Service {
        Service { plane: self.clone() }
    }

    /// Connects a channel to the service within this process.
    ///
    /// # Errors
    /// No descriptors are left.
    pub async fn connect(&self) -> Result<tonic::transport::Channel, tonic::transport::Error> {
        let router =
            tonic::transport::Server::builder().add_service(PlaneServer::new(self.service()));
        slipway_plane_api::within(router).await
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Exists(_) | Error::Change(ChangeError::Taken(_)) => {
                Self::already_exists(message)
            }
            Error::Invalid(_) | Error::Controller(_) | Error::Change(_) | Error::Network(_) => {
                Self::invalid_argument(message)
            }
            Error::Unknown(_) | Error::UnknownNamespace(_) => Self::not_found(message),
            Error::DiskInUse(..)
            | Error::NotCopied(..)
            | Error::Socket { .. }
            | Error::Snooped(_) => Self::failed_precondition(message),
            Error::Resources(_) => Self::resource_exhausted(message),
            Error::Disk(error) => Self::new(code_of_disks(&error), message),
            Error::Fabric(error) => error.into(),
        }
    }
}

/// Returns the code for an error of disks.
fn code_of_disks(error: &slipway_disks::Error) -> Code {
    use slipway_disks::Error as DiskError;
    match error {
        DiskError::ExistingDisk(_) | DiskError::ExistingFile(_) => Code::AlreadyExists,
        DiskError::Invalid(_) => Code::InvalidArgument,
        DiskError::UnknownDisk(_) => Code::NotFound,
        DiskError::Open(_) | DiskError::File { .. } => Code::FailedPrecondition,
        DiskError::Resources(_) => Code::ResourceExhausted,
    }
}

/// Runs work that may block on files outside of the control thread.
pub(crate) async fn blocking<T: Send + 'static, E: Into<Status> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Reply<T> {
    let outcome = tokio::task::spawn_blocking(work).await;
    let outcome = outcome.map_err(|error| Status::internal(error.to_string()))?;
    outcome.map(Response::new).map_err(Into::into)
}

#[tonic::async_trait]
impl v1::plane_server::Plane for Service {
    type SnoopStream = ReceiverStream<Result<v1::SnoopReport, Status>>;
    type InspectLiveStream = ReceiverStream<Result<v1::LivePart, Status>>;
    type CapturePortStream = ReceiverStream<Result<v1::CaptureChunk, Status>>;
    type TracePortStream = ReceiverStream<Result<v1::TraceReport, Status>>;

    async fn snoop(&self, request: Request<v1::SnoopRequest>) -> Reply<Self::SnoopStream> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        // Runs in a task of its own: if the client hangs up meanwhile, no tracing stays half
        // started.
        let started = tokio::spawn(async move { plane.snoop(&request).await }).await;
        let reports = started.map_err(|error| Status::internal(error.to_string()))??;
        Ok(Response::new(ReceiverStream::new(reports)))
    }

    async fn inspect_live(
        &self,
        request: Request<v1::InspectLiveRequest>,
    ) -> Reply<Self::InspectLiveStream> {
        let parts = live::start(self.plane.clone(), request.into_inner().ids)?;
        Ok(Response::new(ReceiverStream::new(parts)))
    }

    async fn list_reactors(
        &self,
        _: Request<v1::ListReactorsRequest>,
    ) -> Reply<v1::ListReactorsReply> {
        let reactors = live::list_reactors(&self.plane);
        Ok(Response::new(v1::ListReactorsReply { reactors }))
    }

    async fn create_endpoint(
        &self,
        request: Request<v1::CreateEndpointRequest>,
    ) -> Reply<v1::Endpoint> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create(&request)).await
    }

    async fn remove_endpoint(
        &self,
        request: Request<v1::RemoveEndpointRequest>,
    ) -> Reply<v1::RemoveEndpointReply> {
        let (plane, id) = (self.plane.clone(), request.into_inner().id);
        blocking(move || plane.remove(&id).map(|()| v1::RemoveEndpointReply {})).await
    }

    async fn get_endpoint(&self, request: Request<v1::GetEndpointRequest>) -> Reply<v1::Endpoint> {
        Ok(Response::new(self.plane.get(&request.into_inner().id)?))
    }

    async fn list_endpoints(
        &self,
        _: Request<v1::ListEndpointsRequest>,
    ) -> Reply<v1::ListEndpointsReply> {
        Ok(Response::new(v1::ListEndpointsReply { endpoints: self.plane.list() }))
    }

    async fn attach_disk(
        &self,
        request: Request<v1::AttachDiskRequest>,
    ) -> Reply<v1::NamespaceStatus> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.attach(&request)).await
    }

    async fn detach_disk(
        &self,
        request: Request<v1::DetachDiskRequest>,
    ) -> Reply<v1::DetachDiskReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.detach(&request).map(|()| v1::DetachDiskReply {})).await
    }

    async fn copy_disk(&self, request: Request<v1::CopyDiskRequest>) -> Reply<v1::CopyDiskReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.copy_disk(&request)).await
    }

    async fn limit_endpoint(
        &self,
        request: Request<v1::LimitEndpointRequest>,
    ) -> Reply<v1::LimitEndpointReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.limit(&request).map(|()| v1::LimitEndpointReply {})).await
    }

    async fn create_disk(&self, request: Request<v1::CreateDiskRequest>) -> Reply<v1::NamedDisk> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create_disk(&request)).await
    }

    async fn remove_disk(
        &self,
        request: Request<v1::RemoveDiskRequest>,
    ) -> Reply<v1::RemoveDiskReply> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.remove_disk(&name).map(|()| v1::RemoveDiskReply {})).await
    }

    async fn resize_disk(&self, request: Request<v1::ResizeDiskRequest>) -> Reply<v1::NamedDisk> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.resize_disk(&request)).await
    }

    async fn list_disks(&self, _: Request<v1::ListDisksRequest>) -> Reply<v1::ListDisksReply> {
        Ok(Response::new(v1::ListDisksReply { disks: self.plane.list_disks() }))
    }

    async fn get_overlay_memory(
        &self,
        _: Request<v1::GetOverlayMemoryRequest>,
    ) -> Reply<v1::OverlayMemory> {
        Ok(Response::new(overlays::describe(self.plane.overlays())))
    }

    async fn get_pool(&self, _: Request<v1::GetPoolRequest>) -> Reply<v1::GetPoolReply> {
        let plane = self.plane.clone();
        let figures = move || {
            let stats = plane.pool()?.stats();
            // A pool that is there for templates alone is shown while a sandbox has memory of it.
            (plane.holds_memory() || stats.lent > 0).then(|| pool_figures(&stats))
        };
        blocking::<_, Error>(move || Ok(v1::GetPoolReply { pool: figures() })).await
    }

    async fn add_template(
        &self,
        request: Request<v1::AddTemplateRequest>,
    ) -> Reply<v1::AddTemplateReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || template::add(&plane, &request)).await
    }

    async fn remove_template(
        &self,
        request: Request<v1::RemoveTemplateRequest>,
    ) -> Reply<v1::RemoveTemplateReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || template::remove(&plane, &request)).await
    }

    async fn learn_template(
        &self,
        request: Request<v1::LearnTemplateRequest>,
    ) -> Reply<v1::LearnTemplateReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || template::learn(&plane, &request)).await
    }

    async fn copy_ahead(
        &self,
        request: Request<v1::CopyAheadRequest>,
    ) -> Reply<v1::CopyAheadReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || template::copy_ahead(&plane, &request)).await
    }

    async fn create_switch(&self, request: Request<v1::CreateSwitchRequest>) -> Reply<v1::Switch> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().create_switch(&request)).await
    }

    async fn remove_switch(
        &self,
        request: Request<v1::RemoveSwitchRequest>,
    ) -> Reply<v1::RemoveSwitchReply> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.remove_switch(&name).map(|()| v1::RemoveSwitchReply {})).await
    }

    async fn create_port(&self, request: Request<v1::CreatePortRequest>) -> Reply<v1::MemoryPort> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().create_port(&request)).await
    }

    async fn remove_port(
        &self,
        request: Request<v1::RemovePortRequest>,
    ) -> Reply<v1::RemovePortReply> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.fabric().remove_port(&name).map(|()| v1::RemovePortReply {})).await
    }

    async fn attach_tap(
        &self,
        request: Request<v1::AttachTapRequest>,
    ) -> Reply<v1::AttachTapReply> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().attach_tap_in_namespace(&request)).await
    }

    async fn detach_tap(
        &self,
        request: Request<v1::DetachTapRequest>,
    ) -> Reply<v1::DetachTapReply> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        let detach = move || plane.fabric().detach_tap_in_namespace(&name);
        blocking(move || detach().map(|()| v1::DetachTapReply {})).await
    }

    async fn list_switches(
        &self,
        _: Request<v1::ListSwitchesRequest>,
    ) -> Reply<v1::ListSwitchesReply> {
        let plane = self.plane.clone();
        let switches = move || Ok(v1::ListSwitchesReply { switches: plane.list_switches() });
        blocking::<_, Error>(switches).await
    }

    async fn impair_port(&self, request: Request<v1::ImpairPortRequest>) -> Reply<v1::SwitchPort> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().impair_port(&request)).await
    }

    async fn capture_port(
        &self,
        request: Request<v1::CapturePortRequest>,
    ) -> Reply<Self::CapturePortStream> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().capture_port(&request).map(ReceiverStream::new)).await
    }

    async fn trace_port(
        &self,
        request: Request<v1::TracePortRequest>,
    ) -> Reply<Self::TracePortStream> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.fabric().trace_port(&request).map(ReceiverStream::new)).await
    }

    async fn set_port(&self, request: Request<v1::SetPortRequest>) -> Reply<v1::SwitchPort> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.set_port(&request)).await
    }
}

fn pool_figures(stats: &slipway_pool::Stats) -> v1::Pool {
    let bytes = |granules: usize| (granules * GRANULE) as u64;
    v1::Pool {
        free_bytes: stats.free_bytes,
        lent_bytes: stats.lent_bytes,
        sandboxes: stats.lent,
        faults: stats.faults,
        zeroed_ahead_bytes: stats.zeroed_ahead * GRANULE as u64,
        huge_bytes: stats.huge_bytes,
        absent_bytes: bytes(stats.granules.absent),
        dirty_bytes: bytes(stats.granules.dirty),
        busy_bytes: bytes(stats.granules.busy),
        untouched_bytes: bytes(stats.granules.untouched),
        clean_bytes: bytes(stats.granules.clean),
        nodes: stats.nodes.iter().map(pool_node).collect(),
        spare_forks: stats.spare_forks,
        spare_pages_bytes: stats.spare_fork_bytes,
        spare_forks_given: stats.spare_forks_given,
    }
}

fn pool_node(bytes: &slipway_pool::NodeBytes) -> v1::PoolNode {
    let slipway_pool::NodeBytes { node, free, lent } = *bytes;
    v1::PoolNode { node: node.number().into(), free_bytes: free, lent_bytes: lent }
}

#[cfg(test)]
mod tests {
    use slipway_disks::Error as DiskError;

    use super::*;

    #[test]
    fn errors_of_disks_have_the_codes_of_their_kind() {
        let status = |error: DiskError| Status::from(Error::from(error));
        let unknown = status(DiskError::UnknownDisk("data".into()));
        assert_eq!(unknown.code(), Code::NotFound);
        assert_eq!(unknown.message(), "there is no disk \"data\"");
        assert_eq!(status(DiskError::ExistingDisk("data".into())).code(), Code::AlreadyExists);
        assert_eq!(status(DiskError::ExistingFile("/copy".into())).code(), Code::AlreadyExists);
        assert_eq!(status(DiskError::Invalid("no kind".into())).code(), Code::InvalidArgument);
        let failed = slipway_block::OpenError::InUse("/disk".into());
        assert_eq!(status(failed.into()).code(), Code::FailedPrecondition);
        assert_eq!(status(DiskError::Resources("memory".into())).code(), Code::ResourceExhausted);
    }
}
