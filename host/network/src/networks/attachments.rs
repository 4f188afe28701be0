//! Attachments: interfaces that are made for containers in their network namespaces.
//!
//! An attachment has a lease in its network, a file, and an interface whose port is at the
//! network's switch, or a function of a pool (`functions`). What outlives the daemon is the file
//! and the interface; the next daemon gives the interface its port back. Operations on one
//! attachment follow each other; those on different attachments share the table of networks for the
//! choice of addresses only.

use std::collections::BTreeSet;
use std::path::PathBuf;

use slipway_netns::Identity;
use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::v1 as plane_v1;
use slipway_telemetry::trace::TraceContext;
use tonic::{Code, Status};

use super::Networks;
use super::at_once::some_at_once;
use super::attachment_request::{Request, key};
use super::description::describe_lease;
use super::members::check_publishable;
use super::namespaces::blocking;
use super::table::NetworkTable;
use crate::allocate::choose;
use crate::attachment::Attachment;
use crate::container;
use crate::dns::Zone;
use crate::ledger::{Lease, Network};
use crate::proxy::{self, Claimed};
use crate::{Error, Result};

/// The number of interfaces that a daemon which has just started opens or removes at once.
const AT_ONCE: usize = 32;

impl Networks {
    /// Makes an interface of a network in a container's network namespace.
    ///
    /// # Errors
    /// [`Error`]. The attachment has been removed then, unless it was there before
    /// ([`Error::ExistingAttachment`]); its network stays up.
    pub async fn attach(&self, request: &v1::AttachRequest) -> Result<v1::Attachment> {
        let mut request = Request::of(request)?;
        let id = request.key.id();
        let _turn = self.turns.take(&id).await;
        if self.attachments.is_noted(&id) {
            self.remove_attachment(&id).await?;
        }
        request.is_hardware = self.check_pool(&request).await?;
        request.check_hardware()?;
        let path = request.namespace.clone();
        let identity = blocking(move || container::identity(&path)).await?;
        let attachment = self.admit(&request, &id, identity).await?;
        let made = match self.take_function(&id, &attachment).await {
            Ok(()) => self.make_interface(&id, &attachment, true).await,
            Err(error) => Err(error),
        };
        let described = match made {
            Ok(has_ipv6) => self.describe_attachment(&id, has_ipv6).await,
            Err(error) => Err(error),
        };
        if described.is_err() {
            // The first failure is reported; a second one adds nothing.
            let _ = self.remove_attachment(&id).await;
        }
        described
    }

    /// Notes the place in a trace to which an attachment belongs. That it is gone is no error.
    pub(crate) async fn note_trace(
        &self,
        container: Option<&v1::ContainerInterface>,
        place: TraceContext,
    ) {
        let Ok(key) = key(container) else { return };
        if let Some(attachment) = self.state.lock().await.attachments.get_mut(&key.id()) {
            attachment.trace = Some(place);
        }
    }

    /// Checks that an attachment is not there yet, chooses its addresses, claims its published
    /// ports, brings its network up, and enters the attachment into the ledger.
    ///
    /// A failure before the attachment is entered leaves nothing that must be taken back: claimed
    /// ports and their servers end when they are dropped, [`Store::save`] leaves no file, and
    /// the network stays up.
    ///
    /// # Errors
    /// [`Error`]; the ledger has no such attachment then, or that of before.
    ///
    /// [`Store::save`]: crate::attachment::Store::save
    async fn admit(
        &self,
        request: &Request<'_>,
        id: &str,
        identity: Identity,
    ) -> Result<Attachment> {
        let mut state = self.state.lock().await;
        let name = request.network;
        self.make_default(&mut state, name)?;
        check_free(&state, request, id, identity)?;
        let (attachment, claimed) = plan(state.find(name)?, request, identity)?;
        if !state.is_up(name) {
            self.bring_up(&mut state, name).await?;
        }
        let Lease { ipv4, ipv6, .. } = attachment.lease;
        let served = claimed.serve(ipv4, ipv6, &self.serving.relay)?;
        self.attachments.save(id, &attachment)?;
        state.enter_attachment(id, &attachment);
        state.serve_attachment(id, &attachment, served);
        if let Err(error) = self.apply_published(&mut state, &attachment).await {
            state.forget_attachment(id, name);
            let _ = self.attachments.remove(id);
            return Err(error);
        }
        Ok(attachment)
    }

    /// Applies the rules for an attachment that has come or gone: they name its published ports
    /// alone.
    async fn apply_published(
        &self,
        state: &mut NetworkTable,
        attachment: &Attachment,
    ) -> Result<()> {
        if attachment.lease.published.is_empty() { Ok(()) } else { self.apply(state).await }
    }

    /// Makes an attachment's interface with its settings and its port, or gives the interface that
    /// is there its port back. Returns whether it has IPv6.
    async fn make_interface(&self, id: &str, attachment: &Attachment, new: bool) -> Result<bool> {
        let settings = {
            let state = self.state.lock().await;
            container::settings(attachment, state.find(&attachment.network)?)
        };
        let Attachment { lease, rates, .. } = attachment;
        let request = plane_v1::AttachTapRequest {
            name: id.to_owned(),
            switch: attachment.network.clone(),
            namespace: attachment.namespace.to_string_lossy().into_owned(),
            device: attachment.device,
            inode: attachment.inode,
            interface: attachment.key.interface.clone(),
            mac: lease.mac.to_string(),
            addresses: vec![lease.ipv4.to_string(), lease.ipv6.to_string()],
            create: new,
            placeholder: attachment.function,
            max_rate: rates.max_rate,
            max_burst: rates.max_burst,
            receive_rate: rates.receive_rate,
            receive_burst: rates.receive_burst,
            settings: Some(container::describe(&settings)),
        };
        match self.plane.clone().attach_tap(request).await {
            Ok(made) => Ok(made.into_inner().has_ipv6),
            // The daemon was told to reconcile twice.
            Err(status) if status.code() == Code::AlreadyExists && !new => Ok(true),
            Err(status) => Err(refusal(&status)),
        }
    }

    /// Removes an attachment; that there is none is no error.
    ///
    /// # Errors
    /// [`Error`]; the attachment is still in the ledger then.
    pub async fn detach(&self, container: Option<&v1::ContainerInterface>) -> Result<()> {
        let id = key(container)?.id();
        let _turn = self.turns.take(&id).await;
        self.remove_attachment(&id).await
    }

    /// Removes an attachment, in whose turn the caller is. The success depends on nothing that the
    /// container controls: its addresses and ports become free.
    async fn remove_attachment(&self, id: &str) -> Result<()> {
        let Some(attachment) = self.state.lock().await.attachments.get(id).cloned() else {
            return self.attachments.remove(id);
        };
        self.return_function(id, &attachment).await;
        let request = plane_v1::DetachTapRequest { name: id.to_owned() };
        match self.plane.clone().detach_tap(request).await {
            // The port was not made, or has no part in it.
            Err(status) if status.code() == Code::NotFound => {
                let attachment = attachment.clone();
                let removed = blocking(move || container::remove(&attachment)).await;
                if let Err(error) = removed {
                    tracing::warn!(%error, id, "an interface is left in its namespace");
                }
            }
            done => drop(done.map_err(|status| Error::Plane(status.message().to_owned()))?),
        }
        let name = &attachment.network;
        let _turn = self.lease_locks.take(name).await;
        let mut state = self.state.lock().await;
        let kept = self.keep_for_sandbox(&mut state, &attachment)?;
        self.attachments.remove(id)?;
        state.forget_attachment(id, name);
        if kept && let Some(up) = state.up.get(name) {
            // The sandbox's name comes before those of attachments.
            up.names.set(Zone::of(state.find(name)?));
        }
        self.apply_published(&mut state, &attachment).await
    }

    /// Makes the addresses of an attachment a lease of the sandbox that has a port of the switch
    /// with them, if there is one: they are free when the sandbox leaves. Returns whether there is
    /// one. The caller has the turn to write the network's leases.
    fn keep_for_sandbox(&self, state: &mut NetworkTable, attachment: &Attachment) -> Result<bool> {
        let owner = state.uplinks.iter().find(|(_, uplink)| {
            uplink.network.as_ref() == Some(&attachment.network) && attachment.is_of(uplink)
        });
        let Some((sandbox, uplink)) = owner else { return Ok(false) };
        let Some(network) = state.networks.get_mut(&attachment.network) else { return Ok(false) };
        let lease = Lease {
            name: uplink.sandbox.clone(),
            published: Vec::new(),
            attached: false,
            sequence: 0,
            ..attachment.lease.clone()
        };
        network.leases.insert(sandbox.clone(), lease);
        self.ledger.leases_of(network)?.write().map(|()| true)
    }

    /// Compares an attachment with the interface in its namespace.
    ///
    /// # Errors
    /// [`Error::UnknownAttachment`]; [`Error::Host`] that says what differs.
    pub async fn check_attachment(
        &self,
        request: &v1::CheckAttachmentRequest,
    ) -> Result<v1::Attachment> {
        let key = key(request.container.as_ref())?;
        let id = key.id();
        let _turn = self.turns.take(&id).await;
        let (attachment, settings) = {
            let state = self.state.lock().await;
            let known = state.attachments.get(&id).filter(|_| !self.attachments.is_noted(&id));
            let attachment = known.ok_or(Error::UnknownAttachment(key.to_string()))?;
            let settings = container::settings(attachment, state.find(&attachment.network)?);
            (attachment.clone(), settings)
        };
        let path = match request.namespace.as_str() {
            "" => attachment.namespace.clone(),
            other => PathBuf::from(other),
        };
        let has_ipv6 = blocking(move || match container::identity(&path)? {
            found if found == attachment.identity() => container::check(&attachment, &settings),
            _ => Err(Error::Host(format!(
                "{} is another network namespace than the attachment's",
                path.display()
            ))),
        });
        self.describe_attachment(&id, has_ipv6.await?).await
    }

    async fn describe_attachment(&self, id: &str, has_ipv6: bool) -> Result<v1::Attachment> {
        let unknown = || Error::Host("the attachment was removed meanwhile".to_owned());
        let found = self.state.lock().await.attachments.get(id).cloned();
        let attachment = found.ok_or_else(unknown)?;
        let function = self.function_of(id, &attachment).await?;
        let state = self.state.lock().await;
        let mut told = describe_lease(state.find(&attachment.network)?, id)?;
        if let Some(function) = function {
            (told.socket_path, told.pci_address) = (function.socket_path, function.address);
        }
        if attachment.hardware.is_some() {
            // The gateways, which answer names, are at the network's switch.
            (told.switch, told.name_servers) = Default::default();
            (told.ipv4_gateway, told.ipv6_gateway) = Default::default();
        }
        if !has_ipv6 {
            (told.ipv6, told.ipv6_gateway) = Default::default();
        }
        let routes = attachment.routes.iter().filter(|(to, _)| has_ipv6 || to.addr().is_ipv4());
        told.routes = routes
            .map(|(to, gateway)| v1::InterfaceRoute {
                destination: to.addr().to_string(),
                prefix: to.prefix_len().into(),
                gateway: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
                ..Default::default()
            })
            .collect();
        Ok(told)
    }

    /// Removes the attachments of a network configuration, except the valid ones. Returns the
    /// number of those removed.
    ///
    /// # Errors
    /// The first error; the others were removed all the same.
    pub async fn collect_attachments(
        &self,
        request: &v1::CollectAttachmentsRequest,
    ) -> Result<u32> {
        let valid: BTreeSet<(&str, &str)> = request
            .valid
            .iter()
            .map(|one| (one.container_id.as_str(), one.interface.as_str()))
            .collect();
        let stale = |one: &&Attachment| {
            one.key.configuration == request.configuration
                && !valid.contains(&(one.key.container.as_str(), one.key.interface.as_str()))
        };
        let all = self.state.lock().await.attachments.clone();
        let ids: Vec<String> = all.values().filter(stale).map(|one| one.key.id()).collect();
        let (mut removed, mut outcome) = (0, Ok(()));
        for id in ids {
            let _turn = self.turns.take(&id).await;
            let done = self.remove_attachment(&id).await;
            removed += u32::from(done.is_ok());
            outcome = outcome.and(done);
        }
        outcome.map(|()| removed)
    }

    /// Removes the attachments that notes name, [`AT_ONCE`] at a time: their containers were
    /// removed while no daemon served.
    pub async fn catch_up(&self) {
        let notes = self.attachments.notes().unwrap_or_default();
        let remove = |id: String| async move {
            let _turn = self.turns.take(&id).await;
            if let Err(error) = self.remove_attachment(&id).await {
                tracing::warn!(%error, id, "an attachment is left");
            }
        };
        some_at_once(notes.into_iter().map(remove), AT_ONCE).await;
    }

    /// Frees the attachments whose namespaces are gone. To be called by a daemon that has just
    /// started, before it opens their interfaces: an open interface keeps its namespace alive.
    pub(super) async fn drop_lost_attachments(&self) {
        let all = self.state.lock().await.attachments.clone();
        for (id, attachment) in all {
            let there = blocking(move || Ok(container::is_there(&attachment))).await;
            if there.is_ok_and(|there| !there) {
                let _turn = self.turns.take(&id).await;
                tracing::info!(id, "the attachment's network namespace is gone");
                if let Err(error) = self.remove_attachment(&id).await {
                    tracing::warn!(%error, id, "an attachment is left");
                }
            }
        }
    }

    /// Gives the interfaces of attachments their ports back, [`AT_ONCE`] at a time: a container can
    /// slow down the opening of its interface.
    ///
    /// # Errors
    /// The first error; the others have their ports all the same.
    pub(super) async fn reconnect_attachments(&self) -> Result<()> {
        let all = self.state.lock().await.attachments.clone();
        let reconnect = |(id, attachment): (String, Attachment)| async move {
            let _turn = self.turns.take(&id).await;
            let done = self.make_interface(&id, &attachment, false).await.map(drop);
            done.inspect_err(|error| tracing::warn!(%error, id, "an attachment has no port"))
        };
        let outcomes = some_at_once(all.into_iter().map(reconnect), AT_ONCE).await;
        outcomes.into_iter().collect()
    }

    /// Returns whether there are attachments.
    pub async fn is_attached(&self) -> bool {
        !self.state.lock().await.attachments.is_empty()
    }
}

/// Returns the error for an interface that the plane did not make.
fn refusal(status: &Status) -> Error {
    let message = status.message().to_owned();
    match status.code() {
        Code::FailedPrecondition => Error::Host(message),
        _ => Error::Plane(message),
    }
}

/// Checks that neither the attachment nor its interface exists.
fn check_free(
    state: &NetworkTable,
    request: &Request<'_>,
    id: &str,
    identity: Identity,
) -> Result<()> {
    let same = |one: &&Attachment| {
        (one.device, one.inode) == (identity.device, identity.inode)
            && one.key.interface == request.key.interface
    };
    let found = state.attachments.get(id).or_else(|| state.attachments.values().find(same));
    found.map_or(Ok(()), |one| Err(Error::ExistingAttachment(one.key.to_string())))
}

/// Chooses the addresses of an attachment and claims its published ports. Changes nothing else.
fn plan(
    network: &Network,
    request: &Request<'_>,
    identity: Identity,
) -> Result<(Attachment, Claimed)> {
    check_publishable(network, &request.publish)?;
    let called = if request.name.is_empty() { &request.key.container } else { request.name };
    let mut lease = choose(network, called, &request.wish)?;
    lease.attached = true;
    lease.sequence = network.next_sequence();
    let claimed = proxy::claim(&request.publish)?;
    lease.published.clone_from(&claimed.published);
    Ok((request.attachment(network, identity, lease), claimed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::AddressRequest;

    #[test]
    fn hardware_has_settings_and_no_gateway() {
        let (subnet, prefix) = ("10.1.2.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap());
        let network = Network::new("blue".into(), "slip0".into(), subnet, prefix);
        let container = Some(v1::ContainerInterface {
            configuration: "a".into(),
            container_id: "p1".into(),
            interface: "eth0".into(),
        });
        let (pool, network_name) = ("nics".to_owned(), "blue".to_owned());
        let wanted = v1::AttachRequest {
            container,
            network: network_name,
            pool,
            vlan: 5,
            no_spoof_check: true,
            ..Default::default()
        };
        let mut request = Request::of(&wanted).unwrap();
        let refused = request.check_hardware().unwrap_err().to_string();
        assert!(refused.contains("leave out \"vlan\""), "{refused}");
        request.is_hardware = true;
        request.check_hardware().unwrap();
        let lease = choose(&network, "p1", &AddressRequest::default()).unwrap();
        let identity = Identity { device: 4, inode: 5 };
        let made = request.attachment(&network, identity, lease);
        let settings = made.hardware.unwrap();
        assert_eq!((settings.vlan, settings.no_spoof_check), (5, true));
        assert!(made.routes.is_empty() && made.function);
        // A file of an earlier version has no such settings.
        let mut file = serde_json::to_value(&made).unwrap();
        file.as_object_mut().unwrap().remove("hardware");
        assert_eq!(serde_json::from_value::<Attachment>(file).unwrap().hardware, None);
        let published = v1::AttachRequest { publish: vec!["80:80/tcp".into()], ..wanted };
        let mut request = Request::of(&published).unwrap();
        request.is_hardware = true;
        let refused = request.check_hardware().unwrap_err().to_string();
        assert!(refused.contains("nothing is published"), "{refused}");
    }

    #[test]
    fn no_two_attachments_have_one_place_in_the_order() {
        let (subnet, prefix) = ("10.1.2.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap());
        let mut state = NetworkTable::default();
        let network = Network::new("blue".into(), "slip0".into(), subnet, prefix);
        state.networks.insert("blue".into(), network);
        let container = Some(v1::ContainerInterface {
            configuration: "a".into(),
            container_id: "p1".into(),
            interface: "eth0".into(),
        });
        let wanted = v1::AttachRequest { container, network: "blue".into(), ..Default::default() };
        let request = Request::of(&wanted).unwrap();
        let (id, identity) = (request.key.id(), Identity { device: 4, inode: 5 });
        for place in 1..=3 {
            let network = &state.networks["blue"];
            let mut lease = choose(network, "p1", &AddressRequest::default()).unwrap();
            lease.sequence = network.next_sequence();
            assert_eq!(lease.sequence, place);
            let attachment = request.attachment(network, identity, lease);
            state.enter_attachment(&id, &attachment);
            state.forget_attachment(&id, "blue");
        }
        assert!(state.networks["blue"].leases.is_empty() && state.attachments.is_empty());
    }
}
