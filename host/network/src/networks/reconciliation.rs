//! The end of a daemon, and the begin of the next one: networks become what the ledger says.

use std::collections::BTreeSet;

use super::Networks;
use super::namespaces::keys;
use super::table::NetworkTable;
use crate::{Result, host};

impl Networks {
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
            freed.extend(state.free_leases(&name, live).map(|change| (name.clone(), change)));
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
            return if state.is_up(name) { Ok(()) } else { host::remove(&device) };
        }
        if state.is_up(name) {
            return Ok(());
        }
        self.bring_up(state, name).await
    }

    /// Takes down each network that is up and has no lease, for a daemon that ends. A network whose
    /// sandboxes outlive the daemon stays up, and the ledger stays as it is.
    pub async fn close(&self) {
        let mut state = self.state.lock().await;
        let unused = |name: &&String| state.find(name).is_ok_and(|one| one.leases.is_empty());
        let names: Vec<String> = state.up.keys().filter(unused).cloned().collect();
        let any = !names.is_empty();
        for name in names {
            self.take_down(&mut state, &name).await;
        }
        if any && let Err(error) = self.apply(&mut state).await {
            tracing::warn!(%error, "rules of networks are left");
        }
    }
}
