//! Random operations on a scheduler: no item is lost, duplicated or overtaken.

use std::collections::BTreeMap;
use std::time::Duration;

use super::random::Random;
use crate::Class;
use crate::share::{ChainId, ExecutorId, ResourceId, Scheduler, TenantId, TenantOptions, Ticket};

/// An item: the number of its chain, and its index among the chain's items.
type Item = (u32, u32);

struct Play {
    random: Random,
    scheduler: Scheduler<Item>,
    resources: Vec<(ResourceId, usize)>,
    executors: Vec<ExecutorId>,
    tenants: Vec<TenantId>,
    /// Open chains by this test's own number: tenant, id, stages, items queued.
    chains: BTreeMap<u32, (TenantId, ChainId, usize, u32)>,
    /// Items that have not come out.
    inside: BTreeMap<Item, ()>,
    /// The last item of each chain that came out of its end.
    last: BTreeMap<u32, u32>,
    tickets: Vec<Ticket<Item>>,
    opened: u32,
    now: Duration,
}

impl Play {
    fn new(seed: u64) -> Self {
        let (mut random, mut scheduler) = (Random::new(seed), Scheduler::new());
        let resources: Vec<_> = (0..1 + random.below(3))
            .map(|_| {
                let depth = 1 + random.below(3);
                (scheduler.add_resource("r", depth), depth)
            })
            .collect();
        let executors = (0..1 + random.below(4))
            .map(|_| {
                let resource = resources[random.below(resources.len())].0;
                scheduler.add_executor("e", Class::M, resource, 1 + random.next() % 1_000_000_000)
            })
            .collect();
        let (tenants, tickets) = (Vec::new(), Vec::new());
        let (chains, inside, last) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let (opened, now) = (0, Duration::ZERO);
        Self {
            random,
            scheduler,
            resources,
            executors,
            tenants,
            chains,
            inside,
            last,
            tickets,
            opened,
            now,
        }
    }

    fn options(&mut self) -> TenantOptions {
        let weight = [0.001, 0.5, 1.0, 3.0, 1000.0][self.random.below(5)];
        let cap = (self.random.below(4) == 0).then(|| self.random.next() % 100_000_000);
        TenantOptions { weight, cap }
    }

    fn step(&mut self) {
        self.now += Duration::from_micros(self.random.below(200) as u64);
        match self.random.below(100) {
            0..2 if self.tenants.len() < 12 => {
                let options = self.options();
                self.tenants.push(self.scheduler.add_tenant(options).unwrap());
            }
            2..5 if self.chains.len() < 30 => self.open(),
            5 => self.close(),
            6 if self.random.below(4) == 0 => self.remove(),
            7..9 if !self.tenants.is_empty() => {
                let (at, options) = (self.random.below(self.tenants.len()), self.options());
                self.scheduler.set_options(self.tenants[at], options).unwrap();
            }
            9..40 => self.push(),
            40..70 => self.take(),
            _ => self.give_back(),
        }
    }

    fn open(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let tenant = self.tenants[self.random.below(self.tenants.len())];
        let stages = 1 + self.random.below(4);
        let executors: Vec<_> =
            (0..stages).map(|_| self.executors[self.random.below(self.executors.len())]).collect();
        let id = self.scheduler.open(tenant, &executors).unwrap();
        self.chains.insert(self.opened, (tenant, id, stages, 0));
        self.opened += 1;
    }

    fn any_chain(&mut self) -> Option<u32> {
        let at = self.random.below(self.chains.len().max(1));
        self.chains.keys().nth(at).copied()
    }

    fn close(&mut self) {
        let Some(chain) = self.any_chain() else { return };
        let (_, id, ..) = self.chains.remove(&chain).unwrap();
        for item in self.scheduler.close(id) {
            assert!(item.0 == chain && self.inside.remove(&item).is_some());
        }
        assert!(self.scheduler.push(id, 1, (0, 0)).is_err());
        assert!(self.scheduler.close(id).is_empty());
    }

    fn remove(&mut self) {
        if self.tenants.is_empty() {
            return;
        }
        let tenant = self.tenants.swap_remove(self.random.below(self.tenants.len()));
        for item in self.scheduler.remove_tenant(tenant) {
            assert!(self.inside.remove(&item).is_some());
        }
        self.chains.retain(|_, chain| chain.0 != tenant);
        assert!(self.scheduler.open(tenant, &self.executors[..1]).is_err());
    }

    fn push(&mut self) {
        let Some(number) = self.any_chain() else { return };
        let chain = self.chains.get_mut(&number).unwrap();
        let bytes = [0, 1, 1500, 65_536, u64::from(u32::MAX)][self.random.below(5)];
        self.scheduler.push(chain.1, bytes, (number, chain.3)).unwrap();
        self.inside.insert((number, chain.3), ());
        chain.3 += 1;
    }

    fn take(&mut self) {
        let (resource, depth) = self.resources[self.random.below(self.resources.len())];
        let before = self.tickets.len();
        while let Some(ticket) = self.scheduler.next(resource, self.now) {
            assert!(self.inside.contains_key(&ticket.item));
            self.tickets.push(ticket);
        }
        assert!(self.tickets.len() - before <= depth);
    }

    /// Gives back the oldest job of an executor: executors end the jobs of a chain in order.
    fn give_back(&mut self) {
        if self.tickets.is_empty() {
            return;
        }
        let executor = self.tickets[self.random.below(self.tickets.len())].executor;
        let oldest = self.tickets.iter().position(|ticket| ticket.executor == executor).unwrap();
        let ticket = self.tickets.remove(oldest);
        let (item, bytes) = (ticket.item, ticket.bytes / 2);
        let busy = Duration::from_nanos(self.random.next() % 1_000_000);
        if self.random.below(20) == 0 {
            assert_eq!(self.scheduler.failed(ticket, busy, self.now), item);
            assert!(self.inside.remove(&item).is_some());
        } else if let Some(done) = self.scheduler.done(ticket, bytes, busy, self.now) {
            assert_eq!(done, item);
            self.came_out(item);
        }
    }

    fn came_out(&mut self, item: Item) {
        assert!(self.inside.remove(&item).is_some(), "twice, or never queued");
        if let Some(last) = self.last.insert(item.0, item.1) {
            assert!(last < item.1 || !self.chains.contains_key(&item.0), "{item:?} after {last}");
        }
    }

    /// Lets every item come out, with enough time for every cap.
    fn finish(&mut self) {
        while !self.tickets.is_empty() {
            self.give_back();
        }
        let mut idle = 0;
        while !self.inside.is_empty() {
            let before = self.inside.len();
            for at in 0..self.resources.len() {
                while let Some(ticket) = self.scheduler.next(self.resources[at].0, self.now) {
                    let (item, bytes) = (ticket.item, ticket.bytes);
                    let busy = Duration::from_nanos(1);
                    if self.scheduler.done(ticket, bytes, busy, self.now).is_some() {
                        self.came_out(item);
                    }
                }
            }
            self.now += Duration::from_secs(1_000_000);
            idle = if self.inside.len() == before { idle + 1 } else { 0 };
            assert!(idle < 10_000, "{} do not come out", self.inside.len());
        }
        let shares = self.scheduler.shares(self.now);
        assert_eq!(shares.tenants.len(), self.tenants.len());
        assert!(shares.tenants.iter().all(|share| share.formula.is_finite()));
    }
}

#[test]
fn nothing_is_lost_doubled_or_overtaken() {
    for seed in 0..150 {
        let mut play = Play::new(seed);
        (0..1500).for_each(|_| play.step());
        play.finish();
    }
}
