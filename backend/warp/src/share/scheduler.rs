//! The scheduler's resources, executors, tenants and chains.

use std::time::Duration;

use super::class::Class;
use super::formula::Demand;
use super::heap::Heap;
use super::resource::Resource;
use super::tenant::{Chain, Seat, Stage, Tenant};
use super::{
    Capacity, ChainId, ExecutorId, MAX_STAGES, MAX_WEIGHT, MIN_WEIGHT, ResourceId, ShareError,
    TenantId, TenantOptions, Throughput,
};

/// The relative change of a capacity after which weights follow.
const DRIFT: f64 = 0.01;
/// The least time between two updates of the weights: an update looks at every tenant.
const PAUSE: Duration = Duration::from_millis(50);
/// The least time between two checks whether an update is due.
const GLANCE: Duration = Duration::from_micros(100);

pub(super) struct ExecutorState {
    pub(super) name: String,
    pub(super) class: Class,
    pub(super) resource: ResourceId,
    pub(super) capacity: Capacity,
    /// The capacity by which jobs are charged and from which weights were computed.
    pub(super) charged: f64,
}

/// A reusable slot.
pub(super) struct Slot<V> {
    pub(super) epoch: u32,
    pub(super) value: Option<V>,
}

/// Shares the executors of one engine thread among its tenants. `T` is the engine's name for a job:
/// a socket, say, from which the engine then takes as much as it finds.
///
/// The engine loops: [`next`](Self::next), do the job, [`done`](Self::done), until no job is left.
/// A pick takes O(log tenants). Nothing is locked, and nothing is allocated unless a queue grows
/// beyond its largest size so far.
///
/// Jobs of one chain stay in order. The queue of a chain's first stage has no limit of its own: the
/// engine bounds it by queueing a socket only once.
pub struct Scheduler<T> {
    pub(super) resources: Vec<Resource>,
    pub(super) executors: Vec<ExecutorState>,
    pub(super) tenants: Vec<Option<Tenant>>,
    free_tenants: Vec<u32>,
    pub(super) chains: Vec<Slot<Chain<T>>>,
    free_chains: Vec<u32>,
    epochs: u32,
    /// The time from which weights may follow capacities again.
    follow_at: Duration,
}

impl<T> Default for Scheduler<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Scheduler<T> {
    /// Creates a scheduler without resources, executors or tenants.
    pub fn new() -> Self {
        let (resources, executors, tenants) = (Vec::new(), Vec::new(), Vec::new());
        let (free_tenants, chains, free_chains) = (Vec::new(), Vec::new(), Vec::new());
        let (epochs, follow_at) = (0, Duration::ZERO);
        Self { resources, executors, tenants, free_tenants, chains, free_chains, epochs, follow_at }
    }

    /// Adds a resource that takes up to `depth` jobs at once, at least 1, and does one after the
    /// other.
    pub fn add_resource(&mut self, name: &str, depth: usize) -> ResourceId {
        self.resources.push(Resource {
            name: name.to_owned(),
            depth: depth.max(1),
            in_service: 0,
            ready: Heap::new(),
            held: Heap::new(),
            served: 0,
        });
        for tenant in self.tenants.iter_mut().flatten() {
            tenant.seats.push(Seat::default());
        }
        ResourceId(self.resources.len() as u32 - 1)
    }

    /// Adds an executor that uses the time of `resource`. Its capacity is taken to be `guess` bytes
    /// per second until it is measured.
    ///
    /// # Panics
    /// If the resource is another scheduler's: a programmer's error.
    pub fn add_executor(
        &mut self,
        name: &str,
        class: Class,
        resource: ResourceId,
        guess: u64,
    ) -> ExecutorId {
        assert!((resource.0 as usize) < self.resources.len(), "a resource of this scheduler");
        let capacity = Capacity::new(guess);
        let charged = capacity.per_second();
        let name = name.to_owned();
        self.executors.push(ExecutorState { name, class, resource, capacity, charged });
        for tenant in self.tenants.iter_mut().flatten() {
            tenant.done.push(Throughput::default());
            tenant.spent.push(Throughput::default());
        }
        ExecutorId(self.executors.len() as u32 - 1)
    }

    /// Adds a tenant.
    ///
    /// # Errors
    /// [`ShareError::Weight`] if the weight is out of range.
    pub fn add_tenant(&mut self, options: TenantOptions) -> Result<TenantId, ShareError> {
        check(options)?;
        let slot = self.free_tenants.pop().unwrap_or(self.tenants.len() as u32);
        let epoch = self.epoch();
        let mut tenant = Tenant::new(epoch, options);
        tenant.seats.resize(self.resources.len(), Seat::default());
        tenant.done.resize(self.executors.len(), Throughput::default());
        tenant.spent.resize(self.executors.len(), Throughput::default());
        match self.tenants.get_mut(slot as usize) {
            Some(free) => *free = Some(tenant),
            None => self.tenants.push(Some(tenant)),
        }
        Ok(TenantId { slot, epoch })
    }

    /// Changes a tenant's weight and cap, from its next job on.
    ///
    /// # Errors
    /// [`ShareError::Weight`] if the weight is out of range, [`ShareError::NoTenant`] if the tenant
    /// is gone.
    pub fn set_options(&mut self, id: TenantId, options: TenantOptions) -> Result<(), ShareError> {
        check(options)?;
        live(&mut self.tenants, id).ok_or(ShareError::NoTenant)?.set_options(options);
        self.weigh(id.slot);
        self.line_up(id);
        Ok(())
    }

    /// Removes a tenant and its chains, and returns the queued items in no order. Tickets of its
    /// jobs that executors have must still be given back.
    pub fn remove_tenant(&mut self, id: TenantId) -> Vec<T> {
        let mut queued = Vec::new();
        let Some(tenant) = live(&mut self.tenants, id) else { return queued };
        for slot in std::mem::take(&mut tenant.chains) {
            let epoch = self.chains[slot as usize].epoch;
            queued.extend(self.close(ChainId { slot, epoch }));
        }
        self.tenants[id.slot as usize] = None;
        self.free_tenants.push(id.slot);
        queued
    }

    /// Opens a chain of a tenant, from the executor next to the source to the one next to the sink.
    ///
    /// # Errors
    /// [`ShareError::NoTenant`] if the tenant is gone, [`ShareError::Stages`] if the executors do
    /// not make a chain.
    pub fn open(
        &mut self,
        tenant: TenantId,
        executors: &[ExecutorId],
    ) -> Result<ChainId, ShareError> {
        self.open_chain(tenant, executors, false)
    }

    /// Opens a chain as [`open`](Self::open) does, but exempts its jobs from the tenant's cap:
    /// another party enforces the cap for them, or the cap is not meant for them.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_free(
        &mut self,
        tenant: TenantId,
        executors: &[ExecutorId],
    ) -> Result<ChainId, ShareError> {
        self.open_chain(tenant, executors, true)
    }

    fn open_chain(
        &mut self,
        tenant: TenantId,
        executors: &[ExecutorId],
        free: bool,
    ) -> Result<ChainId, ShareError> {
        self.tenant(tenant).ok_or(ShareError::NoTenant)?;
        let there = executors.iter().all(|executor| executor.index() < self.executors.len());
        if !there || !(1..=MAX_STAGES).contains(&executors.len()) {
            return Err(ShareError::Stages);
        }
        let stages = executors.iter().copied().map(Stage::new).collect();
        let chain = Chain { tenant, free, stages };
        let slot = self.free_chains.pop().unwrap_or(self.chains.len() as u32);
        let epoch = self.epoch();
        let new = Slot { epoch, value: Some(chain) };
        match self.chains.get_mut(slot as usize) {
            Some(free) => *free = new,
            None => self.chains.push(new),
        }
        if let Some(tenant) = live(&mut self.tenants, tenant) {
            tenant.chains.push(slot);
        }
        self.seat(tenant);
        Ok(ChainId { slot, epoch })
    }

    /// Closes a chain, and returns its queued items, those nearest to the chain's end first.
    /// Tickets of its jobs that executors have must still be given back.
    pub fn close(&mut self, id: ChainId) -> Vec<T> {
        let slot = self.chains.get_mut(id.slot as usize).filter(|slot| slot.epoch == id.epoch);
        let Some(chain) = slot.and_then(|slot| slot.value.take()) else { return Vec::new() };
        self.free_chains.push(id.slot);
        if let Some(tenant) = live(&mut self.tenants, chain.tenant) {
            tenant.chains.retain(|slot| *slot != id.slot);
        }
        self.seat(chain.tenant);
        let queues = chain.stages.into_iter().rev().map(|stage| stage.queue);
        queues.flatten().map(|entry| entry.item).collect()
    }

    /// Returns the number of jobs queued at the first stage of a chain.
    pub fn waiting(&self, id: ChainId) -> usize {
        self.chain(id).map_or(0, |chain| chain.stages[0].queue.len())
    }

    /// Returns the measured capacity of an executor, in bytes per busy second.
    pub fn capacity(&self, executor: ExecutorId) -> f64 {
        self.executors[executor.index()].capacity.per_second()
    }

    fn epoch(&mut self) -> u32 {
        // Epochs repeat after 2^32 tenants and chains.
        self.epochs = self.epochs.wrapping_add(1);
        self.epochs
    }

    pub(super) fn tenant(&self, id: TenantId) -> Option<&Tenant> {
        self.tenants.get(id.slot as usize)?.as_ref().filter(|tenant| tenant.epoch == id.epoch)
    }

    fn chain(&self, id: ChainId) -> Option<&Chain<T>> {
        self.chains.get(id.slot as usize).filter(|slot| slot.epoch == id.epoch)?.value.as_ref()
    }

    pub(super) fn chain_mut(&mut self, id: ChainId) -> Option<&mut Chain<T>> {
        let slot = self.chains.get_mut(id.slot as usize).filter(|slot| slot.epoch == id.epoch)?;
        slot.value.as_mut()
    }

    /// Returns the demand of a tenant with its present chains, at the given capacities of the
    /// executors.
    pub(super) fn demand(
        &self,
        tenant: &Tenant,
        capacity: impl Fn(&ExecutorState) -> f64,
    ) -> Demand {
        let chains =
            tenant.chains.iter().filter_map(|slot| self.chains[*slot as usize].value.as_ref());
        tenant.demand(self.resources.len(), chains, |executor| {
            let executor = &self.executors[executor.index()];
            (executor.resource.index(), capacity(executor).recip())
        })
    }

    /// Recomputes a tenant's stages and weights at the resources from its present chains.
    fn seat(&mut self, id: TenantId) {
        let Some(tenant) = live(&mut self.tenants, id) else { return };
        tenant.seats.iter_mut().for_each(|seat| seat.stages.clear());
        for slot in &tenant.chains {
            let Some(chain) = &self.chains[*slot as usize].value else { continue };
            for (at, stage) in chain.stages.iter().enumerate() {
                let resource = self.executors[stage.executor.index()].resource;
                tenant.seats[resource.index()].stages.push((*slot, at as u32));
            }
        }
        self.weigh(id.slot);
    }

    fn weigh(&mut self, slot: u32) {
        let Some(tenant) = self.tenants[slot as usize].take() else { return };
        let demand = self.demand(&tenant, |executor| executor.charged);
        let tenant = self.tenants[slot as usize].insert(tenant);
        let alone = demand.alone();
        for (seat, seconds) in tenant.seats.iter_mut().zip(demand.seconds) {
            // The weight matters only if a chain of the tenant uses the resource.
            seat.weight =
                if seconds > 0.0 { demand.weight * seconds * alone } else { demand.weight };
        }
    }

    /// Recomputes the weights if a capacity has changed, but only now and then.
    pub(super) fn follow(&mut self, now: Duration) {
        if now < self.follow_at {
            return;
        }
        let moved = |state: &ExecutorState| {
            (state.capacity.per_second() / state.charged - 1.0).abs() > DRIFT
        };
        if !self.executors.iter().any(moved) {
            self.follow_at = now + GLANCE;
            return;
        }
        self.follow_at = now + PAUSE;
        for executor in &mut self.executors {
            executor.charged = executor.capacity.per_second();
        }
        for slot in 0..self.tenants.len() as u32 {
            self.weigh(slot);
        }
    }
}

/// Returns the tenant, or `None` if `id` was given to an earlier one.
pub(super) fn live(tenants: &mut [Option<Tenant>], id: TenantId) -> Option<&mut Tenant> {
    tenants.get_mut(id.slot as usize)?.as_mut().filter(|tenant| tenant.epoch == id.epoch)
}

fn check(options: TenantOptions) -> Result<(), ShareError> {
    let fits = (MIN_WEIGHT..=MAX_WEIGHT).contains(&options.weight);
    if fits { Ok(()) } else { Err(ShareError::Weight) }
}
