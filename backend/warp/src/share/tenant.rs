//! Tenants, their chains, and their seats at the resources.

use std::collections::VecDeque;
use std::time::Duration;

use slipway_rate::{Bucket, Rate};

use super::formula::Demand;
use super::resource::Resource;
use super::{ExecutorId, MIN_WEIGHT, TenantId, Throughput};

/// The weight and cap of a tenant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantOptions {
    /// The weight against the other tenants'; usually 1.
    pub weight: f64,
    /// The largest number of bytes per second for all the tenant's chains together.
    pub cap: Option<u64>,
}

impl Default for TenantOptions {
    fn default() -> Self {
        Self { weight: 1.0, cap: None }
    }
}

/// Ticks of virtual time in a second of a resource: 65,536 in a nanosecond.
pub(super) const TICKS: f64 = 65_536.0 * 1e9;

/// A job in a queue.
#[derive(Debug)]
pub(super) struct QueuedJob<T> {
    pub(super) bytes: u64,
    pub(super) item: T,
}

/// The largest number of a chain's bytes that wait before a stage or are on their way to it. The
/// first stage has no limit. The limit gives a resource its next job at once, and is small enough
/// that no tenant waits long behind the jobs. It counts bytes, since a limit in jobs would keep
/// tenants with small jobs from their share.
const WINDOW: u64 = 256 * 1024;
/// Jobs that may wait before a stage whatever their size.
const WINDOW_JOBS: usize = 4;

/// A number of jobs and the sum of their bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    jobs: usize,
    bytes: u64,
}

impl Load {
    fn add(&mut self, bytes: u64) {
        self.jobs += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(super) fn remove(&mut self, bytes: u64) {
        self.jobs -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// One stage of a chain: its queue, and the load of its jobs that the executor has.
#[derive(Debug)]
pub(super) struct Stage<T> {
    pub(super) executor: ExecutorId,
    pub(super) queue: VecDeque<QueuedJob<T>>,
    queued: Load,
    pub(super) in_service: Load,
}

impl<T> Stage<T> {
    pub(super) fn new(executor: ExecutorId) -> Self {
        let (queued, in_service) = (Load::default(), Load::default());
        Self { executor, queue: VecDeque::new(), queued, in_service }
    }

    pub(super) fn push(&mut self, job: QueuedJob<T>) {
        self.queued.add(job.bytes);
        self.queue.push_back(job);
    }

    /// Takes the first job, which goes to the executor.
    pub(super) fn take(&mut self) -> Option<QueuedJob<T>> {
        let job = self.queue.pop_front()?;
        self.queued.remove(job.bytes);
        self.in_service.add(job.bytes);
        Some(job)
    }
}

/// One chain of a tenant.
#[derive(Debug)]
pub(super) struct Chain<T> {
    pub(super) tenant: TenantId,
    /// The chain's jobs do not count towards the tenant's cap.
    pub(super) free: bool,
    pub(super) stages: Vec<Stage<T>>,
}

impl<T> Chain<T> {
    /// Returns whether stage `at` has a job queued and the next stage has room for it.
    pub(super) fn may_go(&self, at: usize) -> bool {
        let here = &self.stages[at];
        let room = self.stages.get(at + 1).is_none_or(|next| {
            next.queued.jobs + here.in_service.jobs < WINDOW_JOBS
                || next.queued.bytes.saturating_add(here.in_service.bytes) < WINDOW
        });
        room && !here.queue.is_empty()
    }
}

/// The state of a tenant at one resource.
#[derive(Clone, Debug, Default)]
pub(super) struct Seat {
    /// The stages of its chains at the resource: (slot of the chain, stage).
    pub(super) stages: Vec<(u32, u32)>,
    /// The index in `stages` that goes first among those equally near to their chain's end.
    pub(super) turn: usize,
    /// Ticks that the tenant has had, divided by its weight.
    pub(super) had: u128,
    /// Ticks that ended jobs took beyond their estimate (negative: below it), yet to be added to
    /// `had`.
    pub(super) owed: f64,
    /// The tenant's weight at the resource.
    pub(super) weight: f64,
    /// The tenant is in line at the resource.
    pub(super) listed: bool,
    /// The tenant waits at the resource for its cap.
    pub(super) held: bool,
}

impl Seat {
    /// Puts the tenant in line at its resource, no further ahead than the tenant that was served
    /// last.
    pub(super) fn list(&mut self, resource: &mut Resource, id: TenantId) {
        if !self.listed {
            if self.owed != 0.0 {
                self.settle(resource.served);
            }
            self.had = self.had.max(resource.served);
            self.listed = true;
            resource.ready.push(self.had, id);
        }
    }

    /// Adds the owed ticks, by weight, to `had`. A negative debt moves `had` back, but not before
    /// `since`.
    fn settle(&mut self, since: u128) {
        let owed = self.owed / self.weight.max(MIN_WEIGHT);
        match owed >= 0.0 {
            true => self.had += u128::from(owed as u64),
            false => {
                let less = u128::from(-owed as u64);
                self.had = self.had.saturating_sub(less).max(since.min(self.had));
            }
        }
        self.owed = 0.0;
    }
}

/// One tenant of a scheduler.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) epoch: u32,
    pub(super) options: TenantOptions,
    pub(super) bucket: Option<Bucket>,
    /// The slots of the tenant's chains.
    pub(super) chains: Vec<u32>,
    /// The tenant's seats, by resource.
    pub(super) seats: Vec<Seat>,
    /// Bytes that passed each executor, by executor.
    pub(super) done: Vec<Throughput>,
    /// Nanoseconds of each executor's time, by executor.
    pub(super) spent: Vec<Throughput>,
    /// Bytes that left the ends of its chains.
    pub(super) delivered: Throughput,
}

impl Tenant {
    pub(super) fn new(epoch: u32, options: TenantOptions) -> Self {
        let (chains, seats) = (Vec::new(), Vec::new());
        let (done, spent) = (Vec::new(), Vec::new());
        let (bucket, delivered) = (None, Throughput::default());
        let mut tenant = Self { epoch, options, bucket, chains, seats, done, spent, delivered };
        tenant.set_options(options);
        tenant
    }

    pub(super) fn set_options(&mut self, options: TenantOptions) {
        self.options = options;
        // The burst is a hundredth of a second: longer bursts would be unfair to others on the
        // core.
        let bucket =
            |cap: u64| Bucket::new(Rate { per_second: cap.max(1), burst: (cap / 100).max(1) });
        self.bucket = options.cap.map(bucket);
    }

    /// Returns the time at which the tenant's cap lets it begin a job; zero without a cap.
    pub(super) fn opens_at(&self) -> Duration {
        self.bucket.as_ref().map_or(Duration::ZERO, Bucket::opens_at)
    }

    /// Returns the tenant's demand: for each of the first `resources` resources the seconds that a
    /// byte takes there, of the chain that takes most. `cost` returns an executor's resource, and
    /// the seconds that a byte takes on the executor.
    pub(super) fn demand<'a, T: 'a>(
        &self,
        resources: usize,
        chains: impl Iterator<Item = &'a Chain<T>>,
        cost: impl Fn(ExecutorId) -> (usize, f64),
    ) -> Demand {
        let mut seconds = vec![0.0f64; resources];
        for chain in chains {
            let mut one = vec![0.0; resources];
            for stage in &chain.stages {
                let (resource, byte) = cost(stage.executor);
                one[resource] += byte;
            }
            seconds.iter_mut().zip(one).for_each(|(most, one)| *most = most.max(one));
        }
        Demand {
            seconds,
            weight: self.options.weight,
            most: self.options.cap.map(|cap| cap as f64),
        }
    }
}
