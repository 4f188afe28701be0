//! A sandbox's interfaces that somebody else, such as CNI plugins, made in a network namespace of
//! the host. The networks' service finds them and connects them; the agent configures the guest's
//! interfaces as they were found.
//!
//! Each is a function of its own, which is there from the boot. In the guest they have the names of
//! the namespace; an interface without others has the name that the guest's kernel gives it.

use slipway_agent_protocol::v1 as agent_v1;
use slipway_plane_api::network_v1;

use super::{check_interface, enter, leave, refusal};
use crate::node::Node;
use crate::record::{
    FunctionPool, FurtherInterface, NamespaceInterface, Network, Nic, PortRates, Route,
};
use crate::sandbox::Sandbox;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The VLAN of the guest's port, which is that of frames without a tag: the guest sends no tags
/// into a network of others.
pub const VLAN: u32 = 1;

/// Gives a recorded sandbox the interfaces of the network namespace that `spec` names, and records
/// them.
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
    let joined = node.networks.clone().join_namespace(request).await.map_err(refusal)?;
    let interfaces = joined.into_inner().interfaces;
    if let Err(error) = check_functions(spec, &interfaces) {
        let _ = leave(node, &sandbox.id).await;
        return Err(error);
    }
    let mut found = interfaces.into_iter();
    let first = found.next().ok_or_else(|| Error::Invalid("no interface was found".to_owned()))?;
    let network = Network { further: found.map(further).collect(), ..network(spec, first) };
    enter(node, sandbox, network).await
}

/// Refuses what the interface's maker has decided already.
fn check(spec: &RunSpec) -> Result<()> {
    check_interface(spec)?;
    let asked = [
        ("network", spec.network.is_empty()),
        ("mac", spec.mac.is_empty()),
        ("mac-at-port", !spec.mac_at_port),
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

/// Refuses functions that are taken already and that the sandbox cannot have.
///
/// # Errors
/// [`Error::Invalid`].
fn check_functions(spec: &RunSpec, found: &[network_v1::Interface]) -> Result<()> {
    let Some((number, one)) = found.iter().enumerate().find(|(_, one)| !one.pool.is_empty()) else {
        return Ok(());
    };
    let what = if number > 0 || found.iter().skip(1).any(|one| !one.pool.is_empty()) {
        "only a sandbox's first interface can have one"
    } else if check_interface(spec)? != Nic::Virtio || spec.queues > 1 {
        "it is virtio with one queue pair: leave out --nic and --queues"
    } else {
        return Ok(());
    };
    let network_v1::Interface { name, pool, .. } = one;
    Err(Error::Invalid(format!("the interface {name} has a function of pool {pool}: {what}")))
}

fn network(spec: &RunSpec, found: network_v1::Interface) -> Network {
    let first = |six: bool| {
        let mut all = found.addresses.iter().filter(|one| one.address.contains(':') == six);
        all.next().map(|one| (one.address.clone(), one.prefix)).unwrap_or_default()
    };
    let ((ipv4, ipv4_prefix), (ipv6, ipv6_prefix)) = (first(false), first(true));
    let (name, owner) = (found.pool.clone(), found.owner.clone());
    let pool = FunctionPool { name, needed: true, owner, taken: None };
    let FurtherInterface { switch, mac, mtu, settings } = further(found);
    Network {
        name: spec.network_namespace.clone(),
        switch,
        mac,
        ipv4,
        ipv4_prefix,
        ipv4_gateway: String::new(),
        ipv6,
        ipv6_prefix,
        ipv6_gateway: String::new(),
        mtu,
        name_servers: Vec::new(),
        published: Vec::new(),
        mac_at_port: false,
        guest_mac: None,
        wait: spec.wait_network,
        queues: spec.queues,
        nic: spec.nic.parse().unwrap_or_default(),
        interrupt_interval_ns: spec.interrupt_interval_ns,
        pool: Some(pool).filter(|pool| !pool.name.is_empty()),
        namespace: Some(settings),
        further: Vec::new(),
    }
}

/// Returns the record of an interface, as a further one.
fn further(found: network_v1::Interface) -> FurtherInterface {
    let route = |one: network_v1::InterfaceRoute| Route {
        destination: one.destination,
        prefix: one.prefix,
        gateway: one.gateway,
        on_link: one.on_link,
        source: one.source,
        metric: one.metric,
    };
    let settings = NamespaceInterface {
        interface: found.name,
        addresses: found.addresses.into_iter().map(|one| (one.address, one.prefix)).collect(),
        routes: found.routes.into_iter().map(route).collect(),
        neighbours: found.neighbours.into_iter().map(|one| (one.address, one.mac)).collect(),
        rates: rates(found.rates.unwrap_or_default()),
        traceparent: found.traceparent,
    };
    FurtherInterface { switch: found.switch, mac: found.mac, mtu: found.mtu, settings }
}

fn rates(found: network_v1::PortRates) -> PortRates {
    let network_v1::PortRates { max_rate, max_burst, receive_rate, receive_burst } = found;
    PortRates { max_rate, max_burst, receive_rate, receive_burst }
}

/// Returns the settings of a further interface of the guest.
pub fn further_settings(further: &FurtherInterface) -> agent_v1::ConfigureNetworkRequest {
    let FurtherInterface { mac, mtu, settings: interface, .. } = further;
    let name = interface.interface.clone();
    agent_v1::ConfigureNetworkRequest { name, ..settings((mac.as_str(), *mtu), interface) }
}

/// Returns the settings of an interface of the guest, with this MAC address and MTU.
pub fn settings(
    (mac, mtu): (&str, u32),
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
        mac: mac.to_owned(),
        addresses: addresses
            .map(|(address, prefix)| agent_v1::InterfaceAddress { address, prefix })
            .collect(),
        gateways: Vec::new(),
        mtu,
        routes: interface.routes.iter().map(route).collect(),
        neighbours: neighbours
            .map(|(address, mac)| agent_v1::InterfaceNeighbour { address, mac })
            .collect(),
        saved_mac: String::new(),
        name: String::new(),
        pci_address: String::new(),
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
            ..Default::default()
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
        let translated = |spec: &mut RunSpec| {
            (spec.mac_at_port, spec.template) = (true, "web".into());
        };
        assert!(bad(translated).contains("--mac-at-port do"));
        assert!(bad(|spec| spec.mac_at_port = true).contains("begins with a template"));
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
        let interface = network.namespace.as_ref().unwrap();
        let told = settings((network.mac.as_str(), network.mtu), interface);
        assert_eq!((told.mac.as_str(), told.mtu), ("02:00:00:00:00:01", 1450));
        assert!(told.name.is_empty(), "the guest's kernel names the first interface");
        assert_eq!((told.addresses.len(), told.gateways.len()), (3, 0));
        assert_eq!(told.routes[0].gateway, "10.1.1.1");
        let rates = network.rates();
        assert_eq!((rates.max_rate, rates.max_burst), (1000, 0));
        assert_eq!((rates.receive_rate, rates.receive_burst), (2000, 300));
    }

    #[test]
    fn a_function_that_was_taken_for_the_sandbox_is_its_first_interface() {
        let (pool, owner) = ("nics".to_owned(), "slipway-cni:blue,c1,eth0".to_owned());
        let taken = network_v1::Interface { pool, owner, ..found() };
        let network = network(&spec(), taken.clone());
        assert!(network.is_lent());
        let pool = network.pool.unwrap();
        assert!(pool.needed && pool.taken.is_none());
        assert_eq!((&*pool.name, &*pool.owner), ("nics", "slipway-cni:blue,c1,eth0"));
        assert!(super::network(&spec(), found()).pool.is_none());
        let why = |spec: &RunSpec, found: &[network_v1::Interface]| {
            check_functions(spec, found).unwrap_err().to_string()
        };
        check_functions(&spec(), &[taken.clone(), found()]).unwrap();
        check_functions(&RunSpec { queues: 2, ..spec() }, &[found()]).unwrap();
        assert!(why(&spec(), &[found(), taken.clone()]).contains("first interface"));
        assert!(why(&spec(), &[taken.clone(), taken.clone()]).contains("first interface"));
        let queues = RunSpec { queues: 2, ..spec() };
        assert!(why(&queues, std::slice::from_ref(&taken)).contains("queue pair"));
        let e1000 = RunSpec { nic: "e1000".into(), ..spec() };
        assert!(why(&e1000, &[taken]).contains("--nic"));
    }

    #[test]
    fn a_further_interface_has_its_name_in_the_guest() {
        let found = network_v1::Interface { name: "net1".into(), ..found() };
        let told = further_settings(&further(found));
        assert_eq!((told.name.as_str(), told.mac.as_str()), ("net1", "02:00:00:00:00:01"));
        assert_eq!((told.addresses.len(), told.routes.len(), told.mtu), (3, 1, 1450));
    }
}
