//! An endpoint of the plane as a VF.

use slipway_plane_api::{v1, vf_v1};
use slipway_vf_pool::{Device, Fault};

use crate::{Error, Plane};

/// An endpoint that is made before anybody asks for it.
pub(super) struct Function {
    plane: Plane,
    request: v1::CreateEndpointRequest,
    /// This process made the endpoint: its counters tell whether it ever had a client.
    is_new: bool,
}

impl Function {
    pub(super) fn new(plane: Plane, request: v1::CreateEndpointRequest) -> Self {
        Self { plane, request, is_new: false }
    }

    fn create(&mut self) -> Result<(), Fault> {
        self.plane.create(&self.request).map_err(fault)?;
        self.is_new = true;
        Ok(())
    }

    /// Returns whether no client has ever been connected to the function.
    fn is_unused(&self) -> Result<bool, Fault> {
        let endpoint = self.plane.get(&self.request.id).map_err(fault)?;
        let clients = endpoint.counters.map_or(u64::MAX, |counters| counters.clients);
        Ok(self.is_new && clients == 0)
    }

    fn remove(&self) -> Result<(), Fault> {
        match self.plane.remove(&self.request.id) {
            Ok(()) | Err(Error::Unknown(_)) => Ok(()),
            Err(error) => Err(fault(error)),
        }
    }
}

impl Device for Function {
    /// The number is the pool's business.
    type Access = vf_v1::Lease;

    fn open(&mut self) -> Result<(), Fault> {
        match self.plane.get(&self.request.id) {
            Ok(endpoint) if endpoint.socket_path != self.request.socket_path => {
                Err(Fault(format!("endpoint {} is somebody else's", endpoint.id)))
            }
            // Left by the last daemon; the reset that follows cuts its client off.
            Ok(_) => Ok(()),
            Err(_) => self.create(),
        }
    }

    fn adopt(&mut self) -> Result<(), Fault> {
        match self.plane.get(&self.request.id) {
            Ok(endpoint) if endpoint.socket_path == self.request.socket_path => Ok(()),
            _ => Err(Fault("it ended with the last daemon".into())),
        }
    }

    /// A function that had a client is made anew: the client is disconnected, its I/O has ended, no
    /// mapping of its memory is left, and every register has its reset value.
    fn reset(&mut self) -> Result<(), Fault> {
        if self.is_unused()? {
            return Ok(());
        }
        self.remove()?;
        self.create()
    }

    /// The disk went with the function: a new disk in memory is zeros, a new overlay is empty. A
    /// function that had no client was not written to.
    fn scrub(&mut self) -> Result<(), Fault> {
        if self.is_unused()? {
            return Ok(());
        }
        Err(Fault("a client came during its reset".into()))
    }

    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault> {
        for device in devices {
            // One that is closed stays so.
            if device.plane.get(&device.request.id).is_ok() {
                device.remove()?;
                device.create()?;
            }
        }
        Ok(())
    }

    fn access(&self) -> vf_v1::Lease {
        let v1::CreateEndpointRequest { id, socket_path, virtio_net, .. } = self.request.clone();
        let mac = virtio_net.map(|net| net.mac).unwrap_or_default();
        vf_v1::Lease { number: 0, id, socket_path, mac }
    }

    fn close(&mut self) {
        if let Err(Fault(why)) = self.remove() {
            tracing::error!(id = self.request.id, why, "a virtual function is not closed");
        }
    }
}

fn fault(error: Error) -> Fault {
    Fault(error.to_string())
}
