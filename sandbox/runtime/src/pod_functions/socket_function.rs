//! Socket functions that machines are given while they run: a fork's, before its container runs,
//! and a pod's, once a container asks for it. A function that a sandbox or pod begins with is that
//! of the module `sockets`.
//!
//! Its sockets have addresses of one of Slipway's networks: those that the pod has itself, or else
//! those of the first network interface of a pool that has some. An interface that another plugin
//! of CNI made has none: nobody on this node knows that no other pod has them.
//!
//! The pod has the function until its VMM ends. Containers that ask later have it too.
//!
//! The engine is a process of the host's without the pool: it would find zeros in a fork's memory
//! where the template's bytes were not copied yet. So all of the template is copied first, and the
//! engine gets the file, which a fork's VMM can only name.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use slipway_plane_api::{network_v1, v1 as plane_v1};
use tonic::Code;

use super::free;
use crate::agent::Agent;
use crate::node::Node;
use crate::record::{GivenSockets, Network, Record};
use crate::sandbox::Sandbox;
use crate::sockets::{self, NetworkAddresses};
use crate::target::Target;
use crate::{Error, Result, memory};

/// The longest time in which the guest's engine is started again, since the guest's kernel has not
/// found the function yet. A guest under emulation on a busy host takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time between two attempts.
const AGAIN: Duration = Duration::from_millis(100);

/// Checks that a new container of a pod can have the sockets of the engine at `engine`, and returns
/// that path. Returns `None` if `engine` is empty: the container asks for none.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check(engine: &str, record: &Record) -> Result<Option<PathBuf>> {
    if engine.is_empty() {
        return Ok(None);
    }
    if record.may_have_sockets() {
        return Ok(Some(engine.into()));
    }
    let name = &record.name;
    Err(Error::Invalid(match record.template {
        Some(_) => format!(
            "pod {name} began with a template that has no room for a socket function: make the \
             template with --sockets, or the pod without one (the annotation dev.slipway.template, \
             --from)"
        ),
        None => format!(
            "pod {name} has no room for a socket function: set `pod_sockets` in the node's \
             settings, start the daemon again, and make the pod again"
        ),
    }))
}

/// Has the guest of a sandbox that asks for sockets serve them, before its container runs: on the
/// function that it began with or, in a fork, on one that it is given now. When this returns,
/// programs can attach to the guest's engine.
///
/// # Errors
/// As [`join`]; the pool cannot complete the fork's memory.
pub async fn begin(node: &Node, sandbox: &Sandbox, agent: &Agent) -> Result<()> {
    let engine = sandbox.look(|record| {
        let engine = record.sockets.clone();
        engine.filter(|_| record.forks_with_sockets())
    });
    let Some(engine) = engine else { return sockets::start(agent).await };
    let _turn = sandbox.functions.lock().await;
    give(node, sandbox, &engine).await?;
    start(sandbox, agent).await
}

/// Gives a pod the socket function that a container of it asks for, unless it has one. When this
/// returns, programs can attach to the guest's engine.
///
/// # Errors
/// [`Error::Sockets`] if no engine serves the function; [`Error::Invalid`] if the pod has no
/// addresses for it; [`Error::Network`]; [`Error::Hypervisor`] if the VMM does not take it;
/// [`Error::Agent`] if the guest's engine does not serve; [`Error::WrongState`] if the pod has
/// ended; [`Error::File`] if the record is not saved.
pub async fn join(node: &Node, target: &Target) -> Result<()> {
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let engine = sandbox.look(|record| {
        let asked = record.added(name).and_then(|added| added.sockets.clone());
        asked.filter(|_| record.sockets.is_none())
    });
    let Some(engine) = engine else { return Ok(()) };
    let _turn = sandbox.functions.lock().await;
    let given = sandbox.look(|record| record.plugged.sockets.clone());
    let is_there = given.as_ref().is_some_and(|given| !given.address.is_empty());
    // A daemon was killed while it gave the function.
    if let Some(given) = given.filter(|_| !is_there) {
        withdraw(sandbox, &given.device).await;
    }
    if !is_there {
        give(node, sandbox, &engine).await?;
    }
    start(sandbox, &sandbox.agent()?).await
}

/// Has the engine serve a function, and the VMM give it to the guest. All of a fork's memory is
/// copied before.
async fn give(node: &Node, sandbox: &Sandbox, engine: &Path) -> Result<()> {
    sockets::check(engine).await?;
    let record = sandbox.record();
    let place = place(node, &record).await?;
    let gone = || sandbox.wrong_state("it has no microVM");
    let uid = record.vmm_uid.ok_or_else(gone)?;
    let client = record.plugged.client_memory.ok_or_else(gone)?;
    let file = match &record.template {
        Some(_) => Some(memory::complete(node, client).await?),
        None => None,
    };
    let client = plane_v1::ClientMemory::from(client);
    let function = sockets::function(engine, &record.name, &place, &client)?;
    let vm = sandbox.live_vm()?;
    let mut device = String::new();
    let recorded = sandbox.update(|record| {
        device = record.plugged.next_device("sockets");
        let (engine, device) = (engine.to_owned(), device.clone());
        record.plugged.sockets = Some(GivenSockets { engine, device, ..GivenSockets::default() });
    });
    recorded.await?;
    let plugged = async {
        let socket = sockets::path(node, &sandbox.id);
        // Held until the VMM is connected; its connection keeps the function then.
        let served = sockets::serve_at(engine, socket, uid, function, file).await?;
        let address = vm.plug(&device, &served.socket).await?;
        Ok::<_, Error>(address)
    };
    let address = match plugged.await {
        Ok(address) => address,
        Err(error) => {
            withdraw(sandbox, &device).await;
            return Err(error);
        }
    };
    let vmm = vm.record();
    let saved = sandbox.update(|record| {
        record.vm = Some(vmm);
        if let Some(given) = &mut record.plugged.sockets {
            given.address = address;
        }
    });
    saved.await
}

/// Frees the slot that a function may have in the machine, and takes it out of the pod's record in
/// memory.
async fn withdraw(sandbox: &Sandbox, device: &str) {
    if let Some(vm) = sandbox.vm() {
        free(sandbox, &*vm, device).await;
    }
    sandbox.note(|record| record.plugged.sockets = None);
}

/// Has the guest run its engine on the function, unless it does.
async fn start(sandbox: &Sandbox, agent: &Agent) -> Result<()> {
    if sandbox.look(|record| record.plugged.serves_sockets()) {
        return Ok(());
    }
    let begun = Instant::now();
    loop {
        sandbox.live_vm()?;
        match sockets::start(agent).await {
            Ok(()) => break,
            // The guest's engine ends where its kernel has not found the function.
            Err(Error::Agent(_) | Error::Refused(_)) if begun.elapsed() < PATIENCE => {}
            Err(error) => return Err(error),
        }
        tokio::time::sleep(AGAIN).await;
    }
    let saved = sandbox.update(|record| {
        if let Some(given) = &mut record.plugged.sockets {
            given.serves = true;
        }
    });
    saved.await
}

/// Returns the place of a fork or of a pod in one of Slipway's networks.
///
/// # Errors
/// [`Error::Invalid`] if it has none; [`Error::Network`].
async fn place(node: &Node, record: &Record) -> Result<NetworkAddresses> {
    if record.forks_with_sockets()
        && let Some(place) = sockets::place(record)
    {
        return Ok(place);
    }
    if let Some(place) = record.network.as_ref().and_then(own)
        && is_network(node, &place.network).await?
    {
        return Ok(place);
    }
    of_interface(record).ok_or_else(|| {
        Error::Invalid(format!(
            "pod {} has no address in a network of Slipway's, which its sockets would have: give \
             it a network interface of a pool on one too (slipway.dev/POOL), or one by slipway-cni \
             with \"function\": true",
            record.name
        ))
    })
}

/// Returns the place that a pod has if its own interface is in a network: its switch has the
/// network's name, whether slipway-cni or the daemon has put it there.
fn own(network: &Network) -> Option<NetworkAddresses> {
    let addresses = network.addresses();
    let place = NetworkAddresses { network: network.switch.clone(), addresses };
    (!place.addresses.is_empty()).then_some(place)
}

async fn is_network(node: &Node, name: &str) -> Result<bool> {
    let request = network_v1::GetNetworkRequest { name: name.to_owned() };
    match node.networks.clone().get_network(request).await {
        Ok(_) => Ok(true),
        Err(status) if status.code() == Code::NotFound => Ok(false),
        Err(status) => Err(Error::Network(Box::new(status))),
    }
}

/// Returns the place of the first interface of a pool that is in a network.
fn of_interface(record: &Record) -> Option<NetworkAddresses> {
    let nics = record.plugged.functions.iter().filter_map(|given| given.nic.as_ref());
    let mut placed = nics.filter(|nic| !nic.interface.is_empty() && !nic.addresses.is_empty());
    let nic = placed.next()?;
    let addresses = nic.addresses.iter().map(|(address, _)| address.clone()).collect();
    Some(NetworkAddresses { network: nic.switch.clone(), addresses })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{given, pod, pod_with};
    use super::*;
    use crate::record::{Given, GivenNic, Needs};

    fn roomy() -> Record {
        let mut record = pod(0);
        record.plugged.socket_slot = true;
        record
    }

    #[test]
    fn a_pod_that_boots_has_room_for_sockets_if_the_node_gives_it() {
        let why = |record: &Record| check("/e", record).map_err(|error| error.to_string());
        assert_eq!(why(&roomy()).unwrap(), Some(PathBuf::from("/e")));
        assert_eq!((super::super::plug_slots(&roomy()), Needs::of(&roomy()).sockets), (2, true));
        assert!(why(&pod(8)).unwrap_err().contains("`pod_sockets`"));
        let mut fork = Record { template: Some("web".into()), ..pod(0) };
        fork.plugged.fork_socket_slot = true;
        assert_eq!(why(&fork).unwrap(), Some(PathBuf::from("/e")));
        // The slot of a pod's own machine, if it boots, is none of its template's.
        fork.plugged.fork_socket_slot = false;
        fork.plugged.socket_slot = true;
        assert!(why(&fork).unwrap_err().contains("dev.slipway.template"));
        assert!(!Needs::of(&fork).sockets);
        // A socket function that a pod begins with is for all of its containers.
        let begins = Record { sockets: Some("/other".into()), ..pod(0) };
        assert!(why(&begins).unwrap().is_some() && !begins.has_socket_slot());
        assert_eq!(check("", &pod(0)).unwrap(), None);
    }

    #[test]
    fn sockets_have_the_addresses_of_an_interface_that_the_guest_uses() {
        let nic = |number, switch: &str, interface: &str, addresses: &[&str]| {
            let addresses = addresses.iter().map(|&one| (one.to_owned(), 24)).collect();
            let (switch, interface) = (switch.to_owned(), interface.to_owned());
            let nic = Some(GivenNic { switch, interface, addresses, ..GivenNic::default() });
            Given { nic, ..given("nics", number, "0000:00:06.0") }
        };
        let functions = vec![
            given("fast", 0, "0000:00:07.0"),
            nic(0, "plain", "eth1", &[]),
            nic(1, "early", "", &["10.1.0.2"]),
            nic(2, "back", "eth2", &["10.2.0.2", "fd00::2"]),
        ];
        let record = pod_with(0, functions);
        let addresses = vec!["10.2.0.2".to_owned(), "fd00::2".to_owned()];
        assert_eq!(
            of_interface(&record),
            Some(NetworkAddresses { network: "back".into(), addresses })
        );
        assert_eq!(of_interface(&roomy()), None);
        assert_eq!(own(&Network::default()), None);
    }

    #[test]
    fn a_record_of_an_earlier_version_has_no_room_for_sockets() {
        let plugged = pod(1).plugged;
        assert_eq!((plugged.socket_slot, plugged.sockets), (false, None));
    }

    #[test]
    fn a_fork_of_an_earlier_version_has_the_one_slot_that_is_for_shares() {
        let mut written = serde_json::to_value(pod(0)).unwrap();
        let keys = written.as_object_mut().unwrap();
        keys.remove("fork_socket_slot").unwrap();
        // As that version wrote it on a node with `pod_sockets`, whatever the template was.
        let early = r#"{ "template": "web", "socket_slot": true, "given_sockets": null }"#;
        let early: serde_json::Map<_, _> = serde_json::from_str(early).unwrap();
        keys.extend(early);
        let fork: Record = serde_json::from_value(written.clone()).unwrap();
        assert!(check("/e", &fork).unwrap_err().to_string().contains("dev.slipway.template"));
        assert_eq!(super::super::plug_slots(&fork), 1);
        assert_eq!(fork.booted_needs(), Needs::of_template(false));
        // A pod of that version that has booted has the room.
        written["template"] = serde_json::Value::Null;
        let booted: Record = serde_json::from_value(written).unwrap();
        assert_eq!(check("/e", &booted).unwrap(), Some(PathBuf::from("/e")));
        assert_eq!(super::super::plug_slots(&booted), 2);
    }
}
