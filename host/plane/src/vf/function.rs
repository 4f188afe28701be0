//! An endpoint of the plane as a VF.

use slipway_plane_api::{v1, vf_v1};
use slipway_vf_pool::{Device, Fault};

use super::hardware::Hardware;
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
    /// The hardware behind the endpoint; `None` if the plane makes the function itself.
    hardware: Option<Hardware>,
}

impl Function {
    pub(super) fn new(
        plane: Plane,
        request: v1::CreateEndpointRequest,
        hardware: Option<Hardware>,
    ) -> Self {
        Self { plane, request, is_fresh: false, client: None, hardware }
    }

    /// Sets the client that the next owner has for the function.
    pub(super) fn prepare(&mut self, client: Option<vf_v1::Client>) {
        self.client = client;
    }

    /// Makes the endpoint. Hardware is opened, if it is closed, and reset before.
    fn create(&mut self) -> Result<(), Fault> {
        let created = match &mut self.hardware {
            Some(hardware) => {
                hardware.reset()?;
                self.plane.create_hardware(&self.request, hardware.device()?)
            }
            None => self.plane.create_shut(&self.request),
        };
        created.map_err(fault)?;
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
            Err(_) => {
                let created = self.create();
                if created.is_err()
                    && let Some(hardware) = &mut self.hardware
                {
                    // The next try opens it anew: the kernel resets it for that.
                    hardware.shut();
                }
                created
            }
        }
    }

    fn adopt(&mut self) -> Result<(), Fault> {
        match self.plane.get(&self.request.id) {
            // The last daemon may have died before it had opened it to its owner.
            Ok(endpoint) if endpoint.socket_path == self.request.socket_path => self.admit(),
            // Hardware always has: it is open as long as its daemon has its descriptors.
            _ => Err(Fault("it ended with the last daemon".into())),
        }
    }

    /// A function that was open to clients is made anew: its client is disconnected, its I/O has
    /// ended, no mapping of its memory is left, and every register has its reset value. Hardware
    /// has a function-level reset in between.
    fn reset(&mut self) -> Result<(), Fault> {
        if self.is_unused()? {
            return Ok(());
        }
        self.renew()
    }

    /// The disk went with the function: a new disk in memory is zeros, a new overlay is empty. A
    /// function that had no client was not written to. The namespaces of an NVMe VF of hardware are
    /// not the plane's: they are not erased.
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
        let opened = match (self.client.take(), &mut self.hardware) {
            (Some(client), Some(hardware)) => {
                hardware.hold(&client)?;
                // The plane has no port of it whose address it could be.
                let client = vf_v1::Client { mac: String::new(), ..client };
                self.plane.open_endpoint_for(id, &client)
            }
            (Some(client), None) => self.plane.open_endpoint_for(id, &client),
            (None, _) => self.plane.open_endpoint(id),
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
        let kind = match (&self.hardware, &virtio_net) {
            (Some(_), _) => "hardware",
            (None, Some(_)) => "nic",
            (None, None) => "nvme",
        };
        let hardware = self.hardware.as_ref();
        let address = hardware.map_or_else(String::new, |one| one.address().to_string());
        let v1::VirtioNet { mac, switch, mtu, .. } = virtio_net.unwrap_or_default();
        // An owner's client may have said another one, also to the last daemon.
        let mac = self.plane.mac_of(&id).unwrap_or(mac);
        let (number, kind) = (0, kind.to_owned());
        vf_v1::Lease { number, id, socket_path, mac, switch, mtu, kind, address }
    }

    fn close(&mut self) -> Result<(), Fault> {
        self.remove()?;
        self.hardware.as_mut().map_or(Ok(()), Hardware::close)
    }
}

fn fault(error: Error) -> Fault {
    Fault(error.to_string())
}
