//! Memory ports of a network: for programs of the host, kept in the ledger until they are removed.
//!
//! The plane has the ports themselves; this module has the part that outlives the plane. A network
//! with ports is up like one with sandboxes. Whenever it comes up, for the first time or by the
//! next daemon, its ports are made.

use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::v1 as plane_v1;
use tonic::Code;

use super::Networks;
use super::creation::check_name;
use super::table::NetworkTable;
use crate::ledger::{HostPort, Network};
use crate::{Error, Mac, Result};

/// Bytes of an Ethernet header with a tag.
const HEADER: u32 = 18;
/// Bytes of a slot, unless packets are longer.
const SLOT: u32 = 2048;

impl Networks {
    /// Makes a memory port of a network, and brings the network up if needed.
    ///
    /// # Errors
    /// [`Error`]; no port is left then.
    pub async fn create_port(&self, request: &v1::CreatePortRequest) -> Result<v1::HostPort> {
        let (name, network) = (&request.name, &request.network);
        check_name(name)?;
        let mut state = self.state.lock().await;
        if state.networks.values().any(|network| network.ports.contains_key(name)) {
            return Err(Error::ExistingPort(name.clone()));
        }
        self.make_default(&mut state, network)?;
        let port = choose(state.find(network)?, request)?;
        if !state.is_up(network) {
            self.bring_up(&mut state, network).await?;
        }
        let made = self.open_port(network, name, &port).await;
        let made = match made {
            Ok(()) => self.note(&mut state, network, |ports| ports.extend([(name.clone(), port)])),
            refused => refused,
        };
        if let Err(error) = made {
            // The first failure is reported; a second one adds nothing.
            let _ = self.close_port(name).await;
            self.settle_down(&mut state, network).await;
            return Err(error);
        }
        self.describe_port(state.find(network)?, name)
    }

    /// Removes a memory port, even while a client uses it.
    ///
    /// # Errors
    /// [`Error::UnknownPort`]; [`Error::File`], and then the port stays; [`Error::Plane`].
    pub async fn remove_port(&self, name: &str) -> Result<()> {
        let mut state = self.state.lock().await;
        let has = |network: &&Network| network.ports.contains_key(name);
        let found = state.networks.values().find(has).map(|network| network.name.clone());
        let network = found.ok_or_else(|| Error::UnknownPort(name.to_owned()))?;
        self.note(&mut state, &network, |ports| ports.retain(|port, _| port != name))?;
        self.close_port(name).await
    }

    /// Makes the ports of a network that has come up; logs those that cannot be made.
    pub(super) async fn open_ports(&self, network: &Network) {
        for (name, port) in &network.ports {
            if let Err(error) = self.open_port(&network.name, name, port).await {
                tracing::warn!(%error, port = name, network = network.name, "a memory port is not \
                    there");
            }
        }
    }

    /// Describes a port for users.
    pub(super) fn describe_port(&self, network: &Network, name: &str) -> Result<v1::HostPort> {
        let port = network.ports.get(name).ok_or_else(|| Error::UnknownPort(name.to_owned()))?;
        Ok(v1::HostPort {
            name: name.to_owned(),
            network: network.name.clone(),
            socket_path: self.socket(name),
            mac: port.mac.map(|mac| mac.to_string()).unwrap_or_default(),
            slots: port.slots,
            payload: port.payload,
        })
    }

    fn socket(&self, name: &str) -> String {
        self.settings.ports_dir.join(format!("{name}.sock")).to_string_lossy().into_owned()
    }

    async fn open_port(&self, network: &str, name: &str, port: &HostPort) -> Result<()> {
        let request = plane_v1::CreatePortRequest {
            name: name.to_owned(),
            switch: network.to_owned(),
            socket_path: self.socket(name),
            owner: port.owner.map(|(uid, gid)| plane_v1::Owner { uid, gid }),
            mac: port.mac.map(|mac| mac.to_string()).unwrap_or_default(),
            slots: port.slots,
            payload: port.payload,
        };
        let made = self.plane.clone().create_port(request).await;
        made.map(drop).map_err(|status| match status.code() {
            Code::InvalidArgument => Error::Invalid(status.message().to_owned()),
            _ => Error::Plane(status.message().to_owned()),
        })
    }

    async fn close_port(&self, name: &str) -> Result<()> {
        let request = plane_v1::RemovePortRequest { name: name.to_owned() };
        match self.plane.clone().remove_port(request).await {
            Err(status) if status.code() != Code::NotFound => {
                Err(Error::Plane(status.message().to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Changes a network's ports in the ledger first, and then in memory.
    fn note(
        &self,
        state: &mut NetworkTable,
        network: &str,
        change: impl FnOnce(&mut std::collections::BTreeMap<String, HostPort>),
    ) -> Result<()> {
        let mut changed = state.find(network)?.clone();
        change(&mut changed.ports);
        self.ledger.save(&changed)?;
        state.networks.insert(network.to_owned(), changed);
        Ok(())
    }

    /// Takes down a network that came up for a port that was not made.
    async fn settle_down(&self, state: &mut NetworkTable, name: &str) {
        if state.find(name).is_ok_and(|network| !network.is_used()) {
            self.take_down(state, name).await;
            if let Err(error) = self.apply(state).await {
                tracing::warn!(%error, "rules of networks are left");
            }
        }
    }
}

/// Returns the port's parameters for a request.
fn choose(network: &Network, request: &v1::CreatePortRequest) -> Result<HostPort> {
    let mac = match request.mac.as_str() {
        "" => None,
        text => Some(free(network, text.parse()?)?),
    };
    let longest = (network.mtu + HEADER).next_multiple_of(64);
    Ok(HostPort {
        mac,
        slots: request.slots,
        payload: if request.payload == 0 { SLOT.max(longest) } else { request.payload },
        owner: request.owner.map(|owner| (owner.uid, owner.gid)),
    })
}

fn free(network: &Network, mac: Mac) -> Result<Mac> {
    if mac == network.gateway_mac() {
        return Err(Error::Invalid(format!("{mac} is the gateway's MAC address")));
    }
    let sandbox = network.leases.values().find(|lease| lease.mac == mac).map(|lease| &lease.name);
    let port = network.ports.iter().find(|(_, port)| port.mac == Some(mac)).map(|(name, _)| name);
    let owner = sandbox.map(|name| format!("sandbox {name}"));
    match owner.or_else(|| port.map(|name| format!("memory port {name}"))) {
        Some(owner) => Err(Error::Taken { address: mac.to_string(), owner }),
        None => Ok(mac),
    }
}
