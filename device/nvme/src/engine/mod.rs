//! The I/O engine: the part of a controller that carries out I/O commands on one thread.
//!
//! An I/O engine has queues, the commands in flight, buffers, and a disk for each of its
//! namespaces. It fetches, executes, drives the disks, posts completions and interrupts. A
//! controller has one engine, and each of its lanes has one: no command touches two engines, and no
//! command takes a lock.
//!
//! An engine calls nobody. The thread that has it sets its [`Mode`], its [`Tuning`] and its limits,
//! and reads its [`Report`].
//!
//! | module | what it does |
//! |---|---|
//! | `inflight` | the table of commands that disks work on |
//! | `spares` | work areas for commands of several steps |
//! | `report` | news for the thread that has the engine |
//! | `doorbells` | registers and shadow pages of the engine's queues |
//! | `io` | commands of the NVM command set, of one step |
//! | `steps` | commands of several steps |
//! | `complete` | the ends of requests and commands |
//! | `fetch` | which commands start, and when |
//! | `restart` | commands that a predecessor had fetched |
//! | `interrupts` | which completion queues interrupt, and when |

pub(crate) mod complete;
pub(crate) mod doorbells;
mod fetch;
pub(crate) mod inflight;
mod interrupts;
mod io;
pub(crate) mod report;
pub(crate) mod restart;
mod spares;
mod steps;

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use slipway_block::Completion;
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_pci::{Interrupt, Progress, TurnLength};
use slipway_ram::{Memory, Span, View};
use slipway_telemetry::Clock;

pub(crate) use self::fetch::Exclusive;
use self::inflight::Inflight;
use self::report::Report;
use self::spares::Spares;
pub(crate) use self::steps::{COPY_BLOCKS, COPY_RANGE_BLOCKS, COPY_RANGES};
use crate::cell::ShadowPages;
use crate::features::Tuning;
use crate::health::Counters;
use crate::journal::Journal;
use crate::limiter::Limiter;
use crate::namespace::{Namespace, Namespaces};
use crate::parts::Limits;
use crate::prp::Walker;
use crate::queue::{Queues, SubmissionQueue};
use crate::trace::{Latencies, Tracer};
use crate::turn::Quota;

/// Looks at the doorbells after a poll that found nothing, divided among all queues: together some
/// tens of ns.
const LOOKS: usize = 8;

/// The work that an engine may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Nothing is started, and no completion goes to the guest.
    Off,
    /// Commands in flight end; none is started.
    Draining,
    /// Commands are started.
    Running,
}

/// The place of an engine in its controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The controller has no other engine.
    Single,
    /// The engine of a controller with lanes.
    Home,
    /// The engine of a lane.
    Lane,
}

/// The parts that an engine is made of.
pub(crate) struct IoEngineParts {
    pub memory: Memory,
    pub interrupts: Vec<Interrupt>,
    pub doorbells: Doorbells,
    pub clock: Arc<dyn Clock>,
    pub limits: Limits,
    pub namespaces: Vec<Namespace>,
    pub journal: Option<Journal>,
}

/// The module's head describes it.
pub(crate) struct IoEngine {
    pub memory: Memory,
    /// The guest's memory, for the places of data.
    view: View,
    pub interrupts: Vec<Interrupt>,
    pub doorbells: Doorbells,
    pub clock: Arc<dyn Clock>,
    pub limits: Limits,
    pub namespaces: Namespaces,
    pub queues: Queues,
    pub inflight: Inflight,
    /// The thread's part of the journal.
    pub journal: Option<Journal>,
    /// The tracer, while the time of commands is measured.
    pub tracer: Option<Box<Tracer>>,
    pub counters: Counters,
    pub report: Report,

    mode: Mode,
    /// `true` after a fatal error, until the next reset.
    failed: bool,
    /// Bytes of a memory page (CC.MPS).
    pub page_size: u64,
    pub tuning: Tuning,
    pub limiter: Limiter,
    /// The shadow pages, if the host named any: it writes doorbells there instead of to registers.
    pub shadow: Option<ShadowPages>,
    pub role: Role,

    /// `true` if the host was asked for register writes, and nothing has happened since.
    resting: bool,
    /// The submission queue after which the next poll begins.
    turn: u16,
    /// The amount of work that a poll may do.
    quota: Quota,
    /// I/O commands that this poll may still start.
    commands_left: u32,
    /// Bytes that disks may still copy in this poll; 0 between polls.
    bytes_left: u64,
    /// `true` if requests were left for the next poll.
    behind: bool,
    /// The fused pair that is in flight, or that waits for all else to end. Until then nothing else
    /// is fetched from I/O queues.
    exclusive: Option<Exclusive>,
    /// The time at which the first of the held-back interrupts is due.
    interrupt_at: Option<Duration>,

    // Buffers that are kept from poll to poll, so that nothing is allocated in the steady state.
    pub walker: Walker,
    entries: Vec<SubmissionEntry>,
    completions: Vec<Completion>,
    /// The places of the current command's data.
    spans: Vec<Span>,
    spare_spans: Vec<Vec<Span>>,
    spares: Spares,
}

impl IoEngine {
    pub fn new(parts: IoEngineParts) -> Self {
        Self {
            view: View::new(parts.memory.clone()),
            memory: parts.memory,
            interrupts: parts.interrupts,
            doorbells: parts.doorbells,
            clock: parts.clock,
            limits: parts.limits,
            namespaces: Namespaces::new(parts.namespaces),
            queues: Queues::default(),
            inflight: Inflight::default(),
            journal: parts.journal,
            tracer: None,
            counters: Counters::default(),
            report: Report::default(),
            mode: Mode::Off,
            failed: false,
            page_size: 4096,
            tuning: Tuning::default(),
            limiter: Limiter::default(),
            shadow: None,
            role: Role::Single,
            resting: false,
            turn: 0,
            quota: TurnLength::default().into(),
            commands_left: 0,
            bytes_left: 0,
            behind: false,
            exclusive: None,
            interrupt_at: None,
            walker: Walker::default(),
            entries: Vec::new(),
            completions: Vec::new(),
            spans: Vec::new(),
            spare_spans: Vec::new(),
            spares: Spares::default(),
        }
    }

    /// Returns whether commands are started.
    pub fn is_running(&self) -> bool {
        self.mode == Mode::Running && !self.failed
    }

    /// Returns whether completions go to the guest.
    pub fn may_post(&self) -> bool {
        self.mode != Mode::Off && !self.failed
    }

    /// Returns the work that the engine may do, unless it has [failed](IoEngine::has_failed).
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns whether a fatal error has happened since the last reset.
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    pub fn set_mode(&mut self, mode: Mode) {
        self.mode = mode;
    }

    /// Starts nothing more; commands in flight end.
    pub fn drain(&mut self) {
        if self.mode == Mode::Running {
            self.mode = Mode::Draining;
        }
    }

    /// Starts commands again after [`IoEngine::drain`].
    pub fn go_on(&mut self) {
        if self.mode == Mode::Draining {
            self.mode = Mode::Running;
        }
    }

    /// Stops everything until the next reset, and reports that.
    pub fn fail(&mut self) {
        self.report.fatal |= !self.failed;
        self.failed = true;
    }

    /// Sets whether a fatal error has happened, which the caller knows.
    pub fn set_failed(&mut self, failed: bool) {
        self.failed = failed;
    }

    pub fn set_turn(&mut self, turn: TurnLength) {
        self.quota = turn.into();
    }

    /// Begins a poll: disks may copy as much as the turn allows.
    pub fn begin_poll(&mut self) {
        self.bytes_left = self.quota.bytes;
    }

    /// Makes disks copy without a bound in this poll.
    pub fn lift_quota(&mut self) {
        self.bytes_left = Quota::WHOLE.bytes;
    }

    /// Gives up all queues. The ends of commands in flight are not reported.
    pub fn drop_queues(&mut self) {
        self.mode = Mode::Off;
        self.failed = false;
        self.inflight.orphan_all();
        self.queues.clear();
        if let Some(tracer) = &mut self.tracer {
            tracer.forget();
        }
        self.shadow = None;
    }

    /// Releases the guest's memory until it is used again.
    pub fn release_memory(&mut self) {
        self.queues.release_memory();
        self.namespaces.release_memory();
        self.view.release();
        self.spans.clear();
        self.spare_spans.clear();
        self.spares = Spares::default();
    }

    /// Returns how a poll ended that found work if `busy`; `deadline` is when the caller wants the
    /// next poll at the latest.
    pub fn progress(&mut self, busy: bool, deadline: Option<Duration>) -> Progress {
        self.resting &= !busy;
        let held = self.limiter.deadline().filter(|_| self.is_running());
        let times = deadline.into_iter().chain(held).chain(self.interrupt_at);
        match times.min() {
            _ if busy && self.is_behind() => Progress::Behind,
            _ if busy => Progress::Busy,
            deadline if self.resting || !self.is_watching() => Progress::Idle(deadline),
            deadline => Progress::Watching(deadline),
        }
    }

    /// Returns whether more commands wait than the turn had room for.
    fn is_behind(&self) -> bool {
        self.behind || self.queues.submissions().any(|queue| queue.waiting() > 0)
    }

    /// Looks at mapped doorbells some more while no other task needs the thread, and returns
    /// whether one was rung. A look costs a small part of a poll, so a command is seen sooner.
    pub fn is_rung_soon(&self) -> bool {
        let alone = self.quota == TurnLength::Long.into() && self.inflight.is_empty();
        if !alone || !self.doorbells.is_shared() || !self.is_running() {
            return false;
        }
        let queues = usize::from(self.queues.submission_bound()).max(1);
        (0..LOOKS / queues).any(|_| self.queues.submissions().any(SubmissionQueue::is_rung))
    }

    /// Returns whether work may come that only a look finds: in the shadow page, or in doorbell
    /// cells that another engine's thread stores. (The host looks at a mapped page.)
    fn is_watching(&self) -> bool {
        self.shadow.is_some() || (self.role == Role::Lane && !self.doorbells.is_shared())
    }

    /// Asks the guest to write a register with its next change, if it writes shadow doorbells.
    /// `admin_waits` says whether room in the admin completion queue would make work.
    pub fn rest(&mut self, admin_waits: bool) {
        self.resting = true;
        if self.is_running() && self.shadow.is_some() {
            if self.queues.publish(&self.memory, admin_waits).is_err() {
                self.fail();
            }
            // The barrier between storing the event indexes and the last look; the head of `cell`
            // says why.
            fence(Ordering::SeqCst);
        }
    }

    /// Leaves the resting state, since the events that the host was asked to announce may no longer
    /// be the right ones.
    pub fn get_up(&mut self) {
        self.resting = false;
    }

    /// Returns whether the host was asked to announce new work.
    pub fn is_resting(&self) -> bool {
        self.resting
    }

    /// Returns the latencies counted since the last call and goes on with `fresh`. Returns `None`,
    /// and drops `fresh`, if nothing is traced.
    pub fn take_latencies(&mut self, fresh: Latencies) -> Option<Latencies> {
        self.tracer.as_mut().map(|tracer| tracer.take(fresh))
    }
}
