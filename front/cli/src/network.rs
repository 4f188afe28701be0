//! `slipway network`: manages networks, which sandboxes join.

use anyhow::Result;
use slipway_plane_api::{NetworkClient, network_v1 as v1};
use slipway_runtime::Config;

use crate::args::{NetworkCommand, NodeArgs};
use crate::client::{answer, connect_networks, refused};
use crate::table;

/// Runs `slipway network …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &NetworkCommand) -> Result<i32> {
    let mut networks = connect_networks(node, config).await?;
    match command {
        NetworkCommand::Create { name, subnet, ipv6_subnet, gateway, mtu, internal } => {
            anyhow::ensure!(*mtu != Some(0), "an MTU of 0 lets nothing pass");
            let request = v1::CreateNetworkRequest {
                name: name.clone(),
                subnet: subnet.clone().unwrap_or_default(),
                ipv6_subnet: ipv6_subnet.clone().unwrap_or_default(),
                gateway: gateway.clone().unwrap_or_default(),
                mtu: mtu.unwrap_or(0),
                internal: *internal,
            };
            crate::say!("{}", answer(networks.create_network(request).await)?.name);
        }
        NetworkCommand::Ls { json } => {
            let all = answer(networks.list_networks(v1::ListNetworksRequest {}).await)?.networks;
            let header = ["NAME", "SUBNET", "IPV6 SUBNET", "INTERFACE", "MTU", "MEMBERS"];
            table::list(&all, *json, as_json, header, row)?;
        }
        NetworkCommand::Rm { names } => return Ok(remove(&mut networks, names).await),
        NetworkCommand::Inspect { names, .. } => {
            let mut all = Vec::new();
            for name in names {
                let request = v1::GetNetworkRequest { name: name.clone() };
                all.push(as_json(&answer(networks.get_network(request).await)?));
            }
            crate::out::json(&all)?;
        }
    }
    Ok(0)
}

/// Removes networks. Returns the exit status: 1 if one could not be removed.
async fn remove(networks: &mut NetworkClient, names: &[String]) -> i32 {
    let mut status = 0;
    for name in names {
        let request = v1::RemoveNetworkRequest { name: name.clone() };
        match networks.remove_network(request).await {
            Ok(_) => crate::say!("{name}"),
            Err(error) => {
                crate::complain(&refused(error));
                status = 1;
            }
        }
    }
    status
}

fn row(network: &v1::Network) -> [String; 6] {
    let internal = if network.internal { " (internal)" } else { "" };
    [
        format!("{}{internal}", network.name),
        network.subnet.clone(),
        network.ipv6_subnet.clone(),
        if network.up { network.device.clone() } else { String::new() },
        network.mtu.to_string(),
        network.members.len().to_string(),
    ]
}

/// Returns a container's interface that the CNI plugin asked for.
fn attachment(container: &v1::ContainerInterface, namespace: &str) -> serde_json::Value {
    serde_json::json!({
        "configuration": container.configuration,
        "container": container.container_id,
        "interface": container.interface,
        "namespace": namespace,
    })
}

fn as_json(network: &v1::Network) -> serde_json::Value {
    let members = network.members.iter().map(|member| {
        serde_json::json!({
            "id": member.sandbox_id,
            "name": member.name,
            "mac": member.mac,
            "ipv4": member.ipv4,
            "ipv6": member.ipv6,
            "published": member.published,
            "attachment": member.container.as_ref().map(|one| attachment(one, &member.namespace)),
        })
    });
    let ports = network.ports.iter().map(|port| {
        serde_json::json!({
            "name": port.name,
            "mac": (!port.mac.is_empty()).then_some(&port.mac),
            "socket": port.socket_path,
        })
    });
    serde_json::json!({
        "name": network.name,
        "interface": network.up.then_some(&network.device),
        "subnet": network.subnet,
        "gateway": network.gateway,
        "ipv6_subnet": network.ipv6_subnet,
        "ipv6_gateway": network.ipv6_gateway,
        "mtu": network.mtu,
        "internal": network.internal,
        "created_ns": network.created_ns,
        "sandboxes": members.collect::<Vec<_>>(),
        "ports": ports.collect::<Vec<_>>(),
    })
}
