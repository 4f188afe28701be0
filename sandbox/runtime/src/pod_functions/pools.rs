//! The functions of a pod at the pools that they are of.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use slipway_plane_api::functions::{self, POD, SANDBOX};
use slipway_plane_api::vf_v1::template::Kind;
use slipway_plane_api::{v1 as plane_v1, vf_v1};
use tonic::{Code, Status};

use crate::node::Node;
use crate::record::{Given, GivenNic, Record, Wish};
use crate::sandbox::Sandbox;
use crate::{Error, Result};

/// The longest wait for a function that its last owner has just returned, or is about to return.
const PATIENCE: Duration = Duration::from_secs(30);
/// The time between two attempts to take such a function.
const AGAIN: Duration = Duration::from_millis(50);

/// Returns the kind of a pool's functions. Returns `None` for one that this version does not know.
///
/// # Errors
/// [`Error::Plane`] if there is no such pool.
pub(super) async fn kind(node: &Node, pool: &str) -> Result<Option<Kind>> {
    let request = vf_v1::GetPoolRequest { name: pool.to_owned() };
    let pool = node.functions.clone().get_pool(request).await.map_err(Error::plane)?;
    Ok(pool.into_inner().template.and_then(|template| template.kind))
}

/// Takes any function of a pool that is ready, for the VMM of a sandbox that is no pod.
///
/// # Errors
/// [`Error::Plane`] if none is ready; [`Error::WrongState`] if the sandbox has no VMM.
pub(super) async fn take_any(node: &Node, sandbox: &Sandbox, pool: &str) -> Result<vf_v1::Lease> {
    let (pool, owner) = (pool.to_owned(), sandbox.look(|record| owner(record, 0)));
    let client = Some(client(sandbox, None)?);
    let request = vf_v1::TakeRequest { pool, owner, client, number: None };
    let lease = node.functions.clone().take(request).await;
    Ok(lease.map_err(Error::plane)?.into_inner())
}

/// Returns the client of a function that a sandbox's VMM is. `nic` is the interface that the
/// function is to be.
fn client(sandbox: &Sandbox, nic: Option<&GivenNic>) -> Result<vf_v1::Client> {
    let (uid, memory) = sandbox.look(|record| (record.vmm_uid, record.plugged.client_memory));
    let gone = || sandbox.wrong_state("it has no microVM");
    let (uid, memory) = (uid.ok_or_else(gone)?, memory.ok_or_else(gone)?);
    Ok(vf_v1::Client {
        user: Some(plane_v1::Owner { uid, gid: uid }),
        memory: Some(memory.into()),
        mac: nic.map(|nic| nic.mac.clone()).unwrap_or_default(),
        addresses: nic.map(addresses).unwrap_or_default(),
        ..Default::default()
    })
}

/// Takes a function for the pod's VMM. Waits for one that is being reset, and for one that another
/// pod has: an orchestrator may give it to the next pod before the sandbox of the last has ended.
/// `nic` is the interface that the function is to be.
pub(super) async fn take(
    node: &Node,
    sandbox: &Sandbox,
    wish: &Wish,
    nic: Option<&GivenNic>,
) -> Result<vf_v1::Lease> {
    let request = vf_v1::TakeRequest {
        pool: wish.pool.clone(),
        owner: sandbox.look(|record| owner(record, wish.number)),
        client: Some(client(sandbox, nic)?),
        number: Some(wish.number),
    };
    let begun = Instant::now();
    loop {
        sandbox.live_vm()?;
        let status = match node.functions.clone().take(request.clone()).await {
            Ok(lease) => return Ok(lease.into_inner()),
            Err(status) => status,
        };
        if begun.elapsed() >= PATIENCE || !comes_back(node, wish, &status).await {
            return Err(Error::plane(status));
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Returns the addresses that an interface may send from; none stands for any.
fn addresses(nic: &GivenNic) -> Vec<String> {
    nic.addresses.iter().map(|(address, _)| address.clone()).collect()
}

/// Returns whether a function that was refused may be ready soon.
async fn comes_back(node: &Node, wish: &Wish, status: &Status) -> bool {
    match status.code() {
        // It is being reset.
        Code::ResourceExhausted => true,
        Code::FailedPrecondition => {
            let request = vf_v1::GetPoolRequest { name: wish.pool.clone() };
            let pool = node.functions.clone().get_pool(request).await;
            let is_it = |vf: &vf_v1::Vf| vf.number == wish.number && is_passed_on(vf);
            pool.is_ok_and(|pool| pool.get_ref().vfs.iter().any(is_it))
        }
        _ => false,
    }
}

/// Returns whether a function is on its way from a pod to the next one.
fn is_passed_on(vf: &vf_v1::Vf) -> bool {
    let is_on_its_way = match vf.state.as_str() {
        // It has come back since it was refused.
        "ready" | "being reset" => true,
        "taken" => functions::is_pods(&vf.owner),
        _ => false,
    };
    is_on_its_way && !vf.draining
}

/// Gives a function back. One that the sandbox does not have is no error.
pub(super) async fn give_back(
    node: &Node,
    sandbox: &Sandbox,
    pool: &str,
    number: u32,
) -> Result<()> {
    let owner = sandbox.look(|record| owner(record, number));
    let request = vf_v1::ReturnRequest { pool: pool.to_owned(), owner };
    Error::unless_gone(node.functions.clone().r#return(request).await)
}

/// Returns whether the functions that a guest has are still its pod's. Somebody else may have one
/// after a restart of the plane, or if root gave it back. Hardware has ended with the last plane,
/// which a pool that is still taking it over does not know yet.
///
/// # Errors
/// [`Error::Plane`].
pub async fn holds(node: &Node, record: &Record) -> Result<bool> {
    if record.plugged.in_guest().any(|given| !given.host_address.is_empty()) {
        return Ok(false);
    }
    for given in record.plugged.in_guest() {
        let request = vf_v1::GetPoolRequest { name: given.pool.clone() };
        let pool = match node.functions.clone().get_pool(request).await {
            Ok(pool) => pool.into_inner(),
            Err(status) if status.code() == Code::NotFound => return Ok(false),
            Err(status) => return Err(Error::plane(status)),
        };
        if !pool.vfs.iter().any(|vf| is_given(vf, given, record)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns whether a function is the one that a sandbox was given, which has it still.
fn is_given(vf: &vf_v1::Vf, given: &Given, record: &Record) -> bool {
    let socket = given.socket.to_string_lossy();
    vf.number == given.number && vf.owner == owner(record, given.number) && vf.socket_path == socket
}

/// Returns the plane's ids of the functions that a guest has. An earlier version recorded none.
pub fn endpoints(record: &Record) -> impl Iterator<Item = &str> {
    record.plugged.in_guest().map(|given| given.id.as_str()).filter(|id| !id.is_empty())
}

/// Returns the sockets of the functions that a guest has.
pub fn sockets(record: &Record) -> impl Iterator<Item = PathBuf> {
    record.plugged.in_guest().map(|given| given.socket.clone())
}

/// Takes back the functions of all pods that are gone, and those that no guest has.
pub async fn reconcile(node: &Node) {
    let live = node.list().into_iter().filter(|sandbox| sandbox.state().is_live());
    let ids = live.flat_map(|sandbox| sandbox.look(ids)).collect();
    node.reconcile_functions("pods", POD, ids).await;
}

/// Returns the ids of the owners that a pod is of the functions that its guest has.
fn ids(record: &Record) -> Vec<String> {
    record.plugged.in_guest().map(|given| owner_id(&record.id, given.number)).collect()
}

/// An owner has at most one function of a pool, so a pod is one owner for each number.
fn owner_id(sandbox: &str, number: u32) -> String {
    format!("{sandbox}.{number}")
}

/// Returns the owner that a sandbox is of the function `number`. One that is no pod has one
/// function.
fn owner(record: &Record, number: u32) -> String {
    match record.pod {
        true => format!("{POD}:{}", owner_id(&record.id, number)),
        false => format!("{SANDBOX}:{}", record.id),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{given, pod, pod_with};
    use super::*;

    #[test]
    fn a_function_that_no_guest_has_is_not_one_that_a_pod_keeps() {
        let functions = vec![given("fast", 3, "0000:00:06.0"), given("fast", 4, "")];
        let record = pod_with(2, functions);
        assert_eq!(ids(&record), ["0123456789ab.3"]);
        assert!(endpoints(&record).eq(["fast.3"]));
        assert_eq!(owner(&record, 3), "slipway-pod:0123456789ab.3");
        let alone = Record { pod: false, ..record };
        assert_eq!(owner(&alone, 3), "slipway-sandbox:0123456789ab");
    }

    #[test]
    fn a_function_is_a_pods_by_its_owner_and_its_socket() {
        let given = given("fast", 3, "0000:00:06.0");
        let vf = |number, owner: &str, socket_path: &str| {
            let (owner, socket_path) = (owner.to_owned(), socket_path.to_owned());
            vf_v1::Vf { number, owner, socket_path, ..Default::default() }
        };
        let ours = "slipway-pod:0123456789ab.3";
        let is = |vf: vf_v1::Vf| is_given(&vf, &given, &pod(1));
        assert!(is(vf(3, ours, "/vf")));
        assert!(!is(vf(4, ours, "/vf")));
        assert!(!is(vf(3, "slipway-pod:0123456789ab.4", "/vf")));
        assert!(!is(vf(3, ours, "/other")));
    }

    #[test]
    fn a_function_of_another_pod_is_waited_for() {
        let vf = |state: &str, owner: &str| {
            let (state, owner) = (state.to_owned(), owner.to_owned());
            vf_v1::Vf { state, owner, ..Default::default() }
        };
        let coming = [vf("taken", &owner(&pod(1), 3)), vf("being reset", ""), vf("ready", "")];
        for vf in coming {
            assert!(is_passed_on(&vf), "{vf:?}");
            assert!(!is_passed_on(&vf_v1::Vf { draining: true, ..vf }));
        }
        for vf in [
            vf("taken", "slipway-sandbox:0123456789ab"),
            vf("taken", "slipway-podium:1"),
            vf("failed", ""),
            vf("drained", ""),
        ] {
            assert!(!is_passed_on(&vf), "{vf:?}");
        }
    }
}
