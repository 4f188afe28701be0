//! A controller's lanes, as the home sees them: which thread has which queue, and what lanes are
//! told. The head of `lane` says what a lane is, and why nothing is lost between home and lane.
//!
//! Completion queue `n` goes to thread `n` modulo the number of threads; the home is thread 0. The
//! queue's submission queues go with it. Queues on vector 0 stay at home: while MSI-X is off, that
//! vector is the pin, whose level depends on all of these queues.
//!
//! An admin command that needs lanes ends when the lanes have answered.

mod lane;
mod link;
mod make;
mod order;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use slipway_doorbells::Doorbells;

use self::link::LaneLink;
pub(crate) use self::make::make;
pub use self::order::Answer;
pub(crate) use self::order::{Order, Question, Reply, Settings};
use crate::cell::BadDoorbell;
use crate::engine::IoEngine;
use crate::engine::report::Report;
use crate::health::Counters;
use crate::mailbox::{Inbox, Sender};
use crate::namespace::{Done, Namespace};
use crate::permit::Permit;
use crate::queue::{CompletionQueue, SubmissionQueue};
use crate::queue_state::QueueStates;

/// A submission queue that a lane serves.
struct FarSubmission {
    completion: u16,
    base: u64,
    /// The number of entries.
    size: u32,
    /// `true` if the queue is being deleted.
    deleting: bool,
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
    permit: Permit,
    /// The number of answers that have not come.
    left: usize,
    /// Dword 0 of the command's completion: all answers combined by OR.
    result: u32,
    /// The completion queue that the command removes when it ends.
    removes: Option<u16>,
}

/// A namespace whose new size lanes take over first.
struct PendingRefresh {
    nsid: u32,
    done: Done,
    /// The number of lanes that have not done it.
    left: usize,
}

/// The state of a queue that a lane serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneQueueState {
    /// The queue can be used, and deleted.
    Open,
    /// Submission queues complete in this completion queue.
    InUse,
    /// The queue is being deleted.
    Deleting,
}

/// The home's view of its lanes; there may be none. The module's head says how queues are shared
/// out.
#[derive(Default)]
pub(crate) struct Fleet {
    links: Vec<Arc<LaneLink>>,
    replies: Inbox<Reply>,
    submission: BTreeMap<u16, FarSubmission>,
    completion: BTreeMap<u16, FarCompletion>,
    asked: BTreeMap<u64, PendingAdmin>,
    refreshing: BTreeMap<u64, PendingRefresh>,
    /// The number of the next question or refresh.
    next: u64,
    /// The number of the last order to stop.
    stops: u64,
    /// `true` if the last order to stop is in effect.
    stopped: bool,
}

/// Returns the index of the lane, of `lanes` lanes, that serves a completion queue. Returns `None`
/// if the queue stays at home.
fn choose(lanes: usize, id: u16, vector: Option<u16>) -> Option<usize> {
    let at = usize::from(id) % (lanes + 1);
    at.checked_sub(1).filter(|_| vector != Some(0))
}

impl Fleet {
    /// Returns the number of lanes, which is the number of disks that a namespace needs besides its
    /// first.
    pub fn len(&self) -> usize {
        self.links.len()
    }

    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Makes messages of lanes wake the home with `waker` from now on.
    pub fn wake_home_by(&self, waker: Waker) {
        self.replies.wake_by(waker);
    }

    /// Takes over new lanes, of which `found` are commands to carry out again. No lane has been
    /// polled yet: when a lane carries out this order, it has its queues already.
    pub fn restart(&self, found: Vec<Vec<crate::journal::UsedSlot>>) {
        for (link, found) in self.links.iter().zip(found) {
            link.orders.post(Order::Restart(found));
        }
    }

    fn mailbox(&self) -> Sender<Reply> {
        self.replies.sender()
    }

    /// Returns whether lanes may have left messages or reports.
    pub fn has_post(&self) -> bool {
        self.replies.has_post()
    }

    /// Takes the messages of lanes.
    pub fn take_replies(&self) -> impl Iterator<Item = Reply> + use<> {
        self.replies.take()
    }

    /// Swaps the errors and events that lane `lane` has left for `empty`.
    pub fn take_report(&self, lane: usize, empty: &mut Report) {
        self.links[lane].take_report(empty);
    }

    fn order(&self, order: impl Fn() -> Order) {
        self.links.iter().for_each(|link| link.orders.post(order()));
    }

    /// Gives one lane an order, which is dropped if there is no such lane.
    pub fn order_one(&self, lane: usize, order: Order) {
        if let Some(link) = self.links.get(lane) {
            link.orders.post(order);
        }
    }

    /// Limits the lanes' commands.
    pub fn limit(&self, limiter: &crate::limiter::Limiter) {
        self.order(|| Order::Limit(limiter.clone()));
    }

    /// Gives the lanes the values of features, without waiting for an answer.
    pub fn tune(&self, tuning: &crate::features::Tuning) {
        self.order(|| Order::Tune(tuning.clone()));
    }

    /// Stops all lanes after a fatal error.
    pub fn fail(&self) {
        if !self.stopped {
            self.order(|| Order::Fail);
        }
    }

    /// Returns the lanes' counters together.
    pub fn add_counters(&self, to: &mut Counters) {
        self.links.iter().for_each(|link| to.add(&link.counters.get()));
    }
}

/// Queues.
impl Fleet {
    /// Returns the highest number of a submission queue that a lane serves, or 0 if no lane serves
    /// any.
    pub fn last_queue(&self) -> u16 {
        self.submission.last_key_value().map_or(0, |(id, _)| *id)
    }

    /// Returns whether a lane serves any queue.
    pub fn has_queues(&self) -> bool {
        !self.completion.is_empty()
    }

    /// Returns the state of submission queue `id`, if a lane serves it.
    pub fn submission(&self, id: u16) -> Option<LaneQueueState> {
        let queue = self.submission.get(&id)?;
        Some(if queue.deleting { LaneQueueState::Deleting } else { LaneQueueState::Open })
    }

    /// Returns the state of completion queue `id`, if a lane serves it.
    pub fn completion(&self, id: u16) -> Option<LaneQueueState> {
        let queue = self.completion.get(&id)?;
        Some(match queue.users {
            _ if queue.deleting => LaneQueueState::Deleting,
            0 => LaneQueueState::Open,
            _ => LaneQueueState::InUse,
        })
    }

    /// Gives a new completion queue to the thread that is to serve it.
    pub fn add_completion(&mut self, home: &mut IoEngine, queue: CompletionQueue) {
        let id = queue.id;
        let Some(lane) = choose(self.len(), id, queue.vector) else {
            return home.queues.add_completion(queue);
        };
        let (base, size, vector) = (queue.base, queue.size, queue.vector);
        let entry = FarCompletion { lane, base, size, vector, users: 0, deleting: false };
        self.completion.insert(id, entry);
        self.links[lane].orders.post(Order::AddCompletion(queue));
    }

    /// Gives a new submission queue to the thread that serves its completion queue.
    pub fn add_submission(&mut self, home: &mut IoEngine, queue: SubmissionQueue) {
        let Some(completion) = self.completion.get_mut(&queue.completion) else {
            return home.queues.add_submission(queue);
        };
        completion.users += 1;
        let (completes, base, size) = (queue.completion, queue.base, queue.size);
        let entry = FarSubmission { completion: completes, base, size, deleting: false };
        self.submission.insert(queue.id, entry);
        self.links[completion.lane].orders.post(Order::AddSubmission(queue));
    }

    /// Gives the home's queues to the threads that are to serve them.
    pub fn deal_queues(&mut self, home: &mut IoEngine) {
        let (submissions, completions) = std::mem::take(&mut home.queues).into_parts();
        for mut queue in completions {
            queue.users = 0;
            self.add_completion(home, queue);
        }
        submissions.into_iter().for_each(|queue| self.add_submission(home, queue));
    }

    /// Has the lane of submission queue `id` delete it. The lane tells when it is gone.
    pub fn delete_submission(&mut self, id: u16) {
        let Some(lane) = self.lane_of(id) else { return };
        if let Some(queue) = self.submission.get_mut(&id) {
            queue.deleting = true;
            self.links[lane].orders.post(Order::DeleteSubmission(id));
        }
    }

    /// Notes that a lane has dropped submission queue `id`.
    pub fn submission_gone(&mut self, id: u16) {
        let Some(queue) = self.submission.remove(&id) else { return };
        if let Some(completion) = self.completion.get_mut(&queue.completion) {
            completion.users -= 1;
        }
    }

    /// Has the lane of completion queue `id` delete it for the admin command with `permit`.
    pub fn delete_completion(&mut self, id: u16, permit: Permit) {
        let Some(queue) = self.completion.get_mut(&id) else { return drop(permit) };
        queue.deleting = true;
        let lane = queue.lane;
        self.ask_some(permit, lane..lane + 1, 0, Some(id), &Question::RemoveCompletion(id));
    }

    /// Has the lane of submission queue `queue` abort its command `id`, for the admin command with
    /// `permit`. Gives the permit back if no lane serves the queue.
    pub fn abort(&mut self, permit: Permit, queue: u16, id: u16) -> Option<Permit> {
        let Some(lane) = self.lane_of(queue) else { return Some(permit) };
        self.ask_some(permit, lane..lane + 1, 0, None, &Question::Abort(queue, id));
        None
    }

    fn lane_of(&self, submission: u16) -> Option<usize> {
        let queue = self.submission.get(&submission)?;
        Some(self.completion.get(&queue.completion)?.lane)
    }

    /// Takes a write to a doorbell register of a lane's queue: stores the cell and wakes the lane
    /// if it is resting. Returns `None` if no lane serves such a queue. An invalid value is
    /// reported here, since a valid one may follow before the lane looks.
    pub fn ring(
        &self,
        doorbells: &Doorbells,
        index: usize,
        value: u32,
    ) -> Option<Result<(), BadDoorbell>> {
        let id = u16::try_from(index / 2).ok()?;
        let (completion, size) = match index.is_multiple_of(2) {
            true => {
                let queue = self.submission.get(&id)?;
                (queue.completion, Some(queue.size))
            }
            false => (id, None),
        };
        let queue = self.completion.get(&completion)?;
        if value >= size.unwrap_or(queue.size) {
            return Some(Err(BadDoorbell::Value));
        }
        let link = &self.links[queue.lane];
        doorbells.store(index, value);
        if link.nap.misses() {
            link.orders.wake();
        }
        Some(Ok(()))
    }

    /// Wakes the lanes that rest: the cells of some doorbells have changed.
    pub fn notified(&self) {
        for link in &self.links {
            if link.nap.misses() {
                link.orders.wake();
            }
        }
    }

    /// Returns the queue states that lanes saved when they stopped.
    pub fn saved_queues(&self) -> QueueStates {
        let mut all = QueueStates::default();
        self.links.iter().for_each(|link| all.append(&link.saved()));
        all
    }

    /// Returns the queues that lanes serve, as a snapshot has them. `shadow` says whether the host
    /// writes shadow doorbells.
    pub fn present_queues(&self, shadow: bool) -> QueueStates {
        let mut all = QueueStates::default();
        for (id, queue) in &self.completion {
            all.add_completion((*id, queue.vector), (queue.base, queue.size), shadow);
        }
        for (id, queue) in &self.submission {
            all.add_submission((*id, queue.completion), (queue.base, queue.size), shadow);
        }
        all
    }
}

/// Admin commands that lanes take part in.
impl Fleet {
    /// Asks all lanes on behalf of the admin command with `permit`; the last answer ends it with
    /// `result`. Gives the permit back if there are no lanes.
    pub fn ask(&mut self, permit: Permit, result: u32, question: &Question) -> Option<Permit> {
        if self.is_empty() {
            return Some(permit);
        }
        self.ask_some(permit, 0..self.len(), result, None, question);
        None
    }

    fn ask_some(
        &mut self,
        permit: Permit,
        of: Range<usize>,
        result: u32,
        removes: Option<u16>,
        question: &Question,
    ) {
        let number = self.number();
        self.asked.insert(number, PendingAdmin { permit, left: of.len(), result, removes });
        for link in &self.links[of] {
            link.orders.post(Order::Ask(number, question.clone()));
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes a lane's answer. Returns the admin command that has its last answer with it, and dword
    /// 0 of its completion. An answer to a question from before a reset is dropped.
    pub fn answered(&mut self, number: u64, answer: u32) -> Option<(Permit, u32)> {
        let asked = self.asked.get_mut(&number)?;
        (asked.left, asked.result) = (asked.left - 1, asked.result | answer);
        if asked.left > 0 {
            return None;
        }
        let PendingAdmin { permit, result, removes, .. } = self.asked.remove(&number)?;
        removes.map(|id| self.completion.remove(&id));
        Some((permit, result))
    }
}

/// Namespaces.
impl Fleet {
    /// Gives each lane its disk of a namespace that was attached.
    pub fn attach(&self, namespaces: Vec<Namespace>) {
        for (link, namespace) in self.links.iter().zip(namespaces) {
            link.orders.post(Order::Attach(namespace));
        }
    }

    /// Takes a namespace away from every lane. Each lane tells when its requests have ended.
    pub fn detach(&self, nsid: u32) {
        self.order(|| Order::Detach(nsid));
    }

    /// Makes every lane take over a namespace's new size. Gives `done` back if there are no lanes.
    pub fn refresh(&mut self, nsid: u32, done: Done) -> Option<Done> {
        if self.is_empty() {
            return Some(done);
        }
        let (number, left) = (self.number(), self.len());
        self.refreshing.insert(number, PendingRefresh { nsid, done, left });
        self.order(|| Order::Refresh(nsid, number));
        None
    }

    /// Notes that a lane has taken a new size over. Returns the namespace, whose size the home is
    /// to take over now, if it was the last lane.
    pub fn refreshed(&mut self, number: u64) -> Option<(u32, Done)> {
        let pending = self.refreshing.get_mut(&number)?;
        pending.left -= 1;
        if pending.left > 0 {
            return None;
        }
        let PendingRefresh { nsid, done, .. } = self.refreshing.remove(&number)?;
        Some((nsid, done))
    }
}

/// Starting and stopping.
impl Fleet {
    /// Starts the lanes when the controller was enabled or restored.
    pub fn begin(&mut self, settings: &Settings) {
        self.stopped = false;
        self.order(|| Order::Begin(settings.clone()));
    }

    /// Makes lanes give up their queues and their commands.
    pub fn reset(&mut self) {
        if self.is_empty() {
            return;
        }
        self.asked.clear();
        if self.stopped && self.completion.is_empty() {
            // Lanes have nothing: a guest that resets again and again causes no orders.
            return;
        }
        self.submission.clear();
        self.completion.clear();
        self.stops += 1;
        self.stopped = true;
        let number = self.stops;
        self.order(|| Order::Reset(number));
    }

    /// Makes lanes stop, if they have not been told to, and returns whether all have stopped.
    pub fn stop(&mut self) -> bool {
        if !self.stopped && !self.is_empty() {
            self.stops += 1;
            self.stopped = true;
            let number = self.stops;
            self.order(|| Order::Stop(number));
            // The next poll makes the lanes go on.
            self.replies.look_again();
        }
        self.links.iter().all(|link| link.has_stopped(self.stops))
    }

    /// Makes lanes stop once more, after orders that they got since. Their saved queues include
    /// what these orders brought.
    pub fn stop_again(&mut self) -> bool {
        self.stopped = false;
        self.stop()
    }

    /// Returns the number of admin commands that wait for answers of lanes.
    pub fn pending_admin(&self) -> usize {
        self.asked.len()
    }

    /// Makes the next poll look for messages, after those were taken outside of one.
    pub fn look_again(&self) {
        self.replies.look_again();
    }

    /// Makes lanes go on that were stopped.
    pub fn go_on(&mut self) {
        if self.stopped {
            self.stopped = false;
            self.order(|| Order::GoOn);
        }
    }
}
