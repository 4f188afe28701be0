//! `slipway port`: the ports of switches, with what passed them, and memory ports for programs.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Result, bail};
use slipway_plane_api::{network_v1, v1};
use slipway_runtime::Config;

use crate::args::{NodeArgs, PortArgs, PortCommand};
use crate::client::{connect_networks, connect_plane, refused};
use crate::endpoint::owner;
use crate::port_tools;
use crate::size::show;
use crate::table::table;

/// A port, and the switch that it is of.
struct Port {
    network: String,
    port: v1::SwitchPort,
}

/// Runs `slipway port …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &PortCommand) -> Result<i32> {
    let (network, json, is_list) = match command {
        PortCommand::Create(args) => return create(node, config, args).await,
        PortCommand::Rm { names } => return remove(node, config, names).await,
        PortCommand::Ls { network, json } => (network, json, true),
        PortCommand::Stats { network, json } => (network, json, false),
        PortCommand::Impair(args) => return port_tools::impair(node, config, args).await,
        PortCommand::Capture(args) => return port_tools::capture(node, config, args).await,
        PortCommand::Trace(args) => return port_tools::trace(node, config, args).await,
    };
    let mut plane = connect_plane(node, config).await?;
    let reply = plane.list_switches(v1::ListSwitchesRequest {}).await;
    let mut switches = reply.map_err(|status| refused(&status))?.into_inner().switches;
    if let Some(name) = network {
        switches.retain(|switch| switch.name == *name);
        if switches.is_empty() {
            bail!("no network \"{name}\" is in use; `slipway network ls` lists networks");
        }
    }
    let ports = switches.into_iter().flat_map(|switch| {
        let network = switch.name;
        switch.ports.into_iter().map(move |port| Port { network: network.clone(), port })
    });
    let ports: Vec<_> = ports.collect();
    if *json {
        let all: Vec<_> = ports.iter().map(as_json).collect();
        crate::say!("{}", serde_json::to_string_pretty(&all)?);
    } else if is_list {
        let rows: Vec<_> = ports.iter().map(address_row).collect();
        let header = ["NETWORK", "PORT", "NAME", "MAC", "ADDRESSES", "LINK"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    } else {
        let rows: Vec<_> = ports.iter().map(counter_row).collect();
        let header = ["NETWORK", "PORT", "NAME", "SENT", "BYTES", "RECEIVED", "BYTES", "DROPPED"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    }
    Ok(0)
}

async fn create(node: &NodeArgs, config: &Config, args: &PortArgs) -> Result<i32> {
    let owner = args.owner.as_deref().map(owner).transpose()?;
    let request = network_v1::CreatePortRequest {
        network: args.network.clone(),
        name: args.name.clone(),
        mac: args.mac.clone().unwrap_or_default(),
        slots: args.slots.unwrap_or(0),
        payload: args.slot_size.unwrap_or(0),
        owner: owner.map(|owner| network_v1::PortOwner { uid: owner.uid, gid: owner.gid }),
    };
    let mut networks = connect_networks(node, config).await?;
    let made = networks.create_port(request).await.map_err(|status| refused(&status))?;
    crate::say!("{}", made.into_inner().socket_path);
    Ok(0)
}

async fn remove(node: &NodeArgs, config: &Config, names: &[String]) -> Result<i32> {
    let mut networks = connect_networks(node, config).await?;
    let mut status = 0;
    for name in names {
        let request = network_v1::RemovePortRequest { name: name.clone() };
        match networks.remove_port(request).await {
            Ok(_) => crate::say!("{name}"),
            Err(error) => {
                crate::complain(&refused(&error));
                status = 1;
            }
        }
    }
    Ok(status)
}

fn address_row(Port { network, port }: &Port) -> [String; 6] {
    [
        network.clone(),
        port.index.to_string(),
        port.name.clone(),
        port.mac.clone(),
        port.addresses.join(", "),
        link(port),
    ]
}

fn link(port: &v1::SwitchPort) -> String {
    let state = if port.up { "up" } else { "down" };
    match &port.impairment {
        Some(impairment) => format!("{state}, {}", port_tools::describe(impairment)),
        None => state.to_owned(),
    }
}

/// As the port's peer sees it: sent is what came in.
fn counter_row(Port { network, port }: &Port) -> [String; 8] {
    [
        network.clone(),
        port.index.to_string(),
        port.name.clone(),
        port.frames_in.to_string(),
        show(port.bytes_in),
        port.frames_out.to_string(),
        show(port.bytes_out),
        causes(port),
    ]
}

fn causes(port: &v1::SwitchPort) -> String {
    let of = |way: &str, causes: &HashMap<String, u64>| {
        let sorted: BTreeMap<_, _> = causes.iter().collect();
        let texts = sorted.into_iter().map(|(cause, count)| format!("{way} {cause} {count}"));
        texts.collect::<Vec<_>>()
    };
    let mut all = of("sent", &port.dropped_in);
    all.extend(of("received", &port.dropped_out));
    all.join(", ")
}

fn as_json(Port { network, port }: &Port) -> serde_json::Value {
    serde_json::json!({
        "network": network,
        "port": port.index,
        "name": port.name,
        "mac": (!port.mac.is_empty()).then_some(&port.mac),
        "addresses": port.addresses,
        "spoof_check": port.spoof_check,
        "up": port.up,
        "frames_in": port.frames_in,
        "bytes_in": port.bytes_in,
        "frames_out": port.frames_out,
        "bytes_out": port.bytes_out,
        "dropped_in": port.dropped_in,
        "dropped_out": port.dropped_out,
        "impairment": port.impairment.as_ref().map(port_tools::describe),
        "socket": (!port.socket_path.is_empty()).then_some(&port.socket_path),
    })
}
