//! Sandboxes that join networks and leave them.

use slipway_plane_api::network_v1 as v1;
use tokio::sync::MutexGuard;

use super::Networks;
use super::description::describe_lease;
use super::table::NetworkTable;
use crate::allocate::{AddressRequest, choose};
use crate::ledger::Network;
use crate::publish::{self, Published};
use crate::{Error, Result, proxy};

impl Networks {
    /// Adds a sandbox to a network, and makes the default network if it does not exist.
    ///
    /// # Errors
    /// [`Error`]; the sandbox has no lease then.
    pub async fn join(&self, request: &v1::JoinRequest) -> Result<v1::Attachment> {
        let wish = AddressRequest::parse(&request.addresses, &request.mac)?;
        let wanted = publish::parse_all(&request.publish)?;
        let mut state = self.state.lock().await;
        let (id, name) = (&request.sandbox_id, &request.network);
        self.make_default(&mut state, name)?;
        let network = state.find(name)?;
        check_publishable(network, &wanted)?;
        let mut lease = choose(network, &request.name, &wish)?;
        let claimed = proxy::claim(&wanted)?;
        lease.published.clone_from(&claimed.published);
        if !state.is_up(name) {
            self.bring_up(&mut state, name).await?;
        }
        let served = claimed.serve(lease.ipv4, lease.ipv6, &self.serving.relay)?;
        // Before others can have the table: if the sandbox leaves, its ports are free.
        state.insert_lease(name, id, lease, served);
        let settled = self.settle(state, name).await;
        let mut state = self.state.lock().await;
        if let Err(error) = settled {
            state.remove_lease(name, id);
            // The first failure is reported; a second one adds nothing.
            let _ = self.settle(state, name).await;
            return Err(error);
        }
        describe_lease(state.find(name)?, id)
    }

    /// Removes the sandbox `id` from its network. In a namespace that somebody else made, the
    /// interface goes back to its maker. In a network of Slipway's, the lease ends, and its
    /// addresses and published ports are free. A network that never came up is taken down with its
    /// last sandbox.
    ///
    /// # Errors
    /// [`Error`] of the ledger or the packet filter; the addresses are free all the same.
    pub(super) async fn leave_one(&self, id: &str) -> Result<()> {
        self.leave_namespace(id).await?;
        let mut state = self.state.lock().await;
        let has_lease = |network: &&Network| network.leases.contains_key(id);
        let found = state.networks.values().find(has_lease).map(|network| network.name.clone());
        let Some(name) = found else { return Ok(()) };
        state.remove_lease(&name, id);
        if !state.is_up(&name) && !state.find(&name)?.is_used() {
            // The network never came up for its sandboxes, and this was the last one.
            self.take_down(&mut state, &name).await;
        }
        self.settle(state, &name).await
    }

    /// Updates the rules and the ledger after a change of a network's leases. Others may have the
    /// table of networks while the ledger is written.
    async fn settle(&self, mut state: MutexGuard<'_, NetworkTable>, name: &str) -> Result<()> {
        let change = state.note_change(name)?;
        let applied = self.apply(&mut state).await;
        drop(state);
        self.save_leases(name, change).await.and(applied)
    }
}

/// Checks that a network leads to the ports that are to be published in it.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn check_publishable(network: &Network, wanted: &[Published]) -> Result<()> {
    if network.internal && !wanted.is_empty() {
        return Err(Error::Invalid(format!(
            "the network \"{}\" is internal: nothing in it can be published",
            network.name
        )));
    }
    Ok(())
}
