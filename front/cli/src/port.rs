//! `slipway port`: manages the ports of switches, with their traffic, and memory ports for
//! programs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Result, bail};
use slipway_plane_api::{network_v1, v1};
use slipway_runtime::{Config, v1 as sandbox_v1};

use crate::args::{NodeArgs, PortArgs, PortCommand, PortLinkArg, PortSetArgs, Switched};
use crate::client::{answer, connect, connect_networks, connect_plane, refused};
use crate::endpoint::owner;
use crate::port_tools;
use crate::size::{MaxRate, show, show_rate};
use crate::table::table;

/// A port, and the network whose switch it belongs to.
struct Port {
    network: String,
    port: v1::SwitchPort,
    /// The name of the sandbox whose interface is at the port, if it is a sandbox's: with a colon
    /// and the interface's name, if it is a further one.
    sandbox: Option<String>,
}

impl Port {
    /// Returns the name for tables: the sandbox's, or else the port's own.
    fn shown(&self) -> String {
        self.sandbox.as_ref().unwrap_or(&self.port.name).clone()
    }

    /// Returns whether `wanted` refers to this port.
    fn is(&self, wanted: &v1::PortReference) -> bool {
        (wanted.switch.is_empty() || wanted.switch == self.network)
            && (self.port.name == wanted.port || self.port.index.to_string() == wanted.port)
    }

    /// Returns whether an interface of the sandbox with this name is at the port.
    fn is_of(&self, sandbox: &str) -> bool {
        let rest = self.sandbox.as_ref().and_then(|name| name.strip_prefix(sandbox));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
    }
}

/// Runs `slipway port …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &PortCommand) -> Result<i32> {
    let (only, json, is_list) = match command {
        PortCommand::Create(args) => return create(node, config, args).await,
        PortCommand::Rm { names } => return remove(node, config, names).await,
        PortCommand::Ls { only, json } => (only, json, true),
        PortCommand::Stats { only, json } => (only, json, false),
        PortCommand::Impair(args) => return port_tools::impair(node, config, args).await,
        PortCommand::Capture(args) => return port_tools::capture(node, config, args).await,
        PortCommand::Trace(args) => return port_tools::trace(node, config, args).await,
        PortCommand::Inspect { ports, .. } => return inspect(node, config, ports).await,
        PortCommand::Set(wanted) => return set(node, config, wanted).await,
    };
    let mut ports = all(node, config).await?;
    if let Some(name) = only {
        let wanted = port_tools::reference(node, config, name).await?;
        ports = chosen(ports, name, &wanted)?;
    }
    if *json {
        crate::out::json(&ports.iter().map(as_json).collect::<Vec<_>>())?;
    } else if is_list {
        let rows: Vec<_> = ports.iter().map(address_row).collect();
        let header = ["NETWORK", "PORT", "NAME", "MAC", "ADDRESSES", "LINK", "SETTINGS"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    } else {
        let rows: Vec<_> = ports.iter().map(counter_row).collect();
        let header = ["NETWORK", "PORT", "NAME", "SENT", "BYTES", "RECEIVED", "BYTES", "DROPPED"];
        crate::out::print(format_args!("{}", table(header, &rows)));
    }
    Ok(0)
}

/// Returns the ports of the network `name` or, if no network in use has that name, the port that
/// is named so, which is `wanted`. Of a sandbox with several interfaces, all of its ports are.
///
/// # Errors
/// There is neither; the error names the networks that are in use.
fn chosen(ports: Vec<Port>, name: &str, wanted: &v1::PortReference) -> Result<Vec<Port>> {
    /// The most networks that the error names.
    const NAMED: usize = 8;
    let networks: BTreeSet<String> = ports.iter().map(|port| port.network.clone()).collect();
    let is_network = networks.contains(name);
    let is_chosen = |port: &Port| match is_network {
        true => port.network == name,
        false => port.is(wanted) || port.is_of(name),
    };
    let found: Vec<Port> = ports.into_iter().filter(is_chosen).collect();
    if found.is_empty() {
        let first: Vec<_> = networks.iter().take(NAMED).map(String::as_str).collect();
        let (first, more) = (first.join(", "), networks.len() > NAMED);
        let networks = match (first.as_str(), more) {
            ("", _) => "none".to_owned(),
            (first, true) => format!("{first}, …"),
            (first, false) => first.to_owned(),
        };
        bail!(
            "there is no port \"{name}\", and no network of that name is in use: give a network \
             (in use: {networks}), or a port or sandbox as `slipway port ls` lists them"
        );
    }
    Ok(found)
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
    crate::say!("{}", answer(networks.create_port(request).await)?.socket_path);
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
                crate::complain(&refused(error));
                status = 1;
            }
        }
    }
    Ok(status)
}

async fn all(node: &NodeArgs, config: &Config) -> Result<Vec<Port>> {
    let mut plane = connect_plane(node, config).await?;
    let switches = answer(plane.list_switches(v1::ListSwitchesRequest {}).await)?.switches;
    let mut client = connect(node, config).await?;
    let sandboxes = answer(client.list(sandbox_v1::Empty {}).await)?.sandboxes.into_iter();
    let names: HashMap<String, String> = sandboxes.flat_map(port_tools::names).collect();
    let mut ports = Vec::new();
    for switch in switches {
        for port in switch.ports {
            let (network, sandbox) = (switch.name.clone(), names.get(&port.name).cloned());
            ports.push(Port { network, port, sandbox });
        }
    }
    Ok(ports)
}

async fn inspect(node: &NodeArgs, config: &Config, names: &[String]) -> Result<i32> {
    let ports = all(node, config).await?;
    let mut found = Vec::new();
    for name in names {
        let wanted = port_tools::reference(node, config, name).await?;
        let Some(port) = ports.iter().find(|port| port.is(&wanted)) else {
            bail!("there is no port \"{name}\"; `slipway port ls` lists ports");
        };
        found.push(as_json(port));
    }
    crate::out::json(&found)?;
    Ok(0)
}

async fn set(node: &NodeArgs, config: &Config, wanted: &PortSetArgs) -> Result<i32> {
    use v1::set_port_request::{Rate, Receiving};
    let on = |switched: Option<Switched>| switched.map(Switched::is_on);
    let link = wanted.link.map(|link| match link {
        PortLinkArg::Auto => v1::PortLink::Auto,
        PortLinkArg::On => v1::PortLink::On,
        PortLinkArg::Off => v1::PortLink::Off,
    });
    let request = v1::SetPortRequest {
        port: Some(port_tools::reference(node, config, &wanted.port).await?),
        spoof_check: on(wanted.mac_spoof_check),
        trust: on(wanted.trust),
        vlan: wanted.vlan,
        link: link.map(Into::into),
        rate: wanted.max_rate.map(|MaxRate(rate)| match rate {
            Some(rate) => Rate::MaxRate(rate),
            None => Rate::AnyRate(true),
        }),
        receiving: wanted.receive_rate.map(|MaxRate(rate)| match rate {
            Some(rate) => Receiving::ReceiveRate(rate),
            None => Receiving::AnyReceiveRate(true),
        }),
    };
    let set = connect_plane(node, config).await?.set_port(request).await;
    set.map_err(refused)?;
    crate::say!("{}", wanted.port);
    Ok(0)
}

/// Describes those settings of a port that differ from the defaults.
fn settings(port: &v1::SwitchPort) -> String {
    let mut all = Vec::new();
    if !port.spoof_check && !port.mac.is_empty() {
        all.push("no spoof check".to_owned());
    }
    if !port.peer_mac.is_empty() {
        all.push(format!("translates {}", port.peer_mac));
    }
    if port.trust {
        all.push("trusted".to_owned());
    }
    if port.vlan > 0 {
        all.push(format!("VLAN {}", port.vlan));
    }
    if port.link() != v1::PortLink::Auto {
        all.push(format!("link {}", wanted_link(port)));
    }
    if port.max_rate > 0 {
        all.push(format!("sends {}", show_rate(port.max_rate)));
    }
    if port.receive_rate > 0 {
        all.push(format!("receives {}", show_rate(port.receive_rate)));
    }
    all.join(", ")
}

fn wanted_link(port: &v1::SwitchPort) -> &'static str {
    match port.link() {
        v1::PortLink::Auto => "auto",
        v1::PortLink::On => "on",
        v1::PortLink::Off => "off",
    }
}

fn address_row(one: &Port) -> [String; 7] {
    let Port { network, port, .. } = one;
    [
        network.clone(),
        port.index.to_string(),
        one.shown(),
        port.mac.clone(),
        port.addresses.join(", "),
        link(port),
        settings(port),
    ]
}

fn link(port: &v1::SwitchPort) -> String {
    let state = if port.up { "up" } else { "down" };
    match &port.impairment {
        Some(impairment) => format!("{state}, {}", port_tools::describe(impairment)),
        None => state.to_owned(),
    }
}

/// Formats a port's counters from the peer's point of view, as the node's metrics have them: frames
/// that came in were sent by the peer.
fn counter_row(one: &Port) -> [String; 8] {
    let Port { network, port, .. } = one;
    [
        network.clone(),
        port.index.to_string(),
        one.shown(),
        port.frames_in.to_string(),
        show(port.bytes_in),
        port.frames_out.to_string(),
        show(port.bytes_out),
        causes(port),
    ]
}

/// Formats the frames that were dropped, by cause: those that the peer sent, and those that it was
/// to receive.
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

fn as_json(Port { network, port, sandbox }: &Port) -> serde_json::Value {
    serde_json::json!({
        "network": network,
        "port": port.index,
        "name": port.name,
        "sandbox": sandbox,
        "mac": (!port.mac.is_empty()).then_some(&port.mac),
        "peer_mac": (!port.peer_mac.is_empty()).then_some(&port.peer_mac),
        "addresses": port.addresses,
        "spoof_check": port.spoof_check,
        "trust": port.trust,
        "vlan": (port.vlan > 0).then_some(port.vlan),
        "link": wanted_link(port),
        "max_bytes_per_second": (port.max_rate > 0).then_some(port.max_rate),
        "max_byte_burst": (port.max_burst > 0).then_some(port.max_burst),
        "receive_bytes_per_second": (port.receive_rate > 0).then_some(port.receive_rate),
        "receive_byte_burst": (port.receive_burst > 0).then_some(port.receive_burst),
        "up": port.up,
        "frames_in": port.frames_in,
        "bytes_in": port.bytes_in,
        "frames_out": port.frames_out,
        "bytes_out": port.bytes_out,
        "dropped_in": port.dropped_in,
        "dropped_out": port.dropped_out,
        "impairment": port.impairment.as_ref().map(port_tools::describe),
        "socket": (!port.socket_path.is_empty()).then_some(&port.socket_path),
        "e1000": port.e1000.as_ref().map(e1000_json),
    })
}

/// Describes the work of an e1000: its guest's exits by register, and what each frame has cost.
fn e1000_json(counters: &v1::E1000Counters) -> serde_json::Value {
    let accesses = |one: &v1::RegisterAccesses| {
        (one.register.clone(), serde_json::json!({ "reads": one.reads, "writes": one.writes }))
    };
    let accesses_of = |one: &v1::RegisterAccesses| one.reads + one.writes;
    let exits = counters.registers.iter().map(accesses_of).sum::<u64>() + counters.announced;
    let frames = counters.frames_sent + counters.frames_received;
    let each = |count: u64| (frames > 0).then(|| count as f64 / frames as f64);
    serde_json::json!({
        "exits": exits,
        "exits_by_register":
            counters.registers.iter().map(accesses).collect::<serde_json::Map<_, _>>(),
        "exits_announced_by_events": counters.announced,
        "kicks": counters.kicks,
        "interrupts": counters.interrupts,
        "frames_sent": counters.frames_sent,
        "frames_received": counters.frames_received,
        "exits_per_frame": each(exits),
        "kicks_per_frame": each(counters.kicks),
        "interrupts_per_frame": each(counters.interrupts),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_has_the_name_of_its_sandbox() {
        let port = v1::SwitchPort { name: "1.net".into(), ..Default::default() };
        let mut one = Port { network: "default".into(), port, sandbox: Some("web".into()) };
        assert_eq!((&*address_row(&one)[2], &*counter_row(&one)[2]), ("web", "web"));
        let json = as_json(&one);
        assert!(json["sandbox"] == "web" && json["name"] == "1.net", "{json}");
        one.sandbox = None;
        assert_eq!(address_row(&one)[2], "1.net");
        assert!(json["peer_mac"].is_null());
        one.port.peer_mac = "02:00:00:00:00:01".into();
        assert_eq!(as_json(&one)["peer_mac"], "02:00:00:00:00:01");
        assert_eq!(settings(&one.port), "translates 02:00:00:00:00:01");
    }

    #[test]
    fn ports_are_chosen_by_a_network_a_sandbox_or_their_own_name() {
        let port = |network: &str, index: u32, name: &str, sandbox: Option<&str>| Port {
            network: network.into(),
            port: v1::SwitchPort { index, name: name.into(), ..Default::default() },
            sandbox: sandbox.map(str::to_owned),
        };
        let all = || {
            vec![
                port("red", 1, "1.net", Some("web")),
                port("blue", 1, "1.net1", Some("web:net1")),
                port("blue", 2, "memory:m", None),
                port("blue", 3, "2.net", Some("webber")),
            ]
        };
        let found = |name: &str, function: &str| {
            let (switch, port) = function.split_once('/').unwrap_or(("", function));
            let wanted = v1::PortReference { switch: switch.into(), port: port.into() };
            let chosen = chosen(all(), name, &wanted).map_err(|error| error.to_string())?;
            Ok::<_, String>(chosen.iter().map(|one| one.port.name.clone()).collect::<Vec<_>>())
        };
        assert_eq!(found("blue", "blue").unwrap(), ["1.net1", "memory:m", "2.net"]);
        assert_eq!(found("web", "1.net").unwrap(), ["1.net", "1.net1"]);
        assert_eq!(found("web:net1", "1.net1").unwrap(), ["1.net1"]);
        assert_eq!(found("memory:m", "memory:m").unwrap(), ["memory:m"]);
        assert_eq!(found("1", "1").unwrap(), ["1.net", "1.net1"]);
        assert_eq!(found("blue/1", "blue/1").unwrap(), ["1.net1"]);
        let error = found("nosuch", "nosuch").unwrap_err();
        assert!(
            error.contains("no port \"nosuch\"") && error.contains("in use: blue, red)"),
            "{error}"
        );
        let wanted = v1::PortReference::default();
        let error = chosen(Vec::new(), "red", &wanted).err().unwrap().to_string();
        assert!(error.contains("in use: none"), "{error}");
    }
}
