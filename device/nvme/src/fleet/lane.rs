//! A lane: some of a controller's I/O queues, with a thread of their own.
//!
//! In a controller with lanes, the *home* has everything that exists once: registers, admin queue,
//! events, logs, configuration. The home also serves its share of the I/O queues. A lane has whole
//! completion queues with all submission queues that complete there, and everything that their
//! commands need: in-flight table, buffers, tracer, and a `Disk` of its own for each namespace. So
//! no command takes a lock, and no command leaves its lane. A lane is itself a [`Controller`],
//! without registers that a guest writes and without an admin queue: the same code serves I/O
//! commands in home and lane. A controller without lanes pays only a branch before a queue's
//! entries are fetched.
//!
//! Home and lanes exchange messages:
//! - home to lane: *orders*, which are jobs in the lane's [`Mailbox`]: queues to serve or to give
//!   up, features, namespaces, limits, to stop and to go on (`lanes`);
//! - lane to home: answers to orders, as jobs in the home's mailbox, at most as many as there are
//!   orders; the news that the lane has stopped; and what a guest can cause at will, errors and
//!   invalid doorbells, in an [`Outbox`] of bounded size.
//!
//! # Orders come first
//! What the guest was told holds for the commands that it rings for afterwards. So a lane looks for
//! orders once more after it saw a doorbell and before it fetches (`Controller::fetch`). The home
//! posts the order, then completes the guest's command, and the guest rings after that: a lane that
//! sees the doorbell sees the order.
//!
//! # A kill
//! With a journal each thread writes its own part of it (`journal`). Messages between threads are
//! lost when the process is killed. A lost order is made good: it belongs to an admin command that
//! has not ended and is carried out again, or the new lane starts with its effect. A lost answer is
//! made good likewise. Only the contents of an [`Outbox`] stay lost: entries of the error log and
//! events of invalid doorbells.
//!
//! # Stopping
//! An order to stop has a number. A lane that stops fetches nothing, lets its commands end,
//! releases the guest's memory, and then publishes the number. So the home can be asked again and
//! again whether all lanes are quiet (`quiesce`), and a reset is over when all lanes have stopped
//! for it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::registers::{Configuration, ControllerStatus};
use slipway_pci::{Lane, Progress, TurnLength};

use crate::cell::ShadowPages;
use crate::controller::Controller;
use crate::health::{ERROR_ENTRIES, Health};
use crate::lifecycle::{Phase, Shutdown};
use crate::mailbox::Mailbox;
use crate::nap::Nap;
use crate::state::QueueStates;

/// State that a home and one of its lanes share.
pub(crate) struct LaneLink {
    /// The lane's mailbox.
    pub orders: Mailbox,
    /// The home's mailbox.
    home: Mailbox,
    pub nap: Nap,
    /// The number of the last order to stop that has been carried out.
    stopped: AtomicU64,
    /// The lane's queues as they were when it stopped.
    saved: Mutex<QueueStates>,
    /// The counters of the lane's [`Health`], in its order. They lag behind by one poll.
    counters: [AtomicU64; 5],
    outbox: Mutex<Outbox>,
}

/// Errors and events that a lane reports to its home without being asked. The size is bounded,
/// however much the guest does wrong: only the newest errors are kept, as many as the log has room
/// for.
#[derive(Default)]
pub(crate) struct Outbox {
    pub errors: VecDeque<ErrorEntry>,
    pub events: Vec<Event>,
    /// `true` if a queue's memory cannot be reached.
    pub fatal: bool,
    /// `true` if the home was told to look.
    announced: bool,
}

impl LaneLink {
    pub fn new(orders: Mailbox, home: Mailbox) -> Self {
        Self {
            orders,
            home,
            nap: Nap::default(),
            stopped: AtomicU64::new(0),
            saved: Mutex::default(),
            counters: Default::default(),
            outbox: Mutex::new(Outbox {
                errors: VecDeque::with_capacity(ERROR_ENTRIES + 1),
                ..Outbox::default()
            }),
        }
    }

    /// Returns whether the order to stop with this number, or a later one, has been carried out. If
    /// so, everything that the lane did before is visible to the caller.
    pub fn has_stopped(&self, number: u64) -> bool {
        self.stopped.load(Ordering::Acquire) >= number
    }

    /// Returns the lane's queues as they were when it stopped last.
    pub fn saved(&self) -> MutexGuard<'_, QueueStates> {
        self.saved.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the outbox, for the home to empty. The lane announces its next report anew.
    pub fn open_outbox(&self) -> MutexGuard<'_, Outbox> {
        let mut outbox = self.outbox();
        outbox.announced = false;
        outbox
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Adds the lane's counters to `health`.
    pub fn add_to(&self, health: &mut Health) {
        let totals = health.counters_mut();
        totals.into_iter().zip(&self.counters).for_each(|(total, own)| {
            *total = total.saturating_add(own.load(Ordering::Relaxed));
        });
    }

    fn publish(&self, health: &mut Health) {
        health.counters_mut().into_iter().zip(&self.counters).for_each(|(own, shared)| {
            shared.store(*own, Ordering::Relaxed);
        });
    }
}

/// The parts of a controller that only a lane uses.
impl Controller {
    /// Returns whether this is a lane with orders, which come before the commands that a doorbell
    /// announced.
    #[inline]
    pub(crate) fn has_orders(&self) -> bool {
        self.link.is_some() && self.inbox.has_post()
    }

    /// Posts `job` to the home, if this is a lane. Returns the job as an error if this is no lane.
    pub(crate) fn tell_home<J: FnOnce(&mut Controller) + Send + 'static>(
        &self,
        job: J,
    ) -> Result<(), J> {
        match &self.link {
            Some(link) => {
                link.home.post(job);
                Ok(())
            }
            None => Err(job),
        }
    }

    /// Changes the outbox for the home, if this is a lane. Returns whether this is a lane.
    pub(crate) fn report(&mut self, leave: impl FnOnce(&mut Outbox)) -> bool {
        let Some(link) = &self.link else { return false };
        let mut outbox = link.outbox();
        leave(&mut outbox);
        while outbox.errors.len() > ERROR_ENTRIES {
            outbox.errors.pop_front();
        }
        let announced = std::mem::replace(&mut outbox.announced, true);
        drop(outbox);
        if !announced {
            link.home.look();
        }
        true
    }

    /// Starts the lane after the guest enabled the controller.
    pub(crate) fn begin_lane(&mut self, configuration: Configuration, shadow: Option<ShadowPages>) {
        self.registers.configuration = configuration;
        self.registers.status = ControllerStatus(ControllerStatus::READY);
        self.phase = Phase::Enabled;
        self.shadow = shadow;
        self.go_on();
    }

    /// Stops fetching. The lane publishes `number` when nothing is in flight.
    pub(crate) fn stop(&mut self, number: u64) {
        self.shutdown = Shutdown::Draining;
        self.stopping = Some(number);
    }

    /// Fetches again after a stop.
    pub(crate) fn go_on(&mut self) {
        self.shutdown = Shutdown::None;
        self.stopping = None;
    }

    /// Gives up all queues and stops.
    pub(crate) fn reset_lane(&mut self, number: u64) {
        self.drop_queues();
        self.registers.configuration = Configuration::default();
        self.registers.status = ControllerStatus::default();
        self.stop(number);
    }

    /// Completes a stop when no command is in flight: a lane's counterpart of `advance`. Returns
    /// whether the lane has stopped just now.
    pub(crate) fn advance_lane(&mut self) -> bool {
        let Some(number) = self.stopping.filter(|_| self.inflight.is_empty()) else { return false };
        let Some(link) = self.link.clone() else { return false };
        self.stopping = None;
        self.signal_all();
        self.release_memory();
        *link.saved() = crate::state::save_queues(self);
        link.publish(&mut self.health);
        link.stopped.store(number, Ordering::Release);
        link.home.wake();
        true
    }
}

/// A lane as its host gets it.
pub(crate) struct QueueLane {
    controller: Controller,
    link: Arc<LaneLink>,
}

impl QueueLane {
    /// Makes a lane of `controller`, which no host has, for the home with the mailbox `home`;
    /// `waker` has the lane polled. Returns the lane, and the link that the home keeps.
    pub fn make(mut controller: Controller, home: Mailbox, waker: Waker) -> (Self, Arc<LaneLink>) {
        controller.inbox.wake_by(waker);
        let link = Arc::new(LaneLink::new(controller.mailbox(), home));
        controller.link = Some(link.clone());
        (Self { controller, link: link.clone() }, link)
    }

    fn after(&mut self, found: Progress) -> Progress {
        if !self.controller.is_resting() {
            self.link.nap.end();
        }
        if found.is_busy() {
            self.link.publish(&mut self.controller.health);
        }
        found
    }
}

impl Lane for QueueLane {
    fn set_turn(&mut self, turn: TurnLength) {
        slipway_pci::Function::set_turn(&mut self.controller, turn);
    }

    fn poll(&mut self) -> Progress {
        let found = slipway_pci::Function::poll(&mut self.controller);
        self.after(found)
    }

    fn rest(&mut self) -> Progress {
        self.link.nap.begin();
        let found = slipway_pci::Function::rest(&mut self.controller);
        self.after(found)
    }

    fn quiesce(&mut self) -> bool {
        slipway_pci::Function::quiesce(&mut self.controller)
    }
}
