//! How a network comes up and goes down: its switch, its interface, its names and its ports.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use slipway_plane_api::v1 as plane_v1;
use tonic::Code;

use super::Networks;
use super::table::{NetworkTable, Up};
use crate::dns::{Server, Zone};
use crate::host::{self, Surroundings};
use crate::ledger::Network;
use crate::{Error, Result, proxy};

const DNS_PORT: u16 = 53;

impl Networks {
    /// Brings a network up: its switch with the host's end, its addresses, its names, its rules.
    ///
    /// # Errors
    /// [`Error`]; a network without leases is down then.
    pub(super) async fn bring_up(&self, state: &mut NetworkTable, name: &str) -> Result<()> {
        let network = state.find(name)?.clone();
        let around = Surroundings::look(&network.device)?;
        around.check(network.subnet.into())?;
        around.check(network.prefix.into())?;
        // An earlier attempt may have made the switch, and left it to the sandboxes that are on it.
        self.create_switch(plane_v1::CreateSwitchRequest {
            name: network.name.clone(),
            tap: network.device.clone(),
            uplink: None,
        })
        .await?;
        let outcome = self.serve(state, &network).await;
        self.publish_again(state, &network);
        // Sandboxes that outlived the last daemon are on the switch and still reach each other:
        // keep it, and let the next sandbox that joins try again.
        if outcome.is_err() && network.leases.is_empty() {
            self.take_down(state, name).await;
            // The first failure is reported; a second one adds nothing.
            let _ = self.apply(state).await;
        }
        outcome
    }

    /// Gives a network that has a switch its addresses, its names, its memory ports and its rules.
    async fn serve(&self, state: &mut NetworkTable, network: &Network) -> Result<()> {
        host::set_up(network)?;
        let names = self.serve_names(network)?;
        state.up.insert(network.name.clone(), Up { names, ports: BTreeMap::new() });
        self.open_ports(network).await;
        self.apply(state).await
    }

    /// Serves a network's names at those of the gateway's addresses that the host has.
    fn serve_names(&self, network: &Network) -> Result<Server> {
        let gateways = [IpAddr::V4(network.gateway), IpAddr::V6(network.gateway6())];
        let addresses: Vec<_> = host::has(&gateways)?
            .into_iter()
            .map(|address| SocketAddr::new(address, DNS_PORT))
            .collect();
        let resolv_conf = self.settings.resolv_conf.clone();
        Server::start(&addresses, Zone::of(network), resolv_conf, &self.serving.handle)
    }

    /// Serves the published ports of the sandboxes that the network already has.
    fn publish_again(&self, state: &mut NetworkTable, network: &Network) {
        let Some(up) = state.up.get_mut(&network.name) else { return };
        for (id, lease) in &network.leases {
            let claimed = proxy::claim(&lease.published);
            let served =
                claimed.and_then(|ok| ok.serve(lease.ipv4, lease.ipv6, &self.serving.relay));
            match served {
                Ok(served) => drop(up.ports.insert(id.clone(), served)),
                // Another program took the port while no daemon ran: the packet filter redirects
                // packets to the sandbox all the same.
                Err(error) => {
                    tracing::warn!(%error, sandbox = lease.name, "published in part")
                }
            }
        }
    }

    /// Takes a network down. Logs what is left of it.
    pub(super) async fn take_down(&self, state: &mut NetworkTable, name: &str) {
        if let Some(up) = state.up.remove(name) {
            up.names.stop().await;
        }
        if let Err(error) = self.remove_switch(name.to_owned()).await {
            tracing::warn!(network = name, error, "its switch is left");
        }
        let removed = state.find(name).and_then(|network| host::remove(&network.device));
        if let Err(error) = removed {
            tracing::warn!(network = name, %error, "its interface is left");
        }
    }

    /// Has the plane make a switch. A switch that exists is no error.
    ///
    /// # Errors
    /// [`Error::Plane`].
    pub(super) async fn create_switch(&self, request: plane_v1::CreateSwitchRequest) -> Result<()> {
        match self.plane.clone().create_switch(request).await {
            Err(status) if status.code() != Code::AlreadyExists => {
                Err(Error::Plane(status.message().to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Has the plane remove a switch. A switch that is gone is no error.
    ///
    /// # Errors
    /// The plane's message.
    pub(super) async fn remove_switch(&self, name: String) -> Result<(), String> {
        let request = plane_v1::RemoveSwitchRequest { name };
        match self.plane.clone().remove_switch(request).await {
            Err(status) if status.code() != Code::NotFound => Err(status.message().to_owned()),
            _ => Ok(()),
        }
    }
}
