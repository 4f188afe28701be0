//! Endpoints of hardware functions.

use std::sync::Arc;

use slipway_plane_api::v1;
use slipway_vfio::Device;

use super::Plane;
use crate::Error;
use crate::endpoint::Served;
use crate::table::Slot;

impl Plane {
    /// Makes an endpoint of a device that was reset, on a thread of its own. It refuses clients
    /// until [`open_endpoint`](Self::open_endpoint), and ends with this process.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub(crate) fn create_hardware(
        &self,
        request: &v1::CreateEndpointRequest,
        device: &Arc<Device>,
    ) -> Result<v1::Endpoint, Error> {
        let id = request.id.clone();
        let mut endpoints = self.lock();
        if endpoints.contains_key(&id) {
            return Err(Error::Exists(id));
        }
        endpoints.insert(id.clone(), Slot::Reserved(Vec::new()));
        drop(endpoints);
        let home = self.shared.reactors[0].handle();
        match Served::create_hardware(request, device, &self.shared.late, &home) {
            Ok(served) => {
                let described = served.describe();
                self.lock().insert(id, Slot::Served(Box::new(served)));
                Ok(described)
            }
            Err(error) => {
                self.lock().remove(&id);
                Err(error)
            }
        }
    }
}
