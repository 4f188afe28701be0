//! Everything of a controller that exists once: registers, features, events, logs, and the engine
//! of its own thread.
//!
//! | module | what it does |
//! |---|---|
//! | `lifecycle` | enable, reset, shutdown, fatal errors |
//! | `attachment` | namespaces that come, go and grow |
//! | `pin` | the interrupt pin |
//! | `inspect` | the view of the controller's own thread |

mod attachment;
mod inspect;
mod lifecycle;
mod pin;

use std::collections::BTreeMap;
use std::task::Waker;
use std::time::Duration;

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::status::Status;
use slipway_pci::{ConfigSpace, Lane, Msix, Pin};

use crate::activity::Activity;
use crate::engine::report::Report;
use crate::engine::{IoEngine, IoEngineParts};
use crate::events::Events;
use crate::features::Features;
use crate::fleet::{Fleet, Settings};
use crate::health::{Counters, Health};
use crate::journal::{Journal, UsedSlot};
use crate::limiter::{Limiter, Rates};
use crate::parts::{Identity, Parts, PartsError};
use crate::permit::Permit;
use crate::phase::{Phase, Shutdown};
use crate::registers::Registers;

/// The module's head describes it.
pub(crate) struct Home {
    pub pci: ConfigSpace,
    pub msix: Msix,
    /// The interrupt pin, which stands for vector 0 while MSI-X is off.
    pin: Pin,
    pub identity: Identity,
    pub registers: Registers,
    pub phase: Phase,
    pub shutdown: Shutdown,
    pub features: Features,
    pub events: Events,
    pub health: Health,
    /// The time at which the controller was made, for power-on hours.
    pub powered_since: Duration,
    /// The time at which the keep alive timer was started last.
    pub keep_alive_since: Duration,
    /// `true` if state that belongs into a snapshot has changed since the last snapshot.
    pub changed: bool,
    /// The admin commands that delete submission queues, by queue.
    pub deletions: BTreeMap<u16, Permit>,
    /// Recovered commands, which are carried out again once there are lanes.
    pub recovered: Vec<UsedSlot>,
    /// The log page at hand: a buffer that is kept from command to command.
    pub page: Vec<u8>,
    /// An empty report, whose memory is used again and again.
    far_report: Report,
    pub fleet: Fleet,
    pub engine: IoEngine,
    pub activity: Activity,
}

impl Home {
    /// Makes a home in its state after power-on.
    ///
    /// # Errors
    /// [`PartsError::Journal`].
    pub fn new(parts: Parts, pci: ConfigSpace, msix: Msix) -> Result<Self, PartsError> {
        let now = parts.clock.now();
        let journal = match &parts.journal {
            Some(memory) => Some(Journal::new(memory, &parts.limits).ok_or(PartsError::Journal)?),
            None => None,
        };
        let mut home = Self {
            pci,
            msix,
            // The parts have at least one interrupt.
            pin: parts.interrupts[0].pin(),
            identity: parts.identity,
            registers: Registers::new(parts.limits.queue_entries),
            phase: Phase::Disabled,
            shutdown: Shutdown::None,
            features: Features::new(parts.limits.queue_pairs, parts.interrupts.len(), now),
            events: Events::default(),
            health: Health::default(),
            powered_since: now,
            keep_alive_since: now,
            changed: false,
            deletions: BTreeMap::new(),
            recovered: Vec::new(),
            page: Vec::new(),
            far_report: Report::default(),
            fleet: Fleet::default(),
            activity: Activity::default(),
            engine: IoEngine::new(IoEngineParts {
                memory: parts.memory,
                interrupts: parts.interrupts,
                doorbells: parts.doorbells,
                clock: parts.clock,
                limits: parts.limits,
                namespaces: parts.namespaces,
                journal,
            }),
        };
        home.tune();
        Ok(home)
    }

    /// Returns whether commands are started.
    pub fn is_running(&self) -> bool {
        self.engine.is_running()
    }

    /// Returns whether completions go to the guest.
    pub fn may_post(&self) -> bool {
        self.engine.may_post()
    }

    /// Returns the time powered on, in this process and before.
    pub fn powered(&self) -> Duration {
        let here = self.engine.clock.now().saturating_sub(self.powered_since);
        self.health.powered_before.saturating_add(here)
    }

    pub fn default_features(&self) -> Features {
        let (limits, vectors) = (&self.engine.limits, self.engine.interrupts.len());
        Features::new(limits.queue_pairs, vectors, self.engine.clock.now())
    }

    /// Gives the home's engine the present features. Lanes get them with their orders.
    pub fn tune(&mut self) {
        self.engine.tuning = self.features.tuning();
    }

    /// Limits the I/O commands of all threads together.
    pub fn limit(&mut self, rates: Rates) {
        self.engine.limiter = Limiter::new(rates);
        self.fleet.limit(&self.engine.limiter);
    }

    /// Returns the counters of all threads and predecessors together.
    pub fn counters(&self) -> Counters {
        let mut all = self.health.counted_before;
        all.add(&self.engine.counters);
        self.fleet.add_counters(&mut all);
        all
    }

    /// Returns when the keep alive timer runs out, or `None` if it is off (section 7.12).
    pub fn keep_alive_deadline(&self) -> Option<Duration> {
        let timeout = self.features.keep_alive()?;
        self.is_running().then(|| self.keep_alive_since + timeout)
    }

    pub fn check_keep_alive(&mut self) {
        if self.keep_alive_deadline().is_some_and(|at| self.engine.clock.now() >= at) {
            let none = ErrorEntry::NO_COMMAND;
            self.health.log(ErrorEntry::new(0, none, Status::KEEP_ALIVE_EXPIRED));
            self.fail();
        }
    }

    /// Reports a write of an invalid doorbell or value: an event and a log entry, nothing else
    /// (section 5.2.1).
    pub fn invalid_doorbell(&mut self, event: Event) {
        if !self.events.waiting.contains(&event) {
            self.events.raise(event);
            self.health.log(ErrorEntry::new(0, ErrorEntry::NO_COMMAND, Status::SUCCESS));
        }
    }

    /// Takes errors and events over, of the home's engine or of a lane's. Events and fatal errors
    /// from before a reset are dropped.
    pub fn note_errors(&mut self, report: &mut Report) {
        report.errors.drain(..).for_each(|error| self.health.log(error));
        if self.phase == Phase::Enabled {
            report.events.drain(..).for_each(|event| self.invalid_doorbell(event));
            if std::mem::take(&mut report.fatal) {
                self.fail();
            }
        }
    }

    /// Takes the errors and events that lanes have left.
    pub fn collect_reports(&mut self) {
        let mut report = std::mem::take(&mut self.far_report);
        for lane in 0..self.fleet.len() {
            self.fleet.take_report(lane, &mut report);
            self.note_errors(&mut report);
            report.clear();
        }
        self.far_report = report;
    }

    /// Makes the lanes, with the disks that namespaces have for them. Recovered commands of queues
    /// that move to lanes go on there.
    pub fn make_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        self.fleet.wake_home_by(home);
        let made =
            crate::fleet::make(&mut self.fleet, &mut self.engine, &mut self.recovered, wakers);
        let (lanes, found) = made;
        self.activity.set_lanes(self.fleet.published());
        self.deal_queues();
        self.fleet.restart(found);
        lanes
    }

    /// Gives restored queues to the threads that are to serve them.
    pub fn deal_queues(&mut self) {
        if !self.fleet.is_empty() && self.may_post() {
            self.begin_lanes();
            self.fleet.deal_queues(&mut self.engine);
        }
    }

    /// Gives restored queues to the threads that are to serve them, which begin when the controller
    /// is polled.
    pub fn deal_queues_quietly(&mut self) {
        if !self.fleet.is_empty() && self.may_post() {
            self.begin_lanes();
            // Lanes have no queues when they stop, and none can be served before they go on.
            self.fleet.stop();
            self.fleet.deal_queues(&mut self.engine);
            self.fleet.stop_again();
        }
    }

    /// Returns whether an admin command waits for a lane, or for the end of a queue.
    pub fn awaits_lanes(&self) -> bool {
        self.fleet.pending_admin() > 0 || !self.deletions.is_empty()
    }

    /// Starts the lanes when the controller was enabled or restored: they serve queues from now on.
    pub fn begin_lanes(&mut self) {
        if self.fleet.is_empty() {
            return;
        }
        self.fleet.begin(&Settings {
            tuning: self.features.tuning(),
            page_size: self.registers.page_size(),
            shadow: self.engine.shadow,
        });
        if self.shutdown != Shutdown::None {
            self.fleet.stop();
        }
    }

    /// Makes lanes go on that were stopped, unless the controller is disabled or shuts down.
    #[cold]
    pub fn resume_lanes(&mut self) {
        if self.is_running() {
            self.fleet.go_on();
        }
    }
}
