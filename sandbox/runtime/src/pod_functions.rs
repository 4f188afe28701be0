//! Functions of pools in the containers of a pod: NVMe controllers that are reset and empty, and
//! network interfaces ([`nics`]), which the pod's machine is given while it runs. They are the
//! plane's own devices or [`hardware`]; of that, a sandbox that is no pod may have one ([`own`]).
//!
//! A function is named by its pool and its number, since an orchestrator counts them (`slipway
//! device-plugin`). The first container that asks for it has the pod take it. From then on it is
//! the pod's until that ends: a container that is started again finds it as it was, as Kubernetes
//! leaves a device with its pod. It goes back when the VMM has ended, and what a killed daemon has
//! left, the next one takes back ([`reconcile`]).
//!
//! A [socket function](socket_function), which is of no pool, is added to a machine likewise, a
//! fork's among them.
//!
//! It is in the pod's record before it is taken, so nothing of it is lost if the daemon is killed.

mod hardware;
mod nics;
pub mod own;
mod pools;
mod socket_function;

use std::path::PathBuf;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_hypervisor::{Vm, VmEvent};
use slipway_plane_api::vf_v1::Lease;
use slipway_plane_api::vf_v1::template::Kind;
use tokio::sync::broadcast::error::RecvError;

pub use self::nics::members;
pub use self::pools::{endpoints, holds, reconcile, sockets};
pub use self::socket_function::{
    begin as begin_sockets, check as check_sockets, join as join_sockets,
};
use crate::node::Node;
use crate::record::{Added, Given, GivenNic, Record, Volume, Wish};
use crate::sandbox::Sandbox;
use crate::target::Target;
use crate::v1::{PoolFunction, RunSpec};
use crate::{Error, Result, name};

/// The namespace of a function of a pool.
const NSID: u32 = 1;
/// The agent's number for the lowest namespace of a controller.
const LOWEST_NSID: u32 = u32::MAX;
/// The longest wait for a guest that is to give up a function. It frees the slot later, too.
const EJECTION: Duration = Duration::from_secs(10);

/// Refuses functions for a sandbox: containers of pods have them.
///
/// # Errors
/// [`Error::Invalid`].
pub fn refuse(spec: &RunSpec) -> Result<()> {
    if spec.functions.is_empty() {
        return Ok(());
    }
    let why = "functions of pools are for the containers of a pod";
    Err(Error::Invalid(why.to_owned()))
}

/// Returns the number of functions that can be added to a machine.
pub(crate) fn plug_slots(record: &Record) -> usize {
    if let Some(origin) = &record.origin {
        return origin.slots;
    }
    // The function of shares, once a container has some. A template has the slot for its forks.
    let shares = usize::from(record.pod || record.template.is_some());
    shares + record.function_room() + usize::from(record.has_socket_slot())
}

/// Checks the functions that a new container of a pod asks for, beside its volumes.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check(asked: &[PoolFunction], volumes: &[Volume], record: &Record) -> Result<Vec<Wish>> {
    if asked.len() > record.function_room() {
        return Err(Error::Invalid(no_room(record)));
    }
    let mut wishes: Vec<Wish> = Vec::new();
    for PoolFunction { pool, number, name } in asked {
        name::check(name)?;
        let is_there =
            |one: &Wish| one.name == *name || (one.pool == *pool && one.number == *number);
        if wishes.iter().any(is_there) {
            return Err(Error::Invalid(format!("the function {pool}.{number} is asked for twice")));
        }
        // The agent knows both by their names, and both have their devices at them.
        if volumes.iter().any(|volume| volume.name == *name) {
            return Err(Error::Invalid(format!(
                "the function {pool}.{number} and a volume of the container are both called \
                 {name}: give the volume another name"
            )));
        }
        wishes.push(Wish { pool: pool.clone(), number: *number, name: name.clone() });
    }
    Ok(wishes)
}

fn no_room(record: &Record) -> String {
    let name = &record.name;
    if record.template.is_some() {
        return format!(
            "pod {name} began with a template, and has no room for functions of pools: make it \
             without (the annotation dev.slipway.template, --from)"
        );
    }
    format!(
        "pod {name} has room for {} functions of pools: set `pod_functions` in the node's \
         settings, start the daemon again, and make the pod again",
        record.function_room()
    )
}

/// Returns the block devices of the functions that a container has.
pub fn volumes(record: &Record, added: &Added) -> Vec<agent_v1::Volume> {
    let volume = |wish: &Wish| {
        let given = record.plugged.given(wish).filter(|given| given.nic.is_none())?;
        Some(block_device(given, &wish.name))
    };
    added.functions.iter().filter_map(volume).collect()
}

/// Returns the block device called `name` that a function is. Its namespace is that of the plane,
/// or the lowest one that a controller of hardware has.
fn block_device(given: &Given, name: &str) -> agent_v1::Volume {
    let nsid = if given.host_address.is_empty() { NSID } else { LOWEST_NSID };
    let device = agent_v1::BlockDevice { pci_address: given.address.clone(), nsid };
    agent_v1::Volume { name: name.to_owned(), device: Some(device), ..Default::default() }
}

/// Gives a pod the functions that a container of it asks for, unless it has them.
///
/// # Errors
/// [`Error::Plane`] if a function cannot be had; [`Error::Network`] if its network has no place for
/// the pod; [`Error::Busy`] if the machine has no room; [`Error::Hypervisor`] if the VMM does not
/// take it; [`Error::Agent`] if the guest does not configure the interface that it is;
/// [`Error::WrongState`] if the pod has ended; [`Error::File`] if the record is not saved.
pub async fn join(node: &Node, target: &Target) -> Result<()> {
    let (sandbox, name) = (&target.sandbox, &target.container.name);
    let wishes = sandbox.look(|record| record.added(name).map(|added| added.functions.clone()));
    let wishes = wishes.unwrap_or_default();
    if wishes.is_empty() {
        return Ok(());
    }
    let _turn = sandbox.functions.lock().await;
    let agent = sandbox.agent()?;
    for wish in wishes {
        give(node, sandbox, &wish).await?;
        nics::configure(sandbox, &agent, &wish).await?;
    }
    Ok(())
}

async fn give(node: &Node, sandbox: &Sandbox, wish: &Wish) -> Result<()> {
    match sandbox.look(|record| record.plugged.given(wish).map(|given| given.address.is_empty())) {
        Some(false) => return Ok(()),
        // A daemon was killed while it gave the function: the guest does not have it, or has it
        // under an address that nobody knows.
        Some(true) => withdraw(node, sandbox, wish).await?,
        None => {}
    }
    let vm = sandbox.live_vm()?;
    let most = sandbox.look(Record::function_room);
    if sandbox.look(|record| record.plugged.functions.len()) >= most {
        let name = sandbox.name.clone();
        return Err(Error::Busy { name, what: "functions of pools", most });
    }
    let mut device = String::new();
    let recorded = sandbox.update(|record| {
        let Wish { pool, number, .. } = wish.clone();
        device = record.plugged.next_device("pool");
        let device = device.clone();
        record.plugged.functions.push(Given { pool, number, device, ..Given::default() });
    });
    let recorded = recorded.await;
    let given = match recorded {
        Ok(()) => plug(node, sandbox, &*vm, wish, &device).await,
        Err(error) => Err(error),
    };
    let Err(error) = given else { return Ok(()) };
    let has = sandbox
        .look(|record| record.plugged.given(wish).is_some_and(|one| !one.address.is_empty()));
    // A function that the guest has stays with the pod: its VMM would look for it at its socket.
    if !has && let Err(left) = withdraw(node, sandbox, wish).await {
        tracing::warn!(sandbox = sandbox.name, %left, "a function goes back when its pod ends");
    }
    Err(error)
}

/// Takes a function and has the VMM give it to the guest, under this name.
async fn plug(
    node: &Node,
    sandbox: &Sandbox,
    vm: &dyn Vm,
    wish: &Wish,
    device: &str,
) -> Result<()> {
    let (nic, host_address) = identify(node, sandbox, wish).await?;
    // From here on the place goes back with the function.
    sandbox.note(|record| {
        if let Some(given) = record.plugged.given_mut(wish) {
            given.nic.clone_from(&nic);
            given.host_address = host_address;
        }
    });
    let lease = pools::take(node, sandbox, wish, nic.as_ref()).await?;
    if lease.switch != nic.map(|nic| nic.switch).unwrap_or_default() {
        let pool = &wish.pool;
        return Err(Error::Plane(format!(
            "pool {pool} was made anew meanwhile: start the container again"
        )));
    }
    attach(sandbox, vm, wish, device, lease).await
}

/// Returns the interface that a function is to be, or `None` if it is a disk, and the address on
/// the host of one that is hardware. An interface of the plane's has its place in a network then.
async fn identify(
    node: &Node,
    sandbox: &Sandbox,
    wish: &Wish,
) -> Result<(Option<GivenNic>, String)> {
    match pools::kind(node, &wish.pool).await? {
        Some(Kind::Nic(nic)) => {
            let placed = nics::place(node, sandbox, wish, nic).await?;
            Ok((Some(placed), String::new()))
        }
        Some(Kind::Hardware(found)) => match hardware::address(&found, wish.number) {
            // The pool says which numbers it has.
            "" => Ok((None, String::new())),
            address => Ok((hardware::interface(sandbox, address).await?, address.to_owned())),
        },
        _ => Ok((None, String::new())),
    }
}

/// Has the VMM give a function that was taken to the guest, under the name `device`.
async fn attach(
    sandbox: &Sandbox,
    vm: &dyn Vm,
    wish: &Wish,
    device: &str,
    lease: Lease,
) -> Result<()> {
    let given = sandbox.look(|record| record.plugged.given(wish).cloned()).unwrap_or_default();
    let mut nic = given.nic;
    if lease.address != given.host_address {
        let pool = &wish.pool;
        return Err(Error::Plane(format!("pool {pool} was made anew meanwhile: start again")));
    }
    if !lease.address.is_empty() {
        // The guest may be on its way to less memory. No more of it is taken away from now on.
        drop(sandbox.wait_to_change_size().await);
        if let Some(nic) = &mut nic {
            nic.mac = hardware::set_mac(sandbox, &lease.address).await?;
        }
    }
    let socket = PathBuf::from(lease.socket_path);
    let address = vm.plug(device, &socket).await?;
    let record = vm.record();
    let saved = sandbox.update(|kept| {
        kept.vm = Some(record);
        if let Some(given) = kept.plugged.given_mut(wish) {
            (given.id, given.socket, given.address) = (lease.id, socket, address);
            given.nic = nic.map(|nic| GivenNic { own_mac: lease.mac, ..nic });
        }
    });
    saved.await
}

/// Gives a function back, frees the slot that it may have in the machine, and takes it out of the
/// pod's record in memory.
async fn withdraw(node: &Node, sandbox: &Sandbox, wish: &Wish) -> Result<()> {
    // First: a VMM that still connects to the function fails now, and has it or has it not.
    pools::give_back(node, sandbox, &wish.pool, wish.number).await?;
    let given = sandbox.look(|record| record.plugged.given(wish).cloned());
    if let (Some(given), Some(vm)) = (&given, sandbox.vm())
        && !given.device.is_empty()
    {
        free(sandbox, &*vm, &given.device).await;
    }
    if given.is_some_and(|given| given.nic.is_some()) {
        nics::leave(node, &sandbox.id, &wish.pool, wish.number).await?;
    }
    sandbox.note(|record| record.plugged.forget(wish));
    Ok(())
}

/// Has the guest give up a device that the VMM may have, and waits until its slot is free.
async fn free(sandbox: &Sandbox, vm: &dyn Vm, device: &str) {
    let mut events = vm.events();
    match vm.unplug(device).await {
        Ok(()) => {}
        // The VMM has no such device.
        Err(slipway_hypervisor::Error::Refused { .. }) => return,
        Err(error) => {
            let name = &sandbox.name;
            tracing::warn!(
                sandbox = name,
                device,
                %error,
                "a slot for a function may stay taken: make the pod again if it needs the slot"
            );
            return;
        }
    }
    let gone = async {
        loop {
            match events.recv().await {
                Ok(VmEvent::Unplugged(name)) if name == device => return,
                Ok(_) | Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    };
    if tokio::time::timeout(EJECTION, gone).await.is_err() {
        tracing::warn!(sandbox = sandbox.name, device, "the guest has not given up a function");
    }
}

/// Gives all functions of a sandbox back whose VMM has ended. What cannot be given back now, the
/// next daemon takes back.
pub async fn give_back(node: &Node, sandbox: &Sandbox) {
    let _turn = sandbox.functions.lock().await;
    // It may have been taken and not recorded.
    if let Some(own) = sandbox.look(|record| record.plugged.own.clone())
        && let Err(error) = pools::give_back(node, sandbox, &own.pool, 0).await
    {
        tracing::warn!(sandbox = sandbox.name, pool = own.pool, %error, "a function stays taken");
    }
    for Given { pool, number, nic, .. } in sandbox.look(|record| record.plugged.functions.clone()) {
        if let Err(error) = pools::give_back(node, sandbox, &pool, number).await {
            tracing::warn!(sandbox = sandbox.name, pool, number, %error, "a function stays taken");
        }
        if nic.is_some()
            && let Err(error) = nics::leave(node, &sandbox.id, &pool, number).await
        {
            tracing::warn!(sandbox = sandbox.name, pool, number, %error, "its addresses stay");
        }
    }
    sandbox.note(|record| record.plugged.functions.clear());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::{Device, PluggedFunctions, SandboxState};

    fn asked(pool: &str, number: u32, name: &str) -> PoolFunction {
        PoolFunction { pool: pool.into(), number, name: name.into() }
    }

    pub(super) fn given(pool: &str, number: u32, address: &str) -> Given {
        let (pool, address) = (pool.to_owned(), address.to_owned());
        let (device, id) = (format!("pool-{number}"), format!("{pool}.{number}"));
        let socket = "/vf".into();
        Given { pool, number, device, id, socket, address, ..Given::default() }
    }

    pub(super) fn pod(slots: u32) -> Record {
        pod_with(slots, Vec::new())
    }

    pub(super) fn pod_with(slots: u32, functions: Vec<Given>) -> Record {
        let plugged = PluggedFunctions { slots, functions, ..PluggedFunctions::default() };
        Record { pod: true, plugged, ..record_of(SandboxState::Running) }
    }

    #[test]
    fn a_pod_that_boots_has_the_room_that_the_node_gives() {
        assert_eq!((pod(2).function_room(), pod(0).function_room()), (2, 0));
        assert_eq!(Record { template: Some("web".into()), ..pod(2) }.function_room(), 0);
        let mut saved = pod(2);
        saved.saving.as_template = Some("web".into());
        assert_eq!(saved.function_room(), 0);
        assert_eq!(Record { pod: false, ..pod(2) }.function_room(), 0);
        let why = |record: &Record| {
            check(&[asked("fast", 1, "fast-0")], &[], record).map_err(|error| error.to_string())
        };
        assert_eq!(why(&pod(1)).unwrap()[0].name, "fast-0");
        assert!(why(&pod(0)).unwrap_err().contains("`pod_functions`"));
        let fork = Record { template: Some("web".into()), ..pod(1) };
        assert!(why(&fork).unwrap_err().contains("dev.slipway.template"));
    }

    #[test]
    fn functions_that_are_no_functions_of_a_pods_container_are_refused() {
        let two = [asked("fast", 1, "fast-0"), asked("fast", 2, "fast-1")];
        assert_eq!(check(&two, &[], &pod(2)).unwrap().len(), 2);
        assert!(check(&two, &[], &pod(1)).is_err());
        for second in [asked("fast", 1, "b"), asked("slow", 1, "fast-0"), asked("slow", 1, "../x")]
        {
            let both = [two[0].clone(), second];
            assert!(check(&both, &[], &pod(8)).is_err(), "{both:?}");
        }
        refuse(&RunSpec::default()).unwrap();
        let alone = RunSpec { functions: two.to_vec(), ..Default::default() };
        assert!(refuse(&alone).unwrap_err().to_string().contains("containers of a pod"));
    }

    #[test]
    fn a_function_and_a_volume_of_one_name_are_refused() {
        let volume = |name: &str, device_path: &str| Volume {
            name: name.into(),
            path: "/f".into(),
            scratch_bytes: None,
            read_only: false,
            mount_point: String::new(),
            block_size: 0,
            device: Device::Namespace,
            device_path: device_path.into(),
            host_device: None,
            file: None,
            stamp: None,
            overlay: false,
        };
        let asked = [asked("fast", 1, "fast-0")];
        let checked = |volume| check(&asked, &[volume], &pod(1)).map_err(|error| error.to_string());
        checked(volume("fast-1", "")).unwrap();
        checked(volume("fast", "/dev/fast-0")).unwrap();
        for path in ["", "/dev/xvda"] {
            let why = checked(volume("fast-0", path)).unwrap_err();
            assert!(why.contains("fast.1") && why.contains("another name"), "{why}");
        }
    }

    #[test]
    fn a_container_has_the_functions_that_it_asks_for() {
        let nic = Some(GivenNic::default());
        let functions = vec![
            given("fast", 3, "0000:00:06.0"),
            given("fast", 4, "0000:00:07.0"),
            Given { nic, ..given("nics", 0, "0000:00:08.0") },
        ];
        let wish =
            |pool: &str, number, name: &str| Wish { pool: pool.into(), number, name: name.into() };
        let added = added_of("a", SandboxState::Starting);
        // An interface is no block device.
        let functions_of_it = vec![wish("fast", 4, "fast-0"), wish("nics", 0, "nics-0")];
        let added = Added { functions: functions_of_it, ..added };
        let record = pod_with(2, functions);
        let volumes = volumes(&record, &added);
        let device = volumes[0].device.clone().unwrap();
        assert_eq!((volumes.len(), volumes[0].name.as_str()), (1, "fast-0"));
        assert_eq!((device.pci_address.as_str(), device.nsid), ("0000:00:07.0", 1));
    }

    #[test]
    fn a_record_of_an_earlier_version_has_no_functions() {
        let record = record_of(SandboxState::Running);
        assert_eq!(record.plugged, PluggedFunctions::default());
        assert_eq!(added_of("a", SandboxState::Running).functions, []);
        let text = r#"{"pool": "fast", "number": 3, "socket": "/vf", "address": "0000:00:06.0"}"#;
        let old: Given = serde_json::from_str(text).unwrap();
        let new = given("fast", 3, "0000:00:06.0");
        assert_eq!(old, Given { device: String::new(), id: String::new(), ..new });
    }
}
