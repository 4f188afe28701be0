//! Snapshots of a scheduler's shares, for display.

use std::time::Duration;

use super::class::Class;
use super::formula::{Bound, Demand, fill};
use super::scheduler::Scheduler;
use super::tenant::Tenant;
use super::{ExecutorId, ResourceId, TenantId};

/// The limit that keeps a tenant from a higher rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedBy {
    /// Other tenants want this resource as well.
    Resource(ResourceId),
    /// The tenant's cap.
    Cap,
    /// The tenant's own demand: it has nothing more to send.
    Demand,
}

/// One tenant's share.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// The tenant.
    pub tenant: TenantId,
    /// The tenant's weight.
    pub weight: f64,
    /// The tenant's cap, in bytes per second.
    pub cap: Option<u64>,
    /// Bytes that left the ends of its chains.
    pub bytes: u64,
    /// Bytes per second over about the last second.
    pub rate: f64,
    /// Bytes per second that the formula gives the tenant, among the tenants that have something to
    /// send now.
    pub formula: f64,
    /// The limit that keeps the tenant from a higher rate.
    pub limited_by: LimitedBy,
    /// The part of each resource's time that the tenant has, 0 to 1, by resource.
    pub parts: Vec<f64>,
    /// The largest of `parts`: the policy makes it equal, by weight, among the tenants that want
    /// more.
    pub dominant: f64,
    /// The value of `dominant` according to the formula.
    pub dominant_by_formula: f64,
    /// The executors that the tenant has used.
    pub executors: Vec<ExecutorShare>,
}

/// A tenant's use of one executor.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutorShare {
    /// The executor.
    pub executor: ExecutorId,
    /// The executor's name.
    pub name: String,
    /// The executor's class.
    pub class: Class,
    /// Bytes that passed the executor.
    pub bytes: u64,
    /// Bytes per second over about the last second.
    pub rate: f64,
}

/// The shares of all tenants at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    /// The tenants, in the order of their slots.
    pub tenants: Vec<Share>,
    /// The executors' measured capacities: name and bytes per busy second.
    pub capacities: Vec<(String, f64)>,
    /// The names of the resources.
    pub resources: Vec<String>,
}

/// A tenant below this part of its share, with nothing waiting, does not want more.
const CONTENT: f64 = 0.95;
/// Rounds in which such tenants are found: each one that leaves makes the others' shares larger.
const ROUNDS: usize = 4;

impl<T> Scheduler<T> {
    /// Returns the shares at `now`. Allocates; it is for display, a few times a second.
    pub fn shares(&self, now: Duration) -> Shares {
        let tenants: Vec<(u32, &Tenant)> = (0..)
            .zip(&self.tenants)
            .filter_map(|(slot, tenant)| Some((slot, tenant.as_ref()?)))
            .collect();
        let mut demands: Vec<Demand> =
            tenants.iter().map(|(_, tenant)| self.asked(tenant, now)).collect();
        let mut content = vec![false; tenants.len()];
        for _ in 0..ROUNDS {
            let grants = fill(self.resources.len(), &demands);
            for (at, (_, tenant)) in tenants.iter().enumerate() {
                let rate = tenant.delivered.per_second(now);
                if !content[at] && rate < grants[at].rate * CONTENT && !self.has_waiting(tenant) {
                    content[at] = true;
                    demands[at].most = Some(rate);
                }
            }
        }
        let grants = fill(self.resources.len(), &demands);
        let share = |at: usize| {
            let (slot, tenant) = tenants[at];
            let limited_by = match grants[at].bound {
                Bound::Resource(resource) => LimitedBy::Resource(ResourceId(resource as u32)),
                Bound::Most if content[at] || tenant.options.cap.is_none() => LimitedBy::Demand,
                Bound::Most => LimitedBy::Cap,
            };
            let alone = demands[at].alone();
            let part = if alone > 0.0 { grants[at].rate / alone } else { 0.0 };
            self.share(slot, tenant, (grants[at].rate, part), limited_by, now)
        };
        let measured = |executor: &super::scheduler::ExecutorState| {
            (executor.name.clone(), executor.capacity.per_second())
        };
        Shares {
            tenants: (0..tenants.len()).map(share).collect(),
            capacities: self.executors.iter().map(measured).collect(),
            resources: self.resources.iter().map(|resource| resource.name.clone()).collect(),
        }
    }

    /// Returns the tenant's demand. A tenant with several chains, whose bytes may go different
    /// ways, is taken to use the resources as its recent bytes did.
    fn asked(&self, tenant: &Tenant, now: Duration) -> Demand {
        let demand = self.demand(tenant, |executor| executor.capacity.per_second());
        let rate = tenant.delivered.per_second(now);
        let seconds: Vec<f64> =
            self.parts(tenant, now).into_iter().map(|part| part / rate.max(1.0)).collect();
        let known = tenant.chains.len() > 1 && seconds.iter().any(|seconds| *seconds > 0.0);
        if known { Demand { seconds, ..demand } } else { demand }
    }

    /// Returns the part of each resource's time that the tenant has.
    fn parts(&self, tenant: &Tenant, now: Duration) -> Vec<f64> {
        let mut parts = vec![0.0; self.resources.len()];
        for (executor, nanos) in self.executors.iter().zip(&tenant.spent) {
            parts[executor.resource.index()] += nanos.per_second(now) / 1e9;
        }
        parts
    }

    fn share(
        &self,
        slot: u32,
        tenant: &Tenant,
        (formula, dominant_by_formula): (f64, f64),
        limited_by: LimitedBy,
        now: Duration,
    ) -> Share {
        let parts = self.parts(tenant, now);
        let dominant = parts.iter().copied().fold(0.0, f64::max);
        let used = (0..).zip(&tenant.done).filter(|(_, bytes)| bytes.total() > 0);
        let executors = used.map(|(at, bytes)| ExecutorShare {
            executor: ExecutorId(at),
            name: self.executors[at as usize].name.clone(),
            class: self.executors[at as usize].class,
            bytes: bytes.total(),
            rate: bytes.per_second(now),
        });
        Share {
            tenant: TenantId { slot, epoch: tenant.epoch },
            weight: tenant.options.weight,
            cap: tenant.options.cap,
            bytes: tenant.delivered.total(),
            rate: tenant.delivered.per_second(now),
            formula,
            limited_by,
            parts,
            dominant,
            dominant_by_formula,
            executors: executors.collect(),
        }
    }

    /// Returns whether the tenant has a job queued at the first stage of a chain.
    fn has_waiting(&self, tenant: &Tenant) -> bool {
        let chains =
            tenant.chains.iter().filter_map(|slot| self.chains[*slot as usize].value.as_ref());
        chains.into_iter().any(|chain| !chain.stages[0].queue.is_empty())
    }
}
