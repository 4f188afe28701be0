//! The controller as a PCI function.

use std::task::Waker;

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::registers::offset;
use slipway_pci::{
    Access, Bar, ConfigEffect, ConfigSpace, Description, DoorbellRegisters, Function, Lane, Msix,
    MsixLayout, Progress, StateError, TurnLength,
};

use crate::fleet::{Order, Reply};
use crate::home::Home;
use crate::limiter::Rates;
use crate::mailbox::Inbox;
use crate::namespace::{ChangeError, Done, Namespace};
use crate::persist::state::{self, Origin};
use crate::phase::{Phase, Shutdown};
use crate::registers::{DOORBELL_PAGE, MSIX_PENDING, MSIX_TABLE, PCI_IDENTITY, Registers};
use crate::requests::{Mailbox, Request, Threads};
use crate::trace::{Latencies, Tracer};
use crate::{BAR_SIZE, Parts, PartsError, doorbell_count};

/// An NVMe controller; the crate's head describes it.
///
/// Before it drops a controller, the host calls `quiesce` until it returns `true`: disks then hold
/// no guest memory.
pub struct Controller {
    description: Description,
    pub(crate) home: Home,
    requests: Inbox<Request>,
    /// The controller's lanes, polled together with it, so that the same tests run with and without
    /// lanes.
    #[cfg(test)]
    pub(crate) beside: Vec<Box<dyn Lane>>,
}

impl Controller {
    /// Makes a controller in its state after power-on.
    ///
    /// # Errors
    /// [`PartsError`] when the parts do not fit together.
    pub fn new(parts: Parts) -> Result<Self, PartsError> {
        parts.check()?;
        let vectors = parts.interrupts.len() as u16;
        let bar = Bar {
            index: 0,
            size: BAR_SIZE,
            wide: true,
            ports: false,
            doorbells: Some(DoorbellRegisters::Page(DOORBELL_PAGE)),
            notifications: None,
        };
        let description = Description { bars: vec![bar], vectors, pin: true };
        let layout = MsixLayout::new(0, vectors, MSIX_TABLE, MSIX_PENDING);
        let pci = ConfigSpace::new(&PCI_IDENTITY, &description, Some(&layout));
        Ok(Self {
            description,
            home: Home::new(parts, pci, Msix::new(layout))?,
            requests: Inbox::default(),
            #[cfg(test)]
            beside: Vec::new(),
        })
    }

    /// Returns a handle with which other threads post requests to this controller.
    pub fn mailbox(&self) -> Mailbox {
        Mailbox(self.requests.sender())
    }

    /// Returns a handle with which other threads read what I/O commands have moved.
    pub fn activity(&self) -> crate::Activity {
        self.home.activity.clone()
    }

    /// Adds a namespace. It can be called at any time, as the next two methods can; other threads
    /// post a [`Request`]. The guest learns of each change by a Namespace Attribute Changed event,
    /// if it enabled such events (section 5.21.1.11), and by the Changed Namespace List (section
    /// 5.14.1.4).
    ///
    /// # Errors
    /// [`ChangeError::NamespaceId`], [`ChangeError::Taken`], [`ChangeError::Geometry`],
    /// [`ChangeError::Lanes`].
    pub fn attach(&mut self, namespace: Namespace) -> Result<(), ChangeError> {
        self.home.attach(namespace)
    }

    /// Takes a namespace away. Commands that are fetched from then on end with Invalid Namespace or
    /// Format. Commands in flight end as the disk ends them; then the disk is dropped, `done` is
    /// called and the number is free.
    pub fn detach(&mut self, nsid: u32, done: Done) {
        self.home.detach(nsid, done);
        self.home.absorb();
    }

    /// Makes a namespace take over its disk's size ([`slipway_block::Disk::refresh`]). When `done`
    /// is called, requests that were checked against the old size have ended; new requests wait
    /// meanwhile.
    pub fn refresh(&mut self, nsid: u32, done: Done) {
        self.home.refresh(nsid, done);
    }

    /// Limits the controller's I/O commands from now on; all queues share the limit. Bursts begin
    /// anew. The limit is not part of the saved state: a host that restores a controller sets the
    /// limit again.
    pub fn limit(&mut self, rates: Rates) {
        self.home.limit(rates);
    }

    /// Returns the number of requests that disks work on, not counting those of lanes.
    pub fn requests_in_flight(&self) -> u32 {
        self.home.engine.inflight.requests()
    }

    /// Returns the highest number of the controller's I/O submission queues, which is the size for
    /// [`Latencies`].
    pub fn io_queues(&self) -> u16 {
        let own = self.home.engine.queues.submission_bound().saturating_sub(1);
        own.max(self.home.fleet.last_queue())
    }

    /// Traces the controller's own thread with `tracer` from now on, or stops if it is `None`.
    /// Returns the previous tracer, which is large: drop it on another thread.
    pub fn trace(&mut self, tracer: Option<Box<Tracer>>) -> Option<Box<Tracer>> {
        std::mem::replace(&mut self.home.engine.tracer, tracer)
    }

    /// Returns the latencies of the controller's own thread since the last call and goes on with
    /// `fresh`, which may have histograms for queues made meanwhile. Returns `None`, and drops
    /// `fresh`, if nothing is traced.
    pub fn take_latencies(&mut self, fresh: Latencies) -> Option<Latencies> {
        self.home.engine.take_latencies(fresh)
    }

    /// Goes on where a predecessor with the same journal, doorbell cells and configuration was
    /// killed. Returns `false` if there was no predecessor. Namespaces may have come, gone or
    /// changed their size since; the guest is told of that. To be called on a fresh controller,
    /// once nothing of the predecessor can reach the disks or the guest's memory any more, and the
    /// guest's memory is mapped. The next polls, or those of lanes, carry out commands in flight
    /// again.
    ///
    /// # Errors
    /// [`StateError`] if the journal is of another version or another configuration. The controller
    /// is then in its state after a reset.
    pub fn recover(&mut self) -> Result<bool, StateError> {
        let different = match self.home.recover() {
            Ok(Some(different)) => different,
            Ok(None) => return Ok(false),
            Err(error) => {
                self.reset();
                return Err(error);
            }
        };
        match self.home.engine.limits.lanes {
            1 => self.restart(),
            // Lanes, if any, are made before the next poll, which has the rest carried out.
            _ => self.requests.look_again(),
        }
        // The predecessor may not have reported these changes, so they are reported after its own.
        different.into_iter().for_each(|nsid| self.home.namespace_changed(nsid));
        for queue in self.home.engine.queues.completions_mut() {
            // The guest may not have been interrupted for these entries; one interrupt more does no
            // harm.
            queue.fresh = queue.fresh.max(1);
        }
        self.home.checkpoint(None);
        self.home.engine.signal_all();
        self.home.update_pin();
        Ok(true)
    }

    /// Carries out again the commands of a predecessor that have not ended, unless lanes have got
    /// them.
    fn restart(&mut self) {
        for (entry, permit) in self.home.restart() {
            self.home.execute_admin(&entry, permit);
        }
        self.home.absorb();
    }

    /// Takes what other threads have posted.
    #[cold]
    fn take_messages(&mut self) {
        self.home.engine.get_up();
        if !self.home.recovered.is_empty() {
            self.restart();
        }
        for request in self.requests.take() {
            self.carry_out(request);
        }
        self.take_replies();
        self.home.resume_lanes();
        self.home.absorb();
    }

    fn take_replies(&mut self) {
        for reply in self.home.fleet.take_replies() {
            self.take_reply(reply);
        }
        self.home.collect_reports();
    }

    fn carry_out(&mut self, request: Request) {
        let count = self.home.fleet.len() + 1;
        let order = |thread: usize, order| self.home.fleet.order_one(thread - 1, order);
        match request {
            Request::Attach(namespace, done) => done(self.attach(namespace)),
            Request::Detach(nsid, done) => self.detach(nsid, done),
            Request::Refresh(nsid, done) => self.refresh(nsid, done),
            Request::Limit(rates, done) => {
                self.limit(rates);
                done(Ok(()));
            }
            Request::Threads(answer) => answer(Threads { count, queues: self.io_queues() }),
            Request::Trace(0, tracer, answer) => answer(self.trace(tracer)),
            Request::TakeLatencies(0, fresh, answer) => answer(self.take_latencies(fresh)),
            Request::Inspect(0, answer) => answer(self.home.inspect()),
            Request::Trace(thread, tracer, answer) => order(thread, Order::Trace(tracer, answer)),
            Request::TakeLatencies(thread, fresh, answer) => {
                order(thread, Order::TakeLatencies(fresh, answer));
            }
            Request::Inspect(thread, answer) => order(thread, Order::Inspect(answer)),
        }
    }

    fn take_reply(&mut self, reply: Reply) {
        match reply {
            Reply::Answer(number, answer) => {
                if let Some((permit, result)) = self.home.fleet.answered(number, answer) {
                    let success = slipway_nvme_spec::status::Status::SUCCESS;
                    self.home.end_admin(permit, success, result, 0);
                }
            }
            Reply::SubmissionGone(queue) => self.home.submission_gone(queue),
            Reply::NamespaceLeft(nsid) => self.home.namespace_left(nsid),
            Reply::Refreshed(number) => {
                if let Some((nsid, done)) = self.home.fleet.refreshed(number) {
                    self.home.engine.namespaces.refresh(nsid, done);
                }
            }
        }
    }

    /// Takes every step of enabling, resetting and shutting down that is due. Returns whether there
    /// was one.
    fn advance(&mut self) -> bool {
        let mut busy = false;
        if self.home.is_reset_due() {
            if !self.home.fleet.is_empty() {
                // What lanes posted before they stopped dates from before the reset: it is dropped.
                self.take_messages();
            }
            self.home.finish_reset();
            busy = true;
        }
        busy | self.home.advance()
    }

    /// Does the work of one turn, in the order of the crate's head.
    fn poll_once(&mut self) -> Progress {
        if self.requests.has_post() || self.home.fleet.has_post() {
            self.take_messages();
            self.home.changed = true;
        }
        self.home.engine.begin_poll();
        let mut busy = self.advance();
        // A snapshot has every change before the guest can see its effect: before commands start,
        // and before the guest is interrupted.
        self.home.save_changes();
        if self.home.is_running() {
            busy |= self.home.engine.observe_heads();
            busy |= self.home.serve_admin();
        }
        if self.home.is_running() {
            busy |= self.home.engine.fetch_all(|| false);
        }
        busy |= self.home.engine.drive_disks();
        busy |= self.home.absorb();
        if self.home.is_running() {
            busy |= self.home.deliver_events();
            self.home.check_keep_alive();
        }
        self.home.save_changes();
        self.home.engine.signal();
        self.home.update_pin();
        let deadline = self.home.keep_alive_deadline();
        self.home.engine.progress(busy, deadline)
    }

    /// Writes a doorbell register (section 3.1, SQyTDBL and CQyHDBL).
    fn ring(&mut self, at: u64, from: &[u8]) -> Access {
        let Ok(value) = <[u8; 4]>::try_from(from) else { return Access::Refused };
        if !at.is_multiple_of(4) {
            return Access::Refused;
        }
        let (index, value) = ((at / 4) as usize, u32::from_le_bytes(value));
        let home = &mut self.home;
        if !home.engine.ring(index, value) {
            match home.fleet.ring(&home.engine.doorbells, index, value) {
                Some(Ok(())) => {}
                Some(Err(bad)) => home.engine.bad_doorbell(bad),
                None if home.may_post() => home.invalid_doorbell(Event::INVALID_DOORBELL_REGISTER),
                None => {}
            }
        }
        home.absorb();
        Access::Done
    }

    fn read_doorbell(&self, at: u64, into: &mut [u8]) {
        let engine = &self.home.engine;
        let cells = doorbell_count(engine.limits.queue_pairs);
        for (at, byte) in (at..).zip(into) {
            let index = (at / 4) as usize;
            let value = if index < cells { engine.doorbells.load(index) } else { 0 };
            *byte = value.to_le_bytes()[at as usize % 4];
        }
    }
}

impl Function for Controller {
    fn take_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        self.requests.wake_by(home.clone());
        let lanes = self.home.make_lanes(home, wakers);
        self.restart();
        lanes
    }

    fn description(&self) -> &Description {
        &self.description
    }

    fn config_read(&mut self, offset: u16, into: &mut [u8]) {
        let pending = self.home.has_pin_interrupt();
        self.home.pci.set_interrupt_status(pending);
        self.home.pci.read(offset, into);
    }

    fn config_write(&mut self, offset: u16, from: &[u8]) {
        match self.home.pci.write(offset, from) {
            ConfigEffect::None => {}
            ConfigEffect::FunctionLevelReset => self.reset(),
        }
        self.home.update_pin();
        self.home.checkpoint(None);
    }

    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access {
        match (bar, offset) {
            (0, 0..offset::DOORBELLS) => self.home.registers.read(offset, into),
            (0, offset::DOORBELLS..MSIX_TABLE) => {
                self.read_doorbell(offset - offset::DOORBELLS, into);
            }
            (0, MSIX_TABLE..BAR_SIZE) => {
                if self.home.msix.read(bar, offset, into) != Access::Done {
                    into.fill(0);
                }
            }
            _ => return Access::Refused,
        }
        Access::Done
    }

    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access {
        let home = &mut self.home;
        match (bar, offset) {
            (0, 0..offset::DOORBELLS) => {
                let old = home.registers.configuration;
                let access = home.registers.write(offset, from);
                home.configured(old);
                home.update_pin();
                home.checkpoint(None);
                access
            }
            (0, offset::DOORBELLS..MSIX_TABLE) => {
                let access = self.ring(offset - offset::DOORBELLS, from);
                self.home.update_pin();
                access
            }
            (0, MSIX_TABLE..BAR_SIZE) => {
                // Between table and pending bits lies nothing: writes are dropped.
                let _ = home.msix.write(bar, offset, from);
                home.checkpoint(None);
                Access::Done
            }
            _ => Access::Refused,
        }
    }

    fn notified(&mut self, _: u64) {
        // The home's queues look at their cells in the poll that follows.
        self.home.fleet.notified();
    }

    fn set_turn(&mut self, turn: TurnLength) {
        self.home.engine.set_turn(turn);
        #[cfg(test)]
        self.beside.iter_mut().for_each(|lane| lane.set_turn(turn));
    }

    fn poll(&mut self) -> Progress {
        let found = match self.poll_once() {
            Progress::Idle(_) if self.home.engine.is_rung_soon() => self.poll_once(),
            found => found,
        };
        if found.is_busy() {
            self.home.activity.put(&self.home.engine.counters);
        }
        #[cfg(test)]
        let found = self.poll_beside(found);
        found
    }

    fn rest(&mut self) -> Progress {
        let admin_waits = self.home.events.is_ready();
        self.home.engine.rest(admin_waits);
        let found = self.poll();
        #[cfg(test)]
        let found = self.rest_beside(found);
        found
    }

    fn reset(&mut self) {
        let home = &mut self.home;
        if home.phase == Phase::Enabled && home.shutdown != Shutdown::Complete {
            home.health.unsafe_shutdowns += 1;
        }
        home.begin_reset();
        home.shutdown = Shutdown::None;
        home.registers = Registers::new(home.engine.limits.queue_entries);
        home.engine.doorbells.clear();
        home.pci.reset();
        home.msix.reset();
        home.apply_phase();
        home.update_pin();
        home.checkpoint(None);
    }

    fn quiesce(&mut self) -> bool {
        // Commands that disks have must end, and the guest waits for their completions. No other
        // command is started.
        self.restart();
        if self.home.awaits_lanes() {
            // Admin commands that wait for lanes end, too.
            self.take_replies();
            self.home.fleet.look_again();
        }
        let home = &mut self.home;
        home.engine.lift_quota();
        home.engine.drive_disks();
        home.absorb();
        home.engine.signal_all();
        home.update_pin();
        // Lanes are told to stop whether or not the home is quiet.
        let stopped = home.fleet.stop();
        let quiet = stopped && home.engine.inflight.is_empty() && !home.awaits_lanes();
        #[cfg(test)]
        let quiet = self.quiesce_beside(quiet);
        if quiet {
            self.home.collect_reports();
            self.home.engine.release_memory();
        }
        quiet
    }

    fn max_state(&self) -> usize {
        state::MAX_LEN
    }

    fn save(&self) -> Vec<u8> {
        state::save(&self.home)
    }

    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError> {
        // The last step of a reset may be due.
        self.advance();
        let different = state::take_over(&mut self.home, state, Origin::Another)?;
        self.home.deal_queues_quietly();
        different.into_iter().for_each(|nsid| self.home.namespace_changed(nsid));
        self.home.checkpoint(None);
        self.home.update_pin();
        Ok(())
    }

    fn recover(&mut self) -> Result<(), StateError> {
        Self::recover(self).map(drop)
    }

    fn abandon(&mut self) {
        self.home.abandon();
    }
}
