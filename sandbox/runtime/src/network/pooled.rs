//! A sandbox's interface as a virtual function of a pool, which was made before the sandbox.
//!
//! A container's attachment may have taken the function for the sandbox, in a network namespace:
//! the sandbox's VMM is let in then, and the function stays the attachment's.
//!
//! The function is taken when the sandbox starts, for its VMM's user, its memory, and the addresses
//! of its interface. It has the sandbox's MAC address when the guest's driver begins. The function
//! goes back when the sandbox ends; what a killed daemon has left is taken back by the
//! next one ([`reconcile`]), which knows the sandboxes that live.

use std::path::PathBuf;

use slipway_plane_api::functions::SANDBOX;
use slipway_plane_api::{v1 as plane_v1, vf_v1};
use tonic::{Code, Status};

use crate::node::Node;
use crate::record::{FunctionPool, Network, Nic, Record, TakenFunction};
use crate::sandbox::Sandbox;
use crate::v1::RunSpec;
use crate::{Error, Result};

/// The largest packet of a function whose template names none, in bytes.
const MTU: u32 = 1500;

/// Checks that an interface of a pool can be what `spec` asks for.
///
/// # Errors
/// [`Error::Invalid`].
pub fn check(spec: &RunSpec, nic: Nic) -> Result<()> {
    if spec.vf_pool.is_empty() || fits(spec, nic) {
        return Ok(());
    }
    let what = "an interface of a pool is virtio with one queue pair, and no template's: leave out \
                --nic, --queues and --from, or --vf";
    Err(Error::Invalid(what.to_owned()))
}

/// Returns whether a pool's functions are what `spec` asks for.
fn fits(spec: &RunSpec, nic: Nic) -> bool {
    nic == Nic::Virtio && spec.queues <= 1 && spec.template.is_empty()
}

/// Returns the pool that a sandbox has its interface of: that of `spec`, or that of the node's
/// settings.
pub fn chosen(node: &Node, spec: &RunSpec, nic: Nic) -> Option<FunctionPool> {
    let needed = !spec.vf_pool.is_empty();
    let name = if needed { &spec.vf_pool } else { &node.config.vf_pool };
    let named = !name.is_empty() && fits(spec, nic);
    let owner = String::new();
    named.then(|| FunctionPool { name: name.clone(), needed, owner, taken: None })
}

/// Takes the function that the record of a sandbox names, and returns its socket. Returns `None` if
/// the interface is to be made.
///
/// # Errors
/// [`Error::Plane`] if the sandbox needs a function of the pool and cannot have one.
pub async fn take(
    node: &Node,
    sandbox: &Sandbox,
    record: &Record,
    uid: u32,
    memory: &plane_v1::ClientMemory,
) -> Result<Option<PathBuf>> {
    // A template's machine is saved with the address that its function has.
    let found = pool(record).filter(|_| !record.saving.is_for_template());
    let Some((network, pool)) = found else { return Ok(None) };
    let taken = match lease(node, record, network, pool, (uid, memory)).await {
        Ok(taken) => taken,
        Err(error) if pool.needed => return Err(error),
        Err(error) => {
            // The pool's name stays in the record: a function that could not go back does so later.
            tracing::warn!(sandbox = sandbox.name, %error, "its interface is made for it");
            return Ok(None);
        }
    };
    let socket = taken.socket.clone();
    // Saved with the record of the VMM, without which no later daemon takes the sandbox over. The
    // function goes back by the pool's name and the owner, which the record on disk has.
    sandbox.note(|record| {
        let pool = record.network.as_mut().and_then(|network| network.pool.as_mut());
        if let Some(pool) = pool {
            pool.taken = Some(taken);
        }
    });
    Ok(Some(socket))
}

fn pool(record: &Record) -> Option<(&Network, &FunctionPool)> {
    let network = record.network.as_ref()?;
    Some((network, network.pool.as_ref()?))
}

fn owner(record: &Record, pool: &FunctionPool) -> String {
    match pool.owner.as_str() {
        "" => format!("{SANDBOX}:{}", record.id),
        owner => owner.to_owned(),
    }
}

/// Returns the client that a function on a network has, without the user and the memory.
fn client(network: &Network) -> vf_v1::Client {
    let rates = network.rates();
    vf_v1::Client {
        mac: network.mac.clone(),
        addresses: network.addresses(),
        max_rate: rates.max_rate,
        max_burst: rates.max_burst,
        receive_rate: rates.receive_rate,
        receive_burst: rates.receive_burst,
        ..Default::default()
    }
}

async fn lease(
    node: &Node,
    record: &Record,
    network: &Network,
    pool: &FunctionPool,
    (uid, memory): (u32, &plane_v1::ClientMemory),
) -> Result<TakenFunction> {
    let user = Some(plane_v1::Owner { uid, gid: uid });
    let client = Some(vf_v1::Client { user, memory: Some(*memory), ..client(network) });
    let (name, owner) = (pool.name.clone(), owner(record, pool));
    let mut functions = node.functions.clone();
    let lease = if network.is_lent() {
        let request = vf_v1::AdmitRequest { pool: name, owner, client };
        functions.admit(request).await.map_err(|status| lost(status, pool))?.into_inner()
    } else {
        let request = vf_v1::TakeRequest { pool: name, owner, client, number: None };
        functions.take(request).await.map_err(Error::plane)?.into_inner()
    };
    if let Err(error) = serves(&lease, network, &pool.name) {
        give_back(node, record).await?;
        return Err(error);
    }
    let vf_v1::Lease { id, socket_path, mac, .. } = lease;
    Ok(TakenFunction { id, socket: socket_path.into(), mac })
}

/// Converts the refusal of a function that was taken for a sandbox.
fn lost(status: Status, pool: &FunctionPool) -> Error {
    if status.code() != Code::NotFound {
        return Error::plane(status);
    }
    Error::Plane(format!(
        "the interface in the network namespace has lost its function of pool {}: its maker's DEL \
         and ADD give it another one",
        pool.name
    ))
}

/// Checks that a function serves a network.
fn serves(lease: &vf_v1::Lease, network: &Network, pool: &str) -> Result<()> {
    if lease.switch != network.switch {
        let (its, ours) = (&lease.switch, &network.switch);
        let its = if its.is_empty() { "none" } else { its };
        return Err(Error::Plane(format!(
            "the functions of pool {pool} are on the switch {its}, the sandbox's network on {ours}"
        )));
    }
    let mtu = if lease.mtu == 0 { MTU } else { lease.mtu };
    if mtu < network.mtu {
        let most = network.mtu;
        return Err(Error::Plane(format!(
            "the functions of pool {pool} take packets of {mtu} bytes, the network has {most}: \
             `slipway vf create --mtu {most}`"
        )));
    }
    Ok(())
}

/// The call by which a function goes back.
#[derive(Debug, PartialEq)]
enum GivingBack {
    /// The function goes back to its pool.
    Return(vf_v1::ReturnRequest),
    /// The attachment that has the function lets the pool's user in again.
    Admit(vf_v1::AdmitRequest),
}

impl GivingBack {
    /// Returns the call for the function of a sandbox. Returns `None` if there is nothing to give
    /// back.
    ///
    /// A return names the sandbox as the owner, and no later sandbox has that name, so it may be
    /// repeated. An attachment keeps its name, and may have lent its function to another sandbox
    /// since this one ended: a second call would part that one's VMM from the function. So only a
    /// live sandbox gives such a function back. One that ended and left a process is released
    /// again by each daemon.
    fn of(record: &Record) -> Option<Self> {
        let (network, pool) = pool(record)?;
        let (name, owner) = (pool.name.clone(), owner(record, pool));
        if !network.is_lent() {
            return Some(Self::Return(vf_v1::ReturnRequest { pool: name, owner }));
        }
        let client = Some(client(network));
        let admit = vf_v1::AdmitRequest { pool: name, owner, client };
        record.state.is_live().then_some(Self::Admit(admit))
    }
}

/// Gives the function of a sandbox back: to the pool, or to the attachment that has it, which lets
/// the pool's user in again. The plane hangs up on the client that the function had. A sandbox that
/// has none is no error.
///
/// # Errors
/// [`Error::Plane`].
pub async fn give_back(node: &Node, record: &Record) -> Result<()> {
    let mut functions = node.functions.clone();
    match GivingBack::of(record) {
        None => Ok(()),
        Some(GivingBack::Return(request)) => Error::unless_gone(functions.r#return(request).await),
        Some(GivingBack::Admit(request)) => Error::unless_gone(functions.admit(request).await),
    }
}

/// Returns the MAC address of a sandbox's function, if that is another one than the guest's
/// interface shall have. Returns `None` if the guest has nothing to change.
pub fn other_mac(record: &Record) -> Option<String> {
    let network = record.network.as_ref()?;
    let mac = &network.taken()?.mac;
    (mac != network.mac_in_guest()).then(|| mac.clone())
}

/// Returns whether the function that the record names is still the sandbox's, or `true` if it names
/// none. Somebody else may have the function after a restart of the plane, or if root gave it back.
///
/// # Errors
/// [`Error::Plane`].
pub async fn holds(node: &Node, record: &Record) -> Result<bool> {
    let Some((network, pool)) = pool(record) else { return Ok(true) };
    let Some(taken) = network.taken() else { return Ok(true) };
    let request = vf_v1::GetPoolRequest { name: pool.name.clone() };
    match node.functions.clone().get_pool(request).await {
        Ok(found) => {
            let (owner, socket) = (owner(record, pool), taken.socket.to_string_lossy());
            let mut vfs = found.get_ref().vfs.iter();
            Ok(vfs.any(|vf| vf.owner == owner && vf.socket_path == socket))
        }
        Err(status) if status.code() == Code::NotFound => Ok(false),
        Err(status) => Err(Error::plane(status)),
    }
}

/// Takes back the functions of all sandboxes but these, which are gone.
pub async fn reconcile(node: &Node, ids: Vec<String>) {
    node.reconcile_functions("sandboxes", SANDBOX, ids).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::SandboxState;

    fn lease(switch: &str, mtu: u32) -> vf_v1::Lease {
        vf_v1::Lease { switch: switch.into(), mtu, ..Default::default() }
    }

    #[test]
    fn a_function_of_another_network_is_refused() {
        let mut record = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let network = record.network.get_or_insert_with(network);
        (network.switch, network.mtu) = ("default".into(), 1500);
        let why = |lease| serves(&lease, network, "nics").map_err(|error| error.to_string());
        assert_eq!(why(lease("default", 0)), Ok(()));
        assert_eq!(why(lease("default", 9000)), Ok(()));
        assert!(why(lease("other", 0)).unwrap_err().contains("on the switch other"));
        assert!(why(lease("", 0)).unwrap_err().contains("on the switch none"));
        assert!(why(lease("default", 1400)).unwrap_err().contains("--mtu 1500"));
    }

    #[test]
    fn a_function_of_an_attachment_stays_the_attachments() {
        let mut record = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let mut pool =
            FunctionPool { name: "nics".into(), needed: true, owner: String::new(), taken: None };
        assert_eq!(owner(&record, &pool), format!("{SANDBOX}:{}", record.id));
        pool.owner = "slipway-cni:blue,c1,eth0".into();
        assert_eq!(owner(&record, &pool), "slipway-cni:blue,c1,eth0");
        record.network = Some(Network { pool: Some(pool), ..network() });
        assert!(crate::fork::cannot_fork(&record).unwrap().contains("its namespace"));
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap().network, record.network);
        // A record of an earlier version names no owner.
        let early = r#"{"name": "nics", "needed": false, "taken": null}"#;
        assert!(serde_json::from_str::<FunctionPool>(early).unwrap().owner.is_empty());
    }

    #[test]
    fn a_function_of_an_attachment_goes_back_once() {
        let lent = |state, owner: &str| {
            let mut record = crate::adopt::tests::record_of(state);
            let (name, owner) = ("nics".to_owned(), owner.to_owned());
            // No function is recorded: an earlier daemon may have taken one and then been killed.
            let pool = FunctionPool { name, needed: true, owner, taken: None };
            record.network = Some(Network { pool: Some(pool), ..network() });
            GivingBack::of(&record)
        };
        for state in [SandboxState::Starting, SandboxState::Running, SandboxState::Stopping] {
            assert!(matches!(lent(state, "slipway-cni:a"), Some(GivingBack::Admit(_))));
            assert!(matches!(lent(state, ""), Some(GivingBack::Return(_))));
        }
        for state in [SandboxState::Lost, SandboxState::Exited, SandboxState::Failed] {
            assert_eq!(lent(state, "slipway-cni:a"), None, "{state:?}");
            let Some(GivingBack::Return(request)) = lent(state, "") else { panic!("{state:?}") };
            assert_eq!((&*request.pool, &*request.owner), ("nics", "slipway-sandbox:0123456789ab"));
        }
        let without = crate::adopt::tests::record_of(SandboxState::Running);
        assert_eq!(GivingBack::of(&without), None);
    }

    #[test]
    fn the_guest_changes_the_address_of_a_function_that_has_another_one() {
        let mut record = crate::adopt::tests::record_of(crate::record::SandboxState::Running);
        let mut with = |mac: &str| {
            let (id, socket, mac) = ("nics.0".to_owned(), PathBuf::from("/s"), mac.to_owned());
            let taken = Some(TakenFunction { id, socket, mac });
            let (name, owner) = ("nics".to_owned(), String::new());
            let pool = Some(FunctionPool { name, needed: true, owner, taken });
            record.network = Some(Network { pool, ..network() });
            other_mac(&record)
        };
        assert_eq!(with("5a:11:0a:d5:00:02"), None);
        assert_eq!(with("5a:12:00:00:00:01").as_deref(), Some("5a:12:00:00:00:01"));
        record.network = None;
        assert_eq!(other_mac(&record), None);
    }

    #[test]
    fn a_lost_function_is_told_with_the_next_step() {
        let pool =
            FunctionPool { name: "nics".into(), needed: true, owner: "a:b".into(), taken: None };
        let told = |status| lost(status, &pool).to_string();
        assert!(told(Status::not_found("x")).contains("lost its function of pool nics"));
        assert!(told(Status::failed_precondition("why")).contains("why"));
    }

    #[test]
    fn what_no_pool_has_is_refused_where_one_is_asked_for() {
        let spec = RunSpec { vf_pool: "nics".into(), ..Default::default() };
        check(&spec, Nic::Virtio).unwrap();
        assert!(check(&spec, Nic::E1000).is_err());
        let queues = RunSpec { queues: 2, ..spec };
        assert!(check(&queues, Nic::Virtio).is_err());
        check(&RunSpec { queues: 2, ..Default::default() }, Nic::E1000).unwrap();
    }

    fn network() -> Network {
        Network {
            name: "default".into(),
            switch: "default".into(),
            mac: "5a:11:0a:d5:00:02".into(),
            ipv4: "10.213.0.2".into(),
            ipv4_prefix: 16,
            ipv4_gateway: "10.213.0.1".into(),
            ipv6: "fd00::2".into(),
            ipv6_prefix: 64,
            ipv6_gateway: "fd00::1".into(),
            mtu: 1500,
            name_servers: Vec::new(),
            published: Vec::new(),
            mac_at_port: false,
            guest_mac: None,
            wait: false,
            queues: 0,
            nic: Nic::Virtio,
            interrupt_interval_ns: 0,
            namespace: None,
            pool: None,
            further: Vec::new(),
        }
    }
}
