//! Attaches, detaches and resizes disks of running endpoints.
//!
//! The map of endpoints is locked while a record is changed and the controller is asked for the
//! same change, so that a controller makes changes in the order in which the records were changed.
//! It is not locked while a disk is opened or the controller is waited for. Endpoints and
//! namespaces may be replaced meanwhile, so they are known by their records' identities afterwards.

use std::time::{Duration, Instant};

use slipway_disks::{DiskPlace, NamedDisk};
use slipway_nvme::ChangeError;
use slipway_plane_api::v1;

use crate::door::{Attaching, Door, PendingChange, rates};
use crate::id::RecordId;
use crate::plane::Plane;
use crate::{Error, namespace};

/// The time that an endpoint may take to answer, and a disk to finish its requests.
const PATIENCE: Duration = Duration::from_secs(30);

impl Plane {
    /// Adds a namespace to an endpoint; blocks while the disk is opened.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then, and an endpoint that did not answer in time does not attach
    /// the namespace later.
    pub fn attach(&self, request: &v1::AttachDiskRequest) -> Result<v1::NamespaceStatus, Error> {
        self.begin_attach(request)?.end(self, Instant::now() + PATIENCE)
    }

    /// Opens a disk and asks the controller of an endpoint to attach it.
    fn begin_attach(&self, request: &v1::AttachDiskRequest) -> Result<BegunAttach, Error> {
        let id = &request.endpoint_id;
        // No disk changes its size between being opened and being listed among those that are told
        // of new sizes. The controller hears of later sizes once it was asked. It is not waited for
        // with this lock: its client may have stopped it, and must not hold up others.
        let _sizes = self.disks().sizes_stay();
        let wanted = v1::Namespace {
            nsid: request.nsid,
            disk: request.disk.clone(),
            identity: String::new(),
        };
        // Before the disk is opened: an unknown endpoint is the likelier error.
        let (endpoint, overlays, lasts, lanes) = self.with_endpoint(id, |served| {
            let lanes = served.reactors().len().saturating_sub(1);
            Ok::<_, Error>((served.record(), served.overlays()?, served.lasts(), lanes))
        })??;
        let opened = namespace::open(&wanted, (self.disks(), &overlays), lasts, lanes)?;
        self.with_endpoint(id, |served| {
            served.is_still(endpoint)?;
            let door = served.door()?;
            let (status, record, namespace) = served.reserve(&wanted, opened)?;
            let attaching = door.attach(namespace);
            Ok::<_, Error>(BegunAttach { endpoint_id: id.clone(), status, record, attaching })
        })?
    }

    /// Removes namespaces from an endpoint; blocks until their disks are released.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::UnknownNamespace`]; [`Error::Resources`] if a disk does not
    /// finish its requests or the endpoint is not polled (its client has paused it or has not come
    /// back): the disk is released later, and the namespace is not listed any more.
    pub fn detach(&self, request: &v1::DetachDiskRequest) -> Result<(), Error> {
        use v1::detach_disk_request::Namespace;
        let id = &request.endpoint_id;
        let (asked, chosen) = self.with_endpoint(id, |served| {
            let door = served.door()?;
            let chosen = match &request.namespace {
                Some(Namespace::Nsid(nsid)) => served.take(|one| one.status.nsid == *nsid),
                Some(Namespace::Disk(name)) if !name.is_empty() => {
                    served.take(|one| one.status.disk == *name)
                }
                _ => Ok(Vec::new()),
            }?;
            let asked: Vec<_> = chosen.iter().map(|one| door.detach(one.status.nsid)).collect();
            Ok::<_, Error>((asked, chosen))
        })??;
        if chosen.is_empty() {
            return Err(Error::UnknownNamespace(id.clone()));
        }
        let until = Instant::now() + PATIENCE;
        // The overlays' memory goes with their disks.
        drop(chosen);
        let outcomes: Vec<_> = asked.into_iter().map(|asked| asked.wait(id, until)).collect();
        outcomes.into_iter().collect()
    }

    /// Sets the limits of an endpoint's controller.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Network`]; [`Error::Resources`] if the controller does not
    /// answer in time: the limits hold when it is polled again.
    pub fn limit(&self, request: &v1::LimitEndpointRequest) -> Result<(), Error> {
        let id = &request.endpoint_id;
        let limits = request.limits.unwrap_or_default();
        let rates = rates(&limits);
        let asked = self.with_endpoint(id, |served| {
            let door = served.door()?;
            served.set_limits(limits)?;
            Ok::<_, Error>(door.limit(rates))
        })??;
        asked.wait(id, Instant::now() + PATIENCE)
    }

    /// Makes a named disk; blocks while a file is opened.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create_disk(&self, request: &v1::CreateDiskRequest) -> Result<v1::NamedDisk, Error> {
        self.disks().check_free(&request.name)?;
        let place = self.keep().map(|keep| keep.make_disk(request)).transpose()?;
        self.add_disk(request, place)
    }

    /// Makes a named disk in `place`, if it is kept. After an error, nothing is left of the disk.
    pub(crate) fn add_disk(
        &self,
        request: &v1::CreateDiskRequest,
        place: Option<DiskPlace>,
    ) -> Result<v1::NamedDisk, Error> {
        let number = place.as_ref().map(DiskPlace::number);
        let made = NamedDisk::make(request, place).and_then(|disk| {
            self.disks().insert(disk.clone())?;
            Ok(disk.describe(Vec::new()))
        });
        Ok(made.inspect_err(|_| self.forget_disk(number))?)
    }

    fn forget_disk(&self, place: Option<u32>) {
        if let (Some(keep), Some(number)) = (self.keep(), place) {
            keep.give_back_disk(number);
        }
    }

    /// Removes a named disk that no endpoint uses.
    ///
    /// # Errors
    /// [`Error::Disk`] if there is no such disk; [`Error::DiskInUse`].
    pub fn remove_disk(&self, name: &str) -> Result<(), Error> {
        let _alone = self.disks().sizes_change();
        let users = self.users(&self.disks().get(name)?.name);
        if let Some(user) = users.first() {
            return Err(Error::DiskInUse(name.to_owned(), user.endpoint_id.clone()));
        }
        let removed = self.disks().remove(name);
        self.forget_disk(removed.and_then(|disk| disk.place()));
        Ok(())
    }

    /// Resizes a named disk and waits until every user has adopted the new size.
    ///
    /// # Errors
    /// [`Error::Disk`]: the size is unchanged.
    /// [`Error::Resources`]: a user does not finish its requests or is not polled, and adopts the
    /// size later; the part that a smaller disk gives up still exists then.
    pub fn resize_disk(&self, request: &v1::ResizeDiskRequest) -> Result<v1::NamedDisk, Error> {
        let _resizing = self.disks().resizing();
        let alone = self.disks().sizes_change();
        let disk = self.disks().get(&request.name)?;
        disk.resize(request)?;
        let asked = self.tell_users(&disk);
        // Clients may have stopped their functions, and must not hold up others.
        drop(alone);
        adopted(asked, Instant::now() + PATIENCE)?;
        disk.trim()?;
        Ok(disk.describe(self.users(&disk.name)))
    }

    /// Asks every user of a disk to adopt the disk's size. Returns what was asked, with the ids of
    /// the endpoints.
    fn tell_users(&self, disk: &NamedDisk) -> Vec<(String, PendingChange)> {
        let doors = self.each_endpoint(|id, served| {
            let nsids = served.resized(&disk.name, disk.bytes());
            let ask = |door: Door| {
                let refresh = |nsid| (id.to_owned(), door.refresh(nsid));
                nsids.into_iter().map(refresh).collect::<Vec<_>>()
            };
            // An endpoint without a controller has no disks.
            served.door().map_or(Vec::new(), ask)
        });
        doors.into_iter().flatten().collect()
    }

    /// Returns all named disks, by name.
    pub fn list_disks(&self) -> Vec<v1::NamedDisk> {
        let described = |disk: NamedDisk| disk.describe(self.users(&disk.name));
        self.disks().all().into_iter().map(described).collect()
    }

    fn users(&self, name: &str) -> Vec<v1::DiskUser> {
        let users = self.each_endpoint(|_, served| served.uses(name));
        users.into_iter().flatten().collect()
    }
}

/// A namespace that is listed, and that its controller was asked to attach.
struct BegunAttach {
    endpoint_id: String,
    status: v1::NamespaceStatus,
    record: RecordId,
    attaching: Attaching,
}

impl BegunAttach {
    /// Waits for the controller until `until`. After an error the namespace is not listed any more.
    fn end(self, plane: &Plane, until: Instant) -> Result<v1::NamespaceStatus, Error> {
        let Self { endpoint_id: id, status, record, attaching } = self;
        let attached = attaching.wait(&id, until);
        if attached.is_err() {
            // The number may be another namespace's by now.
            let _ = plane.with_endpoint(&id, |served| served.take(|one| one.record == record));
        }
        attached.map(|()| status)
    }
}

/// Waits until `until` for the users of a disk to adopt its size.
///
/// # Errors
/// The first error of [`PendingChange::wait`].
fn adopted(asked: Vec<(String, PendingChange)>, until: Instant) -> Result<(), Error> {
    let outcomes: Vec<_> = asked.into_iter().map(|(id, one)| one.wait(&id, until)).collect();
    let gone =
        |error: &Error| matches!(error, Error::Unknown(_) | Error::Change(ChangeError::Unknown(_)));
    // An endpoint or namespace that was removed meanwhile needs no size.
    outcomes.into_iter().filter(|one| !one.as_ref().is_err_and(gone)).collect()
}

#[cfg(test)]
mod tests {
    use slipway_plane_api::v1::detach_disk_request::Namespace;

    use super::*;

    #[test]
    fn an_attach_that_fails_leaves_a_later_namespace_of_its_number_listed() {
        let folder = tempfile::tempdir().unwrap();
        let plane = Plane::new(crate::Settings::default()).unwrap();
        let socket_path = folder.path().join("cntrl").to_string_lossy().into_owned();
        let nvme = Some(v1::NvmeController::default());
        let id = || "one".to_owned();
        let request =
            v1::CreateEndpointRequest { id: id(), socket_path, nvme, ..Default::default() };
        plane.create(&request).unwrap();
        // The controller refuses the number.
        let nsid = 5000;
        let ram = v1::disk::Kind::Ram(v1::RamDisk { size_bytes: 1 << 20 });
        let disk = Some(v1::Disk { block_size: 0, kind: Some(ram) });
        let attach = v1::AttachDiskRequest { endpoint_id: id(), disk, nsid };
        let listed = || plane.get("one").unwrap().namespaces.len();
        let until = Instant::now() + PATIENCE;
        let first = plane.begin_attach(&attach).unwrap();
        let namespace = Some(Namespace::Nsid(nsid));
        let gone = plane.detach(&v1::DetachDiskRequest { endpoint_id: id(), namespace });
        assert!(matches!(gone, Err(Error::Change(ChangeError::Unknown(_)))), "{gone:?}");
        let second = plane.begin_attach(&attach).unwrap();
        let refused = first.end(&plane, until);
        assert!(matches!(refused, Err(Error::Change(ChangeError::NamespaceId(_)))), "{refused:?}");
        assert_eq!(listed(), 1);
        second.end(&plane, until).unwrap_err();
        assert_eq!(listed(), 0);
    }
}
