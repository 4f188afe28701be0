//! The way to a controller on a reactor.
//!
//! The controller belongs to a reactor. Each change is a job in its mailbox, and the caller, on a
//! thread that may block, waits for the answer.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use slipway_nvme::{ChangeError, Controller, Done, Mailbox, Namespace, Rate, Rates};
use slipway_plane_api::v1;
use slipway_vfio_user::Control;

use crate::Error;
use crate::disk::Opened;
use crate::disks::Named;

/// The means to reach a controller on a reactor.
#[derive(Clone)]
pub struct Door {
    pub mailbox: Mailbox,
    pub control: Control,
}

/// The answer to a change that a reactor was asked for.
pub struct PendingChange(Receiver<Result<(), ChangeError>>);

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
pub struct Attaching {
    asked: PendingChange,
    offer: Offer,
}

impl Door {
    /// Has the controller do `job`, which calls its [`Done`] when it has finished.
    pub fn ask(&self, job: impl FnOnce(&mut Controller, Done) + Send + 'static) -> PendingChange {
        let (sender, receiver) = channel();
        // A caller that no longer waits needs no answer.
        let done: Done = Box::new(move |outcome| drop(sender.send(outcome)));
        self.mailbox.post(move |controller| job(controller, done));
        self.control.poke();
        PendingChange(receiver)
    }

    /// Asks the controller to attach a namespace.
    pub fn attach(&self, namespace: Namespace) -> Attaching {
        let (offer, taken) = Offer::new(namespace);
        let asked = self.ask(move |controller, done| {
            // If the caller has given up, the namespace is gone and nobody waits for an answer.
            if let Some(namespace) = taken.take() {
                done(controller.attach(namespace));
            }
        });
        Attaching { asked, offer }
    }

    /// Asks the controller to detach a namespace.
    pub fn detach(&self, nsid: u32) -> PendingChange {
        self.ask(move |controller, done| controller.detach(nsid, done))
    }

    /// Asks the controller to look at the size of a namespace's disk again.
    pub fn refresh(&self, nsid: u32) -> PendingChange {
        self.ask(move |controller, done| controller.refresh(nsid, done))
    }
}

impl PendingChange {
    /// Waits for the answer of the controller of `endpoint`.
    pub fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
        heard(self.0.recv_timeout(until.saturating_duration_since(Instant::now())), endpoint)
    }
}

impl Attaching {
    /// Waits until the namespace is attached. After an error it is not attached and never will be.
    pub fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
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
    let uuid = named.as_ref().map_or_else(|| crate::id::uuid(id, nsid), Named::uuid);
    let namespace = Namespace::new(nsid, opened.disk, uuid);
    let (shared, lanes) = (named.is_some(), opened.lanes);
    (status, Namespace { shared, lanes, ..namespace })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
