//! A bench in virtual time: simulated executors, and tenants that always have something to send.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_pipes::{Completion, Core, Executor as _, Job, JobEnd, Simulated, Stretch, Work};
use slipway_ram::Span;
use slipway_telemetry::{Clock, ManualClock};
use slipway_warp::Class;
use slipway_warp::share::{ChainId, ResourceId, Scheduler, TenantId, TenantOptions, Ticket};

#[allow(dead_code)] // unit tests use all of it
#[path = "../../src/tests/random.rs"]
mod random;

pub use random::Random;

/// A simulated executor.
#[derive(Clone, Debug)]
pub struct Executor {
    /// Bytes per second.
    pub capacity: f64,
    /// The index of the resource whose time it takes.
    pub resource: usize,
}

/// A tenant that always has something to send.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its executors' indices, from source to sink.
    pub chain: Vec<usize>,
    pub weight: f64,
    pub cap: Option<u64>,
    /// Bytes of a job.
    pub job: usize,
    /// The number of jobs that wait for the first executor.
    pub queued: usize,
}

impl Tenant {
    pub fn on(chain: &[usize]) -> Self {
        Self { chain: chain.to_vec(), weight: 1.0, cap: None, job: 16_384, queued: 32 }
    }
}

#[derive(Clone, Debug)]
pub struct Mix {
    pub executors: Vec<Executor>,
    pub tenants: Vec<Tenant>,
}

/// The state of a tenant. Items in the scheduler are tenants' indices.
struct Sender {
    id: TenantId,
    chain: ChainId,
    job: usize,
    queued: usize,
    silent: bool,
    bytes: u64,
}

pub struct Bench {
    clock: ManualClock,
    scheduler: Scheduler<usize>,
    resources: Vec<ResourceId>,
    executors: Vec<Simulated<Core>>,
    senders: Vec<Sender>,
    memory: Span,
    /// The ticket of the job that each executor has: one at a time, whose tag is the executor's
    /// index.
    tickets: Vec<Option<Ticket<usize>>>,
    jobs: VecDeque<Job>,
    ended: Vec<Completion>,
}

/// An initial capacity that no executor here has, so that capacities must be measured.
const GUESS: u64 = 250_000_000;
const WARM: Duration = Duration::from_millis(150);
const MEASURED: Duration = Duration::from_millis(500);

impl Bench {
    pub fn new(mix: &Mix) -> Self {
        let clock = ManualClock::new();
        let mut scheduler = Scheduler::new();
        let count = mix.executors.iter().map(|executor| executor.resource + 1).max().unwrap();
        let resources: Vec<_> =
            (0..count).map(|at| scheduler.add_resource(&format!("resource {at}"), 1)).collect();
        let ids: Vec<_> = (0..)
            .zip(&mix.executors)
            .map(|(at, executor)| {
                let name = format!("executor {at}");
                scheduler.add_executor(&name, Class::L, resources[executor.resource], GUESS)
            })
            .collect();
        let simulated = |executor: &Executor| {
            let core = Core::new(Class::L, Arc::new(clock.clone()));
            let rate = executor.capacity as u64;
            Simulated::new(core, Class::L, rate, 1, Arc::new(clock.clone()))
        };
        let executors = mix.executors.iter().map(simulated).collect();
        let senders = mix.tenants.iter().map(|tenant| {
            let options = TenantOptions { weight: tenant.weight, cap: tenant.cap };
            let id = scheduler.add_tenant(options).unwrap();
            let chain: Vec<_> = tenant.chain.iter().map(|at| ids[*at]).collect();
            let chain = scheduler.open(id, &chain).unwrap();
            let (job, queued) = (tenant.job, tenant.queued);
            Sender { id, chain, job, queued, silent: false, bytes: 0 }
        });
        let senders = senders.collect();
        let memory = Span::heap(65_536);
        let tickets = mix.executors.iter().map(|_| None).collect();
        let (jobs, ended) = (VecDeque::new(), Vec::new());
        let mut bench =
            Self { clock, scheduler, resources, executors, senders, memory, tickets, jobs, ended };
        (0..bench.senders.len()).for_each(|tenant| bench.top_up(tenant));
        bench
    }

    /// Compares the shares that the scheduler shows after warm-up with the script's.
    pub fn compare_formula(&mut self, expected: &[f64]) {
        self.go_on(WARM);
        let shares = self.scheduler.shares(self.clock.now());
        for ((share, expected), sender) in shares.tenants.iter().zip(expected).zip(&self.senders) {
            assert_eq!(share.tenant, sender.id);
            let off = (share.formula / expected - 1.0).abs();
            assert!(off < 0.03, "the formula has {} for {expected}", share.formula);
        }
    }

    /// Returns the bytes per second of each tenant, once all is warm.
    pub fn run(&mut self) -> Vec<f64> {
        self.go_on(WARM);
        let before: Vec<u64> = self.senders.iter().map(|sender| sender.bytes).collect();
        let began = self.clock.now();
        self.go_on(MEASURED);
        let seconds = (self.clock.now() - began).as_secs_f64();
        let bytes = self.senders.iter().zip(before);
        bytes.map(|(sender, before)| (sender.bytes - before) as f64 / seconds).collect()
    }

    /// Silences a tenant: it sends only its queued jobs.
    pub fn silence(&mut self, tenant: usize) {
        self.senders[tenant].silent = true;
    }

    pub fn wake(&mut self, tenant: usize) {
        self.senders[tenant].silent = false;
        self.top_up(tenant);
    }

    fn top_up(&mut self, tenant: usize) {
        let sender = &self.senders[tenant];
        while !sender.silent && self.scheduler.waiting(sender.chain) < sender.queued {
            self.scheduler.push(sender.chain, sender.job as u64, tenant).unwrap();
        }
    }

    /// Advances time, from event to event.
    fn go_on(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        loop {
            self.hand_out();
            let now = self.clock.now();
            let ends = self.executors.iter().filter_map(|executor| executor.due());
            let caps = self.resources.iter().filter_map(|resource| self.scheduler.due(*resource));
            let Some(next) = ends.chain(caps.filter(|due| *due > now)).min() else { return };
            if next > end {
                return self.clock.advance(end - now);
            }
            self.clock.advance(next.saturating_sub(now));
            self.take_back();
        }
    }

    /// Gives every resource as many jobs as it takes.
    fn hand_out(&mut self) {
        let now = self.clock.now();
        for at in 0..self.resources.len() {
            while let Some(ticket) = self.scheduler.next(self.resources[at], now) {
                self.top_up(ticket.item);
                let (executor, bytes) = (ticket.executor.index(), ticket.bytes);
                let stretch = Stretch::new(0, bytes, 65_536).unwrap();
                let source = JobEnd::Ring(self.memory.clone(), stretch);
                let (tag, sink) = (executor as u64, JobEnd::Buffer(Vec::new()));
                self.jobs.push_back(Job { tag, work: Work::Pass, source, sink });
                self.executors[executor].submit(&mut self.jobs, &mut self.ended);
                assert!(self.jobs.is_empty(), "one at a time");
                self.tickets[executor] = Some(ticket);
            }
        }
    }

    fn take_back(&mut self) {
        let now = self.clock.now();
        self.executors.iter_mut().for_each(|executor| executor.poll(&mut self.ended));
        for completion in self.ended.drain(..) {
            let ticket = self.tickets[completion.job.tag as usize].take().unwrap();
            let bytes = completion.result.unwrap().produced as u64;
            if let Some(tenant) = self.scheduler.done(ticket, bytes, completion.busy, now) {
                self.senders[tenant].bytes += bytes;
            }
        }
    }
}
