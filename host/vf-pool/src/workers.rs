//! Threads that reset what returns.
//!
//! At most as many jobs run at once as the pool's settings say. A job that has not ended when its
//! deadline passes is given up: the supervisor takes its VFs out of service and starts another
//! thread in place of the one that hangs. Such a VF gets no further job until the operation that
//! hangs has ended, so that the threads that hang are never more than the VFs.
//!
//! The supervisor also begins the tries of VFs that failed, when they are due. At most one try is
//! under way at a time: resets that fail again, or hang, leave the other threads to the VFs that
//! return.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
    /// Begins the try of a VF that failed. Returns its job, or `None` if it is not to be tried any
    /// more. Must not wait.
    fn begin_try(&self, vf: u32) -> Option<DeviceOperation>;
}

/// Jobs that wait or run.
pub(crate) struct Queue {
    jobs: Mutex<WorkerQueue>,
    /// There is a job, or the threads are to end.
    work: Condvar,
    /// A job has begun where none ran, a try is planned or has ended, or the supervisor is to end.
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
    /// Times of tries with their VFs. The table of VFs says which of them still hold.
    tries: BTreeSet<(Instant, u32)>,
    is_ending: bool,
}

impl WorkerQueue {
    /// Returns the run with the earliest deadline.
    fn first_run(&self) -> Option<(u64, DeviceOperation, Instant)> {
        self.running.first_key_value().map(|(run, (job, at))| (*run, *job, *at))
    }

    /// Returns the next try. Returns `None` if there is none, or one waits or runs already.
    fn next_try(&self) -> Option<(Instant, u32)> {
        let mut jobs = self.waiting.iter().chain(self.running.values().map(|(job, _)| job));
        let is_trying = jobs.any(|job| matches!(job, DeviceOperation::Retry(_)));
        self.tries.first().copied().filter(|_| !is_trying)
    }
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

    /// Plans a try of a VF that failed.
    pub(crate) fn plan_try(&self, vf: u32, at: Instant) {
        self.lock().tries.insert((at, vf));
        self.watch.notify_one();
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
        let ended = self.lock().running.remove(&run);
        if matches!(ended, Some((DeviceOperation::Retry(_), _))) {
            self.watch.notify_one();
        }
        ended.is_some()
    }

    /// Waits until a run has missed its deadline and has `handler` note that; begins the tries that
    /// are due meanwhile. Returns `false` if the supervisor is to end.
    fn watch(&self, handler: &impl OperationHandler) -> bool {
        let mut jobs = self.lock();
        loop {
            if jobs.is_ending {
                return false;
            }
            let (now, first, next) = (Instant::now(), jobs.first_run(), jobs.next_try());
            if let Some((run, job, deadline)) = first
                && deadline <= now
            {
                jobs.running.remove(&run);
                // With the lock held: the run's own thread cannot note its late end before this.
                handler.give_up(job);
                return true;
            }
            if let Some((at, vf)) = next
                && at <= now
            {
                jobs.tries.remove(&(at, vf));
                if let Some(job) = handler.begin_try(vf) {
                    jobs.waiting.push_back(job);
                    self.work.notify_one();
                }
                continue;
            }
            let times = [first.map(|(_, _, at)| at), next.map(|(at, _)| at)];
            jobs = match times.into_iter().flatten().min() {
                Some(at) => {
                    let waited = self.watch.wait_timeout(jobs, at.saturating_duration_since(now));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.watch.wait(jobs).unwrap_or_else(PoisonError::into_inner),
            };
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
            while queue.watch(&*work) {
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
