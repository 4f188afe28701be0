//! The namespaces of an endpoint's controller, as its record has them.

use slipway_disks::{Content, Opened, Source, watch_all};
use slipway_nvme::{ChangeError, Namespace};
use slipway_plane_api::v1;

use super::{FunctionKind, Served};
use crate::Error;
use crate::id::{RecordId, identity};
use crate::namespace::{self, Listed};

impl Served {
    /// Reserves a namespace number for the disk of `wanted`: the requested one, or the lowest free
    /// one for 0. Watches the disk's descriptor, and has a successor attach the disk likewise.
    /// Returns the status and the identity of the namespace's record, and what the controller gets.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller; [`Error::Change`] if the number is
    /// taken; [`Error::Disk`] if the descriptor cannot be watched; [`Error::Invalid`] if the
    /// namespace's identity cannot be an endpoint's, or if it cannot be kept. Nothing is reserved
    /// then.
    pub fn reserve(
        &mut self,
        wanted: &v1::Namespace,
        opened: Opened,
    ) -> Result<(v1::NamespaceStatus, RecordId, Namespace), Error> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else {
            return Err(Error::Network(self.id.clone()));
        };
        let free = |nsid: &u32| !nvme.namespaces.contains_key(nsid);
        // A number that is too high is refused by the controller.
        let nsid = wanted.nsid;
        let chosen = if nsid == 0 { (1..).find(free) } else { Some(nsid).filter(free) };
        let nsid = chosen.ok_or(ChangeError::Taken(nsid))?;
        let identity = identity(&self.id, wanted)?;
        watch_all(&nvme.wakes, &opened)?;
        let wanted = v1::Namespace { nsid, ..wanted.clone() };
        if let Some(place) = &mut self.place {
            place.attach(wanted.clone(), opened.content.as_ref().map(Content::file))?;
        }
        let (listed, namespace) = namespace::make(&wanted, identity, opened);
        let (status, record) = (listed.status.clone(), listed.record);
        nvme.namespaces.insert(nsid, listed);
        Ok((status, record, namespace))
    }

    /// Removes the namespaces that `chosen` picks, also for a successor. Returns their records, for
    /// the caller to detach them from the controller, and to drop while nothing is locked.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller; [`Error::Invalid`] if the removal
    /// cannot be kept. Nothing is removed then.
    pub fn take(&mut self, chosen: impl Fn(&Listed) -> bool) -> Result<Vec<Listed>, Error> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else {
            return Err(Error::Network(self.id.clone()));
        };
        let taken = nvme.namespaces.iter().filter(|(_, one)| chosen(one));
        let taken: Vec<u32> = taken.map(|(nsid, _)| *nsid).collect();
        if let Some(place) = &mut self.place {
            place.detach(&taken)?;
        }
        Ok(taken.iter().filter_map(|nsid| nvme.namespaces.remove(nsid)).collect())
    }

    /// Returns the content of the disk of namespace `nsid`, to be copied.
    ///
    /// # Errors
    /// [`Error::Network`] if the endpoint has no controller; [`Error::UnknownNamespace`];
    /// [`Error::NotCopied`] if its disk is neither an overlay nor a regular file.
    pub fn source(&self, nsid: u32) -> Result<Source, Error> {
        let listed = self.nvme()?.namespaces.get(&nsid);
        let listed = listed.ok_or_else(|| Error::UnknownNamespace(self.id.clone()))?;
        listed.source.clone().ok_or_else(|| Error::NotCopied(self.id.clone(), nsid))
    }

    /// Stores the new size of a named disk; returns the namespaces that are this disk.
    pub fn resized(&mut self, name: &str, size_bytes: u64) -> Vec<u32> {
        let FunctionKind::Nvme(nvme) = &mut self.kind else { return Vec::new() };
        let same = nvme.namespaces.values_mut().map(|one| &mut one.status);
        let same = same.filter(|one| one.disk == name);
        let noted = same.map(|one| {
            one.size_bytes = size_bytes;
            one.nsid
        });
        noted.collect()
    }

    /// Returns the endpoint's namespaces that are the named disk `name`.
    pub fn uses(&self, name: &str) -> Vec<v1::DiskUser> {
        let FunctionKind::Nvme(nvme) = &self.kind else { return Vec::new() };
        let same = nvme.namespaces.values().map(|one| &one.status).filter(|one| one.disk == name);
        let users = same.map(|one| v1::DiskUser {
            endpoint_id: self.id.clone(),
            nsid: one.nsid,
            read_only: one.read_only,
        });
        users.collect()
    }
}
