//! Threads that reset what returns.
//!
//! At most as many jobs run at once as the pool's settings say. A job that has not ended when its
//! deadline passes is given up: the supervisor takes its VFs out of service and starts another
//! thread in place of the one that hangs. Such a VF gets no further job until the operation that
//! hangs has ended, so that the threads that hang are never more than the VFs. If no thread can be
//! started, that is tried again, unless a thread that hung answers first: it goes on then.
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

/// The pause after a thread could not be started.
const START_PAUSE: Duration = Duration::from_secs(1);

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
    /// The number of threads to start in place of those that hang.
    missing: u32,
    /// The time before which no thread is started, if one could not be.
    no_start_before: Option<Instant>,
    is_ending: bool,
}

impl WorkerQueue {
    /// Returns the run with the earliest deadline.
    fn first_run(&self) -> Option<(u64, DeviceOperation, Instant)> {
        self.running.first_key_value().map(|(run, (job, at))| (*run, *job, *at))
    }

    /// Returns the time of the next start of a thread, which is `now` or later. Returns `None` if
    /// no thread is missing.
    fn next_start(&self, now: Instant) -> Option<Instant> {
        let at = self.no_start_before.map_or(now, |at| at.max(now));
        (self.missing > 0).then_some(at)
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

    /// Notes that a thread could not be started. [`watch`](Self::watch) asks for it again later.
    fn not_started(&self) {
        let mut jobs = self.lock();
        jobs.missing += 1;
        jobs.no_start_before = Some(Instant::now() + START_PAUSE);
    }

    /// Returns whether a thread that was given up goes on, because none serves in its place.
    fn goes_on(&self) -> bool {
        let mut jobs = self.lock();
        let is_missing = jobs.missing > 0;
        jobs.missing -= u32::from(is_missing);
        is_missing
    }

    /// Waits until a thread is to be started: in place of one whose run has missed its deadline, of
    /// which `handler` is told. Begins the tries that are due meanwhile. Returns `false` if the
    /// supervisor is to end.
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
                jobs.missing += 1;
                continue;
            }
            let start = jobs.next_start(now);
            if start == Some(now) {
                jobs.missing -= 1;
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
            let times = [first.map(|(_, _, at)| at), start, next.map(|(at, _)| at)];
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
                    queue.not_started();
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
                work.late(job);
                if !queue.goes_on() {
                    // Another thread serves in place of this one.
                    return;
                }
            }
        }
    };
    std::thread::Builder::new().name("vf-reset".into()).spawn(serve).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool without VFs.
    struct Nothing;

    impl OperationHandler for Nothing {
        fn operate(&self, _: DeviceOperation) -> Result<(), Fault> {
            Ok(())
        }

        fn finish(&self, _: DeviceOperation, _: Result<(), Fault>) {}

        fn give_up(&self, _: DeviceOperation) {}

        fn late(&self, _: DeviceOperation) {}

        fn begin_try(&self, _: u32) -> Option<DeviceOperation> {
            None
        }
    }

    #[test]
    fn a_thread_that_was_not_started_is_started_later() {
        let queue = Queue::new(Duration::ZERO);
        queue.push([DeviceOperation::Return(0)]);
        assert!(queue.next().is_some());
        assert!(queue.watch(&Nothing));
        let begun = Instant::now();
        queue.not_started();
        assert!(queue.watch(&Nothing));
        assert!(begun.elapsed() >= START_PAUSE);
        assert!(!queue.goes_on());
    }

    #[test]
    fn a_thread_that_hung_goes_on_in_place_of_one_that_was_not_started() {
        let queue = Queue::new(Duration::from_secs(100));
        queue.not_started();
        assert!(queue.goes_on());
        assert!(!queue.goes_on());
    }
}
