//! The state that a home shares with one of its lanes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::order::{Order, Reply};
use crate::engine::report::Report;
use crate::health::Published;
use crate::mailbox::Sender;
use crate::nap::Nap;
use crate::queue_state::QueueStates;

/// State that a home and one of its lanes share.
pub(crate) struct LaneLink {
    /// The lane's mailbox.
    pub orders: Sender<Order>,
    /// The home's mailbox.
    pub home: Sender<Reply>,
    pub nap: Nap,
    /// The number of the last order to stop that has been carried out.
    stopped: AtomicU64,
    /// The lane's queues as they were when it stopped.
    saved: Mutex<QueueStates>,
    /// The lane's counters.
    pub counters: Arc<Published>,
    outbox: Mutex<Outbox>,
}

/// The errors and events that a lane leaves for its home without being asked. Its size is bounded,
/// as a report's is.
#[derive(Default)]
struct Outbox {
    report: Report,
    /// `true` if the home was told to look.
    announced: bool,
}

impl LaneLink {
    pub fn new(orders: Sender<Order>, home: Sender<Reply>) -> Arc<Self> {
        Arc::new(Self {
            orders,
            home,
            nap: Nap::default(),
            stopped: AtomicU64::new(0),
            saved: Mutex::default(),
            counters: Arc::default(),
            outbox: Mutex::default(),
        })
    }

    /// Returns whether the order to stop with this number, or a later one, has been carried out. If
    /// so, everything that the lane did before is visible to the caller.
    pub fn has_stopped(&self, number: u64) -> bool {
        self.stopped.load(Ordering::Acquire) >= number
    }

    /// Publishes that the order to stop with this number has been carried out.
    pub fn set_stopped(&self, number: u64, queues: QueueStates) {
        *self.saved() = queues;
        self.stopped.store(number, Ordering::Release);
        self.home.wake();
    }

    /// Returns the lane's queues as they were when it stopped last.
    pub fn saved(&self) -> MutexGuard<'_, QueueStates> {
        self.saved.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Leaves the errors and events of a lane's report for the home.
    pub fn leave(&self, report: &mut Report) {
        let mut outbox = self.outbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let whole = &mut outbox.report;
        whole.fatal |= std::mem::take(&mut report.fatal);
        report.errors.drain(..).for_each(|error| whole.log(error));
        report.events.drain(..).for_each(|event| whole.raise(event));
        let announced = std::mem::replace(&mut outbox.announced, true);
        drop(outbox);
        if !announced {
            self.home.look();
        }
    }

    /// Swaps what the lane has left for `empty`. The lane announces its next report anew.
    pub fn take_report(&self, empty: &mut Report) {
        let mut outbox = self.outbox.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        outbox.announced = false;
        std::mem::swap(&mut outbox.report, empty);
    }
}

impl super::Fleet {
    /// Returns the counters of each lane, for other threads.
    pub fn published(&self) -> Vec<Arc<Published>> {
        self.links.iter().map(|link| Arc::clone(&link.counters)).collect()
    }
}
