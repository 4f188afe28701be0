//! Threads that reset what returns.
//!
//! At most as many jobs run at once as the pool's settings say. A job that has not ended when its
//! deadline passes is given up: the supervisor takes its VFs out of service and starts another
//! thread in place of the one that hangs. A VF out of service gets no further job, so that the
//! threads that hang are never more than the VFs.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Fault;
use crate::table::DeviceOperation;

/// The pool's side of its workers.
pub(crate) trait OperationHandler: Send + Sync + 'static {
    /// Does the operations of a job, which may take any time.
    fn operate(&self, job: DeviceOperation) -> Result<(), Fault>;
    /// Notes the end of a job.
    fn finish(&self, job: DeviceOperation, outcome: Result<(), Fault>);
    /// Notes that a job has not ended in time. Must not wait.
    fn give_up(&self, job: DeviceOperation);
    /// Notes the end of a job that was given up.
    fn late(&self, job: DeviceOperation);
}

/// Jobs that wait or run.
pub(crate) struct Queue {
    jobs: Mutex<WorkerQueue>,
    /// There is a job, or the threads are to end.
    work: Condvar,
    /// A job has begun where none ran, or the supervisor is to end.
    watch: Condvar,
    /// The time that a job may take.
    deadline: Duration,
}

#[derive(Default)]
struct WorkerQueue {
    waiting: VecDeque<DeviceOperation>,
    /// By the order of their beginnings, which is that of their deadlines.
    running: BTreeMap<u64, (DeviceOperation, Instant)>,
    begun: u64,
    is_ending: bool,
}

impl Queue {
    pub(crate) fn new(deadline: Duration) -> Self {
        let (work, watch) = (Condvar::new(), Condvar::new());
        Self { jobs: Mutex::default(), work, watch, deadline }
    }

    pub(crate) fn push(&self, jobs: impl IntoIterator<Item = DeviceOperation>) {
        let mut queue = self.lock();
        for job in jobs {
            queue.waiting.push_back(job);
            self.work.notify_one();
        }
    }

    /// Lets threads end when they have finished their jobs.
    fn end(&self) {
        self.lock().is_ending = true;
        self.work.notify_all();
        self.watch.notify_all();
    }

    /// Waits for a job. Returns `None` if the thread is to end.
    fn next(&self) -> Option<(u64, DeviceOperation)> {
        let mut jobs = self.lock();
        loop {
            if jobs.is_ending {
                return None;
            }
            if let Some(job) = jobs.waiting.pop_front() {
                let run = jobs.begun;
                jobs.begun += 1;
                jobs.running.insert(run, (job, Instant::now() + self.deadline));
                if jobs.running.len() == 1 {
                    self.watch.notify_one();
                }
                return Some((run, job));
            }
            jobs = self.work.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends a run. Returns `false` if it was given up.
    fn ended(&self, run: u64) -> bool {
        self.lock().running.remove(&run).is_some()
    }

    /// Waits until a run has missed its deadline and has `give_up` note that. Returns `false` if
    /// the supervisor is to end.
    fn watch(&self, give_up: impl FnOnce(DeviceOperation)) -> bool {
        let mut jobs = self.lock();
        loop {
            if jobs.is_ending {
                return false;
            }
            let first = jobs.running.first_key_value().map(|(run, (job, at))| (*run, *job, *at));
            let Some((run, job, deadline)) = first else {
                jobs = self.watch.wait(jobs).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                jobs.running.remove(&run);
                // With the lock held: the run's own thread cannot note its late end before this.
                give_up(job);
                return true;
            }
            let waited = self.watch.wait_timeout(jobs, left);
            jobs = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorkerQueue> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threads of a pool. They end when this is dropped, those that hang when their device answers.
pub(crate) struct Workers {
    queue: Arc<Queue>,
}

impl Workers {
    /// Starts `count` threads (at least 1) and their supervisor.
    pub(crate) fn start<W: OperationHandler>(
        work: &Arc<W>,
        queue: &Arc<Queue>,
        count: u32,
    ) -> std::io::Result<Self> {
        let workers = Self { queue: queue.clone() };
        for _ in 0..count.max(1) {
            spawn(work.clone(), queue.clone())?;
        }
        let (work, queue) = (work.clone(), queue.clone());
        let supervise = move || {
            while queue.watch(|job| work.give_up(job)) {
                if let Err(error) = spawn(work.clone(), queue.clone()) {
                    tracing::error!(%error, "no thread in place of one that hangs in a reset");
                }
            }
        };
        std::thread::Builder::new().name("vf-watch".into()).spawn(supervise)?;
        Ok(workers)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.end();
    }
}

fn spawn<W: OperationHandler>(work: Arc<W>, queue: Arc<Queue>) -> std::io::Result<()> {
    let serve = move || {
        while let Some((run, job)) = queue.next() {
            let operation = AssertUnwindSafe(|| work.operate(job));
            let outcome = catch_unwind(operation)
                .unwrap_or_else(|_| Err(Fault("its driver panicked; the log says where".into())));
            if queue.ended(run) {
                work.finish(job, outcome);
            } else {
                // Another thread serves in place of this one.
                return work.late(job);
            }
        }
    };
    std::thread::Builder::new().name("vf-reset".into()).spawn(serve).map(drop)
}
