//! The networks of a node.
//!
//! Over 500 lines: the operations on networks, under one lock.

mod attachment_request;
mod attachments;
mod functions;
mod namespaces;
mod ports;
mod saves;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::v1 as plane_v1;
use slipway_plane_api::{PlaneClient, VfClient};
use tokio::sync::{Mutex, MutexGuard};
use tonic::Code;

use self::namespaces::{blocking, keys};
use crate::allocate::{self, AddressRequest, choose};
use crate::attachment::{Attachment, Store};
use crate::dns::{Server, Zone};
use crate::forwarding::Forwarding;
use crate::host::{self, Surroundings};
use crate::ledger::{Ledger, Network, Uplink};
use crate::publish::{MAX_PORTS, Published};
use crate::reach::Policy;
use crate::{DEFAULT_NETWORK, Error, MTU, NO_NETWORK, OnlyForSandboxes, Result, nft, proxy, rules};

const DNS_PORT: u16 = 53;

/// The node's settings for networks.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The directory of the ledger.
    pub dir: PathBuf,
    /// The directory of the sockets of memory ports.
    pub ports_dir: PathBuf,
    /// The name of the packet filter's table; another daemon on the host uses another table.
    pub table: String,
    /// The file that names the host's resolvers: `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
    /// The addresses beyond the host that sandboxes may reach.
    pub reach: Policy,
    /// The file that records the former state of the host's forwarding switches. All daemons of a
    /// host share it, in a directory that is empty after the machine's start ([`FORWARDING_FILE`]).
    /// The cookie of the network namespace is added to its name.
    pub forwarding: PathBuf,
}

/// The usual path of the record of the host's forwarding switches that were changed.
pub const FORWARDING_FILE: &str = "/run/slipway/forwarding.json";

/// All networks of a node.
pub struct Networks {
    settings: Settings,
    forwarding: Forwarding,
    ledger: Ledger,
    attachments: Store,
    /// Locks that have operations on one attachment run one after the other.
    turns: turns::AttachmentLocks,
    /// Locks for writing a network's leases, by its name. Each is taken before `state` is locked.
    lease_locks: turns::AttachmentLocks,
    plane: PlaneClient,
    /// The pools of functions that attachments may have.
    functions: Option<VfClient>,
    /// A thread of their own serves names and published ports: a sandbox that floods it keeps
    /// nobody from managing sandboxes.
    serving: ServerThread,
    state: Mutex<NetworkTable>,
}

#[derive(Default)]
struct NetworkTable {
    networks: BTreeMap<String, Network>,
    /// The networks that are up.
    up: BTreeMap<String, Up>,
    /// Interfaces in namespaces of others, by their keys.
    uplinks: BTreeMap<String, Uplink>,
    /// Interfaces of containers, by id; their leases are in their networks.
    attachments: BTreeMap<String, Attachment>,
    /// The rules in force; `None` if they are unknown.
    rules: Option<String>,
    /// The families that forwarding was switched on for; `None` if it is as it was before, or
    /// unknown.
    forwards: Option<OnlyForSandboxes>,
}

/// The resources of a network that is up, besides its switch, interface and rules.
struct Up {
    names: Server,
    /// Published ports by sandbox.
    ports: BTreeMap<String, proxy::Proxy>,
}

impl Networks {
    /// Opens the ledger. No network is up until [`Networks::reconcile`] is called.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Host`].
    pub fn open(settings: Settings, plane: PlaneClient) -> Result<Self> {
        let forwarding = Forwarding::new(&settings.forwarding)?;
        let ledger = Ledger::open(&settings.dir)?;
        let networks = ledger.load()?.into_iter().map(|one| (one.name.clone(), one)).collect();
        let serving = ServerThread::start().map_err(Error::host("no thread for networks"))?;
        let uplinks = ledger.load_uplinks()?;
        let mut table = NetworkTable { networks, uplinks, ..NetworkTable::default() };
        let attachments = Store::open(&settings.dir)?;
        for (id, one) in attachments.load()? {
            attachments::enter(&mut table, &id, &one, one.lease.clone());
        }
        Ok(Self {
            settings,
            forwarding,
            ledger,
            attachments,
            turns: turns::AttachmentLocks::default(),
            lease_locks: turns::AttachmentLocks::default(),
            plane,
            functions: None,
            serving,
            state: Mutex::new(table),
        })
    }

    /// Makes a network; it comes up when a sandbox joins it.
    ///
    /// # Errors
    /// [`Error`]; nothing is left of the network then.
    pub async fn create(&self, request: &v1::CreateNetworkRequest) -> Result<v1::Network> {
        let mut state = self.state.lock().await;
        self.make(&mut state, request)?;
        self.describe(&state, &request.name)
    }

    /// Makes the default network if `name` is its name and it does not exist.
    fn make_default(&self, state: &mut NetworkTable, name: &str) -> Result<()> {
        if name != DEFAULT_NETWORK || state.networks.contains_key(name) {
            return Ok(());
        }
        let default = v1::CreateNetworkRequest { name: name.to_owned(), ..Default::default() };
        self.make(state, &default)
    }

    /// Makes a network of a request, and enters it in the ledger and in `state`. It is not brought
    /// up: its first sandbox, container or port does that.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Invalid`] for what cannot be had; the error of the ledger.
    fn make(&self, state: &mut NetworkTable, request: &v1::CreateNetworkRequest) -> Result<()> {
        check_name(&request.name)?;
        if state.networks.contains_key(&request.name) {
            return Err(Error::Exists(request.name.clone()));
        }
        let mut around = Surroundings::look("")?;
        state.networks.values().for_each(|network| around.add(network));
        let subnet = match request.subnet.as_str() {
            "" => around.free_subnet()?,
            text => allocate::subnet(text)?,
        };
        let prefix = match request.ipv6_subnet.as_str() {
            "" => around.free_prefix()?,
            text => allocate::prefix(text)?,
        };
        around.check(subnet.into())?;
        around.check(prefix.into())?;
        let mut network = Network::new(request.name.clone(), around.free_device(), subnet, prefix);
        if !request.gateway.is_empty() {
            network.gateway = allocate::gateway(&request.gateway, subnet)?;
        }
        if request.mtu != 0 {
            if !MTU.contains(&request.mtu) {
                let (least, most) = (MTU.start(), MTU.end());
                return Err(Error::Invalid(format!(
                    "an MTU of {} is not possible: {least} to {most} bytes",
                    request.mtu
                )));
            }
            network.mtu = request.mtu;
        }
        network.internal = request.internal;
        self.ledger.save(&network)?;
        state.networks.insert(network.name.clone(), network);
        Ok(())
    }

    /// Removes a network that is not in use, with all that was made for it.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Used`], [`Error::HasPorts`], and failures of the packet filter
    /// or the ledger.
    pub async fn remove(&self, name: &str) -> Result<()> {
        let _turn = self.lease_locks.take(name).await;
        let mut state = self.state.lock().await;
        let network = find(&state, name)?;
        if !network.leases.is_empty() {
            let sandboxes = network.leases.values().map(|lease| lease.name.clone()).collect();
            return Err(Error::Used { network: name.to_owned(), sandboxes });
        }
        if !network.ports.is_empty() {
            let ports = network.ports.keys().cloned().collect();
            return Err(Error::HasPorts { network: name.to_owned(), ports });
        }
        if state.up.contains_key(name) {
            self.take_down(&mut state, name).await;
            self.apply(&mut state).await?;
        }
        self.ledger.remove(name)?;
        state.networks.remove(name);
        Ok(())
    }

    /// Describes a network as it is now.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub async fn get(&self, name: &str) -> Result<v1::Network> {
        self.describe(&*self.state.lock().await, name)
    }

    /// Describes all networks, by name.
    pub async fn list(&self) -> Vec<v1::Network> {
        let state = self.state.lock().await;
        state.networks.keys().filter_map(|name| self.describe(&state, name).ok()).collect()
    }

    /// Adds a sandbox to a network, and makes the default network if it does not exist.
    ///
    /// # Errors
    /// [`Error`]; the sandbox has no lease then.
    pub async fn join(&self, request: &v1::JoinRequest) -> Result<v1::Attachment> {
        let wish = AddressRequest::parse(&request.addresses, &request.mac)?;
        let wanted = ports(&request.publish)?;
        let mut state = self.state.lock().await;
        let (id, name) = (&request.sandbox_id, &request.network);
        self.make_default(&mut state, name)?;
        let network = find(&state, name)?;
        if network.internal && !wanted.is_empty() {
            return Err(Error::Invalid(format!(
                "the network \"{name}\" is internal: nothing in it can be published"
            )));
        }
        let mut lease = choose(network, &request.name, &wish)?;
        let claimed = proxy::claim(&wanted)?;
        lease.published.clone_from(&claimed.published);
        if !state.up.contains_key(name) {
            self.bring_up(&mut state, name).await?;
        }
        let served = claimed.serve(lease.ipv4, lease.ipv6, &self.serving.handle)?;
        if let Some(network) = state.networks.get_mut(name) {
            network.leases.insert(id.clone(), lease);
        }
        // Before others can have the table: if the sandbox leaves, its ports are free.
        if let Some(up) = state.up.get_mut(name) {
            up.ports.insert(id.clone(), served);
        }
        let settled = self.settle(state, name).await;
        let mut state = self.state.lock().await;
        if let Err(error) = settled {
            if let Some(network) = state.networks.get_mut(name) {
                network.leases.remove(id);
            }
            if let Some(up) = state.up.get_mut(name) {
                up.ports.remove(id);
            }
            // The first failure is reported; a second one adds nothing.
            let _ = self.settle(state, name).await;
            return Err(error);
        }
        describe_lease(find(&state, name)?, id)
    }

    /// Removes the sandbox `id` from its network. In a namespace that somebody else made, the
    /// interface goes back to its maker. In a network of Slipway's, the lease ends, and its
    /// addresses and published ports are free. A network that never came up is taken down with its
    /// last sandbox.
    ///
    /// # Errors
    /// [`Error`] of the ledger or the packet filter; the addresses are free all the same.
    async fn leave_one(&self, id: &str) -> Result<()> {
        self.leave_namespace(id).await?;
        let mut state = self.state.lock().await;
        let has_lease = |network: &&mut Network| network.leases.contains_key(id);
        let Some(network) = state.networks.values_mut().find(has_lease) else { return Ok(()) };
        network.leases.remove(id);
        let name = network.name.clone();
        if let Some(up) = state.up.get_mut(&name) {
            up.ports.remove(id);
        } else if !find(&state, &name)?.is_used() {
            // The network never came up for its sandboxes, and this was the last one.
            self.take_down(&mut state, &name).await;
        }
        self.settle(state, &name).await
    }

    /// Makes networks what the ledger says, for a daemon that has just started. `live` are the ids
    /// of the sandboxes that go on: the leases of all others are freed. Networks that are in use
    /// are brought up, and what is left of others on the host is removed. Attachments whose
    /// namespace is gone are freed, and the others get their ports again.
    ///
    /// # Errors
    /// The first error; the rest was done all the same.
    pub async fn reconcile(&self, live: &BTreeSet<String>) -> Result<()> {
        let live: BTreeSet<String> = live.iter().flat_map(|id| keys(id)).collect();
        let mut outcome = self.reconcile_namespaces(&live).await;
        self.catch_up().await;
        self.drop_lost_attachments().await;
        self.drop_lost_functions().await;
        outcome = outcome.and(self.reconcile_networks(&live).await);
        outcome.and(self.reconnect_attachments().await)
    }

    async fn reconcile_networks(&self, live: &BTreeSet<String>) -> Result<()> {
        let mut outcome = Ok(());
        let mut state = self.state.lock().await;
        let names: Vec<String> = state.networks.keys().cloned().collect();
        let mut freed = Vec::new();
        for name in names {
            freed.extend(free_leases(&mut state, &name, live).map(|change| (name.clone(), change)));
            let done = self.reconcile_one(&mut state, &name).await;
            outcome = outcome.and(done);
        }
        // Even if no network is up: the rules of the last daemon may be in force. Without networks,
        // it or a daemon with others may have been killed, or have left switches on with the rule
        // that drops what others would have forwarded.
        if !state.networks.is_empty() || self.forwarding.is_recorded() {
            outcome = outcome.and(self.apply(&mut state).await);
        }
        drop(state);
        for (name, change) in freed {
            outcome = outcome.and(self.save_leases(&name, change).await);
        }
        outcome
    }

    async fn reconcile_one(&self, state: &mut NetworkTable, name: &str) -> Result<()> {
        let Some(network) = state.networks.get(name) else { return Ok(()) };
        if !network.is_used() {
            let device = network.device.clone();
            return if state.up.contains_key(name) { Ok(()) } else { host::remove(&device) };
        }
        if state.up.contains_key(name) {
            return Ok(());
        }
        self.bring_up(state, name).await
    }

    /// Takes down each network that is up and has no lease, for a daemon that ends. A network whose
    /// sandboxes outlive the daemon stays up, and the ledger stays as it is.
    pub async fn close(&self) {
        let mut state = self.state.lock().await;
        let unused = |name: &&String| find(&state, name).is_ok_and(|one| one.leases.is_empty());
        let names: Vec<String> = state.up.keys().filter(unused).cloned().collect();
        let any = !names.is_empty();
        for name in names {
            self.take_down(&mut state, &name).await;
        }
        if any && let Err(error) = self.apply(&mut state).await {
            tracing::warn!(%error, "rules of networks are left");
        }
    }

    /// Brings a network up: its switch with the host's end, its addresses, its names, its rules.
    async fn bring_up(&self, state: &mut NetworkTable, name: &str) -> Result<()> {
        let network = find(state, name)?.clone();
        let around = Surroundings::look(&network.device)?;
        around.check(network.subnet.into())?;
        around.check(network.prefix.into())?;
        let request = plane_v1::CreateSwitchRequest {
            name: name.to_owned(),
            tap: network.device.clone(),
            uplink: None,
        };
        match self.plane.clone().create_switch(request).await {
            // An earlier attempt made the switch, and left it to the sandboxes that are on it.
            Err(status) if status.code() != Code::AlreadyExists => {
                return Err(Error::Plane(status.message().to_owned()));
            }
            _ => {}
        }
        let up = async {
            host::set_up(&network)?;
            let gateways = [IpAddr::V4(network.gateway), IpAddr::V6(network.gateway6())];
            let there = host::has(&gateways)?;
            let addresses: Vec<_> =
                there.into_iter().map(|address| SocketAddr::new(address, DNS_PORT)).collect();
            let resolv_conf = self.settings.resolv_conf.clone();
            let names =
                Server::start(&addresses, Zone::of(&network), resolv_conf, &self.serving.handle)?;
            state.up.insert(name.to_owned(), Up { names, ports: BTreeMap::new() });
            self.open_ports(&network).await;
            self.apply(state).await
        };
        let outcome = up.await;
        self.publish_again(state, &network);
        // Sandboxes that outlived the last daemon are on the switch and still reach each other:
        // keep it, and let the next sandbox that joins try again.
        if outcome.is_err() && network.leases.is_empty() {
            self.take_down(state, name).await;
            // The first failure is reported; a second one adds nothing.
            let _ = self.apply(state).await;
        }
        outcome
    }

    /// Serves the published ports of the sandboxes that the network already has.
    fn publish_again(&self, state: &mut NetworkTable, network: &Network) {
        let Some(up) = state.up.get_mut(&network.name) else { return };
        for (id, lease) in &network.leases {
            let claimed = proxy::claim(&lease.published);
            let served =
                claimed.and_then(|ok| ok.serve(lease.ipv4, lease.ipv6, &self.serving.handle));
            match served {
                Ok(served) => drop(up.ports.insert(id.clone(), served)),
                // Another program took the port while no daemon ran: the packet filter redirects
                // packets to the sandbox all the same.
                Err(error) => {
                    tracing::warn!(%error, sandbox = lease.name, "published in part")
                }
            }
        }
    }

    async fn take_down(&self, state: &mut NetworkTable, name: &str) {
        if let Some(up) = state.up.remove(name) {
            up.names.stop().await;
        }
        let request = plane_v1::RemoveSwitchRequest { name: name.to_owned() };
        match self.plane.clone().remove_switch(request).await {
            Err(status) if status.code() != Code::NotFound => {
                tracing::warn!(network = name, error = status.message(), "its switch is left");
            }
            _ => {}
        }
        let removed = find(state, name).and_then(|network| host::remove(&network.device));
        if let Err(error) = removed {
            tracing::warn!(network = name, %error, "its interface is left");
        }
    }

    /// Updates the names, the rules and the ledger after a change of a network's leases. Others may
    /// have the table of networks while the ledger is written.
    async fn settle(&self, mut state: MutexGuard<'_, NetworkTable>, name: &str) -> Result<()> {
        let change = note_change(&mut state, name)?;
        let applied = self.apply(&mut state).await;
        drop(state);
        self.save_leases(name, change).await.and(applied)
    }

    /// Applies the rules for the networks that are up, unless they are in force, and makes the host
    /// forward while a network has a way out. The rules that limit forwarding are there before it
    /// is switched on and until it is off.
    async fn apply(&self, state: &mut NetworkTable) -> Result<()> {
        let forwarding = &self.forwarding;
        let up = state.networks.values().filter(|network| state.up.contains_key(&network.name));
        let up: Vec<&Network> = up.collect();
        let leads_out = up.iter().any(|network| !network.internal);
        let only = match leads_out {
            true => forwarding.only_for_sandboxes()?,
            false => {
                state.forwards = None;
                stop_forwarding(forwarding, devices(&up)).await
            }
        };
        let Settings { table, reach, .. } = &self.settings;
        let rules = rules::ruleset(table, &up, reach, only);
        if state.rules.as_ref() != Some(&rules) {
            nft::apply(&rules).await?;
            state.rules = Some(rules);
        }
        if leads_out && state.forwards != Some(only) {
            let forwarding = forwarding.clone();
            blocking(move || forwarding.open(only)).await?;
            state.forwards = Some(only);
        }
        Ok(())
    }

    fn describe(&self, state: &NetworkTable, name: &str) -> Result<v1::Network> {
        let network = find(state, name)?;
        let members = network.leases.iter().map(|(id, lease)| v1::Member {
            sandbox_id: id.clone(),
            name: lease.name.clone(),
            mac: lease.mac.to_string(),
            ipv4: lease.ipv4.to_string(),
            ipv6: lease.ipv6.to_string(),
            published: lease.published.iter().map(ToString::to_string).collect(),
            container: state.attachments.get(id).map(|one| one.key.describe()),
            namespace: state.attachments.get(id).map(|one| one.path()).unwrap_or_default(),
        });
        let ports = network.ports.keys().filter_map(|name| self.describe_port(network, name).ok());
        Ok(v1::Network {
            name: network.name.clone(),
            device: network.device.clone(),
            subnet: network.subnet.to_string(),
            gateway: network.gateway.to_string(),
            ipv6_subnet: network.prefix.to_string(),
            ipv6_gateway: network.gateway6().to_string(),
            mtu: network.mtu,
            internal: network.internal,
            created_ns: network.created_ns,
            members: members.collect(),
            up: state.up.contains_key(name),
            ports: ports.collect(),
        })
    }
}

/// The thread on which networks are served. Dropping it ends all tasks and frees their addresses.
struct ServerThread {
    handle: tokio::runtime::Handle,
    /// The sender that stops the thread, and the thread.
    running: Option<(tokio::sync::oneshot::Sender<()>, std::thread::JoinHandle<()>)>,
}

impl ServerThread {
    fn start() -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new().name("networks".to_owned()).spawn(move || {
            // Ends, with all tasks, when the sender is dropped.
            let _ = runtime.block_on(stopped);
            // The calls that may block on a file system end later.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, running: Some((stop, thread)) })
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            // The next server has the same addresses.
            let _ = thread.join();
        }
    }
}

fn devices(networks: &[&Network]) -> BTreeSet<String> {
    networks.iter().map(|network| network.device.clone()).collect()
}

/// Restores the host's forwarding switches, unless daemons with other interfaces than `own` use
/// them. Returns the families of which all packets must be dropped even so: none, unless a switch
/// may have stayed on.
async fn stop_forwarding(forwarding: &Forwarding, own: BTreeSet<String>) -> OnlyForSandboxes {
    let its = forwarding.clone();
    let Err(error) = blocking(move || its.close(&own)).await else {
        return OnlyForSandboxes::default();
    };
    tracing::warn!(%error, "the host goes on forwarding until the next change");
    forwarding.only_after_failure()
}

/// Frees the leases of all sandboxes of a network but `live`. Returns the number of the change;
/// returns `None` if nothing was freed.
fn free_leases(state: &mut NetworkTable, name: &str, live: &BTreeSet<String>) -> Option<u64> {
    let network = state.networks.get_mut(name)?;
    let before = network.leases.len();
    network.leases.retain(|id, lease| lease.attached || live.contains(id));
    let freed = network.leases.len() < before;
    freed.then(|| note_change(state, name).ok()).flatten()
}

/// Counts a change of a network's leases, and has the network's names follow it. Returns the number
/// of the change, for [`Networks::save_leases`].
fn note_change(state: &mut NetworkTable, name: &str) -> Result<u64> {
    let unknown = || Error::Unknown(name.to_owned());
    let network = state.networks.get_mut(name).ok_or_else(unknown)?;
    network.changes += 1;
    if let Some(up) = state.up.get(name) {
        up.names.set(Zone::of(network));
    }
    Ok(network.changes)
}

fn find<'a>(state: &'a NetworkTable, name: &str) -> Result<&'a Network> {
    state.networks.get(name).ok_or_else(|| Error::Unknown(name.to_owned()))
}

/// Checks that a name can be a file name and a DNS label, and is no reserved word of the command
/// line.
fn check_name(name: &str) -> Result<()> {
    let bad =
        |why: &str| Err(Error::Invalid(format!("\"{name}\" is no name for a network: {why}")));
    let ordinary = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !begins || name.len() > 32 || !name.bytes().all(ordinary) {
        return bad("letters, digits, '-' and '_', at most 32, the first a letter or a digit");
    }
    if [NO_NETWORK, "host"].contains(&name) {
        return bad("the word stands for something else");
    }
    Ok(())
}

fn ports(texts: &[String]) -> Result<Vec<Published>> {
    let mut all = Vec::new();
    for text in texts {
        all.extend(Published::parse(text)?);
    }
    if all.len() > MAX_PORTS {
        return Err(Error::Invalid(format!("a sandbox publishes at most {MAX_PORTS} ports")));
    }
    Ok(all)
}

/// Describes the lease `id` of a network for the sandbox that has it.
///
/// # Errors
/// [`Error::Unknown`] if the network has no such lease.
fn describe_lease(network: &Network, id: &str) -> Result<v1::Attachment> {
    let lease = network.leases.get(id).ok_or_else(|| Error::Unknown(network.name.clone()))?;
    Ok(v1::Attachment {
        network: network.name.clone(),
        switch: network.name.clone(),
        mac: lease.mac.to_string(),
        ipv4: lease.ipv4.to_string(),
        ipv4_prefix: network.subnet.prefix_len().into(),
        ipv4_gateway: network.gateway.to_string(),
        ipv6: lease.ipv6.to_string(),
        ipv6_prefix: network.prefix.prefix_len().into(),
        ipv6_gateway: network.gateway6().to_string(),
        mtu: network.mtu,
        name_servers: vec![network.gateway.to_string()],
        published: lease.published.iter().map(ToString::to_string).collect(),
        ..Default::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_networks() {
        for good in ["default", "a", "A_b-9", &"x".repeat(32)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "none", "host", "a.b", "a/b", "-a", "a b", &"x".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
