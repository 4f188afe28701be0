//! An endpoint of the plane as a VF.

use slipway_plane_api::{v1, vf_v1};
use slipway_vf_pool::{Device, Fault};

use crate::{Error, Plane};

/// An endpoint that is made before anybody asks for it. Its socket refuses clients until an owner
/// has the function, and it ends at once when the owner returns it.
pub(super) struct Function {
    plane: Plane,
    request: v1::CreateEndpointRequest,
    /// This process made the endpoint and has not opened it to clients.
    is_fresh: bool,
    /// The client of the owner to come, if that said one.
    client: Option<vf_v1::Client>,
}

impl Function {
    pub(super) fn new(plane: Plane, request: v1::CreateEndpointRequest) -> Self {
        Self { plane, request, is_fresh: false, client: None }
    }

    /// Sets the client that the next owner has for the function.
    pub(super) fn prepare(&mut self, client: Option<vf_v1::Client>) {
        self.client = client;
    }

    fn create(&mut self) -> Result<(), Fault> {
        self.plane.create_shut(&self.request).map_err(fault)?;
        self.is_fresh = true;
        Ok(())
    }

    fn renew(&mut self) -> Result<(), Fault> {
        self.remove()?;
        self.create()
    }

    /// Returns whether the function was never open to a client and had none.
    fn is_unused(&self) -> Result<bool, Fault> {
        if !self.is_fresh {
            return Ok(false);
        }
        let endpoint = self.plane.get(&self.request.id).map_err(fault)?;
        let clients = endpoint.counters.map_or(u64::MAX, |counters| counters.clients);
        Ok(clients == 0)
    }

    fn remove(&mut self) -> Result<(), Fault> {
        self.is_fresh = false;
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
            // The last daemon may have died before it had opened it to its owner.
            Ok(endpoint) if endpoint.socket_path == self.request.socket_path => self.admit(),
            _ => Err(Fault("it ended with the last daemon".into())),
        }
    }

    /// A function that was open to clients is made anew: its client is disconnected, its I/O has
    /// ended, no mapping of its memory is left, and every register has its reset value.
    fn reset(&mut self) -> Result<(), Fault> {
        if self.is_unused()? {
            return Ok(());
        }
        self.renew()
    }

    /// The disk went with the function: a new disk in memory is zeros, a new overlay is empty. A
    /// function that had no client was not written to.
    fn scrub(&mut self) -> Result<(), Fault> {
        if self.is_unused()? {
            return Ok(());
        }
        Err(Fault("it had a client before it had an owner".into()))
    }

    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault> {
        for device in devices {
            // A closed device stays closed.
            if device.plane.get(&device.request.id).is_ok() {
                device.renew()?;
            }
        }
        Ok(())
    }

    fn admit(&mut self) -> Result<(), Fault> {
        self.is_fresh = false;
        let id = &self.request.id;
        let opened = match self.client.take() {
            Some(client) => self.plane.open_endpoint_for(id, &client),
            None => self.plane.open_endpoint(id),
        };
        opened.map_err(fault)
    }

    fn expel(&mut self) {
        self.is_fresh = false;
        // An error: the endpoint is gone.
        let _ = self.plane.end_endpoint(&self.request.id);
    }

    fn access(&self) -> vf_v1::Lease {
        let v1::CreateEndpointRequest { id, socket_path, virtio_net, .. } = self.request.clone();
        let v1::VirtioNet { mac, switch, mtu, .. } = virtio_net.unwrap_or_default();
        vf_v1::Lease { number: 0, id, socket_path, mac, switch, mtu }
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.remove()
    }
}

fn fault(error: Error) -> Fault {
    Fault(error.to_string())
}
