//! Attaches, detaches and resizes disks of running endpoints.
//!
//! The controller belongs to a reactor. Each change is a job in its mailbox, and the caller, on a
//! thread that may block, waits for the answer. The map of endpoints is locked for lookups only.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use slipway_nvme::{ChangeError, Controller, Done, Mailbox, Namespace, Rate, Rates};
use slipway_plane_api::v1;
use slipway_vfio_user::Control;

use crate::disk::{self, Opened};
use crate::keep::DiskPlace;
use crate::plane::Plane;
use crate::{Error, disks::Named};

/// The time that a disk may take to finish its requests.
const PATIENCE: Duration = Duration::from_secs(30);

/// The means to reach a controller on a reactor.
#[derive(Clone)]
pub struct Door {
    pub mailbox: Mailbox,
    pub control: Control,
}

/// The answer to a change that a reactor was asked for.
struct PendingChange(Receiver<Result<(), ChangeError>>);

/// A namespace that is offered to a controller. The controller's job and the caller that gives up
/// both take it from here, and only one of them finds it. So a namespace is either attached, and
/// the caller is told so, or it is dropped by the caller and never attached.
struct Offer(Arc<Mutex<Option<Namespace>>>);

impl Offer {
    fn new(namespace: Namespace) -> (Self, Self) {
        let shared = Arc::new(Mutex::new(Some(namespace)));
        (Self(shared.clone()), Self(shared))
    }

    /// Takes the namespace. Returns `None` if the other side has taken it. The lock is held for
    /// this move only, so the reactor does not wait for the caller.
    fn take(&self) -> Option<Namespace> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }
}

/// A namespace that a controller was asked to attach.
struct Attaching {
    asked: PendingChange,
    offer: Offer,
}

impl Door {
    /// Has the controller do `job`, which calls its [`Done`] when it has finished.
    fn ask(&self, job: impl FnOnce(&mut Controller, Done) + Send + 'static) -> PendingChange {
        let (sender, receiver) = channel();
        // A caller that no longer waits needs no answer.
        let done: Done = Box::new(move |outcome| drop(sender.send(outcome)));
        self.mailbox.post(move |controller| job(controller, done));
        self.control.poke();
        PendingChange(receiver)
    }

    fn attach(&self, namespace: Namespace) -> Attaching {
        let (offer, taken) = Offer::new(namespace);
        let asked = self.ask(move |controller, done| {
            // If the caller has given up, the namespace is gone and nobody waits for an answer.
            if let Some(namespace) = taken.take() {
                done(controller.attach(namespace));
            }
        });
        Attaching { asked, offer }
    }

    fn detach(&self, nsid: u32) -> PendingChange {
        self.ask(move |controller, done| controller.detach(nsid, done))
    }

    fn refresh(&self, nsid: u32) -> PendingChange {
        self.ask(move |controller, done| controller.refresh(nsid, done))
    }
}

impl PendingChange {
    fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
        heard(self.0.recv_timeout(until.saturating_duration_since(Instant::now())), endpoint)
    }
}

impl Attaching {
    /// Waits until the namespace is attached. After an error it is not attached and never will be.
    fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
        let Self { asked, offer } = self;
        match asked.0.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Err(RecvTimeoutError::Timeout) if offer.take().is_none() => {
                // The job has begun, and a job waits for nothing: its answer is on the way.
                Ok(asked.0.recv().map_err(|_| Error::Unknown(endpoint.to_owned()))??)
            }
            outcome => heard(outcome, endpoint),
        }
    }
}

/// Converts the answer of a reactor, or its absence, to the caller's result.
fn heard(
    outcome: Result<Result<(), ChangeError>, RecvTimeoutError>,
    endpoint: &str,
) -> Result<(), Error> {
    match outcome {
        Ok(outcome) => Ok(outcome?),
        Err(RecvTimeoutError::Timeout) => {
            Err(Error::Resources(format!("endpoint {endpoint} still waits for a disk")))
        }
        // The controller ended first.
        Err(RecvTimeoutError::Disconnected) => Err(Error::Unknown(endpoint.to_owned())),
    }
}

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
        let _sizes = self.sizes_stay();
        let wanted = v1::Namespace { nsid: request.nsid, disk: request.disk.clone() };
        // Before the disk is opened: an unknown endpoint is the likelier error.
        let (lasts, lanes) =
            self.with_endpoint(id, |served| (served.lasts(), served.reactors().len() - 1))?;
        let opened = disk::open(&wanted, self.disks(), lasts, lanes)?;
        let (door, status, namespace) = self.with_endpoint(id, |served| {
            let (status, namespace) = served.reserve(&wanted, opened)?;
            Ok::<_, Error>((served.door()?, status, namespace))
        })??;
        let attached = door.attach(namespace).wait(id, Instant::now() + PATIENCE);
        if attached.is_err() {
            let _ = self.with_endpoint(id, |served| served.take(|one| one.nsid == status.nsid));
        }
        attached.map(|()| status)
    }

    /// Removes namespaces from an endpoint; blocks until their disks are released.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::UnknownNamespace`]; [`Error::Resources`] if a disk does not
    /// finish its requests: it is released when it has.
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
        let asked: Vec<_> = chosen.into_iter().map(|nsid| door.detach(nsid)).collect();
        let outcomes: Vec<_> = asked.into_iter().map(|asked| asked.wait(id, until)).collect();
        outcomes.into_iter().collect()
    }

    /// Sets the limits of an endpoint's controller.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Network`]; [`Error::Resources`] if the controller does not
    /// answer in time.
    pub fn limit(&self, request: &v1::LimitEndpointRequest) -> Result<(), Error> {
        let id = &request.endpoint_id;
        let limits = request.limits.unwrap_or_default();
        let rates = rates(&limits);
        let door = self.with_endpoint(id, |served| {
            served.set_limits(limits)?;
            served.door()
        })??;
        let asked = door.ask(move |controller, done| {
            controller.limit(rates);
            done(Ok(()));
        });
        asked.wait(id, Instant::now() + PATIENCE)
    }

    /// Makes a named disk; blocks while a file is opened.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create_disk(&self, request: &v1::CreateDiskRequest) -> Result<v1::NamedDisk, Error> {
        if self.disks().get(&request.name).is_ok() {
            return Err(Error::ExistingDisk(request.name.clone()));
        }
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
        let made = Named::make(request, place).and_then(|disk| {
            self.disks().insert(disk.clone())?;
            Ok(disk.describe(Vec::new()))
        });
        made.inspect_err(|_| self.forget_disk(number))
    }

    fn forget_disk(&self, place: Option<u32>) {
        if let (Some(keep), Some(number)) = (self.keep(), place) {
            keep.give_back_disk(number);
        }
    }

    /// Removes a named disk that no endpoint uses.
    ///
    /// # Errors
    /// [`Error::UnknownDisk`], [`Error::DiskInUse`].
    pub fn remove_disk(&self, name: &str) -> Result<(), Error> {
        let _alone = self.sizes_change();
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
    /// [`Error::UnknownDisk`], [`Error::Invalid`], [`Error::Disk`]: the size is unchanged.
    /// [`Error::Resources`]: a user does not finish its requests, and adopts the size when it has;
    /// the part that a smaller disk gives up still exists then.
    pub fn resize_disk(&self, request: &v1::ResizeDiskRequest) -> Result<v1::NamedDisk, Error> {
        let _alone = self.sizes_change();
        let disk = self.disks().get(&request.name)?;
        let before = disk.shared.geometry().bytes();
        let bytes = (request.size_bytes > 0).then_some(request.size_bytes);
        if bytes.is_some_and(|bytes| bytes < before) && !request.shrink {
            return Err(Error::Invalid(format!(
                "disk {} has {before} bytes: making it smaller loses what lies behind, and has to \
                 be asked for",
                disk.name
            )));
        }
        disk.shared.resize(bytes)?;
        disk.keep_size()?;
        self.tell_users(&disk)?;
        disk.shared.trim()?;
        Ok(disk.describe(self.users(&disk.name)))
    }

    /// Has every user of a disk adopt the disk's size.
    fn tell_users(&self, disk: &Named) -> Result<(), Error> {
        let until = Instant::now() + PATIENCE;
        let doors = self.each_endpoint(|id, served| {
            let nsids = served.resized(&disk.name, disk.shared.geometry().bytes());
            let ask = |door: Door| {
                nsids.into_iter().map(|nsid| (id.to_owned(), door.refresh(nsid))).collect()
            };
            // An endpoint without a controller has no disks.
            served.door().map_or(Vec::new(), ask)
        });
        let outcomes = doors.into_iter().flatten().map(|(id, asked)| asked.wait(&id, until));
        let outcomes: Vec<_> = outcomes.collect();
        let gone = |error: &Error| {
            matches!(error, Error::Unknown(_) | Error::Change(ChangeError::Unknown(_)))
        };
        // An endpoint or namespace that was removed meanwhile needs no size.
        outcomes.into_iter().filter(|one| !one.as_ref().is_err_and(gone)).collect()
    }

    /// Returns all named disks, by name.
    pub fn list_disks(&self) -> Vec<v1::NamedDisk> {
        let described = |disk: Named| disk.describe(self.users(&disk.name));
        self.disks().all().into_iter().map(described).collect()
    }

    fn users(&self, name: &str) -> Vec<v1::DiskUser> {
        let users = self.each_endpoint(|_, served| served.uses(name));
        users.into_iter().flatten().collect()
    }
}

/// Converts limits to a controller's rates.
pub fn rates(limits: &v1::Limits) -> Rates {
    let rate = |per_second, burst| (per_second > 0).then_some(Rate { per_second, burst });
    Rates {
        commands: rate(limits.commands_per_second, limits.command_burst),
        bytes: rate(limits.bytes_per_second, limits.byte_burst),
    }
}

/// Makes a namespace of `opened` with number `nsid`, and its status for the interface.
pub fn namespace(id: &str, nsid: u32, opened: Opened) -> (v1::NamespaceStatus, Namespace) {
    let shape = opened.disk.geometry();
    let named = opened.named;
    let status = v1::NamespaceStatus {
        nsid,
        size_bytes: shape.bytes(),
        read_only: shape.read_only,
        kind: opened.kind.to_owned(),
        disk: named.as_ref().map(|named| named.name.clone()).unwrap_or_default(),
    };
    let uuid = named.as_ref().map_or_else(|| crate::endpoint::uuid(id, nsid), Named::uuid);
    let namespace = Namespace::new(nsid, opened.disk, uuid);
    let (shared, lanes) = (named.is_some(), opened.lanes);
    (status, Namespace { shared, lanes, ..namespace })
}

#[cfg(test)]
mod tests {
    use slipway_block::RamDisk;
    use slipway_nvme::{Identity, Limits, Parts, doorbell_count};
    use slipway_pci::Interrupt;
    use slipway_reactor::{Handle, Reactor, Settings};
    use slipway_vfio_user::{Config, Endpoint, EndpointParts};

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// An endpoint that is not on a reactor yet: as slow as a reactor can be.
    struct Slow {
        endpoint: Endpoint,
        door: Door,
        home: Handle,
        _reactor: Reactor,
        _dir: tempfile::TempDir,
    }

    fn slow() -> Slow {
        let dir = tempfile::tempdir().unwrap();
        let config = Config::at(dir.path().join("cntrl"));
        let reactor = Reactor::spawn(Settings::default()).unwrap();
        let mut parts = EndpointParts::new(&config);
        let limits = Limits::default();
        let controller = Controller::new(Parts {
            memory: parts.memory(),
            interrupts: vec![Interrupt::new(parts.interrupts(), 0)],
            doorbells: parts.doorbells(doorbell_count(limits.queue_pairs)).unwrap(),
            namespaces: Vec::new(),
            clock: parts.clock(),
            identity: Identity::new("slow"),
            limits,
            journal: None,
        });
        let controller = controller.unwrap();
        let mailbox = controller.mailbox();
        let home = reactor.handle();
        let endpoint = Endpoint::new(config, parts, Box::new(controller), Vec::new(), &home);
        let endpoint = endpoint.unwrap();
        let door = Door { mailbox, control: endpoint.control() };
        Slow { endpoint, door, home, _reactor: reactor, _dir: dir }
    }

    fn disk() -> Namespace {
        Namespace::new(1, Box::new(RamDisk::new(1 << 20, 512).unwrap()), [1; 16])
    }

    #[test]
    fn what_the_caller_has_given_up_is_never_attached() {
        let Slow { endpoint, door, home, _reactor, _dir } = slow();
        let late = door.attach(disk()).wait("slow", Instant::now());
        assert!(matches!(late, Err(Error::Resources(_))), "{late:?}");
        home.add(Box::new(endpoint)).unwrap();
        // Jobs run in order, so the number is free after the first job.
        door.attach(disk()).wait("slow", Instant::now() + LONG).unwrap();
    }

    #[test]
    fn what_was_attached_in_time_is_told_however_late_the_caller_looks() {
        let Slow { endpoint, door, home, _reactor, _dir } = slow();
        let first = door.attach(disk());
        home.add(Box::new(endpoint)).unwrap();
        door.ask(|_, done| done(Ok(()))).wait("slow", Instant::now() + LONG).unwrap();
        first.wait("slow", Instant::now()).unwrap();
    }

    #[test]
    fn a_caller_whose_time_ends_while_the_job_runs_waits_for_its_answer() {
        let (sender, receiver) = channel();
        let (offer, taken) = Offer::new(disk());
        assert!(taken.take().is_some(), "the job has begun");
        let job = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            sender.send(Ok(())).unwrap();
        });
        let attaching = Attaching { asked: PendingChange(receiver), offer };
        attaching.wait("slow", Instant::now()).unwrap();
        job.join().unwrap();
    }

    #[test]
    fn a_controller_that_goes_attaches_nothing() {
        let Slow { endpoint, door, .. } = slow();
        let asked = door.attach(disk());
        drop(endpoint);
        let gone = asked.wait("slow", Instant::now() + LONG);
        assert!(matches!(gone, Err(Error::Unknown(_))), "{gone:?}");
    }
}
