//! Commands and events about functions: those of `slipway-vmm`, and QEMU's for a function that is
//! added.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::{Value, json};

use super::{Command, Qmp, message};
use crate::{Error, Result};

/// The name of a port of QEMU's for one more function, before its number.
pub(crate) const PORT: &str = "port-";

/// The command of `slipway-vmm` that saves its machine.
pub(crate) const SAVE: &str = "slipway-save";
/// The command of `slipway-vmm` that copies the memory of its machine while the guest runs.
pub(crate) const COPY_AHEAD: &str = "slipway-copy-ahead";

/// A port of QEMU's root bus that has no function yet.
#[derive(Debug, PartialEq)]
pub(crate) struct FreePort {
    id: String,
    /// The number of the bus behind it. 0: the guest has not given it one.
    bus: u8,
}

impl Qmp {
    /// Gives `slipway-vmm` a new connection of the function `index`.
    pub(crate) async fn reconnect(
        &self,
        index: usize,
        connection: OwnedFd,
        timeout: Duration,
    ) -> Result<()> {
        let command = Command {
            name: "slipway-reconnect",
            arguments: Some(json!({ "function": index })),
            descriptors: vec![connection],
        };
        self.execute_within(&command, timeout).await.map(drop)
    }

    /// Gives `slipway-vmm` the connection of a new function. Returns the function's number.
    pub(crate) async fn plug(
        &self,
        name: &str,
        connection: OwnedFd,
        timeout: Duration,
    ) -> Result<usize> {
        let command = Command {
            name: "device_add",
            arguments: Some(json!({ "driver": "vfio-user-pci", "id": name })),
            descriptors: vec![connection],
        };
        let answer = self.execute_within(&command, timeout).await?;
        let unknown = || Error::Control("device_add did not answer with a function".into());
        message::function(&answer).ok_or_else(unknown)
    }

    /// Has `slipway-vmm` write the state of its machine to `file`, and then its memory to the pipe
    /// `pages`, if there is one; with `rest` only what was written to since it was copied ahead.
    /// Returns the number of bytes of the state.
    pub(crate) async fn save(
        &self,
        file: OwnedFd,
        (pages, rest): (Option<OwnedFd>, bool),
        timeout: Duration,
    ) -> Result<u64> {
        let descriptors = std::iter::once(file).chain(pages).collect();
        // A VMM of an earlier version knows no argument.
        let arguments = rest.then(|| json!({ "rest": true }));
        let command = Command { name: SAVE, arguments, descriptors };
        let answer = self.execute_within(&command, timeout).await?;
        let bytes = answer.get("bytes").and_then(Value::as_u64);
        bytes.ok_or_else(|| Error::Control(format!("{SAVE} did not answer with a number")))
    }

    /// Has `slipway-vmm` write the memory of its machine to the pipe `pages`, while the guest runs.
    pub(crate) async fn copy_ahead(&self, pages: OwnedFd, timeout: Duration) -> Result<()> {
        let command = Command { name: COPY_AHEAD, arguments: None, descriptors: vec![pages] };
        self.execute_within(&command, timeout).await.map(drop)
    }

    /// Finds a port of QEMU's for one more function.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the machine was made without ports; [`Error::Refused`] if all are
    /// taken.
    pub(crate) async fn free_port(&self, timeout: Duration) -> Result<FreePort> {
        match free_port(&self.execute("query-pci", timeout).await?) {
            None => crate::no_hot_plug(),
            Some(None) => {
                let message = "each slot for another function has one".to_owned();
                Err(Error::Refused { command: "device_add".to_owned(), message })
            }
            Some(Some(port)) => Ok(port),
        }
    }

    /// Has QEMU add a function that is served at a socket of the path `socket` in its own root.
    /// Returns its PCI address.
    pub(crate) async fn plug_at_port(
        &self,
        port: FreePort,
        name: &str,
        socket: &str,
        timeout: Duration,
    ) -> Result<String> {
        let socket = json!({ "type": "unix", "path": socket });
        let device =
            json!({ "driver": "vfio-user-pci", "id": name, "bus": port.id, "socket": socket });
        let add = Command { name: "device_add", arguments: Some(device), descriptors: Vec::new() };
        self.execute_within(&add, timeout).await?;
        Ok(format!("0000:{:02x}:00.0", port.bus))
    }

    /// Waits until connections of functions are reported lost, and takes their indices. Returns
    /// `None` when the channel is closed. For one caller at a time.
    pub(crate) async fn lost_functions(&self) -> Option<BTreeSet<usize>> {
        loop {
            let lost = self.take_lost_functions()?;
            if !lost.is_empty() {
                return Some(lost);
            }
            self.shared.lost.notified().await;
        }
    }

    /// Takes the indices of the functions that were reported lost so far. Returns `None` when the
    /// channel is closed.
    pub(crate) fn take_lost_functions(&self) -> Option<BTreeSet<usize>> {
        let mut state = self.shared.state();
        if state.closed.is_some() { None } else { Some(std::mem::take(&mut state.lost)) }
    }

    /// Returns the numbers of the functions that were reported broken for good. A VMM tells each
    /// new client of those before it answers the first command after `qmp_capabilities`.
    pub(crate) fn broken_functions(&self) -> BTreeSet<usize> {
        self.shared.state().broken.clone()
    }
}

/// Finds the first port without a function in the answer to `query-pci` (QEMU, *qapi/pci.json*).
/// Returns `None` if there are no ports at all, and `Some(None)` if all have functions.
fn free_port(buses: &Value) -> Option<Option<FreePort>> {
    let devices = buses.as_array()?.iter().filter_map(|bus| bus.get("devices")?.as_array());
    let ports = devices.flatten().filter_map(|device| {
        let id = device.get("qdev_id")?.as_str().filter(|id| id.starts_with(PORT))?;
        Some((id, device.get("pci_bridge")?))
    });
    let mut ports = ports.peekable();
    ports.peek()?;
    let is_free = |bridge: &Value| {
        let devices = bridge.get("devices").and_then(Value::as_array);
        devices.is_none_or(Vec::is_empty)
    };
    let free = ports.find(|(_, bridge)| is_free(bridge));
    Some(free.map(|(id, bridge)| {
        let bus = bridge.pointer("/bus/secondary").and_then(Value::as_u64);
        FreePort { id: id.to_owned(), bus: bus.and_then(|bus| bus.try_into().ok()).unwrap_or(0) }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(id: &str, devices: Value) -> Value {
        let bus = json!({ "number": 0, "secondary": 3 });
        json!({ "bus": 0, "qdev_id": id, "pci_bridge": { "bus": bus, "devices": devices } })
    }

    #[test]
    fn the_first_port_without_a_function_is_free() {
        let buses = |ports: &[Value]| json!([{ "bus": 0, "devices": ports }]);
        let other = json!({ "bus": 0, "qdev_id": "" });
        let (taken, empty) = (port("port-0", json!([other])), port("port-1", json!([])));
        let free = FreePort { id: "port-1".to_owned(), bus: 3 };
        let all = buses(&[other.clone(), taken.clone(), empty]);
        assert_eq!(free_port(&all), Some(Some(free)));
        assert_eq!(free_port(&buses(&[other.clone(), taken])), Some(None));
        assert_eq!(free_port(&buses(&[other, port("bridge", json!([]))])), None);
        assert_eq!(free_port(&json!({})), None);
        let bare = json!({ "qdev_id": "port-7", "pci_bridge": {} });
        let unknown = FreePort { id: "port-7".to_owned(), bus: 0 };
        assert_eq!(free_port(&buses(&[bare])), Some(Some(unknown)));
    }
}
