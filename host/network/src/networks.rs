//! The networks of a node.
//!
//! [`Networks`] is the object that the service calls. Its operations are in modules by what they
//! are about:
//! - `table`: the state that all of them share, under one lock;
//! - `creation`: how a network is chosen and entered into the ledger;
//! - `members`: sandboxes that join networks and leave them; `saves`: how their leases are written;
//! - `switches`: how a network comes up and goes down; `rules_in_force`: the packet filter's rules
//!   and the host's forwarding; `serving`: the thread of names and published ports;
//! - `reconciliation`: what the next daemon does with what an earlier one left;
//! - `attachments`, with `attachment_request` and `functions`: interfaces of containers;
//!   `namespaces`: interfaces that somebody else made; `ports`: memory ports;
//! - `description`: networks and leases as replies; `turns`: locks by name; `at_once`: operations
//!   of which a number goes on at once.

mod at_once;
mod attachment_request;
mod attachments;
mod creation;
mod description;
mod functions;
mod members;
mod namespaces;
mod ports;
mod reconciliation;
mod rules_in_force;
mod saves;
mod serving;
mod switches;
mod table;
mod turns;

use std::path::PathBuf;

use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::{PlaneClient, VfClient};
use tokio::sync::Mutex;

use self::serving::ServerThread;
use self::table::NetworkTable;
use crate::attachment::Store;
use crate::forwarding::Forwarding;
use crate::ledger::{Ledger, Network};
use crate::reach::Policy;
use crate::{Error, Result};

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
    turns: turns::NamedLocks,
    /// Locks for writing a network's leases, by its name. Each is taken before `state` is locked.
    lease_locks: turns::NamedLocks,
    plane: PlaneClient,
    /// The pools of functions that attachments may have.
    functions: Option<VfClient>,
    /// The thread that serves names and published ports. It serves nothing else: a sandbox that
    /// floods it keeps nobody from managing sandboxes.
    serving: ServerThread,
    state: Mutex<NetworkTable>,
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
            table.enter_attachment(&id, &one);
        }
        Ok(Self {
            settings,
            forwarding,
            ledger,
            attachments,
            turns: turns::NamedLocks::default(),
            lease_locks: turns::NamedLocks::default(),
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

    /// Removes a network that is not in use, with all that was made for it.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Used`], [`Error::HasPorts`], and failures of the packet filter
    /// or the ledger.
    pub async fn remove(&self, name: &str) -> Result<()> {
        let _turn = self.lease_locks.take(name).await;
        let mut state = self.state.lock().await;
        check_unused(state.find(name)?)?;
        if state.is_up(name) {
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
}

/// Checks that a network has no leases and no memory ports.
///
/// # Errors
/// [`Error::Used`], [`Error::HasPorts`].
fn check_unused(network: &Network) -> Result<()> {
    let name = || network.name.clone();
    if !network.leases.is_empty() {
        let sandboxes = network.leases.values().map(|lease| lease.name.clone()).collect();
        return Err(Error::Used { network: name(), sandboxes });
    }
    if !network.ports.is_empty() {
        let ports = network.ports.keys().cloned().collect();
        return Err(Error::HasPorts { network: name(), ports });
    }
    Ok(())
}
