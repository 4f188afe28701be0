//! What a scheduler shows of itself.

use std::time::Duration;

use super::formula::{Bound, Demand, fill};
use super::scheduler::Scheduler;
use super::tenant::Tenant;
use super::{ExecutorId, ResourceId, TenantId};
use crate::Class;

/// What keeps a tenant from more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedBy {
    /// Others want this resource as well.
    Resource(ResourceId),
    /// Its cap.
    Cap,
    /// Itself: it has nothing more to send.
    Demand,
}

/// One tenant's share.
#[derive(Clone, Debug, PartialEq)]
pub struct Share {
    /// Whose.
    pub tenant: TenantId,
    /// Its weight.
    pub weight: f64,
    /// Its cap, in bytes per second.
    pub cap: Option<u64>,
    /// Bytes that came out of its chains.
    pub bytes: u64,
    /// Bytes per second of the last second or so.
    pub rate: f64,
    /// Bytes per second that the formula gives it, among those who have something to send now.
    pub formula: f64,
    /// Why not more.
    pub limited_by: LimitedBy,
    /// By resource: the part of its time that the tenant has, 0 to 1.
    pub parts: Vec<f64>,
    /// The largest of `parts`: what the policy makes equal, by weight, for those who want more.
    pub dominant: f64,
    /// What `dominant` is by the formula.
    pub dominant_by_formula: f64,
    /// By executor, those that it has used.
    pub executors: Vec<ExecutorShare>,
}

/// What a tenant had of one executor.
#[derive(Clone, Debug, PartialEq)]
pub struct ExecutorShare {
    /// Which.
    pub executor: ExecutorId,
    /// Its name.
    pub name: String,
    /// Its class.
    pub class: Class,
    /// Bytes.
    pub bytes: u64,
    /// Bytes per second of the last second or so.
    pub rate: f64,
}

/// All shares at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    /// By tenant, in the order of their slots.
    pub tenants: Vec<Share>,
    /// Capacities of the executors as measured: name and bytes per busy second.
    pub capacities: Vec<(String, f64)>,
    /// Names of the resources.
    pub resources: Vec<String>,
}

/// Who has less than this part of its share, and nothing waiting, does not want more.
const CONTENT: f64 = 0.95;
/// Rounds in which those are found: their leaving makes others' shares larger.
const ROUNDS: usize = 4;

impl<T> Scheduler<T> {
    /// The shares at `now`. Allocates; it is for people, some times a second.
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

    /// What a tenant asks for: of one with several chains, which may go different ways, what its bytes of late
    /// took.
    fn asked(&self, tenant: &Tenant, now: Duration) -> Demand {
        let demand = self.demand(tenant, |executor| executor.capacity.per_second());
        let rate = tenant.delivered.per_second(now);
        let seconds: Vec<f64> =
            self.parts(tenant, now).into_iter().map(|part| part / rate.max(1.0)).collect();
        let known = tenant.chains.len() > 1 && seconds.iter().any(|seconds| *seconds > 0.0);
        if known { Demand { seconds, ..demand } } else { demand }
    }

    /// The parts of the resources' time that a tenant has.
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

    /// Whether something of it waits at the beginning of a chain.
    fn has_waiting(&self, tenant: &Tenant) -> bool {
        let chains =
            tenant.chains.iter().filter_map(|slot| self.chains[*slot as usize].value.as_ref());
        chains.into_iter().any(|chain| !chain.stages[0].queue.is_empty())
    }
}
