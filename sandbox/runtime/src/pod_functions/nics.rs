//! Functions of pools that are network interfaces. A pod has each beside the interface that it has
//! by CNI, in the same network namespace of its guest.
//!
//! Where the pool's switch is a network's, the pod gets addresses of that network for the
//! interface, and the route to the network. It gets no default route: that is CNI's. On another
//! switch the interface has no address, and what runs in the pod gives it some.
//!
//! A place in a network is the pod's from before the function is taken until the function goes
//! back. Its owner in the network is `SANDBOX.POOL.NUMBER`, since a sandbox has one place under its
//! own id.

use std::time::Duration;

use slipway_agent_protocol::v1::{self as agent_v1, agent_client::AgentClient};
use slipway_plane_api::{network_v1, vf_v1};
use tonic::Code;

use crate::agent::Agent;
use crate::node::Node;
use crate::record::{Given, GivenNic, Record, Wish};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The largest packet of a function whose template names none, in bytes.
const MTU: u32 = 1500;
/// The deadline of the agent's call to configure an interface; the agent itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(90);
/// The longest name of an interface of Linux.
const LONGEST_NAME: usize = 15;

/// Gives a pod its place in the network of a pool of interfaces, and returns the interface.
///
/// # Errors
/// [`Error::Network`] if the pod gets no place.
pub(super) async fn place(
    node: &Node,
    sandbox: &Sandbox,
    wish: &Wish,
    nic: vf_v1::template::Nic,
) -> Result<GivenNic> {
    let own = if nic.mtu == 0 { MTU } else { nic.mtu };
    let found = GivenNic { switch: nic.switch.clone(), mtu: own, ..GivenNic::default() };
    let request = network_v1::GetNetworkRequest { name: nic.switch.clone() };
    match node.networks.clone().get_network(request).await {
        Err(status) if status.code() == Code::NotFound => return Ok(found),
        Err(status) => return Err(Error::Network(Box::new(status))),
        Ok(_) => {}
    }
    let request = network_v1::JoinRequest {
        sandbox_id: member(&sandbox.id, &wish.pool, wish.number),
        name: sandbox.name.clone(),
        network: nic.switch,
        ..Default::default()
    };
    let joined = node.networks.clone().join(request).await;
    let joined = joined.map_err(|status| Error::Network(Box::new(status)))?.into_inner();
    Ok(in_network(found, joined))
}

/// Returns an interface with the addresses that a pod has for it in a network.
fn in_network(nic: GivenNic, place: network_v1::Attachment) -> GivenNic {
    let both = [(place.ipv4, place.ipv4_prefix), (place.ipv6, place.ipv6_prefix)];
    let addresses = both.into_iter().filter(|(address, _)| !address.is_empty()).collect();
    let mtu = if place.mtu == 0 { nic.mtu } else { nic.mtu.min(place.mtu) };
    GivenNic { mac: place.mac, addresses, mtu, ..nic }
}

/// Gives the place in a network back that a pod has for a function. One that it does not have is no
/// error.
pub(super) async fn leave(node: &Node, id: &str, pool: &str, number: u32) -> Result<()> {
    let request = network_v1::LeaveRequest { sandbox_id: member(id, pool, number) };
    let left = node.networks.clone().leave(request).await;
    left.map(drop).map_err(|status| Error::Network(Box::new(status)))
}

/// Has the guest configure the interface that a function is, unless it has done so or the function
/// is a disk.
///
/// # Errors
/// [`Error::Agent`] with the agent's message; [`Error::File`] if the record is not saved.
pub(super) async fn configure(sandbox: &Sandbox, agent: &Agent, wish: &Wish) -> Result<()> {
    let given = sandbox.look(|record| record.plugged.given(wish).cloned());
    let Some(request) = given.as_ref().and_then(settings) else { return Ok(()) };
    // One interface after the other: the agent tells how long the last one took.
    let _turn = sandbox.configuring.lock().await;
    let configure =
        |mut client: AgentClient<_>| async move { client.configure_network(request).await };
    let reply = agent.call_within(Some(PATIENCE), configure).await?;
    let interface = name(&reply.interface)?;
    let saved = sandbox.update(|record| {
        let given = record.plugged.given_mut(wish);
        if let Some(nic) = given.and_then(|given| given.nic.as_mut()) {
            nic.interface = interface;
        }
    });
    saved.await
}

/// Checks the name of an interface, which the guest says.
fn name(said: &str) -> Result<String> {
    let is_name = (1..=LONGEST_NAME).contains(&said.len())
        && said.bytes().all(|byte| byte.is_ascii_graphic());
    match is_name {
        true => Ok(said.to_owned()),
        false => Err(Error::Agent("the guest does not name the interface".to_owned())),
    }
}

/// Returns the settings of the guest's interface that a function is. Returns `None` if the function
/// is a disk, or the guest has configured the interface.
fn settings(given: &Given) -> Option<agent_v1::ConfigureNetworkRequest> {
    let nic = given.nic.as_ref().filter(|nic| nic.interface.is_empty())?;
    let address = |(address, prefix): &(String, u32)| agent_v1::InterfaceAddress {
        address: address.clone(),
        prefix: *prefix,
    };
    let has_it = nic.mac.is_empty() || nic.mac == nic.own_mac;
    let (mac, saved_mac) = match has_it {
        true => (nic.own_mac.clone(), String::new()),
        false => (nic.mac.clone(), nic.own_mac.clone()),
    };
    // Only the driver in the guest may know the MAC address of hardware.
    let is_hardware = !given.host_address.is_empty();
    Some(agent_v1::ConfigureNetworkRequest {
        mac,
        addresses: nic.addresses.iter().map(address).collect(),
        mtu: nic.mtu,
        saved_mac,
        pci_address: if is_hardware { given.address.clone() } else { String::new() },
        ..Default::default()
    })
}

/// Returns the owners of the places in networks that pods keep, for a daemon that has just started.
/// `live` are the ids of the sandboxes that may live. If a record could not be read (`all_read` is
/// false), each of these sandboxes keeps all the places that the networks list for it.
pub async fn members(node: &Node, live: &[String], all_read: bool) -> Vec<String> {
    let sandboxes = node.list().into_iter().filter(|sandbox| sandbox.state().is_live());
    let mut members: Vec<_> = sandboxes.flat_map(|sandbox| sandbox.look(placed)).collect();
    if !all_read {
        let listed = node.networks.clone().list_networks(network_v1::ListNetworksRequest {}).await;
        let networks = listed.map(|reply| reply.into_inner().networks).unwrap_or_default();
        let all = networks.into_iter().flat_map(|network| network.members);
        members.extend(all.map(|one| one.sandbox_id).filter(|member| is_of(member, live)));
    }
    members
}

/// Returns whether a member of a network is one of these sandboxes' for a function.
fn is_of(member: &str, live: &[String]) -> bool {
    member.split_once('.').is_some_and(|(sandbox, _)| live.iter().any(|id| id == sandbox))
}

/// Returns the owners of the places that a pod has for interfaces that its guest has.
fn placed(record: &Record) -> Vec<String> {
    let given = record.plugged.in_guest().filter(|given| given.nic.is_some());
    given.map(|given| member(&record.id, &given.pool, given.number)).collect()
}

/// Returns the owner of the place in a network that a pod has for a function.
fn member(sandbox: &str, pool: &str, number: u32) -> String {
    format!("{sandbox}.{pool}.{number}")
}

#[cfg(test)]
mod tests {
    use super::super::tests::{given, pod_with};
    use super::*;

    fn settings_of(nic: GivenNic) -> agent_v1::ConfigureNetworkRequest {
        settings(&Given { nic: Some(nic), ..given("nics", 3, "0000:00:06.0") }).unwrap()
    }

    fn nic() -> GivenNic {
        let (switch, own_mac) = ("pods".to_owned(), "5a:12:00:00:00:01".to_owned());
        GivenNic { switch, own_mac, mtu: 9000, ..GivenNic::default() }
    }

    #[test]
    fn an_interface_has_the_addresses_of_its_network_and_no_default_route() {
        let place = network_v1::Attachment {
            mac: "5a:11:0a:50:00:02".into(),
            ipv4: "10.80.0.2".into(),
            ipv4_prefix: 16,
            ipv4_gateway: "10.80.0.1".into(),
            ipv6: "fd00::2".into(),
            ipv6_prefix: 64,
            mtu: 1500,
            ..Default::default()
        };
        let request = settings_of(in_network(nic(), place));
        let addresses = request.addresses.iter().map(|one| (one.address.as_str(), one.prefix));
        assert!(addresses.eq([("10.80.0.2", 16), ("fd00::2", 64)]));
        assert_eq!((request.mac.as_str(), request.mtu), ("5a:11:0a:50:00:02", 1500));
        // The guest finds it by the function's own address, and gives it the other one.
        assert_eq!(request.saved_mac, "5a:12:00:00:00:01");
        let mac = "5a:11:0a:50:00:02".to_owned();
        let has_it = settings_of(GivenNic { own_mac: mac.clone(), mac, ..nic() });
        assert_eq!((&*has_it.mac, &*has_it.saved_mac), ("5a:11:0a:50:00:02", ""));
        assert!(request.gateways.is_empty() && request.routes.is_empty());
    }

    #[test]
    fn an_interface_on_a_switch_of_no_network_has_no_address() {
        let request = settings_of(nic());
        assert_eq!((request.mac.as_str(), request.mtu), ("5a:12:00:00:00:01", 9000));
        assert!(request.addresses.is_empty() && request.saved_mac.is_empty());
    }

    #[test]
    fn an_interface_of_hardware_is_found_by_its_function() {
        let host_address = "0000:01:10.0".to_owned();
        let hardware = Given { host_address, ..given("hw", 0, "0000:00:06.0") };
        let of = |nic| Given { nic, ..hardware.clone() };
        let request = settings(&of(Some(GivenNic::default()))).unwrap();
        assert_eq!((request.pci_address.as_str(), request.mac.as_str()), ("0000:00:06.0", ""));
        let configured = GivenNic { interface: "eth1".into(), ..GivenNic::default() };
        assert_eq!((settings(&of(Some(configured))), settings(&of(None))), (None, None));
        assert_eq!(settings_of(nic()).pci_address, "");
    }

    #[test]
    fn a_pod_keeps_the_places_of_interfaces_that_its_guest_has() {
        let nic = |number, address| Given { nic: Some(nic()), ..given("nics", number, address) };
        let functions = vec![nic(3, "0000:00:06.0"), nic(4, ""), given("fast", 0, "0000:00:07.0")];
        let record = pod_with(3, functions);
        assert_eq!(placed(&record), ["0123456789ab.nics.3"]);
        let live = ["0123456789ab".to_owned()];
        assert!(is_of("0123456789ab.nics.3", &live));
        for other in ["0123456789ab", "0123456789ac.nics.3", "pods/0123456789ab/eth0", ""] {
            assert!(!is_of(other, &live), "{other}");
        }
    }

    #[test]
    fn a_guest_names_the_interface_as_linux_does() {
        assert_eq!(name("eth1").unwrap(), "eth1");
        let long = "x".repeat(1 << 20);
        for wrong in ["", "a b", "eth\n", "sixteen-letters-", long.as_str()] {
            assert!(name(wrong).is_err(), "{wrong:.20}");
        }
    }
}
