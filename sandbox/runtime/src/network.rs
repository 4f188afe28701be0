//! A sandbox's interface in a network: the networks' service assigns it, a function of the plane
//! provides it, and the agent configures it while the container is being created. In a network
//! namespace of others there may be [further](further) ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1::{self as agent_v1, agent_client::AgentClient};
use slipway_plane_api::{network_v1, v1 as plane_v1};
use slipway_telemetry::monotonic_ns;
use tokio::task::JoinHandle;
use tonic::Status;

use crate::agent::{Agent, stages};
use crate::node::Node;
use crate::record::{Network, Nic, Record};
use crate::sandbox::Sandbox;
use crate::v1::RunSpec;
use crate::{Error, Result, pod_functions, process};

pub mod further;
mod namespace;
mod pooled;

pub use pooled::holds;

/// The name of the stage on the timeline.
pub const STAGE: &str = "network";
/// The setting for no network.
pub const NONE: &str = "none";
/// The longest interval that an e1000's register ITR has: 16 bits of 256 ns (Intel's manual of the
/// 8254x, section 13.4.18).
const LONGEST_INTERVAL_NS: u64 = 65_535 * 256;
/// The setting for the default network on a host that can have networks.
const AUTO: &str = "auto";
/// The name of the network that is created when it is first needed.
const DEFAULT: &str = "default";

/// The name in place of a network's for an interface that leads nowhere.
const ISOLATED: &str = "isolated";
/// The address of such an interface.
const ISOLATED_MAC: &str = "5a:11:0a:00:00:01";
/// The deadline of the agent's call to configure an interface; the agent itself gives up earlier.
const PATIENCE: Duration = Duration::from_secs(90);

/// The most queue pairs of an interface.
const MAX_QUEUES: u32 = 64;

/// Returns the first program or device that networks need and this host lacks. Returns `None` if
/// networks are possible.
pub fn missing() -> Option<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| dir.join("nft").is_file()) {
        return Some("the program nft");
    }
    (!std::path::Path::new("/dev/net/tun").exists()).then_some("/dev/net/tun")
}

fn refusal(status: Status) -> Error {
    Error::Network(Box::new(status))
}

/// Joins a recorded sandbox to the network that `spec` asks for, and records its interface.
///
/// # Errors
/// [`Error::Network`] if the networks' service refuses, [`Error::Invalid`] for a contradictory
/// `spec`, [`Error::File`] or [`Error::TooLarge`] if the record cannot be saved. The sandbox has no
/// interface then.
pub async fn join(node: &Node, sandbox: &Sandbox, spec: &RunSpec) -> Result<()> {
    if !spec.network_namespace.is_empty() {
        return namespace::join(node, sandbox, spec).await;
    }
    let nic = check_interface(spec)?;
    pooled::check(spec, nic)?;
    let mut network = process::or(&spec.network, &node.config.network);
    if network == AUTO {
        // A user who asks for anything of a network gets the networks' error about what is missing.
        let there = asks(spec) || sandbox.lane.run(missing).await.is_none();
        network = if there { DEFAULT } else { NONE }.to_owned();
    }
    if network == NONE {
        return check_without(spec);
    }
    let request = network_v1::JoinRequest {
        sandbox_id: sandbox.id.clone(),
        name: sandbox.name.clone(),
        network,
        mac: spec.mac.clone(),
        addresses: spec.addresses.clone(),
        publish: spec.publish.clone(),
    };
    let place = node.networks.clone().join(request).await.map_err(refusal)?.into_inner();
    let place = Network { pool: pooled::chosen(node, spec, nic), ..attached(place, spec, nic) };
    enter(node, sandbox, place).await
}

/// Returns the interface for the place that a sandbox has in a network.
fn attached(place: network_v1::Attachment, spec: &RunSpec, nic: Nic) -> Network {
    Network {
        name: place.network,
        switch: place.switch,
        mac: place.mac,
        ipv4: place.ipv4,
        ipv4_prefix: place.ipv4_prefix,
        ipv4_gateway: place.ipv4_gateway,
        ipv6: place.ipv6,
        ipv6_prefix: place.ipv6_prefix,
        ipv6_gateway: place.ipv6_gateway,
        mtu: place.mtu,
        name_servers: place.name_servers,
        published: place.published,
        mac_at_port: spec.mac_at_port,
        guest_mac: None,
        wait: spec.wait_network,
        queues: spec.queues,
        nic,
        interrupt_interval_ns: spec.interrupt_interval_ns,
        namespace: None,
        pool: None,
        further: Vec::new(),
    }
}

/// Returns whether `spec` asks for anything that only a sandbox in a network has.
fn asks(spec: &RunSpec) -> bool {
    let address = spec.mac_at_port || !(spec.mac.is_empty() && spec.addresses.is_empty());
    let function = !(spec.nic.is_empty() && spec.vf_pool.is_empty());
    let settings = spec.queues > 0 || spec.interrupt_interval_ns > 0 || spec.wait_network;
    let sockets = !spec.socket_engine.is_empty();
    address || function || settings || sockets || !spec.publish.is_empty()
}

/// Refuses what a sandbox without a network cannot have.
///
/// # Errors
/// [`Error::Invalid`].
fn check_without(spec: &RunSpec) -> Result<()> {
    let what = if !spec.socket_engine.is_empty() {
        "a sandbox whose sockets are devices needs a network, whose address they have"
    } else if asks(spec) {
        "a sandbox without a network has no addresses and publishes nothing"
    } else {
        return Ok(());
    };
    Err(Error::Invalid(what.to_owned()))
}

/// Gives a recorded sandbox, whose machine is saved, an interface that leads nowhere, and records
/// it. Its forks have other addresses.
///
/// # Errors
/// [`Error::Plane`]; [`Error::Invalid`] for a contradictory `spec`; those of saving the record.
pub async fn isolate(node: &Node, sandbox: &Sandbox, spec: &RunSpec, mtu: u32) -> Result<()> {
    let nic = check_interface(spec)?;
    let switch = isolated(&sandbox.id);
    let request = plane_v1::CreateSwitchRequest { name: switch.clone(), ..Default::default() };
    let made = node.plane.clone().create_switch(request).await;
    made.map_err(Error::plane)?;
    let (queues, mac) = (spec.queues, ISOLATED_MAC.to_owned());
    let name = ISOLATED.to_owned();
    enter(node, sandbox, Network { name, switch, mac, mtu, queues, nic, ..Network::default() })
        .await
}

/// Returns the name of the switch of a sandbox whose interface leads nowhere.
fn isolated(sandbox_id: &str) -> String {
    format!("{sandbox_id}.{ISOLATED}")
}

/// Checks the interface that `spec` asks for, and returns its kind.
fn check_interface(spec: &RunSpec) -> Result<Nic> {
    let nic: Nic = spec.nic.parse().map_err(Error::Invalid)?;
    if spec.queues > MAX_QUEUES {
        let what = format!("{} queues are too many: at most {MAX_QUEUES}", spec.queues);
        return Err(Error::Invalid(what));
    }
    if spec.queues > 1 && nic != Nic::Virtio {
        let what = "an e1000 has one queue pair: leave --queues out, or choose --nic virtio";
        return Err(Error::Invalid(what.to_owned()));
    }
    if spec.interrupt_interval_ns > 0 && nic == Nic::Virtio {
        let what = "only an e1000 has an interval between interrupts: choose --nic e1000 too";
        return Err(Error::Invalid(what.to_owned()));
    }
    if spec.mac_at_port && spec.template.is_empty() {
        let what = "only a sandbox that begins with a template keeps that one's MAC address: name \
                    one (--from), or leave --mac-at-port out";
        return Err(Error::Invalid(what.to_owned()));
    }
    if spec.interrupt_interval_ns > LONGEST_INTERVAL_NS {
        let what = "an interval between interrupts is at most 16.7 ms: choose a shorter one";
        return Err(Error::Invalid(what.to_owned()));
    }
    Ok(nic)
}

/// Returns the plane's word for a kind of interface.
fn model(nic: Nic) -> plane_v1::NetworkModel {
    match nic {
        Nic::Virtio => plane_v1::NetworkModel::Virtio,
        Nic::E1000 => plane_v1::NetworkModel::E1000,
        Nic::E1000Csb => plane_v1::NetworkModel::E1000Csb,
    }
}

/// Records the sandbox's interface, or gives it back.
async fn enter(node: &Node, sandbox: &Sandbox, place: Network) -> Result<()> {
    let recorded = sandbox.update(|record| record.network = Some(place)).await;
    if recorded.is_err() {
        let _ = leave(node, &sandbox.id).await;
    }
    recorded
}

/// Tells the networks' service which sandboxes may live. The interfaces and addresses of all others
/// become free. With records that could not be read (`all_read` is false), functions of pools stay
/// with their owners: the sandbox of such a record may live.
pub async fn reconcile(node: &Node, sandbox_ids: Vec<String>, all_read: bool) {
    if all_read {
        pooled::reconcile(node, sandbox_ids.clone()).await;
    }
    let mut live = sandbox_ids;
    let of_functions = pod_functions::members(node, &live, all_read).await;
    live.extend(of_functions);
    let request = network_v1::ReconcileRequest { sandbox_ids: live };
    if let Err(status) = node.networks.clone().reconcile(request).await {
        // Sandboxes without a network, and those of other networks, run even so.
        tracing::warn!(error = status.message(), "networks are not as they should be");
    }
}

async fn leave(node: &Node, id: &str) -> Result<()> {
    let request = network_v1::LeaveRequest { sandbox_id: id.to_owned() };
    node.networks.clone().leave(request).await.map(drop).map_err(refusal)
}

/// Returns the plane's id of the sandbox's network function.
pub fn function_id(sandbox_id: &str) -> String {
    format!("{sandbox_id}.net")
}

/// Returns the plane's id of the function that a sandbox has for its network.
pub fn function_of(record: &Record) -> String {
    let taken = record.network.as_ref().and_then(Network::taken);
    taken.map_or_else(|| function_id(&record.id), |taken| taken.id.clone())
}

/// Returns the plane's ids of all functions that a sandbox has for its network, in their order on
/// the bus.
pub fn functions_of(record: &Record) -> Vec<String> {
    let first = record.network.is_some().then(|| function_of(record));
    first.into_iter().chain(further::ids(record)).collect()
}

/// Returns the socket of the first network function, or `None` if the sandbox has no network.
fn socket(node: &Node, record: &Record) -> Option<PathBuf> {
    let network = record.network.as_ref()?;
    let own = || node.run_dir(&record.id).join("net.sock");
    Some(network.taken().map_or_else(own, |taken| taken.socket.clone()))
}

/// Returns the sockets of all network functions, in their order on the bus.
pub fn sockets(node: &Node, record: &Record) -> Vec<PathBuf> {
    socket(node, record).into_iter().chain(further::sockets(node, record)).collect()
}

/// Makes the plane serve the network functions, or takes one of a pool. When this returns, their
/// sockets accept the VMM. Returns the sockets in their order on the bus: none if the sandbox has
/// no network.
///
/// # Errors
/// [`Error::Plane`].
pub async fn serve(
    node: &Node,
    sandbox: &Sandbox,
    uid: u32,
    memory: &plane_v1::ClientMemory,
) -> Result<Vec<PathBuf>> {
    let record = &sandbox.record();
    let (Some(network), Some(own)) = (&record.network, socket(node, record)) else {
        return Ok(Vec::new());
    };
    let first = match pooled::take(node, sandbox, record, uid, memory).await? {
        Some(taken) => taken,
        None => {
            let id = function_id(&record.id);
            create(node, (id, own.as_path()), uid, memory, virtio_net(record, network)).await?;
            own
        }
    };
    let mut sockets = vec![first];
    sockets.extend(further::serve(node, record, uid, memory).await?);
    Ok(sockets)
}

/// Describes the function of a sandbox's first interface.
fn virtio_net(record: &Record, network: &Network) -> plane_v1::VirtioNet {
    let rates = network.rates();
    plane_v1::VirtioNet {
        switch: network.switch.clone(),
        mac: network.mac.clone(),
        peer_mac: network.guest_mac.clone().unwrap_or_default(),
        mtu: network.mtu,
        queue_pairs: if network.queues == 0 { record.cpus.boot } else { network.queues },
        addresses: network.addresses(),
        spoof_check: true,
        vlan: if network.namespace.is_some() { namespace::VLAN } else { 0 },
        model: model(network.nic).into(),
        interrupt_interval_ns: network.interrupt_interval_ns,
        max_rate: rates.max_rate,
        max_burst: rates.max_burst,
        receive_rate: rates.receive_rate,
        receive_burst: rates.receive_burst,
        ..Default::default()
    }
}

/// Makes the plane serve a function with this id at this socket.
async fn create(
    node: &Node,
    (id, socket): (String, &Path),
    uid: u32,
    memory: &plane_v1::ClientMemory,
    virtio_net: plane_v1::VirtioNet,
) -> Result<()> {
    let request = plane_v1::CreateEndpointRequest {
        id,
        socket_path: socket.to_string_lossy().into_owned(),
        owner: Some(plane_v1::Owner { uid, gid: uid }),
        nvme: None,
        memory: Some(*memory),
        virtio_net: Some(virtio_net),
    };
    let created = node.plane.clone().create_endpoint(request).await;
    created.map(drop).map_err(Error::plane)
}

/// Removes the first network function, unless it is of a pool. The sandbox keeps its addresses. A
/// missing function is no error.
///
/// # Errors
/// [`Error::Plane`].
pub async fn remove_first(node: &Node, record: &Record) -> Result<()> {
    node.remove_functions(std::iter::once(function_id(&record.id))).await
}

/// Removes the network functions and releases the interfaces. Missing ones are no error.
///
/// # Errors
/// The first failure. The rest is released even so.
pub async fn release(node: &Node, record: &Record) -> Result<()> {
    let removed = remove_first(node, record).await;
    if record.saving.is_for_template() {
        // Not there if its interface is in a network.
        let request = plane_v1::RemoveSwitchRequest { name: isolated(&record.id) };
        let _ = node.plane.clone().remove_switch(request).await;
    }
    let returned = pooled::give_back(node, record).await;
    // The interface is released even if it was not recorded: a daemon may have been killed before
    // it was.
    let further = further::remove(node, record).await;
    removed.and(further).and(returned).and(leave(node, &record.id).await)
}

/// Returns the name servers and addresses for the container's name service files. Returns `None` if
/// the sandbox has no network.
pub fn names(record: &Record) -> Option<agent_v1::Names> {
    let network = record.network.as_ref()?;
    Some(agent_v1::Names { servers: network.name_servers.clone(), addresses: network.addresses() })
}

/// The interfaces of a sandbox that are being configured. Dropping this does not stop the
/// configuration.
pub struct Configuring(JoinHandle<Result<()>>);

impl Configuring {
    /// Waits until the interfaces are usable.
    ///
    /// # Errors
    /// [`Error::Agent`] with the agent's message.
    pub async fn done(self) -> Result<()> {
        self.0.await.unwrap_or_else(|error| Err(Error::Agent(error.to_string())))
    }
}

/// Starts a task in which the agent configures the interfaces, while the caller goes on. Returns
/// `None` if the sandbox has no interface. `saved_mac` is the address that the first interface has
/// until then, in a fork.
pub fn begin(
    sandbox: &Arc<Sandbox>,
    agent: &Agent,
    record: &Record,
    saved_mac: Option<String>,
) -> Option<Configuring> {
    let mut first = wanted(record)?;
    first.saved_mac = saved_mac.or_else(|| pooled::other_mac(record)).unwrap_or_default();
    let further: Vec<_> = further::of(record).iter().map(namespace::further_settings).collect();
    let interface = record.network.as_ref().and_then(|network| network.namespace.as_ref());
    if let Some(interface) = interface.filter(|_| !further.is_empty()) {
        // The guest's kernel may have found another one first.
        first.name.clone_from(&interface.interface);
    }
    let (sandbox, agent) = (Arc::clone(sandbox), agent.clone());
    let turn = Arc::clone(&sandbox.configuring).try_lock_owned();
    Some(Configuring(tokio::spawn(async move {
        let _turn = turn;
        let configured = configure_all(&sandbox, &agent, first, further).await;
        if let Err(error) = &configured
            && !sandbox.is_stopping()
            && sandbox.state().is_live()
        {
            tracing::warn!(sandbox = sandbox.name, %error, "it has no network");
        }
        configured
    })))
}

/// Returns the settings of a sandbox's first interface. One that the VMM emulates gets no address:
/// its user gives it some.
fn wanted(record: &Record) -> Option<agent_v1::ConfigureNetworkRequest> {
    let Some(network) = &record.network else {
        let mac = record.emulated_nic.as_ref()?.mac.clone();
        return Some(agent_v1::ConfigureNetworkRequest { mac, ..Default::default() });
    };
    Some(match &network.namespace {
        Some(interface) => namespace::settings((network.mac.as_str(), network.mtu), interface),
        None => settings(network),
    })
}

/// Configures interfaces one after the other. The stage of the timeline is that of the first.
async fn configure_all(
    sandbox: &Sandbox,
    agent: &Agent,
    first: agent_v1::ConfigureNetworkRequest,
    further: Vec<agent_v1::ConfigureNetworkRequest>,
) -> Result<()> {
    let begun = monotonic_ns();
    let reply = configure(agent, first).await?;
    let stages = match reply.stage {
        Some(stage) => stages(&[stage], reply.boottime_ns, monotonic_ns()),
        // An agent of an earlier version.
        None => agent.hello().await?.stages,
    };
    if let Some(stage) = stages.iter().find(|stage| stage.name == STAGE) {
        sandbox.record_stage(stage.name, stage.since(begun), None);
    }
    for request in further {
        configure(agent, request).await?;
    }
    Ok(())
}

async fn configure(
    agent: &Agent,
    request: agent_v1::ConfigureNetworkRequest,
) -> Result<agent_v1::ConfigureNetworkReply> {
    let configure =
        |mut client: AgentClient<_>| async move { client.configure_network(request).await };
    agent.call_within(Some(PATIENCE), configure).await
}

/// Has an adopted sandbox's driver start its interface anew, if the plane has reset it: an e1000
/// does not go on where its predecessor was, and its driver may never look. Beside everything else.
pub fn restart(sandbox: &Arc<Sandbox>, agent: &Agent) {
    let Some(network) = sandbox.record().network.filter(|network| network.nic != Nic::Virtio)
    else {
        return;
    };
    let (sandbox, agent) = (Arc::clone(sandbox), agent.clone());
    tokio::spawn(async move {
        if let Err(error) = agent.restart_interface(network.mac_in_guest().to_owned()).await {
            tracing::warn!(sandbox = sandbox.name, %error, "its interface does not go on");
        }
    });
}

/// Returns the settings of an interface in a network.
fn settings(network: &Network) -> agent_v1::ConfigureNetworkRequest {
    let address =
        |address: &String, prefix| agent_v1::InterfaceAddress { address: address.clone(), prefix };
    agent_v1::ConfigureNetworkRequest {
        mac: network.mac_in_guest().to_owned(),
        addresses: vec![
            address(&network.ipv4, network.ipv4_prefix),
            address(&network.ipv6, network.ipv6_prefix),
        ],
        gateways: vec![network.ipv4_gateway.clone(), network.ipv6_gateway.clone()],
        mtu: network.mtu,
        ..Default::default()
    }
}
