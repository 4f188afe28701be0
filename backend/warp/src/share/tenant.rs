//! A tenant, its chains, and its seats at the resources.

use std::collections::VecDeque;
use std::time::Duration;

use slipway_rate::{Bucket, Rate};

use super::formula::Demand;
use super::scheduler::Resource;
use super::{ExecutorId, MIN_WEIGHT, TenantId, Throughput};

/// What a tenant is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantOptions {
    /// Its weight against the others'; 1 is the usual one.
    pub weight: f64,
    /// Bytes per second that it may have, at most, of all its chains together.
    pub cap: Option<u64>,
}

impl Default for TenantOptions {
    fn default() -> Self {
        Self { weight: 1.0, cap: None }
    }
}

/// Virtual time: parts of a nanosecond of a resource that is shared with nobody.
pub(super) const TICKS: f64 = 65_536.0 * 1e9;

/// A job in a queue.
#[derive(Debug)]
pub(super) struct Entry<T> {
    pub(super) bytes: u64,
    pub(super) item: T,
}

/// Bytes of a chain that wait before a stage or are on their way there, at most, but for the first stage:
/// enough for a resource to have the next at hand, few enough that nobody waits long behind them. In bytes,
/// or those with small jobs would be kept from their share by it.
const WINDOW: u64 = 256 * 1024;
/// Jobs that may wait there whatever their size.
const WINDOW_JOBS: usize = 4;

/// Jobs, and their bytes.
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

/// One stage of a chain: its queue, and what of it an executor has.
#[derive(Debug)]
pub(super) struct Stage<T> {
    pub(super) executor: ExecutorId,
    pub(super) queue: VecDeque<Entry<T>>,
    queued: Load,
    pub(super) in_service: Load,
}

impl<T> Stage<T> {
    pub(super) fn new(executor: ExecutorId) -> Self {
        let (queued, in_service) = (Load::default(), Load::default());
        Self { executor, queue: VecDeque::new(), queued, in_service }
    }

    pub(super) fn push(&mut self, entry: Entry<T>) {
        self.queued.add(entry.bytes);
        self.queue.push_back(entry);
    }

    /// The first job goes to an executor.
    pub(super) fn take(&mut self) -> Option<Entry<T>> {
        let entry = self.queue.pop_front()?;
        self.queued.remove(entry.bytes);
        self.in_service.add(entry.bytes);
        Some(entry)
    }
}

/// A chain of a tenant.
#[derive(Debug)]
pub(super) struct Chain<T> {
    pub(super) tenant: TenantId,
    /// Its jobs do not count for the tenant's cap.
    pub(super) free: bool,
    pub(super) stages: Vec<Stage<T>>,
}

impl<T> Chain<T> {
    /// Whether stage `at` has something to do, and the stage after it has room for that.
    pub(super) fn may_go(&self, at: usize) -> bool {
        let here = &self.stages[at];
        let room = self.stages.get(at + 1).is_none_or(|next| {
            next.queued.jobs + here.in_service.jobs < WINDOW_JOBS
                || next.queued.bytes.saturating_add(here.in_service.bytes) < WINDOW
        });
        room && !here.queue.is_empty()
    }
}

/// What a tenant has at one resource.
#[derive(Clone, Debug, Default)]
pub(super) struct Seat {
    /// The stages of its chains there: (slot of the chain, stage).
    pub(super) stages: Vec<(u32, u32)>,
    /// Who of `stages` goes first among those that are equally near to their chain's end.
    pub(super) turn: usize,
    /// What it has had, in ticks for its weight.
    pub(super) had: u128,
    /// What the jobs that ended took beyond their estimate, or less: to be added.
    pub(super) owed: f64,
    /// Its weight.
    pub(super) weight: f64,
    /// It is in line at the resource.
    pub(super) listed: bool,
    /// It waits there for its cap.
    pub(super) held: bool,
}

impl Seat {
    /// Gets in line at its resource, no further ahead than who was served last.
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

    /// Adds what is owed; never so much less that it goes back before `since`.
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

/// A tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) epoch: u32,
    pub(super) options: TenantOptions,
    pub(super) bucket: Option<Bucket>,
    /// The slots of its chains.
    pub(super) chains: Vec<u32>,
    /// By resource.
    pub(super) seats: Vec<Seat>,
    /// By executor.
    pub(super) done: Vec<Throughput>,
    /// Nanoseconds of executors' time, by executor.
    pub(super) spent: Vec<Throughput>,
    /// What left the ends of its chains.
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
        // A hundredth of a second at once: longer bursts would be unfair to those who share a core.
        let bucket =
            |cap: u64| Bucket::new(Rate { per_second: cap.max(1), burst: (cap / 100).max(1) });
        self.bucket = options.cap.map(bucket);
    }

    /// When its cap lets it begin; zero without one.
    pub(super) fn opens_at(&self) -> Duration {
        self.bucket.as_ref().map_or(Duration::ZERO, Bucket::opens_at)
    }

    /// What it asks for: the seconds of each resource for a byte, by the chain that takes most of it.
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
