//! Sandboxes with interfaces in a network namespace of others.
//!
//! Each interface has a switch of its own, with the interface and the sandbox's function as its
//! ports. What outlives the daemon is an entry of the ledger and the rule in the namespace. An
//! interface that was made for a function (`attachments`) has that at the network's own switch
//! instead.
//!
//! The key of a sandbox's first interface, in the ledger and in networks, is the sandbox's id. That
//! of a further one has the interface's number at its end: `ID.1` to `ID.3`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use slipway_netns::Identity;
use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::v1 as plane_v1;

use super::Networks;
use super::functions::PoolFunction;
use crate::attachment::Rates;
use crate::ledger::{Lease, Uplink};
use crate::namespace::Interface;
use crate::{Error, Result, namespace};

/// Returns the key of a sandbox's interface of this number.
fn key_of(id: &str, number: u32) -> String {
    if number == 0 { id.to_owned() } else { format!("{id}.{number}") }
}

/// Returns the keys of all interfaces that a sandbox may have.
pub(super) fn keys(id: &str) -> impl Iterator<Item = String> {
    (0..namespace::MOST_INTERFACES).map(move |number| key_of(id, number))
}

/// Returns the switch of the interface `key`. No network's name has a dot.
fn switch_of(key: &str) -> String {
    format!("uplink.{key}")
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
    /// The function of a pool that the attachment has for the sandbox.
    function: PoolFunction,
}

/// Runs work that waits for the kernel or for a program.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(Error::Host(error.to_string())))
}

impl Networks {
    /// Gives a sandbox the interfaces of a network namespace.
    ///
    /// # Errors
    /// The first [`Error`]. The sandbox then has none of the interfaces.
    pub async fn join_namespace(
        &self,
        request: &v1::JoinNamespaceRequest,
    ) -> Result<v1::JoinNamespaceReply> {
        let (id, name) = (&request.sandbox_id, request.name.as_str());
        slipway_plane_api::check_id(id).map_err(Error::Invalid)?;
        if id.contains('.') {
            // The keys of further interfaces have one.
            return Err(Error::Invalid(format!("\"{id}\" is no sandbox's id: it has a dot")));
        }
        let path = PathBuf::from(&request.path);
        let (path, found) =
            blocking(move || namespace::look(&path).map(|found| (path, found))).await?;
        if !found.left_out.is_empty() {
            tracing::warn!(
                sandbox = request.name,
                namespace = %path.display(),
                interfaces = found.left_out.join(", "),
                "a sandbox does not get these interfaces of its namespace"
            );
        }
        let mut interfaces = Vec::new();
        for (number, interface) in (0..).zip(found.interfaces) {
            let uplink = interface.uplink((name, number), &path, found.identity);
            match self.take(&key_of(id, number), interface, uplink).await {
                Ok(taken) => interfaces.push(taken),
                Err(error) => {
                    // The first failure is reported; a second one adds nothing.
                    let _ = self.leave(id).await;
                    return Err(error);
                }
            }
        }
        if let Some(first) = interfaces.first_mut() {
            first.traceparent = self.trace_in(found.identity).await;
        }
        Ok(v1::JoinNamespaceReply { interfaces })
    }

    /// Takes one of a sandbox's interfaces. After an error it may be half taken.
    async fn take(
        &self,
        key: &str,
        mut interface: Interface,
        mut uplink: Uplink,
    ) -> Result<v1::Interface> {
        if let Some(port) = self.claim(key, &mut uplink).await? {
            interface.restrict(&port.lease, port.prefix);
            let (rates, PoolFunction { pool, owner }) = (port.rates.describe(), port.function);
            let described = interface.describe(port.network);
            return Ok(v1::Interface { rates, pool, owner, ..described });
        }
        self.bring_up_uplink(key, &uplink).await?;
        Ok(interface.describe(switch_of(key)))
    }

    /// Gives back what a sandbox has: its place in a network, with addresses and ports, or its
    /// interfaces of others.
    ///
    /// # Errors
    /// The first [`Error`] of the ledger or the packet filter. The rest is given back, and
    /// addresses are free, all the same.
    pub async fn leave(&self, id: &str) -> Result<()> {
        let mut left = Ok(());
        // A further interface can own a lease, too: that of an attachment which was removed first.
        for key in keys(id) {
            left = left.and(self.leave_one(&key).await);
        }
        left
    }

    /// Returns the `traceparent` to which an attachment in a namespace belongs; empty if there is
    /// none.
    async fn trace_in(&self, namespace: Identity) -> String {
        let state = self.state.lock().await;
        let mut there = state.attachments.values().filter(|one| one.identity() == namespace);
        let trace = there.find_map(|one| one.trace);
        trace.map(|place| place.to_string()).unwrap_or_default()
    }

    /// Enters an interface into the ledger. Returns the sandbox's port for an interface that was
    /// made for it.
    async fn claim(&self, key: &str, uplink: &mut Uplink) -> Result<Option<NetworkPort>> {
        let mut state = self.state.lock().await;
        let attachment = state.attachments.values().find(|one| one.is_of(uplink));
        if let Some(one) = attachment.filter(|one| one.hardware.is_some()) {
            return Err(Error::Invalid(format!(
                "the interface {} of {} has a function of hardware, of pool {}, for a program at \
                 its socket: a sandbox has hardware with `slipway run --vf`",
                uplink.interface,
                uplink.namespace.display(),
                one.pool
            )));
        }
        let port = attachment.and_then(|one| {
            let prefix = state.networks.get(&one.network)?.subnet.prefix_len();
            let (network, lease) = (one.network.clone(), one.lease.clone());
            let function = PoolFunction::of(one);
            Some(NetworkPort { network, lease, prefix, rates: one.rates, function })
        });
        uplink.network = port.as_ref().map(|port| port.network.clone());
        let taken = |(other, one): &(&String, &Uplink)| *other != key && one.is_same(uplink);
        if let Some((_, other)) = state.uplinks.iter().find(taken) {
            return Err(Error::InterfaceTaken {
                interface: uplink.interface.clone(),
                namespace: uplink.namespace.display().to_string(),
                sandbox: other.sandbox.clone(),
            });
        }
        self.ledger.save_uplink(key, uplink)?;
        state.uplinks.insert(key.to_owned(), uplink.clone());
        Ok(port)
    }

    /// Connects the switch of the interface `key` to the interface.
    async fn bring_up_uplink(&self, key: &str, uplink: &Uplink) -> Result<()> {
        let closed = uplink.clone();
        blocking(move || namespace::close(&closed)).await?;
        self.create_switch(plane_v1::CreateSwitchRequest {
            name: switch_of(key),
            tap: String::new(),
            uplink: Some(plane_v1::Uplink {
                namespace: uplink.namespace.to_string_lossy().into_owned(),
                device: uplink.device,
                inode: uplink.inode,
                interface: uplink.interface.clone(),
                index: uplink.index,
            }),
        })
        .await
    }

    /// Gives the interface `key` of a sandbox back, if it has it. A namespace or an interface that
    /// is gone is no error.
    ///
    /// # Errors
    /// [`Error::File`]: the ledger still has the entry.
    pub(super) async fn leave_namespace(&self, key: &str) -> Result<()> {
        let Some(uplink) = self.state.lock().await.uplinks.get(key).cloned() else { return Ok(()) };
        if uplink.network.is_none() {
            self.disconnect(key, uplink).await;
        }
        self.ledger.remove_uplink(key)?;
        self.state.lock().await.uplinks.remove(key);
        Ok(())
    }

    /// Removes the interface's switch and the rule in the namespace.
    async fn disconnect(&self, key: &str, uplink: Uplink) {
        if let Err(error) = self.remove_switch(switch_of(key)).await {
            tracing::warn!(sandbox = uplink.sandbox, error, "its switch is left");
        }
        let sandbox = uplink.sandbox.clone();
        if let Err(error) = blocking(move || namespace::open_again(&uplink)).await {
            tracing::warn!(sandbox, %error, "a rule is left in its network namespace");
        }
    }

    /// Connects the interfaces of the sandboxes that outlived the last daemon, and gives those of
    /// all others back. `live` are the keys of the former.
    ///
    /// # Errors
    /// The first error; the rest was done all the same. A sandbox whose namespace is gone goes on
    /// without a network.
    pub(super) async fn reconcile_namespaces(&self, live: &BTreeSet<String>) -> Result<()> {
        let uplinks = self.state.lock().await.uplinks.clone();
        let mut outcome = Ok(());
        for (key, uplink) in uplinks {
            let done = match live.contains(&key) {
                // Its network comes up by its lease.
                true if uplink.network.is_some() => Ok(()),
                true => self.bring_up_uplink(&key, &uplink).await,
                false => self.leave_namespace(&key).await,
            };
            if let Err(error) = &done {
                tracing::warn!(sandbox = uplink.sandbox, %error, "its interface is not connected");
            }
            outcome = outcome.and(done);
        }
        outcome
    }
}
