//! The packet filter's rules, and the host's forwarding: both follow the networks that are up.

use std::collections::BTreeSet;

use super::namespaces::blocking;
use super::table::NetworkTable;
use super::{Networks, Settings};
use crate::{OnlyForSandboxes, Result, nft, rules};

impl Networks {
    /// Applies the rules for the networks that are up, unless they are in force, and makes the host
    /// forward while a network has a way out. The rules that limit forwarding are there before it
    /// is switched on and until it is off.
    ///
    /// # Errors
    /// [`Error::Host`](crate::Error::Host), [`Error::File`](crate::Error::File).
    pub(super) async fn apply(&self, state: &mut NetworkTable) -> Result<()> {
        let leads_out = state.networks_up().iter().any(|network| !network.internal);
        let only = match leads_out {
            true => self.forwarding.only_for_sandboxes()?,
            false => self.stop_forwarding(state).await,
        };
        let Settings { table, reach, .. } = &self.settings;
        let rules = rules::ruleset(table, &state.networks_up(), reach, only);
        if state.rules.as_ref() != Some(&rules) {
            nft::apply(&rules).await?;
            state.rules = Some(rules);
        }
        if leads_out && state.forwards != Some(only) {
            let forwarding = self.forwarding.clone();
            blocking(move || forwarding.open(only)).await?;
            state.forwards = Some(only);
        }
        Ok(())
    }

    /// Restores the host's forwarding switches, unless daemons with other interfaces use them.
    /// Returns the families of which all packets must be dropped even so: none, unless a switch may
    /// have stayed on.
    async fn stop_forwarding(&self, state: &mut NetworkTable) -> OnlyForSandboxes {
        state.forwards = None;
        let own: BTreeSet<String> =
            state.networks_up().into_iter().map(|network| network.device.clone()).collect();
        let forwarding = self.forwarding.clone();
        let Err(error) = blocking(move || forwarding.close(&own)).await else {
            return OnlyForSandboxes::default();
        };
        tracing::warn!(%error, "the host goes on forwarding until the next change");
        self.forwarding.only_after_failure()
    }
}
