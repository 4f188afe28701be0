//! Sandboxes with an interface in a network namespace of others.
//!
//! Each has a switch of its own, with the interface and the sandbox's function as its ports. What
//! outlives the daemon is an entry of the ledger and the rule in the namespace. A sandbox with an
//! interface that was made for a function (`attachments`) is at the network's own switch instead.

use std::collections::BTreeSet;
use std::path::PathBuf;

use slipway_netns::Identity;
use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::v1 as plane_v1;
use tonic::Code;

use super::Networks;
use crate::attachment::{Attachment, Rates};
use crate::ledger::{Lease, Uplink};
use crate::{Error, Result, namespace};

/// Returns the switch of sandbox `id`. No network's name has a dot.
fn switch_of(id: &str) -> String {
    format!("uplink.{id}")
}

/// A sandbox's port of a network's own switch.
struct NetworkPort {
    /// The network.
    network: String,
    /// The sandbox's addresses. They stay its own as long as the ledger has the interface.
    lease: Lease,
    /// The length of the network's IPv4 prefix in bits.
    prefix: u8,
    /// The port's rates.
    rates: Rates,
}

/// Runs work that waits for the kernel or for a program.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::Host(error.to_string())))
}

impl Networks {
    /// Gives a sandbox the interface of a network namespace.
    ///
    /// # Errors
    /// [`Error`]; the interface is as it was then.
    pub async fn join_namespace(
        &self,
        request: &v1::JoinNamespaceRequest,
    ) -> Result<v1::Interface> {
        let id = &request.sandbox_id;
        slipway_plane_api::check_id(id).map_err(Error::Invalid)?;
        let path = PathBuf::from(&request.path);
        let (path, (identity, mut interface)) =
            blocking(move || namespace::look(&path).map(|found| (path, found))).await?;
        if !interface.left_out().is_empty() {
            tracing::warn!(
                sandbox = request.name,
                namespace = %path.display(),
                interfaces = interface.left_out().join(", "),
                "a sandbox gets one interface of its namespace, and not these others"
            );
        }
        let mut uplink = interface.uplink(&request.name, &path, identity);
        let traceparent = self.trace_in(identity).await;
        if let Some(port) = self.claim(id, &mut uplink).await? {
            interface.restrict(&port.lease, port.prefix);
            let rates = port.rates.describe();
            return Ok(v1::Interface { rates, traceparent, ..interface.describe(port.network) });
        }
        if let Err(error) = self.bring_up_uplink(id, &uplink).await {
            // The first failure is reported; a second one adds nothing.
            let _ = self.leave_namespace(id).await;
            return Err(error);
        }
        Ok(v1::Interface { traceparent, ..interface.describe(switch_of(id)) })
    }

    /// Returns the `traceparent` to which an attachment in a namespace belongs; empty if there is
    /// none.
    async fn trace_in(&self, namespace: Identity) -> String {
        let is_there =
            |one: &&Attachment| (one.device, one.inode) == (namespace.device, namespace.inode);
        let state = self.state.lock().await;
        let trace = state.attachments.values().filter(is_there).find_map(|one| one.trace);
        trace.map(|place| place.to_string()).unwrap_or_default()
    }

    /// Enters an interface into the ledger. Returns the sandbox's port for an interface that was
    /// made for it.
    async fn claim(&self, id: &str, uplink: &mut Uplink) -> Result<Option<NetworkPort>> {
        let mut state = self.state.lock().await;
        let attachment = state.attachments.values().find(|one| one.is_of(uplink));
        let port = attachment.and_then(|one| {
            let prefix = state.networks.get(&one.network)?.subnet.prefix_len();
            let (network, lease) = (one.network.clone(), one.lease.clone());
            Some(NetworkPort { network, lease, prefix, rates: one.rates })
        });
        uplink.network = port.as_ref().map(|port| port.network.clone());
        let taken = |(other, one): &(&String, &Uplink)| *other != id && one.is_same(uplink);
        if let Some((_, other)) = state.uplinks.iter().find(taken) {
            return Err(Error::InterfaceTaken {
                interface: uplink.interface.clone(),
                namespace: uplink.namespace.display().to_string(),
                sandbox: other.sandbox.clone(),
            });
        }
        self.ledger.save_uplink(id, uplink)?;
        state.uplinks.insert(id.to_owned(), uplink.clone());
        Ok(port)
    }

    /// Connects the sandbox's switch to the interface.
    async fn bring_up_uplink(&self, id: &str, uplink: &Uplink) -> Result<()> {
        let closed = uplink.clone();
        blocking(move || namespace::close(&closed)).await?;
        let request = plane_v1::CreateSwitchRequest {
            name: switch_of(id),
            tap: String::new(),
            uplink: Some(plane_v1::Uplink {
                namespace: uplink.namespace.to_string_lossy().into_owned(),
                device: uplink.device,
                inode: uplink.inode,
                interface: uplink.interface.clone(),
                index: uplink.index,
            }),
        };
        match self.plane.clone().create_switch(request).await {
            Err(status) if status.code() != Code::AlreadyExists => {
                Err(Error::Plane(status.message().to_owned()))
            }
            _ => Ok(()),
        }
    }

    /// Gives the interface of sandbox `id` back, if it has one. A namespace or an interface that is
    /// gone is no error.
    ///
    /// # Errors
    /// [`Error::File`]: the ledger still has the entry.
    pub(super) async fn leave_namespace(&self, id: &str) -> Result<()> {
        let Some(uplink) = self.state.lock().await.uplinks.get(id).cloned() else { return Ok(()) };
        if uplink.network.is_none() {
            self.disconnect(id, uplink).await;
        }
        self.ledger.remove_uplink(id)?;
        self.state.lock().await.uplinks.remove(id);
        Ok(())
    }

    /// Removes the sandbox's switch and the rule in the namespace.
    async fn disconnect(&self, id: &str, uplink: Uplink) {
        let request = plane_v1::RemoveSwitchRequest { name: switch_of(id) };
        match self.plane.clone().remove_switch(request).await {
            Err(status) if status.code() != Code::NotFound => {
                tracing::warn!(
                    sandbox = uplink.sandbox,
                    error = status.message(),
                    "its switch is \
                    left"
                );
            }
            _ => {}
        }
        let sandbox = uplink.sandbox.clone();
        if let Err(error) = blocking(move || namespace::open_again(&uplink)).await {
            tracing::warn!(sandbox, %error, "a rule is left in its network namespace");
        }
    }

    /// Connects the interfaces of the sandboxes that outlived the last daemon, and gives those of
    /// all others back.
    ///
    /// # Errors
    /// The first error; the rest was done all the same. A sandbox whose namespace is gone goes on
    /// without a network.
    pub(super) async fn reconcile_namespaces(&self, live: &BTreeSet<String>) -> Result<()> {
        let uplinks = self.state.lock().await.uplinks.clone();
        let mut outcome = Ok(());
        for (id, uplink) in uplinks {
            let done = match live.contains(&id) {
                // Its network comes up by its lease.
                true if uplink.network.is_some() => Ok(()),
                true => self.bring_up_uplink(&id, &uplink).await,
                false => self.leave_namespace(&id).await,
            };
            if let Err(error) = &done {
                tracing::warn!(sandbox = uplink.sandbox, %error, "its interface is not connected");
            }
            outcome = outcome.and(done);
        }
        outcome
    }
}
