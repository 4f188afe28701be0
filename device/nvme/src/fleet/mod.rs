//! A controller's lanes, as the home sees them: which thread has which queue, and what lanes are
//! told. The head of `lane` says what a lane is, and why nothing is lost between home and lane.
//!
//! Completion queue `n` goes to thread `n` modulo the number of threads; the home is thread 0. The
//! queue's submission queues go with it. Queues on vector 0 stay at home: while MSI-X is off, that
//! vector is the pin, whose level depends on all of these queues.
//!
//! An admin command that needs lanes ends when the lanes have answered.
//!
//! Over 500 lines: to be cut into the orders to lanes and the table of queues.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::status::Status;
use slipway_pci::Lane;

use crate::attachment::Done;
use crate::cell::ShadowPages;
use crate::controller::Controller;
use crate::health::Health;
use crate::io::Outcome;
use crate::journal::{Ticket, UsedSlot};
use crate::lane::{LaneLink, QueueLane};
use crate::lifecycle::Shutdown;
use crate::mailbox::Mailbox;
use crate::namespace::Namespace;
use crate::parts::Parts;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::recover::Recovered;

/// A submission queue that a lane serves.
struct FarSubmission {
    completion: u16,
    base: u64,
    /// The number of entries.
    size: u32,
    /// The command that deletes the queue, and that command's slot in the journal.
    deleting: Option<(u16, Ticket)>,
}

/// A completion queue that a lane serves.
struct FarCompletion {
    lane: usize,
    base: u64,
    /// The number of entries.
    size: u32,
    vector: Option<u16>,
    /// The number of submission queues that complete there.
    users: u32,
    /// `true` if the queue is being deleted.
    deleting: bool,
}

/// An admin command that waits for answers of lanes.
struct PendingAdmin {
    id: u16,
    ticket: Ticket,
    /// The number of answers that have not come.
    left: usize,
    /// Dword 0 of the command's completion: all answers combined by OR.
    result: u32,
    /// The completion queue that the command removes when it ends.
    removes: Option<u16>,
}

/// The home's view of its lanes. The module's head says how queues are shared out.
pub(crate) struct Lanes {
    links: Vec<Arc<LaneLink>>,
    submission: BTreeMap<u16, FarSubmission>,
    completion: BTreeMap<u16, FarCompletion>,
    asked: BTreeMap<u64, PendingAdmin>,
    next_question: u64,
    /// The number of the last order to stop.
    stops: u64,
    /// `true` if the last order to stop is in effect.
    pub stopped: bool,
}

impl Lanes {
    fn of_submission(&self, id: u16) -> Option<&Arc<LaneLink>> {
        let queue = self.submission.get(&id)?;
        self.links.get(self.completion.get(&queue.completion)?.lane)
    }

    fn order(&self, order: impl Fn(&mut Controller) + Clone + Send + 'static) {
        self.links.iter().for_each(|link| link.orders.post(order.clone()));
    }

    /// Returns whether the last order to stop is in effect and all lanes have carried it out.
    fn are_still(&self) -> bool {
        self.stopped && self.links.iter().all(|link| link.has_stopped(self.stops))
    }
}

/// Returns the index of the lane, of `lanes` lanes, that serves a completion queue. Returns `None`
/// if the queue stays at home.
fn choose(lanes: usize, id: u16, vector: Option<u16>) -> Option<usize> {
    let at = usize::from(id) % (lanes + 1);
    at.checked_sub(1).filter(|_| vector != Some(0))
}

impl Controller {
    /// Makes the lanes, with the disks that namespaces have for them. Recovered commands of queues
    /// that move to lanes go on there.
    pub(crate) fn make_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        let most = usize::from(self.limits.lanes) - 1;
        let most = self.journal.as_ref().map_or(most, |journal| most.min(journal.parts() - 1));
        self.inbox.wake_by(home);
        let wakers: Vec<Waker> = wakers.into_iter().take(most).collect();
        let mut controllers = self.lane_controllers(wakers.len());
        let found = self.share_out(&mut controllers);
        let mut made: Vec<Box<dyn Lane>> = Vec::new();
        let mut links = Vec::new();
        for (controller, waker) in controllers.into_iter().zip(wakers) {
            let (lane, link) = QueueLane::make(controller, self.mailbox(), waker);
            made.push(Box::new(lane));
            links.push(link);
        }
        self.namespaces.iter_mut().for_each(|one| one.lanes.clear());
        if !links.is_empty() {
            self.lanes = Some(Box::new(Lanes {
                links,
                submission: BTreeMap::new(),
                completion: BTreeMap::new(),
                asked: BTreeMap::new(),
                next_question: 0,
                stops: 0,
                stopped: false,
            }));
            self.deal_queues();
            // No lane has been polled yet: when a lane runs this order, it has its queues already.
            for (link, found) in self.lanes.iter().flat_map(|lanes| &lanes.links).zip(found) {
                link.orders.post(move |lane| lane.restart(&found));
            }
        }
        self.go_on_recovered();
        made
    }

    fn lane_controllers(&mut self, count: usize) -> Vec<Self> {
        let mut controllers = Vec::new();
        for lane in 1..=count {
            let Ok(mut controller) = Self::new(self.parts_of_lane()) else {
                debug_assert!(false, "the home's parts were checked");
                break;
            };
            controller.limiter = self.limiter.clone();
            controller.journal = self.journal.as_ref().and_then(|journal| journal.part(lane));
            controllers.push(controller);
        }
        controllers
    }

    /// Splits the recovered commands by lane, with journal slots of that lane, and returns them.
    /// Commands of the home's queues stay in `recovered`.
    fn share_out(&mut self, lanes: &mut [Self]) -> Vec<Vec<UsedSlot>> {
        let mut all: Vec<Vec<UsedSlot>> = lanes.iter().map(|_| Vec::new()).collect();
        let Some(Recovered(found)) = self.recovered.take() else { return all };
        let mut own = Vec::new();
        for mut one in found {
            let queue = self.queues.pair(one.queue);
            let lane = queue.and_then(|(_, queue)| choose(all.len(), queue.id, queue.vector));
            self.move_slot(lanes, lane, &mut one);
            lane.map_or(&mut own, |at| &mut all[at]).push(one);
        }
        self.recovered = Some(Recovered(own));
        all
    }

    /// Moves a recovered command's journal slot to the part of the lane, or of the home, that is to
    /// carry the command out, if the slot lies in another thread's part.
    fn move_slot(&mut self, lanes: &mut [Self], to: Option<usize>, one: &mut UsedSlot) {
        let taker = match to {
            Some(at) => &mut lanes[at].journal,
            None => &mut self.journal,
        };
        let Some(journal) = taker else { return };
        if journal.owns(one.ticket) {
            return;
        }
        let moved = journal.adopt(one);
        if moved == Ticket::NONE {
            // More slots than a thread can have: this slot stays in its part.
            return;
        }
        let old = std::mem::replace(&mut one.ticket, moved);
        let mut journals = lanes.iter_mut().filter_map(|lane| lane.journal.as_mut());
        let owner = journals.find(|journal| journal.owns(old)).or(self.journal.as_mut());
        if let Some(owner) = owner {
            owner.end(old);
        }
    }

    fn parts_of_lane(&mut self) -> Parts {
        let namespaces = self.namespaces.iter_mut().filter_map(|one| one.of_lane());
        Parts {
            memory: self.memory.clone(),
            interrupts: self.interrupts.clone(),
            doorbells: self.doorbells.clone(),
            namespaces: namespaces.collect(),
            clock: self.clock.clone(),
            identity: self.identity.clone(),
            limits: crate::Limits { lanes: 1, ..self.limits },
            journal: None,
        }
    }

    /// Returns the number of lanes, which is the number of disks that a namespace needs besides its
    /// first.
    pub(crate) fn lane_count(&self) -> usize {
        self.lanes.as_ref().map_or(0, |lanes| lanes.links.len())
    }

    /// Returns the mailboxes of the controller's lanes, in their order. Work that every lane must
    /// do for itself, such as tracing, is posted to each of them. Posting wakes the lane.
    pub fn lane_mailboxes(&self) -> Vec<Mailbox> {
        let links = self.lanes.iter().flat_map(|lanes| &lanes.links);
        links.map(|link| link.orders.clone()).collect()
    }

    /// Posts a job to every lane.
    pub(crate) fn order(&self, order: impl Fn(&mut Controller) + Clone + Send + 'static) {
        if let Some(lanes) = &self.lanes {
            lanes.order(order);
        }
    }

    /// Returns the highest number of a submission queue that a lane serves, or 0 if no lane serves
    /// any.
    pub(crate) fn last_far_queue(&self) -> u16 {
        let last = self.lanes.as_ref().and_then(|lanes| lanes.submission.last_key_value());
        last.map_or(0, |(id, _)| *id)
    }

    /// Returns whether a lane serves any queue.
    pub(crate) fn has_far_queues(&self) -> bool {
        self.lanes.as_ref().is_some_and(|lanes| !lanes.completion.is_empty())
    }

    pub(crate) fn has_submission(&mut self, id: u16) -> bool {
        let far = self.lanes.as_ref().is_some_and(|lanes| lanes.submission.contains_key(&id));
        far || self.queues.submission(id).is_some()
    }

    pub(crate) fn has_completion(&mut self, id: u16) -> bool {
        let far = self.lanes.as_ref().is_some_and(|lanes| lanes.completion.contains_key(&id));
        far || self.queues.completion(id).is_some()
    }

    /// Returns whether submission queues that complete in queue `id` may be made.
    pub(crate) fn takes_completions(&mut self, id: u16) -> bool {
        let far = self.lanes.as_ref().and_then(|lanes| lanes.completion.get(&id));
        far.map_or_else(|| self.queues.completion(id).is_some(), |queue| !queue.deleting)
    }

    /// Gives a new completion queue to the thread that is to serve it.
    pub(crate) fn add_completion(&mut self, queue: CompletionQueue) {
        let id = queue.id;
        let count = self.lane_count();
        let lane = choose(count, id, queue.vector);
        match (&mut self.lanes, lane) {
            (Some(lanes), Some(lane)) => {
                let (base, size, vector) = (queue.base, queue.size, queue.vector);
                let entry = FarCompletion { lane, base, size, vector, users: 0, deleting: false };
                lanes.completion.insert(id, entry);
                lanes.links[lane].orders.post(move |lane| lane.queues.add_completion(queue));
            }
            _ => self.queues.add_completion(queue),
        }
    }

    /// Gives a new submission queue to the thread that serves its completion queue.
    pub(crate) fn add_submission(&mut self, queue: SubmissionQueue) {
        if let Some(lanes) = &mut self.lanes
            && let Some(completion) = lanes.completion.get_mut(&queue.completion)
        {
            completion.users += 1;
            let (completes, base, size) = (queue.completion, queue.base, queue.size);
            let entry = FarSubmission { completion: completes, base, size, deleting: None };
            lanes.submission.insert(queue.id, entry);
            let link = &lanes.links[completion.lane];
            return link.orders.post(move |lane| lane.queues.add_submission(queue));
        }
        self.queues.add_submission(queue);
    }

    /// Deletes a submission queue that a lane serves. Returns `None` if no lane serves it.
    pub(crate) fn delete_far_submission(&mut self, id: u16, command: u16) -> Option<Outcome> {
        let ticket = self.ticket;
        let lanes = self.lanes.as_mut()?;
        let link = lanes.of_submission(id)?.clone();
        let queue = lanes.submission.get_mut(&id)?;
        if queue.deleting.is_some() {
            return Some(Status::INVALID_QUEUE_ID.dnr().into());
        }
        queue.deleting = Some((command, ticket));
        link.orders.post(move |lane| lane.begin_deletion(id, (0, Ticket::NONE)));
        Some(Outcome::Pending)
    }

    /// Notes that a lane has dropped submission queue `id`, and ends the command that deleted it.
    pub(crate) fn far_submission_gone(&mut self, id: u16) {
        let Some(lanes) = &mut self.lanes else { return };
        let Some(queue) = lanes.submission.remove(&id) else { return };
        if let Some(completion) = lanes.completion.get_mut(&queue.completion) {
            completion.users -= 1;
        }
        if let Some((command, ticket)) = queue.deleting {
            self.ticket = ticket;
            self.end_admin(command, Status::SUCCESS, 0);
        }
    }

    /// Deletes a completion queue that a lane serves. Returns `None` if no lane serves it.
    pub(crate) fn delete_far_completion(&mut self, id: u16, command: u16) -> Option<Outcome> {
        let queue = self.lanes.as_mut()?.completion.get_mut(&id)?;
        if queue.deleting {
            return Some(Status::INVALID_QUEUE_ID.dnr().into());
        }
        if queue.users > 0 {
            return Some(Status::INVALID_QUEUE_DELETION.dnr().into());
        }
        queue.deleting = true;
        let lane = queue.lane;
        Some(self.ask(command, lane..lane + 1, Some(id), move |lane| {
            drop(lane.queues.remove_completion(id));
            0
        }))
    }

    /// Makes the lane of submission queue `queue` abort its command `id`. Returns `None` if no lane
    /// serves the queue.
    pub(crate) fn abort_far(&mut self, command: u16, queue: u16, id: u16) -> Option<Outcome> {
        let lanes = self.lanes.as_ref()?;
        let completion = lanes.submission.get(&queue)?.completion;
        let lane = lanes.completion.get(&completion)?.lane;
        let abort = move |lane: &mut Controller| u32::from(!lane.abort_io(queue, id));
        Some(self.ask(command, lane..lane + 1, None, abort))
    }

    /// Makes all lanes look at shadow doorbells. Returns `None` if there are no lanes.
    pub(crate) fn follow_far(&mut self, command: u16, pages: ShadowPages) -> Option<Outcome> {
        let count = self.lanes.as_ref()?.links.len();
        Some(self.ask(command, 0..count, None, move |lane| {
            lane.follow(pages);
            0
        }))
    }

    /// Makes all lanes take over the features; the command ends with `result`.
    pub(crate) fn set_far_features(&mut self, command: u16, result: u32) -> Outcome {
        let features = self.features.clone();
        self.ask(command, 0..self.lane_count(), None, move |lane| {
            lane.features = features.clone();
            result
        })
    }

    /// Asks lanes on behalf of admin command `id`, which is the current command; the last answer
    /// ends it.
    fn ask(
        &mut self,
        id: u16,
        of: std::ops::Range<usize>,
        removes: Option<u16>,
        question: impl Fn(&mut Controller) -> u32 + Clone + Send + 'static,
    ) -> Outcome {
        let ticket = self.ticket;
        let Some(lanes) = &mut self.lanes else { return Status::INTERNAL_ERROR.into() };
        let number = lanes.next_question;
        lanes.next_question += 1;
        lanes.asked.insert(number, PendingAdmin { id, ticket, left: of.len(), result: 0, removes });
        for link in &lanes.links[of] {
            let question = question.clone();
            link.orders.post(move |lane| {
                let answer = question(lane);
                let _ = lane.tell_home(move |home| home.answered(number, answer));
            });
        }
        Outcome::Pending
    }

    /// Takes a lane's answer. An answer to a question from before a reset is dropped.
    fn answered(&mut self, number: u64, answer: u32) {
        let Some(lanes) = &mut self.lanes else { return };
        let Some(asked) = lanes.asked.get_mut(&number) else { return };
        (asked.left, asked.result) = (asked.left - 1, asked.result | answer);
        if asked.left > 0 {
            return;
        }
        if let Some(asked) = lanes.asked.remove(&number) {
            asked.removes.map(|id| lanes.completion.remove(&id));
            self.ticket = asked.ticket;
            self.end_admin(asked.id, Status::SUCCESS, asked.result);
        }
    }

    /// Takes a write to a doorbell register of a lane's queue: stores the cell and wakes the lane
    /// if it is resting. Returns whether a lane serves such a queue. An invalid value is reported
    /// here, since a valid one may follow before the lane looks.
    pub(crate) fn ring_far(&mut self, index: usize, value: u32) -> bool {
        let Some(lanes) = &self.lanes else { return false };
        let Ok(id) = u16::try_from(index / 2) else { return false };
        let (completion, size) = match lanes.submission.get(&id) {
            Some(queue) if index.is_multiple_of(2) => (queue.completion, Some(queue.size)),
            None if index.is_multiple_of(2) => return false,
            _ => (id, None),
        };
        let Some(queue) = lanes.completion.get(&completion) else { return false };
        if value >= size.unwrap_or(queue.size) {
            self.invalid_doorbell(Event::INVALID_DOORBELL_VALUE);
            return true;
        }
        let link = &lanes.links[queue.lane];
        self.doorbells.store(index, value);
        if link.nap.misses() {
            link.orders.wake();
        }
        true
    }

    /// Starts the lanes when the controller was enabled or restored: they serve queues from now on.
    pub(crate) fn begin_lanes(&mut self) {
        let (configuration, shadow) = (self.registers.configuration, self.shadow);
        let features = self.features.clone();
        if let Some(lanes) = &mut self.lanes {
            lanes.stopped = false;
            lanes.order(move |lane| {
                lane.features = features.clone();
                lane.begin_lane(configuration, shadow);
            });
        }
        if self.shutdown != Shutdown::None {
            self.stop_lanes();
        }
    }

    /// Makes lanes give up their queues and their commands.
    pub(crate) fn reset_lanes(&mut self) {
        let Some(lanes) = &mut self.lanes else { return };
        if lanes.stopped && lanes.completion.is_empty() {
            // Lanes have nothing: a guest that resets again and again causes no orders.
            return lanes.asked.clear();
        }
        lanes.submission.clear();
        lanes.completion.clear();
        lanes.asked.clear();
        lanes.stops += 1;
        lanes.stopped = true;
        let number = lanes.stops;
        lanes.order(move |lane| lane.reset_lane(number));
    }

    /// Makes lanes stop, if they have not been told to, and returns whether all have stopped.
    pub(crate) fn stop_lanes(&mut self) -> bool {
        let Some(lanes) = &mut self.lanes else { return true };
        if !lanes.stopped {
            lanes.stops += 1;
            lanes.stopped = true;
            let number = lanes.stops;
            lanes.order(move |lane| lane.stop(number));
            // The next poll makes the lanes go on.
            self.inbox.look_again();
        }
        self.lanes.as_ref().is_none_or(|lanes| lanes.are_still())
    }

    /// Makes lanes go on that were stopped by `quiesce`, unless the controller is disabled or shuts
    /// down.
    #[cold]
    pub(crate) fn resume_lanes(&mut self) {
        let goes_on = self.may_post() && self.shutdown == Shutdown::None;
        if let Some(lanes) = self.lanes.as_mut().filter(|lanes| lanes.stopped && goes_on) {
            lanes.stopped = false;
            lanes.order(Controller::go_on);
        }
    }

    /// Takes the errors and events that lanes have left for the home.
    pub(crate) fn collect_reports(&mut self) {
        let may_post = self.may_post();
        for lane in 0..self.lane_count() {
            let Some(link) = self.lanes.as_ref().map(|lanes| lanes.links[lane].clone()) else {
                return;
            };
            let mut outbox = link.open_outbox();
            outbox.errors.drain(..).for_each(|error| self.health.log(error));
            // Events from before a reset are dropped.
            outbox.events.drain(..).filter(|_| may_post).for_each(|event| {
                self.invalid_doorbell(event);
            });
            if std::mem::take(&mut outbox.fatal) && may_post {
                self.fail();
            }
        }
    }

    /// Returns the health counters of all threads together.
    pub(crate) fn whole_health(&self) -> Health {
        let mut health = self.health.clone();
        let links = self.lanes.iter().flat_map(|lanes| &lanes.links);
        links.for_each(|link| link.add_to(&mut health));
        health
    }

    /// Returns the queue states that lanes saved when they stopped.
    pub(crate) fn far_states(&self) -> crate::state::QueueStates {
        let mut all = crate::state::QueueStates::default();
        let links = self.lanes.iter().flat_map(|lanes| &lanes.links);
        links.for_each(|link| all.append(&link.saved()));
        all
    }

    /// Returns the queues that lanes serve, as a snapshot has them.
    pub(crate) fn far_shapes(&self) -> crate::state::QueueStates {
        let mut all = crate::state::QueueStates::default();
        let Some(lanes) = &self.lanes else { return all };
        let shadow = self.shadow.is_some();
        for (id, queue) in &lanes.completion {
            all.add_completion((*id, queue.vector), (queue.base, queue.size), shadow);
        }
        for (id, queue) in &lanes.submission {
            all.add_submission((*id, queue.completion), (queue.base, queue.size), shadow);
        }
        all
    }

    /// Gives restored queues to the threads that are to serve them.
    pub(crate) fn deal_queues(&mut self) {
        if self.lanes.is_none() || !self.may_post() {
            return;
        }
        self.begin_lanes();
        let queues = std::mem::take(&mut self.queues);
        let (submissions, completions) = queues.into_parts();
        for mut queue in completions {
            queue.users = 0;
            self.add_completion(queue);
        }
        submissions.into_iter().for_each(|queue| self.add_submission(queue));
    }

    /// Gives each lane its disk of a namespace that was attached.
    pub(crate) fn attach_far(&mut self, namespaces: Vec<Namespace>) {
        let Some(lanes) = &self.lanes else { return };
        for (link, namespace) in lanes.links.iter().zip(namespaces) {
            link.orders.post(move |lane| {
                let attached = lane.attach(namespace);
                debug_assert!(attached.is_ok(), "the home had the number free");
            });
        }
    }

    /// Takes a namespace away from every lane. `namespace_left` is called for each lane in which
    /// the namespace's requests have ended.
    pub(crate) fn detach_far(&mut self, nsid: u32) {
        let Some(lanes) = &self.lanes else { return };
        for link in &lanes.links {
            let home = self.mailbox();
            link.orders.post(move |lane| {
                let left = move |_| home.post(move |home| home.namespace_left(nsid));
                lane.detach(nsid, Box::new(left));
            });
        }
    }

    /// Makes every lane take over a namespace's new size, and then the home, whose guest is told.
    /// Returns `done` if there are no lanes.
    pub(crate) fn refresh_far(&mut self, nsid: u32, done: Done) -> Option<Done> {
        let Some(lanes) = &self.lanes else { return Some(done) };
        let left = Arc::new(AtomicUsize::new(lanes.links.len()));
        let done = Arc::new(Mutex::new(Some(done)));
        for link in &lanes.links {
            let (home, left, done) = (self.mailbox(), left.clone(), done.clone());
            link.orders.post(move |lane| {
                let taken = move |_| {
                    let last = left.fetch_sub(1, Ordering::AcqRel) == 1;
                    let done = || done.lock().unwrap_or_else(|p| p.into_inner()).take();
                    if let Some(done) = last.then(done).flatten() {
                        home.post(move |home| home.namespaces.refresh(nsid, done));
                    }
                };
                lane.namespaces.refresh(nsid, Box::new(taken));
            });
        }
        None
    }
}
