//! The plane's gRPC service.

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use slipway_plane_api::v1;

use crate::{Error, Plane};

/// The server of `slipway-plane-api`'s calls.
pub struct Service {
    plane: Plane,
}

impl Service {
    pub(crate) fn new(plane: Plane) -> Self {
        Self { plane }
    }
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Invalid(_) | Error::Controller(_) | Error::Change(_) | Error::Network(_) => {
                Self::invalid_argument(message)
            }
            Error::Port(slipway_switch::BadConfig::Full) => Self::resource_exhausted(message),
            Error::Port(_) => Self::invalid_argument(message),
            Error::Exists(_)
            | Error::ExistingDisk(_)
            | Error::ExistingSwitch(_)
            | Error::ExistingPort(_) => Self::already_exists(message),
            Error::Unknown(_)
            | Error::UnknownDisk(_)
            | Error::UnknownNamespace(_)
            | Error::UnknownPort(_)
            | Error::UnknownMemoryPort(_)
            | Error::UnknownSwitch(_) => Self::not_found(message),
            Error::AmbiguousPort(_) => Self::invalid_argument(message),
            Error::Tap { .. } => Self::failed_precondition(message),
            Error::Disk(_) | Error::DiskInUse(..) | Error::Socket { .. } | Error::Snooped(_) => {
                Self::failed_precondition(message)
            }
            Error::Resources(_) => Self::resource_exhausted(message),
        }
    }
}

/// Runs work that may block on files outside of the control thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<Response<T>, Status> {
    let outcome = tokio::task::spawn_blocking(work).await;
    let outcome = outcome.map_err(|error| Status::internal(error.to_string()))?;
    Ok(Response::new(outcome?))
}

#[tonic::async_trait]
impl v1::plane_server::Plane for Service {
    type SnoopStream = ReceiverStream<Result<v1::SnoopReport, Status>>;
    type CapturePortStream = ReceiverStream<Result<v1::CaptureChunk, Status>>;
    type TracePortStream = ReceiverStream<Result<v1::TraceReport, Status>>;

    async fn snoop(
        &self,
        request: Request<v1::SnoopRequest>,
    ) -> Result<Response<Self::SnoopStream>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        // Runs in a task of its own: if the client hangs up meanwhile, no tracing stays half
        // started.
        let started = tokio::spawn(async move { plane.snoop(&request).await }).await;
        let reports = started.map_err(|error| Status::internal(error.to_string()))??;
        Ok(Response::new(ReceiverStream::new(reports)))
    }

    async fn create_endpoint(
        &self,
        request: Request<v1::CreateEndpointRequest>,
    ) -> Result<Response<v1::Endpoint>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create(&request)).await
    }

    async fn remove_endpoint(
        &self,
        request: Request<v1::RemoveEndpointRequest>,
    ) -> Result<Response<v1::RemoveEndpointReply>, Status> {
        let (plane, id) = (self.plane.clone(), request.into_inner().id);
        blocking(move || plane.remove(&id).map(|()| v1::RemoveEndpointReply {})).await
    }

    async fn get_endpoint(
        &self,
        request: Request<v1::GetEndpointRequest>,
    ) -> Result<Response<v1::Endpoint>, Status> {
        Ok(Response::new(self.plane.get(&request.into_inner().id)?))
    }

    async fn list_endpoints(
        &self,
        _: Request<v1::ListEndpointsRequest>,
    ) -> Result<Response<v1::ListEndpointsReply>, Status> {
        Ok(Response::new(v1::ListEndpointsReply { endpoints: self.plane.list() }))
    }

    async fn attach_disk(
        &self,
        request: Request<v1::AttachDiskRequest>,
    ) -> Result<Response<v1::NamespaceStatus>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.attach(&request)).await
    }

    async fn detach_disk(
        &self,
        request: Request<v1::DetachDiskRequest>,
    ) -> Result<Response<v1::DetachDiskReply>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.detach(&request).map(|()| v1::DetachDiskReply {})).await
    }

    async fn limit_endpoint(
        &self,
        request: Request<v1::LimitEndpointRequest>,
    ) -> Result<Response<v1::LimitEndpointReply>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.limit(&request).map(|()| v1::LimitEndpointReply {})).await
    }

    async fn create_disk(
        &self,
        request: Request<v1::CreateDiskRequest>,
    ) -> Result<Response<v1::NamedDisk>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create_disk(&request)).await
    }

    async fn remove_disk(
        &self,
        request: Request<v1::RemoveDiskRequest>,
    ) -> Result<Response<v1::RemoveDiskReply>, Status> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.remove_disk(&name).map(|()| v1::RemoveDiskReply {})).await
    }

    async fn resize_disk(
        &self,
        request: Request<v1::ResizeDiskRequest>,
    ) -> Result<Response<v1::NamedDisk>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.resize_disk(&request)).await
    }

    async fn list_disks(
        &self,
        _: Request<v1::ListDisksRequest>,
    ) -> Result<Response<v1::ListDisksReply>, Status> {
        Ok(Response::new(v1::ListDisksReply { disks: self.plane.list_disks() }))
    }

    async fn create_switch(
        &self,
        request: Request<v1::CreateSwitchRequest>,
    ) -> Result<Response<v1::Switch>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create_switch(&request)).await
    }

    async fn remove_switch(
        &self,
        request: Request<v1::RemoveSwitchRequest>,
    ) -> Result<Response<v1::RemoveSwitchReply>, Status> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.remove_switch(&name).map(|()| v1::RemoveSwitchReply {})).await
    }

    async fn create_port(
        &self,
        request: Request<v1::CreatePortRequest>,
    ) -> Result<Response<v1::MemoryPort>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.create_port(&request)).await
    }

    async fn remove_port(
        &self,
        request: Request<v1::RemovePortRequest>,
    ) -> Result<Response<v1::RemovePortReply>, Status> {
        let (plane, name) = (self.plane.clone(), request.into_inner().name);
        blocking(move || plane.remove_port(&name).map(|()| v1::RemovePortReply {})).await
    }

    async fn list_switches(
        &self,
        _: Request<v1::ListSwitchesRequest>,
    ) -> Result<Response<v1::ListSwitchesReply>, Status> {
        let plane = self.plane.clone();
        blocking(move || Ok(v1::ListSwitchesReply { switches: plane.list_switches() })).await
    }

    async fn impair_port(
        &self,
        request: Request<v1::ImpairPortRequest>,
    ) -> Result<Response<v1::SwitchPort>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.impair_port(&request)).await
    }

    async fn capture_port(
        &self,
        request: Request<v1::CapturePortRequest>,
    ) -> Result<Response<Self::CapturePortStream>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.capture_port(&request).map(ReceiverStream::new)).await
    }

    async fn trace_port(
        &self,
        request: Request<v1::TracePortRequest>,
    ) -> Result<Response<Self::TracePortStream>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.trace_port(&request).map(ReceiverStream::new)).await
    }

    async fn set_port(
        &self,
        request: Request<v1::SetPortRequest>,
    ) -> Result<Response<v1::SwitchPort>, Status> {
        let (plane, request) = (self.plane.clone(), request.into_inner());
        blocking(move || plane.set_port(&request)).await
    }
}
