//! Memory ports: ports of switches for programs of this host. Each has a socket at which its client
//! attaches (`slipway_ring` has the protocol).
//!
//! - `listener` is the socket.
//! - `gate` is a task on the switch's reactor that serves the socket. It gives one client at a time
//!   a new link, replaces the switch's port by the switch's side of the link, and removes it when
//!   the client is gone.
//! - This module is the control thread's record of the ports.
//!
//! Each client has memory of its own: a client cannot affect the next one by what it did to its
//! link or still maps. A port without a client holds no memory.

mod gate;
mod listener;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use slipway_plane_api::{check_id, v1};
use slipway_ring::Geometry;
use slipway_switch::ports::UnpluggedPort;
use slipway_switch::{Handle, Mac, PortConfig, PortIndex};

use crate::error::Error;
use crate::switch::SwitchHandle;
use gate::{Gate, Keyhole};
use listener::Listener;

/// The time that the reactor may take to end a port, since it has other tasks.
const CLOSE: Duration = Duration::from_secs(10);

/// The control thread's record of a memory port.
struct Port {
    switch: String,
    index: PortIndex,
    socket: String,
    handle: Handle,
    gate: Keyhole,
}

/// All memory ports of a plane, by name.
#[derive(Default)]
pub struct MemoryPorts(Mutex<BTreeMap<String, Port>>);

impl MemoryPorts {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Port>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the sockets of a switch's memory ports, by the number of the port.
    pub fn sockets(&self, switch: &str) -> BTreeMap<PortIndex, String> {
        let ports = self.lock();
        let of = ports.values().filter(|port| port.switch == switch);
        of.map(|port| (port.index, port.socket.clone())).collect()
    }

    /// Ends the memory ports of a switch that is being removed.
    pub fn remove_of(&self, switch: &str) {
        let mut ports = self.lock();
        let gone: Vec<Port> =
            ports.extract_if(.., |_, port| port.switch == switch).map(|(_, port)| port).collect();
        gone.into_iter().for_each(Port::close);
    }
}

impl Port {
    /// Ends the port. The gate ends first: otherwise it could replace a later port that has got the
    /// number.
    fn close(self) {
        self.gate.close(CLOSE);
        let index = self.index;
        // An error means that the switch is gone, and its ports with it.
        let _ = self.handle.call(move |owner| drop(owner.detach(index)));
    }
}

impl MemoryPorts {
    /// Makes a memory port at `switch`, a task of `reactor`; blocks. On return its socket accepts a
    /// client.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create(
        &self,
        request: &v1::CreatePortRequest,
        switch: &SwitchHandle,
        reactor: &slipway_reactor::Handle,
    ) -> Result<v1::MemoryPort, Error> {
        let name = &request.name;
        check_id(name).map_err(Error::Invalid)?;
        let geometry = geometry(request)?;
        let config = port_config(request)?;
        let mut ports = self.lock();
        if ports.contains_key(name) {
            return Err(Error::ExistingPort(name.clone()));
        }
        let listener = Listener::bind(&request.socket_path, request.owner.as_ref())?;
        let mac = config.mac.map_or([0; 6], |mac| mac.0);
        let handle = switch.handle.clone();
        let attached = handle.call(move |owner| owner.attach(Box::new(UnpluggedPort), config));
        let index = attached.map_err(|_| Error::UnknownSwitch(request.switch.clone()))??;
        let gate = Gate::spawn(reactor, listener, (handle.clone(), index), geometry, mac);
        let gate = gate.map_err(|error| {
            let _ = handle.run(move |owner| drop(owner.detach(index)));
            Error::Resources(error.to_string())
        })?;
        let (switch, socket) = (request.switch.clone(), request.socket_path.clone());
        ports.insert(name.clone(), Port { switch, index, socket, handle, gate });
        Ok(v1::MemoryPort {
            name: name.clone(),
            switch: request.switch.clone(),
            socket_path: request.socket_path.clone(),
        })
    }

    /// Disconnects a memory port's client and removes the port; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownMemoryPort`].
    pub fn remove(&self, name: &str) -> Result<(), Error> {
        let mut ports = self.lock();
        let port = ports.remove(name).ok_or_else(|| Error::UnknownMemoryPort(name.to_owned()))?;
        // Under the lock: a caller that then makes a port of this name finds the socket's path
        // free.
        port.close();
        Ok(())
    }

    /// Returns the number of memory ports.
    pub fn count(&self) -> usize {
        self.lock().len()
    }
}

fn geometry(request: &v1::CreatePortRequest) -> Result<Geometry, Error> {
    let usual = Geometry::default();
    let or = |value: u32, other: u32| if value == 0 { other } else { value };
    let wanted = Geometry {
        slots: or(request.slots, usual.slots),
        payload: or(request.payload, usual.payload),
    };
    if wanted.is_possible() {
        return Ok(wanted);
    }
    Err(Error::Invalid(format!(
        "a ring of {} slots of {} bytes is not possible: slots are a power of two, 16 to 32768, \
         and hold a multiple of 64 bytes, 64 to 65536",
        wanted.slots, wanted.payload
    )))
}

fn port_config(request: &v1::CreatePortRequest) -> Result<PortConfig, Error> {
    let name = format!("memory:{}", request.name);
    if request.mac.is_empty() {
        return Ok(PortConfig { name, ..PortConfig::default() });
    }
    let mac: Mac = request.mac.parse().map_err(|error| {
        Error::Invalid(format!("\"{}\" is no MAC address: {error}", request.mac))
    })?;
    Ok(PortConfig { name, mac: Some(mac), spoof_check: true, ..PortConfig::default() })
}
