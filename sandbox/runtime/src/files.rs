//! The threads that access the disk, so that the control thread and the guests' thread never do.
//!
//! Each sandbox has a [`Lane`], which is no lane of a device. Operations of one lane run one at a
//! time, in the order of their calls. [`Files`] is a fixed number of threads. Each thread takes the
//! lane that has waited longest, runs one operation of it, and puts the lane behind the others. So
//! a sandbox that writes much has the same share as one that writes little. An operation that does
//! not return (on a disk that hangs) blocks its own sandbox and one thread.
//!
//! Not here: waiting for processes and for other daemons, which may take seconds even with a
//! healthy disk (`tokio::task::spawn_blocking`).

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex};

use tokio::sync::oneshot;

use crate::lock::lock;

/// The number of threads. While all but one of them hang, other operations still run.
pub const THREADS: usize = 4;

type Operation = Box<dyn FnOnce() + Send>;

/// The threads that run file operations. Clones share them. The threads end after the last clone
/// and the last [`Lane`] are dropped.
#[derive(Clone)]
pub struct Files(Arc<Owner>);

struct Owner(Arc<LaneQueue>);

/// The lanes with waiting operations.
#[derive(Default)]
struct LaneQueue {
    waiting: Mutex<Waiting>,
    more: Condvar,
}

#[derive(Default)]
struct Waiting {
    lanes: VecDeque<Arc<Queue>>,
    closed: bool,
}

/// The operations of one sandbox, run in order.
#[derive(Clone)]
pub struct Lane {
    files: Files,
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue(Mutex<Operations>);

#[derive(Default)]
struct Operations {
    waiting: VecDeque<Operation>,
    /// Set while the lane is in [`Waiting::lanes`] or a thread runs an operation of it.
    scheduled: bool,
}

impl Files {
    /// Starts the threads.
    ///
    /// # Errors
    /// The error of creating a thread.
    pub fn start() -> std::io::Result<Self> {
        let turns = Arc::new(LaneQueue::default());
        let files = Self(Arc::new(Owner(Arc::clone(&turns))));
        for number in 0..THREADS {
            let turns = Arc::clone(&turns);
            let builder = std::thread::Builder::new().name(format!("files-{number}"));
            builder.spawn(move || turns.work())?;
        }
        Ok(files)
    }

    /// Makes a lane for one sandbox.
    pub fn lane(&self) -> Lane {
        Lane { files: self.clone(), queue: Arc::default() }
    }
}

impl Lane {
    /// Runs `operation` after the earlier ones of this lane. The operation runs to its end even if
    /// the caller stops waiting.
    ///
    /// # Panics
    /// If `operation` panics.
    pub async fn run<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let (done, outcome) = oneshot::channel();
        self.push(Box::new(move || {
            let _ = done.send(catch_unwind(AssertUnwindSafe(operation)));
        }));
        match outcome.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(panic)) => resume_unwind(panic),
            // The threads live as long as `self`, and each operation sends its result.
            Err(_) => resume_unwind(Box::new("a file operation was lost") as Box<dyn Any + Send>),
        }
    }

    fn push(&self, operation: Operation) {
        let mut queue = lock(&self.queue.0);
        queue.waiting.push_back(operation);
        let scheduled = std::mem::replace(&mut queue.scheduled, true);
        drop(queue);
        if !scheduled {
            self.files.0.0.schedule(Arc::clone(&self.queue));
        }
    }
}

impl LaneQueue {
    fn schedule(&self, lane: Arc<Queue>) {
        lock(&self.waiting).lanes.push_back(lane);
        self.more.notify_one();
    }

    fn work(&self) {
        while let Some(lane) = self.next() {
            let operation = lock(&lane.0).waiting.pop_front();
            if let Some(operation) = operation {
                operation();
            }
            let mut queue = lock(&lane.0);
            queue.scheduled = !queue.waiting.is_empty();
            let more = queue.scheduled;
            drop(queue);
            if more {
                self.schedule(lane);
            }
        }
    }

    /// Waits for a lane. Returns `None` after the last handle was dropped.
    fn next(&self) -> Option<Arc<Queue>> {
        let mut waiting = lock(&self.waiting);
        loop {
            if let Some(lane) = waiting.lanes.pop_front() {
                return Some(lane);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.more.wait(waiting).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&self.0.waiting).closed = true;
        self.0.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn operations_of_a_lane_run_in_their_order() {
        let lane = Files::start().unwrap().lane();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let runs: Vec<_> = (0..100)
            .map(|number| {
                let (lane, seen) = (lane.clone(), Arc::clone(&seen));
                tokio::spawn(async move { lane.run(move || lock(&seen).push(number)).await })
            })
            .collect();
        for run in runs {
            run.await.unwrap();
        }
        assert_eq!(*lock(&seen), (0..100).collect::<Vec<_>>());
    }

    /// Operations of other lanes end while the hanging ones still hang.
    #[tokio::test]
    async fn a_lane_that_hangs_holds_up_no_other() {
        let files = Files::start().unwrap();
        let mut hanging = Vec::new();
        for _ in 1..THREADS {
            let (release, held) = channel::<()>();
            let (lane, other) = (files.lane(), files.lane());
            let hang = tokio::spawn(async move { lane.run(move || held.recv().is_err()).await });
            for _ in 0..100 {
                other.run(|| ()).await;
            }
            hanging.push((release, hang));
        }
        for (release, hang) in hanging {
            assert!(!hang.is_finished());
            drop(release);
            assert!(hang.await.unwrap());
        }
    }

    /// With one free thread, a lane with a thousand waiting operations takes turns with the other
    /// lane.
    #[tokio::test]
    async fn a_lane_that_floods_takes_turns() {
        let files = Files::start().unwrap();
        let releases: Vec<_> = (1..THREADS)
            .map(|_| {
                let ((release, held), lane) = (channel::<()>(), files.lane());
                tokio::spawn(async move { lane.run(move || held.recv().is_err()).await });
                release
            })
            .collect();
        tokio::task::yield_now().await;
        let (flood, other) = (files.lane(), files.lane());
        let (go, gate) = channel::<()>();
        flood.push(Box::new(move || assert!(gate.recv().is_ok())));
        let ran = Arc::new(Mutex::new(0));
        for _ in 0..1000 {
            let ran = Arc::clone(&ran);
            flood.push(Box::new(move || *lock(&ran) += 1));
        }
        let counted = Arc::clone(&ran);
        let asked = tokio::spawn(async move { other.run(move || *lock(&counted)).await });
        tokio::task::yield_now().await;
        go.send(()).unwrap();
        let before = asked.await.unwrap();
        assert!(before <= 1, "{before} operations of the other lane came first");
        drop(releases);
    }

    #[tokio::test]
    async fn a_panic_is_its_callers() {
        let lane = Files::start().unwrap().lane();
        let panics = lane.clone();
        let run =
            tokio::spawn(async move { panics.run(|| resume_unwind(Box::new("on purpose"))).await });
        assert!(run.await.is_err());
        assert_eq!(lane.run(|| 7).await, 7);
    }
}
