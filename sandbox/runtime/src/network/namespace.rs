//! A sandbox's interface that somebody else, such as a CNI plugin, made in a network namespace of
//! the host. The networks' service finds it and connects it; the agent configures the guest's
//! interface as it was found.

use slipway_agent_protocol::v1 as agent_v1;
use slipway_plane_api::network_v1;

use super::{check_interface, enter, refusal};
use crate::node::Node;
use crate::record::{NamespaceInterface, Network, PortRates, Route};
use crate::sandbox::Sandbox;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The VLAN of the guest's port, which is that of frames without a tag: the guest sends no tags
/// into a network of others.
pub const VLAN: u32 = 1;

/// Gives a recorded sandbox the interface of the network namespace that `spec` names, and records
/// it.
///
/// # Errors
/// The errors of [`super::join`].
pub async fn join(node: &Node, sandbox: &Sandbox, spec: &RunSpec) -> Result<()> {
    check(spec)?;
    let request = network_v1::JoinNamespaceRequest {
        sandbox_id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        path: spec.network_namespace.clone(),
    };
    let found = node.networks.clone().join_namespace(request).await.map_err(refusal)?.into_inner();
    enter(node, sandbox, network(spec, found)).await
}

/// Refuses what the interface's maker has decided already.
fn check(spec: &RunSpec) -> Result<()> {
    check_interface(spec)?;
    let asked = [
        ("network", spec.network.is_empty()),
        ("mac", spec.mac.is_empty()),
        ("ip", spec.addresses.is_empty()),
        ("publish", spec.publish.is_empty()),
        ("sockets", spec.socket_engine.is_empty()),
        ("vf", spec.vf_pool.is_empty()),
    ];
    match asked.iter().find(|(_, absent)| !absent) {
        Some((what, _)) => Err(Error::Invalid(format!(
            "--network-namespace and --{what} do not go together: the interface is as its maker \
             left it in the namespace"
        ))),
        None => Ok(()),
    }
}

fn network(spec: &RunSpec, found: network_v1::Interface) -> Network {
    let first = |six: bool| {
        let mut all = found.addresses.iter().filter(|one| one.address.contains(':') == six);
        all.next().map(|one| (one.address.clone(), one.prefix)).unwrap_or_default()
    };
    let ((ipv4, ipv4_prefix), (ipv6, ipv6_prefix)) = (first(false), first(true));
    let route = |one: network_v1::InterfaceRoute| Route {
        destination: one.destination,
        prefix: one.prefix,
        gateway: one.gateway,
        on_link: one.on_link,
        source: one.source,
        metric: one.metric,
    };
    Network {
        name: spec.network_namespace.clone(),
        switch: found.switch,
        mac: found.mac,
        ipv4,
        ipv4_prefix,
        ipv4_gateway: String::new(),
        ipv6,
        ipv6_prefix,
        ipv6_gateway: String::new(),
        mtu: found.mtu,
        name_servers: Vec::new(),
        published: Vec::new(),
        wait: spec.wait_network,
        queues: spec.queues,
        nic: spec.nic.parse().unwrap_or_default(),
        interrupt_interval_ns: spec.interrupt_interval_ns,
        pool: None,
        namespace: Some(NamespaceInterface {
            interface: found.name,
            addresses: found.addresses.into_iter().map(|one| (one.address, one.prefix)).collect(),
            routes: found.routes.into_iter().map(route).collect(),
            neighbours: found.neighbours.into_iter().map(|one| (one.address, one.mac)).collect(),
            rates: rates(found.rates.unwrap_or_default()),
            traceparent: found.traceparent,
        }),
    }
}

fn rates(found: network_v1::PortRates) -> PortRates {
    let network_v1::PortRates { max_rate, max_burst, receive_rate, receive_burst } = found;
    PortRates { max_rate, max_burst, receive_rate, receive_burst }
}

/// Returns the settings of the guest's interface.
pub fn settings(
    network: &Network,
    interface: &NamespaceInterface,
) -> agent_v1::ConfigureNetworkRequest {
    let addresses = interface.addresses.iter().cloned();
    let neighbours = interface.neighbours.iter().cloned();
    let route = |one: &Route| agent_v1::InterfaceRoute {
        destination: one.destination.clone(),
        prefix: one.prefix,
        gateway: one.gateway.clone(),
        on_link: one.on_link,
        source: one.source.clone(),
        metric: one.metric,
    };
    agent_v1::ConfigureNetworkRequest {
        mac: network.mac.clone(),
        addresses: addresses
            .map(|(address, prefix)| agent_v1::InterfaceAddress { address, prefix })
            .collect(),
        gateways: Vec::new(),
        mtu: network.mtu,
        routes: interface.routes.iter().map(route).collect(),
        neighbours: neighbours
            .map(|(address, mac)| agent_v1::InterfaceNeighbour { address, mac })
            .collect(),
        saved_mac: String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> RunSpec {
        RunSpec { network_namespace: "/run/netns/a".into(), ..Default::default() }
    }

    fn found() -> network_v1::Interface {
        let address = |address: &str, prefix| network_v1::InterfaceAddress {
            address: address.into(),
            prefix,
        };
        network_v1::Interface {
            switch: "uplink.x".into(),
            name: "eth0".into(),
            mac: "02:00:00:00:00:01".into(),
            mtu: 1450,
            addresses: vec![
                address("fd00::2", 64),
                address("10.1.1.2", 24),
                address("10.1.1.3", 32),
            ],
            routes: vec![network_v1::InterfaceRoute {
                destination: "0.0.0.0".into(),
                gateway: "10.1.1.1".into(),
                ..Default::default()
            }],
            neighbours: Vec::new(),
            rates: Some(network_v1::PortRates {
                max_rate: 1000,
                receive_rate: 2000,
                receive_burst: 300,
                ..Default::default()
            }),
            traceparent: "00-1-2-01".into(),
        }
    }

    #[test]
    fn what_the_maker_decided_cannot_be_asked_for() {
        check(&spec()).unwrap();
        let bad = |change: fn(&mut RunSpec)| {
            let mut spec = spec();
            change(&mut spec);
            check(&spec).unwrap_err().to_string()
        };
        assert!(bad(|spec| spec.network = "default".into()).contains("--network do"));
        assert!(bad(|spec| spec.mac = "02:00:00:00:00:01".into()).contains("--mac"));
        assert!(bad(|spec| spec.addresses = vec!["10.0.0.1".into()]).contains("--ip"));
        assert!(bad(|spec| spec.publish = vec!["80:80".into()]).contains("--publish"));
        assert!(bad(|spec| spec.socket_engine = "/run/s".into()).contains("--sockets"));
        assert!(bad(|spec| spec.queues = 65).contains("queues"));
    }

    #[test]
    fn the_guest_gets_what_was_found() {
        let network = network(&spec(), found());
        assert_eq!((network.ipv4.as_str(), network.ipv6.as_str()), ("10.1.1.2", "fd00::2"));
        assert_eq!(network.addresses(), ["10.1.1.2", "10.1.1.3", "fd00::2"]);
        assert_eq!(network.namespace.as_ref().unwrap().traceparent, "00-1-2-01");
        let text = serde_json::to_string(&network).unwrap();
        assert!(!text.contains("00-1-2-01"), "it is of no use to a later daemon: {text}");
        let network: Network = serde_json::from_str(&text).unwrap();
        let told = settings(&network, network.namespace.as_ref().unwrap());
        assert_eq!((told.mac.as_str(), told.mtu), ("02:00:00:00:00:01", 1450));
        assert_eq!((told.addresses.len(), told.gateways.len()), (3, 0));
        assert_eq!(told.routes[0].gateway, "10.1.1.1");
        let rates = network.rates();
        assert_eq!((rates.max_rate, rates.max_burst), (1000, 0));
        assert_eq!((rates.receive_rate, rates.receive_burst), (2000, 300));
    }
}
