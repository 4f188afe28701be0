//! An endpoint of a hardware function.

use std::sync::Arc;

use slipway_plane_api::v1;
use slipway_ram::LateFiles;
use slipway_reactor::Handle;
use slipway_telemetry::monotonic_ns;
use slipway_vfio::{Device, Driver, HardwareFunction};
use slipway_vfio_user::{Config, Endpoint, EndpointParts};

use super::{FunctionKind, Served, config};
use crate::Error;
use crate::id::{RecordId, check_id};

impl Served {
    /// Makes an endpoint of a device that was reset, and serves it on a thread of its own. The
    /// socket refuses clients until the endpoint is opened for one. `home` is any reactor: the
    /// endpoint never has a step there.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::Socket`], [`Error::Resources`]; nothing is left then.
    pub fn create_hardware(
        request: &v1::CreateEndpointRequest,
        device: &Arc<Device>,
        late: &LateFiles,
        home: &Handle,
    ) -> Result<Self, Error> {
        let created_ns = monotonic_ns();
        check_id(&request.id)?;
        let config = config(request, &v1::NvmeController::default())?;
        let config = Config { late: late.clone(), shut: true, ..config };
        let socket = config.location.socket();
        let mut parts = EndpointParts::new(&config);
        parts.set_hardware(Box::new(Driver::new(device.clone())));
        let function = HardwareFunction::new(device.clone());
        let function = Box::new(function.map_err(|error| Error::Invalid(error.to_string()))?);
        let endpoint = Endpoint::new(config, parts, function, Vec::new(), home);
        let path = socket.clone();
        let endpoint = endpoint.map_err(|source| Error::Socket { path, source })?;
        let (id, control) = (request.id.clone(), endpoint.control());
        let served = endpoint.serve_alone(&id);
        served.map_err(|error| Error::Resources(error.to_string()))?;
        let (ready_ns, kind) = (monotonic_ns(), FunctionKind::Hardware);
        let (record, reactors) = (RecordId::new(), Vec::new());
        Ok(Self { id, record, reactors, socket, created_ns, ready_ns, control, kind, place: None })
    }
}
