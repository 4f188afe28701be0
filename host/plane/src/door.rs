//! Changes of an NVMe controller that belongs to a reactor, asked for by other threads.
//!
//! Each change is a request in the controller's mailbox. The caller, on a thread that may block,
//! waits for the answer until a deadline, since a controller is polled only while its client lets
//! it run.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use slipway_nvme::{ChangeError, Done, Mailbox, Namespace, Posted, Rate, Rates, Request};
use slipway_plane_api::v1;
use slipway_vfio_user::Control;

use crate::Error;

/// The means to ask a controller on a reactor for changes.
#[derive(Clone)]
pub struct Door {
    /// The controller's mailbox.
    pub mailbox: Mailbox,
    /// The control of the controller's endpoint, by which the controller is polled soon.
    pub control: Control,
}

/// A change that a controller was asked for. It stays posted until the controller is polled,
/// however long the caller waits, since the caller has recorded the change as made.
pub struct PendingChange {
    answer: Receiver<Result<(), ChangeError>>,
}

/// A namespace that a controller was asked to attach.
pub struct Attaching {
    pending: PendingChange,
    posted: Posted,
}

impl Door {
    /// Posts the request that `request` makes of the means to answer it, and has the controller
    /// polled.
    fn ask(&self, request: impl FnOnce(Done) -> Request) -> (PendingChange, Posted) {
        let (sender, answer) = channel();
        // A caller that no longer waits needs no answer.
        let done: Done = Box::new(move |outcome| drop(sender.send(outcome)));
        let posted = self.mailbox.post(request(done));
        self.control.poke();
        (PendingChange { answer }, posted)
    }

    /// Asks the controller to attach a namespace.
    pub fn attach(&self, namespace: Namespace) -> Attaching {
        let (pending, posted) = self.ask(|done| Request::Attach(namespace, done));
        Attaching { pending, posted }
    }

    /// Asks the controller to detach a namespace.
    pub fn detach(&self, nsid: u32) -> PendingChange {
        self.ask(|done| Request::Detach(nsid, done)).0
    }

    /// Asks the controller to look at the size of a namespace's disk again.
    pub fn refresh(&self, nsid: u32) -> PendingChange {
        self.ask(|done| Request::Refresh(nsid, done)).0
    }

    /// Asks the controller to limit its commands.
    pub fn limit(&self, rates: Rates) -> PendingChange {
        self.ask(|done| Request::Limit(rates, done)).0
    }
}

impl PendingChange {
    /// Waits until `until` for the answer of the controller of `endpoint`.
    ///
    /// # Errors
    /// [`Error::Change`] if the controller refuses the change; [`Error::Unknown`] if the controller
    /// has ended; [`Error::Resources`] if the change is not made by `until`. In the last case it is
    /// made as soon as it can be.
    pub fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
        heard(self.answer_by(until), endpoint, LATER)
    }

    /// Waits for the answer until `until`.
    fn answer_by(&self, until: Instant) -> Result<Result<(), ChangeError>, RecvTimeoutError> {
        self.answer.recv_timeout(until.saturating_duration_since(Instant::now()))
    }
}

impl Attaching {
    /// Waits until the namespace is attached, or until `until` for the controller to begin with
    /// that. After an error the namespace is not attached and never will be.
    ///
    /// # Errors
    /// [`Error::Change`] if the controller refuses the namespace; [`Error::Unknown`] if the
    /// controller has ended; [`Error::Resources`] if it has not begun by `until`.
    pub fn wait(self, endpoint: &str, until: Instant) -> Result<(), Error> {
        let Self { pending, posted } = self;
        match pending.answer_by(until) {
            Err(RecvTimeoutError::Timeout) if posted.take_back().is_none() => {
                // The controller has begun, so it answers within the same poll or, if it ends
                // first, drops the sender. A caller that did not wait for that could not tell
                // whether the namespace is attached.
                let answer = pending.answer.recv().map_err(|_| RecvTimeoutError::Disconnected);
                heard(answer, endpoint, NEVER)
            }
            outcome => heard(outcome, endpoint, NEVER),
        }
    }
}

/// The reasons for which a change is not made in time, and what becomes of the change.
const LATER: &str = "its client has paused it or has not come back, or a disk still works on \
                     requests; the change is made as soon as it can be";
/// The reasons for which a disk is not attached in time.
const NEVER: &str = "its client has paused it or has not come back; the disk is not attached";

/// Converts the answer of the controller of `endpoint` to the caller's result. `late` has the
/// reasons for which there is no answer in time.
fn heard(
    outcome: Result<Result<(), ChangeError>, RecvTimeoutError>,
    endpoint: &str,
    late: &str,
) -> Result<(), Error> {
    match outcome {
        Ok(outcome) => Ok(outcome?),
        Err(RecvTimeoutError::Timeout) => {
            Err(Error::Resources(format!("endpoint {endpoint} did not answer in time: {late}")))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use slipway_block::RamDisk;
    use slipway_nvme::{Controller, Identity, Limits, Parts, doorbell_count};
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
        door.limit(Rates::default()).wait("slow", Instant::now() + LONG).unwrap();
        first.wait("slow", Instant::now()).unwrap();
    }

    #[test]
    fn a_caller_whose_time_ends_while_the_controller_is_at_it_waits_for_its_answer() {
        // A controller that is gone gives no request back, as one that has begun it.
        let Slow { endpoint, door, .. } = slow();
        drop(endpoint);
        let posted = door.attach(disk()).posted;
        let (sender, answer) = channel();
        let answers = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            sender.send(Ok(())).unwrap();
        });
        let attaching = Attaching { pending: PendingChange { answer }, posted };
        attaching.wait("slow", Instant::now()).unwrap();
        answers.join().unwrap();
    }

    #[test]
    fn a_disk_whose_detaching_took_too_long_is_detached_later() {
        let Slow { endpoint, door, home, _reactor, _dir } = slow();
        let first = door.attach(disk());
        let late = door.detach(1).wait("slow", Instant::now());
        let Err(Error::Resources(text)) = &late else { panic!("{late:?}") };
        assert!(text.starts_with("endpoint slow did not answer") && text.contains(LATER), "{text}");
        home.add(Box::new(endpoint)).unwrap();
        first.wait("slow", Instant::now() + LONG).unwrap();
        // The number is free again.
        let gone = door.detach(1).wait("slow", Instant::now() + LONG);
        assert!(matches!(gone, Err(Error::Change(ChangeError::Unknown(1)))), "{gone:?}");
        door.attach(disk()).wait("slow", Instant::now() + LONG).unwrap();
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
