//! Networks and leases as replies show them.

use slipway_plane_api::network_v1 as v1;

use super::Networks;
use super::table::NetworkTable;
use crate::ledger::{Lease, Network};
use crate::{Error, Result};

impl Networks {
    /// Describes a network as it is now.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub(super) fn describe(&self, state: &NetworkTable, name: &str) -> Result<v1::Network> {
        let network = state.find(name)?;
        let members = network.leases.iter().map(|(id, lease)| describe_member(state, id, lease));
        let ports = network.ports.keys().filter_map(|name| self.describe_port(network, name).ok());
        Ok(v1::Network {
            name: network.name.clone(),
            device: network.device.clone(),
            subnet: network.subnet.to_string(),
            gateway: network.gateway.to_string(),
            ipv6_subnet: network.prefix.to_string(),
            ipv6_gateway: network.gateway6().to_string(),
            mtu: network.mtu,
            internal: network.internal,
            created_ns: network.created_ns,
            members: members.collect(),
            up: state.is_up(name),
            ports: ports.collect(),
        })
    }
}

/// Describes a sandbox or a container's interface as a member of its network.
fn describe_member(state: &NetworkTable, id: &str, lease: &Lease) -> v1::Member {
    let attachment = state.attachments.get(id);
    v1::Member {
        sandbox_id: id.to_owned(),
        name: lease.name.clone(),
        mac: lease.mac.to_string(),
        ipv4: lease.ipv4.to_string(),
        ipv6: lease.ipv6.to_string(),
        published: lease.published.iter().map(ToString::to_string).collect(),
        container: attachment.map(|one| one.key.describe()),
        namespace: attachment.map(|one| one.path()).unwrap_or_default(),
    }
}

/// Describes the lease `id` of a network for the sandbox that has it.
///
/// # Errors
/// [`Error::Unknown`] if the network has no such lease.
pub(super) fn describe_lease(network: &Network, id: &str) -> Result<v1::Attachment> {
    let lease = network.leases.get(id).ok_or_else(|| Error::Unknown(network.name.clone()))?;
    Ok(v1::Attachment {
        network: network.name.clone(),
        switch: network.name.clone(),
        mac: lease.mac.to_string(),
        ipv4: lease.ipv4.to_string(),
        ipv4_prefix: network.subnet.prefix_len().into(),
        ipv4_gateway: network.gateway.to_string(),
        ipv6: lease.ipv6.to_string(),
        ipv6_prefix: network.prefix.prefix_len().into(),
        ipv6_gateway: network.gateway6().to_string(),
        mtu: network.mtu,
        name_servers: vec![network.gateway.to_string()],
        published: lease.published.iter().map(ToString::to_string).collect(),
        ..Default::default()
    })
}
