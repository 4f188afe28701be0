//! The state of all networks, which the operations share under one lock.

use std::collections::{BTreeMap, BTreeSet};

use crate::attachment::Attachment;
use crate::dns::{Server, Zone};
use crate::ledger::{Lease, Network, Uplink};
use crate::{Error, OnlyForSandboxes, Result, proxy};

/// The networks, their parts that are up, and the interfaces of containers and sandboxes.
#[derive(Default)]
pub(super) struct NetworkTable {
    pub(super) networks: BTreeMap<String, Network>,
    /// The networks that are up.
    pub(super) up: BTreeMap<String, Up>,
    /// Interfaces in namespaces of others, by their keys.
    pub(super) uplinks: BTreeMap<String, Uplink>,
    /// Interfaces of containers, by id; their leases are in their networks.
    pub(super) attachments: BTreeMap<String, Attachment>,
    /// The rules in force; `None` if they are unknown.
    pub(super) rules: Option<String>,
    /// The families that forwarding was switched on for; `None` if it is as it was before, or
    /// unknown.
    pub(super) forwards: Option<OnlyForSandboxes>,
}

/// The resources of a network that is up, besides its switch, interface and rules.
pub(super) struct Up {
    pub(super) names: Server,
    /// Published ports by sandbox.
    pub(super) ports: BTreeMap<String, proxy::Proxy>,
}

impl NetworkTable {
    /// Returns the network of this name.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub(super) fn find(&self, name: &str) -> Result<&Network> {
        self.networks.get(name).ok_or_else(|| Error::Unknown(name.to_owned()))
    }

    /// Returns whether a network is up.
    pub(super) fn is_up(&self, name: &str) -> bool {
        self.up.contains_key(name)
    }

    /// Returns the networks that are up, by name.
    pub(super) fn networks_up(&self) -> Vec<&Network> {
        self.networks.values().filter(|network| self.is_up(&network.name)).collect()
    }

    /// Enters a sandbox's lease of a network, with its name and the servers of its published ports.
    /// The other names stay as they are, since a network may have thousands. If another lease has
    /// the name, all names are made anew, by which it is decided who has it.
    pub(super) fn insert_lease(
        &mut self,
        network: &str,
        id: &str,
        lease: Lease,
        served: proxy::Proxy,
    ) {
        let Some(entry) = self.networks.get_mut(network) else { return };
        let up = self.up.get_mut(network);
        let is_new = up.as_ref().is_some_and(|up| up.names.add_new(id, &lease));
        let former = entry.leases.insert(id.to_owned(), lease);
        if let Some(up) = up {
            up.ports.insert(id.to_owned(), served);
            if !is_new || former.is_some() {
                up.names.set(Zone::of(entry));
            }
        }
    }

    /// Removes a lease of a network with its names, and ends the servers of its published ports.
    /// Returns the lease, or `None` if there is none.
    pub(super) fn remove_lease(&mut self, network: &str, id: &str) -> Option<Lease> {
        let lease = self.networks.get_mut(network)?.leases.remove(id);
        if let Some(up) = self.up.get_mut(network) {
            up.ports.remove(id);
            if let Some(lease) = &lease {
                up.names.remove(id, lease);
            }
        }
        lease
    }

    /// Frees the leases of all sandboxes of a network but `live`. Returns the number of the change;
    /// returns `None` if nothing was freed.
    pub(super) fn free_leases(&mut self, name: &str, live: &BTreeSet<String>) -> Option<u64> {
        let network = self.networks.get_mut(name)?;
        let before = network.leases.len();
        network.leases.retain(|id, lease| lease.attached || live.contains(id));
        if network.leases.len() == before {
            return None;
        }
        if let Some(up) = self.up.get(name) {
            up.names.set(Zone::of(network));
        }
        self.note_change(name).ok()
    }

    /// Counts a change of a network's leases. Returns the number of the change, for
    /// [`Networks::save_leases`](super::Networks::save_leases).
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub(super) fn note_change(&mut self, name: &str) -> Result<u64> {
        let unknown = || Error::Unknown(name.to_owned());
        let network = self.networks.get_mut(name).ok_or_else(unknown)?;
        network.changes += 1;
        Ok(network.changes)
    }

    /// Enters an attachment, and its lease into its network.
    pub(super) fn enter_attachment(&mut self, id: &str, attachment: &Attachment) {
        if let Some(network) = self.networks.get_mut(&attachment.network) {
            let lease = Lease { attached: true, ..attachment.lease.clone() };
            network.last_sequence = network.last_sequence.max(lease.sequence);
            network.leases.insert(id.to_owned(), lease);
        }
        self.attachments.insert(id.to_owned(), attachment.clone());
    }

    /// Adds an attachment's names to those of its network, which is up, and keeps the servers of
    /// its published ports.
    pub(super) fn serve_attachment(
        &mut self,
        id: &str,
        attachment: &Attachment,
        served: proxy::Proxy,
    ) {
        if let Some(up) = self.up.get_mut(&attachment.network) {
            up.ports.insert(id.to_owned(), served);
            up.names.add(id, &attachment.lease);
        }
    }

    /// Removes an attachment and its lease with its names.
    pub(super) fn forget_attachment(&mut self, id: &str, network: &str) {
        self.attachments.remove(id);
        self.remove_lease(network, id);
    }
}
