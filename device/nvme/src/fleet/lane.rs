//! A lane: some of a controller's I/O queues, with a thread of their own.
//!
//! In a controller with lanes, the *home* has everything that exists once: registers, admin queue,
//! events, logs, configuration. The home also serves its share of the I/O queues. A lane has whole
//! completion queues with all submission queues that complete there, and an [`IoEngine`] of its
//! own: no command takes a lock, and no command leaves its lane. The same code serves I/O commands
//! in home and lane.
//!
//! Home and lanes exchange messages:
//! - home to lane: an [`Order`] in the lane's mailbox: queues to serve or to give up, features,
//!   namespaces, limits, to stop and to go on;
//! - lane to home: a [`Reply`] in the home's mailbox, at most as many as there are orders; the
//!   news that the lane has stopped; and what a guest can cause at will, errors and invalid
//!   doorbells, in an outbox of bounded size ([`LaneLink`]).
//!
//! # Orders come first
//! What the guest was told holds for the commands that it rings for afterwards. So a lane looks for
//! orders once more after it saw a doorbell and before it fetches ([`IoEngine::fetch_all`]). The
//! home posts the order, then completes the guest's command, and the guest rings after that: a lane
//! that sees the doorbell sees the order.
//!
//! # A kill
//! With a journal each thread writes its own part of it (`journal`). Messages between threads are
//! lost when the process is killed. A lost order is made good: it belongs to an admin command that
//! has not ended and is carried out again, or the new lane starts with its effect. A lost answer is
//! made good likewise. Only the contents of an outbox stay lost: entries of the error log and
//! events of invalid doorbells.
//!
//! # Stopping
//! An order to stop has a number. A lane that stops fetches nothing, lets its commands end,
//! releases the guest's memory, and then publishes the number. So the home can be asked again and
//! again whether all lanes are quiet (`quiesce`), and a reset is over when all lanes have stopped
//! for it.

use std::sync::Arc;
use std::task::Waker;

use slipway_pci::{Lane, Progress, TurnLength};

use super::link::LaneLink;
use super::order::{Order, Question, Reply};
use crate::engine::{IoEngine, Mode};
use crate::inspect::ThreadView;
use crate::mailbox::{Inbox, Sender};
use crate::queue_state::QueueStates;

/// A lane as its host gets it.
pub(crate) struct QueueLane {
    engine: IoEngine,
    orders: Inbox<Order>,
    link: Arc<LaneLink>,
    /// The number of the order to stop that is being carried out.
    stopping: Option<u64>,
}

impl QueueLane {
    /// Makes a lane with this engine. `home` is the mailbox of the home; `waker` has the lane
    /// polled.
    pub fn new(engine: IoEngine, home: Sender<Reply>, waker: Waker) -> Self {
        let orders = Inbox::default();
        orders.wake_by(waker);
        let link = LaneLink::new(orders.sender(), home);
        Self { engine, orders, link, stopping: None }
    }

    /// Returns the state that the lane shares with its home.
    pub fn link(&self) -> Arc<LaneLink> {
        self.link.clone()
    }

    #[cold]
    fn take_orders(&mut self) {
        self.engine.get_up();
        for order in self.orders.take() {
            self.carry_out(order);
        }
    }

    fn carry_out(&mut self, order: Order) {
        let engine = &mut self.engine;
        match order {
            Order::Begin(settings) => {
                engine.tuning = settings.tuning;
                engine.page_size = settings.page_size;
                engine.shadow = settings.shadow;
                engine.set_failed(false);
                engine.set_mode(Mode::Running);
                self.stopping = None;
            }
            Order::Stop(number) => self.stop(number),
            Order::GoOn => {
                engine.go_on();
                self.stopping = None;
            }
            Order::Reset(number) => {
                engine.drop_queues();
                self.stop(number);
            }
            Order::Fail => engine.set_failed(true),
            Order::AddCompletion(queue) => engine.queues.add_completion(queue),
            Order::AddSubmission(queue) => engine.queues.add_submission(queue),
            Order::DeleteSubmission(id) => engine.begin_deletion(id),
            Order::Ask(number, question) => {
                let answer = self.answer(question);
                self.link.home.post(Reply::Answer(number, answer));
            }
            Order::Limit(limiter) => engine.limiter = limiter,
            Order::Tune(tuning) => engine.tuning = tuning,
            Order::Attach(namespace) => engine.namespaces.attach(namespace),
            Order::Detach(nsid) => self.detach(nsid),
            Order::Refresh(nsid, number) => {
                let home = self.link.home.clone();
                let done = move |_| home.post(Reply::Refreshed(number));
                engine.namespaces.refresh(nsid, Box::new(done));
            }
            Order::Restart(found) => {
                let admin = engine.restart(&found);
                debug_assert!(admin.is_empty(), "the home carries out admin commands");
            }
            Order::Trace(tracer, answer) => {
                answer(std::mem::replace(&mut engine.tracer, tracer));
            }
            Order::TakeLatencies(fresh, answer) => answer(engine.take_latencies(fresh)),
            Order::Inspect(answer) => answer(ThreadView::new(engine)),
        }
    }

    fn answer(&mut self, question: Question) -> u32 {
        let engine = &mut self.engine;
        match question {
            Question::RemoveCompletion(id) => drop(engine.queues.remove_completion(id)),
            Question::Abort(queue, id) => return u32::from(!engine.abort(queue, id)),
            Question::Follow(pages) => engine.follow(pages),
            Question::Tune(tuning) => engine.tuning = tuning,
        }
        0
    }

    fn detach(&mut self, nsid: u32) {
        let home = self.link.home.clone();
        let left = move |_| home.post(Reply::NamespaceLeft(nsid));
        match self.engine.detach(nsid, Box::new(left), 0) {
            Ok(()) => self.engine.complete_changes(),
            Err(left) => left(Ok(())),
        }
    }

    /// Starts nothing more. The lane publishes `number` when nothing is in flight.
    fn stop(&mut self, number: u64) {
        self.engine.drain();
        self.stopping = Some(number);
    }

    /// Completes a stop when no command is in flight. Returns whether the lane has stopped just
    /// now.
    fn finish_stop(&mut self) -> bool {
        let empty = self.engine.inflight.is_empty();
        let Some(number) = self.stopping.take_if(|_| empty) else { return false };
        self.engine.signal_all();
        self.engine.release_memory();
        self.tell_home();
        self.link.counters.put(&self.engine.counters);
        self.link.set_stopped(number, QueueStates::from(&self.engine.queues));
        true
    }

    /// Passes the engine's report on. The home tells the guest of namespaces.
    fn tell_home(&mut self) {
        if self.engine.report.is_empty() {
            return;
        }
        let report = &mut self.engine.report;
        report.resized.clear();
        for queue in report.gone.drain(..) {
            self.link.home.post(Reply::SubmissionGone(queue));
        }
        if !report.is_empty() {
            self.link.leave(report);
        }
    }

    fn poll_once(&mut self) -> Progress {
        if self.orders.has_post() {
            self.take_orders();
        }
        self.engine.begin_poll();
        let mut busy = self.finish_stop();
        let engine = &mut self.engine;
        if engine.is_running() {
            busy |= engine.observe_heads();
            busy |= engine.fetch_all(|| self.orders.has_post());
        }
        busy |= engine.drive_disks();
        self.tell_home();
        self.engine.signal();
        self.engine.progress(busy, None)
    }

    fn after(&mut self, found: Progress) -> Progress {
        if !self.engine.is_resting() {
            self.link.nap.end();
        }
        if found.is_busy() {
            self.link.counters.put(&self.engine.counters);
        }
        found
    }
}

impl Lane for QueueLane {
    fn set_turn(&mut self, turn: TurnLength) {
        self.engine.set_turn(turn);
    }

    fn poll(&mut self) -> Progress {
        let found = match self.poll_once() {
            Progress::Idle(_) if self.engine.is_rung_soon() => self.poll_once(),
            found => found,
        };
        self.after(found)
    }

    fn rest(&mut self) -> Progress {
        self.link.nap.begin();
        self.engine.rest(false);
        self.poll()
    }

    fn quiesce(&mut self) -> bool {
        // The commands that disks have end. No other command is started.
        self.engine.lift_quota();
        self.engine.drive_disks();
        self.tell_home();
        self.engine.signal_all();
        let quiet = self.engine.inflight.is_empty();
        if quiet {
            self.engine.release_memory();
        }
        quiet
    }
}
