//! The controller as a PCI function.
//!
//! Over 500 lines: to be cut into the registers and the parts behind them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::Waker;
use std::time::Duration;

use slipway_block::Completion;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::registers::offset;
use slipway_nvme_spec::status::Status;
use slipway_pci::{
    Access, Bar, ConfigEffect, ConfigSpace, Description, Doorbells, Function, Interrupt, Lane,
    Msix, MsixLayout, Pin, Progress, StateError, TurnLength,
};
use slipway_ram::{Memory, Span, View};
use slipway_telemetry::Clock;

use crate::admin::features::Features;
use crate::cell::{BadDoorbell, ShadowPages};
use crate::events::Events;
use crate::health::Health;
use crate::inflight::Inflight;
use crate::journal::{Journal, Side, Ticket};
use crate::lane::LaneLink;
use crate::lanes::Lanes;
use crate::lifecycle::{Phase, Shutdown};
use crate::limiter::{Limiter, Rates};
use crate::mailbox::Inbox;
use crate::namespace::Namespaces;
use crate::prp::Walker;
use crate::queue::{Queues, SubmissionQueue};
use crate::recover::{Recovered, note_moved};
use crate::registers::Registers;
use crate::serve::Exclusive;
use crate::spares::Spares;
use crate::trace::Tracer;
use crate::turn::Quota;
use crate::{BAR_SIZE, Identity, Limits, Parts, PartsError, doorbell_count};

/// The page of BAR0 that holds doorbells and nothing else.
const DOORBELL_PAGE: std::ops::Range<u64> = offset::DOORBELLS..0x2000;
/// Offset of the MSI-X table in BAR0. Up to 256 vectors fit its page.
const MSIX_TABLE: u64 = 0x2000;
/// Offset of the MSI-X pending bits in BAR0.
const MSIX_PENDING: u64 = 0x3000;
/// Most vectors whose table ends before the pending bits.
pub(crate) const MAX_VECTORS: usize = ((MSIX_PENDING - MSIX_TABLE) / 16) as usize;

/// Looks at the doorbells after a poll that found nothing, divided among all queues: together some
/// tens of ns.
const LOOKS: usize = 8;

/// PCI identity. Drivers bind by class (01 08 02: mass storage, non-volatile memory, NVM Express;
/// section 2.1.5), so the IDs need only be honest. 1af4:10f0 to 1af4:10ff are set aside by their
/// vendor (Red Hat) for software devices that have no ID of their own. With the IDs of another
/// vendor's product, drivers would apply that product's quirks.
const PCI_IDENTITY: slipway_pci::Identity = slipway_pci::Identity {
    vendor: 0x1af4,
    device: 0x10f0,
    subsystem_vendor: 0x1af4,
    subsystem: 0x10f0,
    class: 0x01_08_02,
    revision: 1,
};
/// VID and SSVID, which Identify Controller repeats.
pub(crate) const PCI_VENDOR: u16 = PCI_IDENTITY.vendor;

/// An NVMe controller; the crate's head describes it.
///
/// Before it drops a controller, the host calls `quiesce` until it returns `true`: disks then hold
/// no guest memory.
pub struct Controller {
    description: Description,
    pub(crate) pci: ConfigSpace,
    pub(crate) msix: Msix,
    pub(crate) memory: Memory,
    /// The guest's memory, for the places of data.
    pub(crate) view: View,
    pub(crate) interrupts: Vec<Interrupt>,
    /// The interrupt pin, which stands for vector 0 while MSI-X is off.
    pub(crate) pin: Pin,
    pub(crate) doorbells: Doorbells,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) identity: Identity,
    pub(crate) limits: Limits,
    pub(crate) namespaces: Namespaces,
    pub(crate) registers: Registers,
    pub(crate) phase: Phase,
    pub(crate) shutdown: Shutdown,
    pub(crate) queues: Queues,
    /// The shadow pages, if the host named any: it writes doorbells there instead of to registers.
    pub(crate) shadow: Option<ShadowPages>,
    /// `true` if the host was asked for register writes, and nothing has happened since.
    resting: bool,
    pub(crate) features: Features,
    pub(crate) events: Events,
    pub(crate) health: Health,
    /// The time at which the controller was made, for power-on hours.
    pub(crate) powered_since: Duration,
    /// The time at which the keep alive timer was started last.
    pub(crate) keep_alive_since: Duration,
    pub(crate) inflight: Inflight,
    pub(crate) limiter: Limiter,
    /// The time at which the first of the held-back interrupts is due.
    pub(crate) interrupt_at: Option<Duration>,
    pub(crate) journal: Option<Journal>,
    /// Recovered commands, which the controller carries out again once it has its lanes.
    pub(crate) recovered: Option<Recovered>,
    /// The journal slot of the current command.
    pub(crate) ticket: Ticket,
    /// `true` if state that belongs into a snapshot has changed since the last snapshot.
    pub(crate) changed: bool,
    pub(crate) inbox: Inbox,
    /// The tracer, while the time of commands is measured.
    pub(crate) tracer: Option<Box<Tracer>>,
    /// The controller's lanes, if this controller is a home that has any.
    pub(crate) lanes: Option<Box<Lanes>>,
    /// The link to the home, if this controller is a lane.
    pub(crate) link: Option<Arc<LaneLink>>,
    /// The number of the order to stop that a lane carries out.
    pub(crate) stopping: Option<u64>,
    /// The controller's lanes, polled together with it, so that the same tests run with and without
    /// lanes.
    #[cfg(test)]
    pub(crate) beside: Vec<Box<dyn Lane>>,
    /// The submission queue after which the next poll begins.
    pub(crate) turn: u16,
    /// The amount of work that a poll may do.
    pub(crate) quota: Quota,
    /// I/O commands that this poll may still start.
    pub(crate) commands_left: u32,
    /// Bytes that disks may still copy in this poll; 0 between polls.
    pub(crate) bytes_left: u64,
    /// `true` if requests were left for the next poll.
    pub(crate) behind: bool,
    /// The fused pair that is in flight, or that waits for all else to end. Until then nothing else
    /// is fetched from I/O queues.
    pub(crate) exclusive: Option<Exclusive>,
    // Buffers that are kept from poll to poll, so that nothing is allocated in the steady state.
    pub(crate) walker: Walker,
    pub(crate) entries: Vec<SubmissionEntry>,
    pub(crate) completions: Vec<Completion>,
    /// The places of the current command's data.
    pub(crate) spans: Vec<Span>,
    pub(crate) spare_spans: Vec<Vec<Span>>,
    pub(crate) spares: Spares,
    pub(crate) page: Vec<u8>,
}

impl Controller {
    /// Makes a controller in its state after power-on.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        parts.check()?;
        let vectors = parts.interrupts.len();
        let description = Description {
            bars: vec![Bar {
                index: 0,
                size: BAR_SIZE,
                wide: true,
                doorbell_page: Some(DOORBELL_PAGE),
            }],
            vectors: vectors as u16,
            pin: true,
        };
        let layout = MsixLayout::new(0, vectors as u16, MSIX_TABLE, MSIX_PENDING);
        let powered_since = parts.clock.now();
        let journal = match &parts.journal {
            Some(memory) => Some(Journal::new(memory, &parts.limits).ok_or(PartsError::Journal)?),
            None => None,
        };
        Ok(Self {
            pci: ConfigSpace::new(&PCI_IDENTITY, &description, Some(&layout)),
            msix: Msix::new(layout),
            description,
            view: View::new(parts.memory.clone()),
            memory: parts.memory,
            // `check` has made sure that there is an interrupt.
            pin: parts.interrupts[0].pin(),
            interrupts: parts.interrupts,
            doorbells: parts.doorbells,
            identity: parts.identity,
            namespaces: Namespaces::new(parts.namespaces),
            registers: Registers::new(parts.limits.queue_entries),
            phase: Phase::Disabled,
            shutdown: Shutdown::None,
            queues: Queues::default(),
            shadow: None,
            resting: false,
            features: Features::new(parts.limits.queue_pairs, vectors, powered_since),
            events: Events::default(),
            health: Health::default(),
            powered_since,
            keep_alive_since: powered_since,
            clock: parts.clock,
            limits: parts.limits,
            inflight: Inflight::default(),
            limiter: Limiter::default(),
            interrupt_at: None,
            journal,
            recovered: None,
            ticket: Ticket::NONE,
            changed: false,
            inbox: Inbox::default(),
            tracer: None,
            lanes: None,
            link: None,
            stopping: None,
            #[cfg(test)]
            beside: Vec::new(),
            turn: 0,
            quota: TurnLength::default().into(),
            commands_left: 0,
            bytes_left: 0,
            behind: false,
            exclusive: None,
            walker: Walker::default(),
            entries: Vec::new(),
            completions: Vec::new(),
            spans: Vec::new(),
            spare_spans: Vec::new(),
            spares: Spares::default(),
            page: Vec::new(),
        })
    }

    /// Returns the descriptors that become readable when a disk has completions and is not polled.
    /// The host watches them while it sleeps.
    pub fn wake_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.namespaces.iter().filter_map(|namespace| namespace.disk.wake_descriptor())
    }

    /// Limits the controller's I/O commands from now on; all queues share the limit. Bursts begin
    /// anew. The limit is not part of the saved state: a host that restores a controller sets the
    /// limit again.
    pub fn limit(&mut self, rates: Rates) {
        self.limiter = Limiter::new(rates);
        if self.lanes.is_some() {
            let limiter = self.limiter.clone();
            self.order(move |lane| lane.limiter = limiter.clone());
        }
    }

    /// Returns the number of requests that disks work on, not counting those of lanes.
    pub fn requests_in_flight(&self) -> u32 {
        self.inflight.requests()
    }

    /// Returns the time powered on, in this process and before.
    pub(crate) fn powered(&self) -> Duration {
        let here = self.clock.now().saturating_sub(self.powered_since);
        self.health.powered_before.saturating_add(here)
    }

    pub(crate) fn default_features(&self) -> Features {
        Features::new(self.limits.queue_pairs, self.interrupts.len(), self.clock.now())
    }

    /// Writes a doorbell register (section 3.1, SQyTDBL and CQyHDBL).
    fn ring(&mut self, at: u64, from: &[u8]) -> Access {
        let Ok(value) = <[u8; 4]>::try_from(from) else { return Access::Refused };
        if !at.is_multiple_of(4) {
            return Access::Refused;
        }
        let index = (at / 4) as usize;
        // An invalid value is reported at once, even if a valid one follows before the poll.
        let value = u32::from_le_bytes(value);
        match self.store_doorbell(index, value) {
            None if self.lanes.is_some() && self.ring_far(index, value) => {}
            None if self.may_post() => self.invalid_doorbell(Event::INVALID_DOORBELL_REGISTER),
            Some(Err(bad)) => self.bad_doorbell(bad),
            None | Some(Ok(())) => {}
        }
        Access::Done
    }

    /// Stores a doorbell value and lets its queue look at it. Returns `None` if this thread has no
    /// such queue.
    fn store_doorbell(&mut self, index: usize, value: u32) -> Option<Result<(), BadDoorbell>> {
        let queue = u16::try_from(index / 2).ok()?;
        if index.is_multiple_of(2) {
            let queue = self.queues.submission(queue)?;
            self.doorbells.store(index, value);
            let before = queue.tail;
            let still = queue.doorbell.is_still();
            let observed = queue.observe(&self.memory);
            if still && !queue.doorbell.is_still() {
                note_moved(&self.journal, self.shadow, queue.id, Side::Tail);
            }
            if let Some(tracer) = &mut self.tracer {
                tracer.observed(queue, before);
            }
            Some(observed)
        } else {
            let queue = self.queues.completion(queue)?;
            self.doorbells.store(index, value);
            let still = queue.doorbell.is_still();
            let observed = queue.observe(&self.memory);
            if still && !queue.doorbell.is_still() {
                note_moved(&self.journal, self.shadow, queue.id, Side::Head);
            }
            Some(observed)
        }
    }

    fn read_doorbell(&self, at: u64, into: &mut [u8]) {
        let cells = doorbell_count(self.limits.queue_pairs);
        for (at, byte) in (at..).zip(into) {
            let index = (at / 4) as usize;
            let value = if index < cells { self.doorbells.load(index) } else { 0 };
            *byte = value.to_le_bytes()[at as usize % 4];
        }
    }

    /// Returns when the keep alive timer runs out, or `None` if it is off (section 7.12).
    fn keep_alive_deadline(&self) -> Option<Duration> {
        let timeout = self.features.keep_alive()?;
        (self.is_running() && self.link.is_none()).then(|| self.keep_alive_since + timeout)
    }

    fn check_keep_alive(&mut self) {
        if self.keep_alive_deadline().is_some_and(|deadline| self.clock.now() >= deadline) {
            let none = ErrorEntry::NO_COMMAND;
            self.health.log(ErrorEntry::new(0, none, Status::KEEP_ALIVE_EXPIRED));
            self.fail();
        }
    }

    /// Returns whether more commands wait than the turn had room for.
    fn is_behind(&self) -> bool {
        self.behind || self.queues.submissions().any(|queue| queue.waiting() > 0)
    }

    /// Looks at mapped doorbells some more while no other task needs the thread, and returns
    /// whether one was rung. A look costs a small part of a poll, so a command is seen sooner.
    fn is_rung_soon(&self) -> bool {
        let alone = self.quota == TurnLength::Long.into() && self.inflight.is_empty();
        if !alone || !self.doorbells.is_shared() || !self.is_running() {
            return false;
        }
        let queues = usize::from(self.queues.submission_bound()).max(1);
        (0..LOOKS / queues).any(|_| self.queues.submissions().any(SubmissionQueue::is_rung))
    }

    /// Returns whether work may come that only a look finds: in the shadow page, or in doorbell
    /// cells that a lane's home stores. (The host looks at a mapped page.)
    fn is_watching(&self) -> bool {
        self.shadow.is_some() || (self.link.is_some() && !self.doorbells.is_shared())
    }

    /// Leaves the resting state, since the events that the host was asked to announce may no longer
    /// be the right ones.
    pub(crate) fn get_up(&mut self) {
        self.resting = false;
    }

    /// Returns whether the host, or the home, was asked to announce new work.
    pub(crate) fn is_resting(&self) -> bool {
        self.resting
    }

    /// Releases the guest's memory until it is used again.
    pub(crate) fn release_memory(&mut self) {
        self.queues.release_memory();
        self.namespaces.release_memory();
        self.view.release();
        self.spans.clear();
        self.spare_spans.clear();
        self.spares = Spares::default();
    }

    fn poll_once(&mut self) -> Progress {
        if self.inbox.has_post() {
            self.run_jobs();
            self.changed = true;
        }
        self.bytes_left = self.quota.bytes;
        let mut busy = match self.link {
            None => self.advance(),
            Some(_) => self.advance_lane(),
        };
        self.settle();
        if self.is_running() {
            busy |= self.fetch_all();
        }
        busy |= self.drive_disks();
        if self.is_running() {
            busy |= self.deliver_events();
            self.check_keep_alive();
        }
        self.settle();
        self.signal();
        self.update_pin();
        self.resting &= !busy;
        let held = self.limiter.deadline().filter(|_| self.is_running());
        let times = self.keep_alive_deadline().into_iter().chain(held).chain(self.interrupt_at);
        match times.min() {
            _ if busy && self.is_behind() => Progress::Behind,
            _ if busy => Progress::Busy,
            deadline if self.resting || !self.is_watching() => Progress::Idle(deadline),
            deadline => Progress::Watching(deadline),
        }
    }
}

impl Function for Controller {
    fn take_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        self.make_lanes(home, wakers)
    }

    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        self.pci.set_interrupt_status(self.has_pin_interrupt());
        self.pci.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.pci.write(offset, from) {
            ConfigEffect::None => {}
            ConfigEffect::FunctionLevelReset => self.reset(),
        }
        self.update_pin();
        self.checkpoint(None);
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        match (bar, offset) {
            (0, 0..offset::DOORBELLS) => self.registers.read(offset, into),
            (0, offset::DOORBELLS..MSIX_TABLE) => {
                self.read_doorbell(offset - offset::DOORBELLS, into);
            }
            (0, MSIX_TABLE..BAR_SIZE) => {
                if self.msix.read(bar, offset, into) != Access::Done {
                    into.fill(0);
                }
            }
            _ => return Access::Refused,
        }
        Access::Done
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        match (bar, offset) {
            (0, 0..offset::DOORBELLS) => {
                let old = self.registers.configuration;
                let access = self.registers.write(offset, from);
                self.configured(old);
                self.update_pin();
                self.checkpoint(None);
                access
            }
            (0, offset::DOORBELLS..MSIX_TABLE) => {
                let access = self.ring(offset - offset::DOORBELLS, from);
                self.update_pin();
                access
            }
            (0, MSIX_TABLE..BAR_SIZE) => {
                // Between table and pending bits lies nothing: writes are dropped.
                let _ = self.msix.write(bar, offset, from);
                self.checkpoint(None);
                Access::Done
            }
            _ => Access::Refused,
        }
    }

    fn set_turn(&mut self, turn: TurnLength) {
        self.quota = turn.into();
        #[cfg(test)]
        self.beside.iter_mut().for_each(|lane| lane.set_turn(turn));
    }

    fn poll(&mut self) -> Progress {
        let found = self.poll_once();
        let found = match found {
            Progress::Idle(_) if self.is_rung_soon() => self.poll_once(),
            found => found,
        };
        #[cfg(test)]
        let found = self.poll_beside(found);
        found
    }

    fn rest(&mut self) -> Progress {
        self.resting = true;
        if self.is_running() && self.shadow.is_some() {
            let admin_waits = self.events.is_ready();
            if self.queues.publish(&self.memory, admin_waits).is_err() {
                self.fail();
            }
            // The barrier between storing the event indexes and the last look; the head of `cell`
            // says why.
            fence(Ordering::SeqCst);
        }
        let found = self.poll();
        #[cfg(test)]
        let found = self.rest_beside(found);
        found
    }

    fn reset(&mut self) {
        if self.phase == Phase::Enabled && self.shutdown != Shutdown::Complete {
            self.health.unsafe_shutdowns += 1;
        }
        self.begin_reset();
        self.shutdown = Shutdown::None;
        self.registers = Registers::new(self.limits.queue_entries);
        self.doorbells.clear();
        self.pci.reset();
        self.msix.reset();
        self.update_pin();
        self.checkpoint(None);
    }

    fn quiesce(&mut self) -> bool {
        // Commands that disks have must end, and the guest waits for their completions. No other
        // command is started.
        self.go_on_recovered();
        self.bytes_left = Quota::WHOLE.bytes;
        self.drive_disks();
        self.signal_all();
        self.update_pin();
        let quiet = self.stop_lanes() & self.inflight.is_empty();
        #[cfg(test)]
        let quiet = self.quiesce_beside(quiet);
        if quiet {
            self.collect_reports();
            self.release_memory();
        }
        quiet
    }

    fn save(&self) -> Vec<u8> {
        crate::state::save(self)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), StateError> {
        let restored = crate::state::restore(self, state);
        match restored {
            Ok(()) => self.deal_queues(),
            Err(_) => self.reset(),
        }
        self.update_pin();
        restored
    }
}
