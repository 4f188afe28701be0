//! Attaches, detaches and resizes disks of running endpoints.
//! The map of endpoints is locked for lookups only.

use std::time::{Duration, Instant};

use slipway_disks::{DiskPlace, NamedDisk};
use slipway_nvme::ChangeError;
use slipway_plane_api::v1;

use crate::door::{Door, PendingChange, rates};
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
        let id = &request.endpoint_id;
        // No disk changes its size between being opened and being listed among those that are told
        // of new sizes.
        let sizes = self.disks().sizes_stay();
        let wanted = v1::Namespace {
            nsid: request.nsid,
            disk: request.disk.clone(),
            identity: String::new(),
        };
        // Before the disk is opened: an unknown endpoint is the likelier error.
        let (overlays, lasts, lanes) = self.with_endpoint(id, |served| {
            let lanes = served.reactors().len().saturating_sub(1);
            Ok::<_, Error>((served.overlays()?, served.lasts(), lanes))
        })??;
        let opened = namespace::open(&wanted, (self.disks(), &overlays), lasts, lanes)?;
        let (door, status, namespace) = self.with_endpoint(id, |served| {
            let (status, namespace) = served.reserve(&wanted, opened)?;
            Ok::<_, Error>((served.door()?, status, namespace))
        })??;
        let attaching = door.attach(namespace);
        // The controller hears of later sizes after this. Its client may have stopped it, and must
        // not hold up others.
        drop(sizes);
        let attached = attaching.wait(id, Instant::now() + PATIENCE);
        if attached.is_err() {
            let _ = self.with_endpoint(id, |served| served.take(|one| one.nsid == status.nsid));
        }
        attached.map(|()| status)
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
        let (door, chosen) = self.with_endpoint(id, |served| {
            let chosen = match &request.namespace {
                Some(Namespace::Nsid(nsid)) => served.take(|one| one.nsid == *nsid),
                Some(Namespace::Disk(name)) if !name.is_empty() => {
                    served.take(|one| one.disk == *name)
                }
                _ => Ok(Vec::new()),
            };
            Ok::<_, Error>((served.door()?, chosen?))
        })??;
        if chosen.is_empty() {
            return Err(Error::UnknownNamespace(id.clone()));
        }
        let until = Instant::now() + PATIENCE;
        let asked: Vec<_> = chosen.iter().map(|one| door.detach(one.status.nsid)).collect();
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
        let door = self.with_endpoint(id, |served| {
            served.set_limits(limits)?;
            served.door()
        })??;
        door.limit(rates).wait(id, Instant::now() + PATIENCE)
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
