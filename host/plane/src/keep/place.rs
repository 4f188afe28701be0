//! Where one endpoint is kept.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use prost::Message;
use slipway_keeper::Shelf;
use slipway_plane_api::v1;
use slipway_ram::{Lasting, Snapshots};
use slipway_vfio_user::{HOST_SLOTS, KEPT_LEN, Kept};

use crate::Error;
use crate::disk::Lasts;

/// Bytes for the description, twice.
pub const DESCRIPTION_LEN: usize = 256 << 10;

/// What an endpoint is now.
#[derive(Clone, PartialEq, Message)]
pub struct Description {
    /// As if it had been made so: with the disks that it has by now.
    #[prost(message, optional, tag = "1")]
    pub request: Option<v1::CreateEndpointRequest>,
    #[prost(message, optional, tag = "2")]
    pub limits: Option<v1::Limits>,
    /// Slots of the contents of disks in memory, by namespace.
    #[prost(btree_map = "uint32, uint32", tag = "3")]
    pub contents: BTreeMap<u32, u32>,
}

/// Where one endpoint is kept.
pub struct Place {
    pub(super) number: u32,
    pub(super) shelf: Shelf,
    stored: Snapshots,
    description: Description,
    session: Lasting,
    /// The controller's.
    pub journal: Lasting,
    /// What a predecessor left, by slot.
    found: BTreeMap<u32, OwnedFd>,
    witness: Arc<OwnedFd>,
}

impl Place {
    /// In `memory`, what follows the head; `found` is what a predecessor left on the shelf.
    pub(super) fn new(
        number: u32,
        (shelf, memory): (Shelf, &Lasting),
        witness: Arc<OwnedFd>,
        found: BTreeMap<u32, OwnedFd>,
    ) -> Option<Self> {
        let (stored, rest) = memory.split(DESCRIPTION_LEN)?;
        let (session, journal) = rest.split(KEPT_LEN)?;
        let stored = Snapshots::new(&stored)?;
        let description = Description::default();
        Some(Self { number, shelf, stored, description, session, journal, found, witness })
    }

    /// Reads what a predecessor stored.
    pub(super) fn load(&mut self) -> Option<()> {
        self.description = Description::decode(self.stored.load()?.as_slice()).ok()?;
        self.description.request.is_some().then_some(())
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    /// What the endpoint is.
    pub fn request(&self) -> v1::CreateEndpointRequest {
        self.description.request.clone().unwrap_or_default()
    }

    /// How it is limited; None: as it was made.
    pub fn limits(&self) -> Option<v1::Limits> {
        self.description.limits
    }

    /// A new endpoint is what `request` says.
    pub(super) fn describe(&mut self, request: &v1::CreateEndpointRequest) -> Result<(), Error> {
        self.description.request = Some(request.clone());
        self.store()
    }

    /// From now on it has these limits.
    pub fn limit(&mut self, limits: v1::Limits) -> Result<(), Error> {
        self.description.limits = Some(limits);
        self.store()
    }

    /// From now on its port has these settings.
    pub fn set_port(&mut self, port: &v1::SwitchPort) -> Result<(), Error> {
        let request = self.description.request.get_or_insert_default();
        let net = request.virtio_net.get_or_insert_default();
        (net.spoof_check, net.trust, net.vlan) = (port.spoof_check, port.trust, port.vlan);
        (net.link, net.max_rate) = (port.link, port.max_rate);
        self.store()
    }

    /// From now on it has this namespace, whose disk has this content if that is kept here.
    pub fn attach(
        &mut self,
        namespace: v1::Namespace,
        content: Option<&OwnedFd>,
    ) -> Result<(), Error> {
        if let Some(file) = content {
            self.put_content(namespace.nsid, file)?;
        }
        self.namespaces().push(namespace);
        self.store()
    }

    /// From now on it has none of these namespaces.
    pub fn detach(&mut self, nsids: &[u32]) -> Result<(), Error> {
        self.namespaces().retain(|one| !nsids.contains(&one.nsid));
        let slots: Vec<u32> =
            nsids.iter().filter_map(|nsid| self.description.contents.remove(nsid)).collect();
        self.store()?;
        // A keeper that is gone holds nothing.
        slots.into_iter().for_each(|slot| drop(self.shelf.clear(slot)));
        Ok(())
    }

    fn namespaces(&mut self) -> &mut Vec<v1::Namespace> {
        let request = self.description.request.get_or_insert_default();
        &mut request.nvme.get_or_insert_default().namespaces
    }

    /// Has a successor go on with what the description says now.
    pub fn store(&mut self) -> Result<(), Error> {
        let kept = self.description.encode_to_vec();
        if self.stored.store(&kept) {
            return Ok(());
        }
        // Better no successor than one with other disks.
        let _ = self.stored.store(&[]);
        Err(Error::Invalid("the endpoint's description is too long to be kept".into()))
    }

    /// The endpoint's part.
    pub fn kept(&mut self) -> Kept {
        let found = std::mem::take(&mut self.found);
        Kept { shelf: self.shelf.clone(), memory: self.session.clone(), found }
    }

    /// How disks of this endpoint are opened.
    pub fn lasts(&self) -> Lasts {
        Lasts { witness: self.witness.clone(), content: None }
    }

    /// The same for the disk that namespace `nsid` had already.
    ///
    /// # Errors
    /// Its content is not there, and a new one would be another disk.
    pub fn found(&mut self, nsid: u32) -> Result<Lasts, Error> {
        let Some(slot) = self.description.contents.get(&nsid) else { return Ok(self.lasts()) };
        let content = self.found.remove(slot);
        let lost = || Error::Resources(format!("the content of namespace {nsid} was not kept"));
        Ok(Lasts { content: Some(content.ok_or_else(lost)?), ..self.lasts() })
    }

    /// Leaves the content of a disk in memory on the shelf. Not described before [`Place::store`].
    pub fn put_content(&mut self, nsid: u32, file: &OwnedFd) -> Result<(), Error> {
        let known = &mut self.description.contents;
        if known.contains_key(&nsid) {
            return Ok(());
        }
        let free = HOST_SLOTS.clone().find(|slot| !known.values().any(|taken| taken == slot));
        let slot =
            free.ok_or_else(|| Error::Invalid("too many disks in memory to be kept".into()))?;
        let put = self.shelf.put(slot, file.as_fd());
        put.map_err(|error| Error::Resources(error.to_string()))?;
        known.insert(nsid, slot);
        Ok(())
    }
}
