//! The scheduler's path for every job: queue it, pick the next one, account for it when it ends.

use std::time::Duration;

use super::scheduler::{Scheduler, live};
use super::tenant::{QueuedJob, TICKS};
use super::{ChainId, ExecutorId, MIN_WEIGHT, ResourceId, ShareError, TenantId};

/// A job that an executor works on. Give it back by [`Scheduler::done`] or [`Scheduler::failed`].
#[derive(Debug)]
#[must_use = "a resource waits for the job to be given back"]
pub struct Ticket<T> {
    /// The item that was queued.
    pub item: T,
    /// Bytes of the job: at first those that it was queued with. The engine may replace them by the
    /// bytes that it finds.
    pub bytes: u64,
    /// The executor that is to do the job.
    pub executor: ExecutorId,
    /// The tenant that owns the job.
    pub tenant: TenantId,
    /// The chain that the job belongs to.
    pub chain: ChainId,
    stage: u32,
    /// Bytes that the job was queued with.
    queued: u64,
    /// Ticks of the resource that the tenant was charged.
    charge: f64,
}

/// The work that a tenant can do at a resource.
enum Choice {
    /// Begin the next job of this stage: its index in the seat's list.
    Go(usize),
    /// Begin a job once the tenant's cap permits it.
    Held,
    /// No job can begin: none is queued, or the next stage has no room.
    Nothing,
}

impl<T> Scheduler<T> {
    /// Queues a job of about `bytes` at the chain's first stage.
    ///
    /// # Errors
    /// [`ShareError::NoChain`] if the chain is closed.
    pub fn push(&mut self, id: ChainId, bytes: u64, item: T) -> Result<(), ShareError> {
        let chain = self.chain_mut(id).ok_or(ShareError::NoChain)?;
        chain.stages[0].push(QueuedJob { bytes, item });
        let (tenant, executor) = (chain.tenant, chain.stages[0].executor);
        self.ready(tenant, executor);
        Ok(())
    }

    /// Returns the next job for `resource`, from the tenant that has had the least of it in
    /// proportion to its weight. Returns `None` if the resource has as many jobs as it takes, or if
    /// no tenant has a job for it except tenants that have used up their cap (see
    /// [`due`](Self::due)).
    pub fn next(&mut self, resource: ResourceId, now: Duration) -> Option<Ticket<T>> {
        let at = resource.index();
        if self.resources[at].in_service >= self.resources[at].depth {
            return None;
        }
        self.let_go(resource, now);
        while let Some((_, id)) = self.resources[at].ready.pop() {
            let Some(tenant) = live(&mut self.tenants, id) else { continue };
            let held = tenant.opens_at();
            tenant.seats[at].listed = false;
            match self.choose(id, resource, held <= now) {
                Choice::Go(place) => return self.take(id, resource, place, now),
                Choice::Held => self.hold(id, resource, held),
                Choice::Nothing => {}
            }
        }
        None
    }

    /// Returns the time at which a tenant's cap next permits a job for `resource`. Returns `None`
    /// if no tenant waits for its cap there: only a queued or a completed job can then make one
    /// available.
    pub fn due(&self, resource: ResourceId) -> Option<Duration> {
        self.resources[resource.index()].held.least()
    }

    /// Ends a job that took `busy` and handled [`Ticket::bytes`]; `bytes` go on to the chain's next
    /// stage. Returns the item if that was the last stage, or if the chain has been closed.
    pub fn done(
        &mut self,
        ticket: Ticket<T>,
        bytes: u64,
        busy: Duration,
        now: Duration,
    ) -> Option<T> {
        self.account(&ticket, busy, now);
        let Some(chain) = self.chain_mut(ticket.chain) else { return Some(ticket.item) };
        let (stage, tenant) = (ticket.stage as usize, chain.tenant);
        chain.stages[stage].in_service.remove(ticket.queued);
        if let Some(next) = chain.stages.get_mut(stage + 1) {
            next.push(QueuedJob { bytes, item: ticket.item });
            let executor = next.executor;
            self.ready(tenant, executor);
            return None;
        }
        if let Some(tenant) = live(&mut self.tenants, tenant) {
            tenant.delivered.add(ticket.bytes, now);
        }
        Some(ticket.item)
    }

    /// Records that `bytes` of a tenant passed an executor without being queued, and that the
    /// executor was busy with them for `busy` (zero if unknown). The tenant is charged for the
    /// time, and the bytes appear in its share.
    pub fn book(
        &mut self,
        id: TenantId,
        executor: ExecutorId,
        bytes: u64,
        busy: Duration,
        now: Duration,
    ) {
        self.measured(id, executor, bytes, busy, now, 0.0);
    }

    /// Ends a job that failed after `busy`, and returns its item: the job goes no further.
    pub fn failed(&mut self, ticket: Ticket<T>, busy: Duration, now: Duration) -> T {
        self.account(&ticket, busy, now);
        if let Some(chain) = self.chain_mut(ticket.chain) {
            chain.stages[ticket.stage as usize].in_service.remove(ticket.queued);
            // The failed job no longer takes up room before the next stage.
            self.ready(ticket.tenant, ticket.executor);
        }
        ticket.item
    }

    /// Puts a tenant that may have a job for an executor in line, no further ahead than the tenant
    /// that was served last: an idle tenant gathers no claims.
    fn ready(&mut self, id: TenantId, executor: ExecutorId) {
        let at = self.executors[executor.index()].resource.index();
        let Some(tenant) = live(&mut self.tenants, id) else { return };
        let (resource, seat) = (&mut self.resources[at], &mut tenant.seats[at]);
        seat.list(resource, id);
    }

    /// Puts a tenant in line wherever it may have a job: its cap may have changed.
    pub(super) fn line_up(&mut self, id: TenantId) {
        let Some(tenant) = live(&mut self.tenants, id) else { return };
        for (seat, resource) in tenant.seats.iter_mut().zip(&mut self.resources) {
            if !seat.stages.is_empty() {
                seat.list(resource, id);
            }
        }
    }

    /// Puts the tenants that waited for their cap, and whose cap permits a job now, in line again.
    fn let_go(&mut self, resource: ResourceId, now: Duration) {
        let at = resource.index();
        let resource = &mut self.resources[at];
        while resource.held.least().is_some_and(|due| due <= now) {
            let Some((_, id)) = resource.held.pop() else { return };
            let Some(tenant) = live(&mut self.tenants, id) else { continue };
            let seat = &mut tenant.seats[at];
            seat.held = false;
            seat.list(resource, id);
        }
    }

    /// Records that a tenant's cap permits no job at a resource before `until`.
    fn hold(&mut self, id: TenantId, resource: ResourceId, until: Duration) {
        let Some(tenant) = live(&mut self.tenants, id) else { return };
        let seat = &mut tenant.seats[resource.index()];
        if !seat.held {
            seat.held = true;
            self.resources[resource.index()].held.push(until, id);
        }
    }

    /// Returns whether the tenant has a job queued for the resource, at any stage.
    fn has_queued(&self, id: TenantId, resource: ResourceId) -> bool {
        let Some(tenant) = self.tenant(id) else { return false };
        tenant.seats[resource.index()].stages.iter().any(|(slot, stage)| {
            let chain = self.chains[*slot as usize].value.as_ref();
            chain.is_some_and(|chain| !chain.stages[*stage as usize].queue.is_empty())
        })
    }

    /// Chooses among the tenant's possible jobs at a resource the one nearest to its chain's end,
    /// because bytes that have come far make room. Chains that are equally near take turns.
    fn choose(&self, id: TenantId, resource: ResourceId, open: bool) -> Choice {
        let Some(tenant) = self.tenant(id) else { return Choice::Nothing };
        let seat = &tenant.seats[resource.index()];
        let (mut best, mut choice) = (usize::MAX, Choice::Nothing);
        for nth in 0..seat.stages.len() {
            let place = (seat.turn + nth) % seat.stages.len();
            let (slot, stage) = seat.stages[place];
            let Some(chain) = &self.chains[slot as usize].value else { continue };
            let left = chain.stages.len() - stage as usize;
            if left >= best || !chain.may_go(stage as usize) {
                continue;
            }
            if stage > 0 || open || chain.free {
                (best, choice) = (left, Choice::Go(place));
            } else if matches!(choice, Choice::Nothing) {
                choice = Choice::Held;
            }
        }
        choice
    }

    /// Takes the first job of a stage, charges its tenant, and puts the tenant in line again if it
    /// has more.
    fn take(
        &mut self,
        id: TenantId,
        resource: ResourceId,
        place: usize,
        now: Duration,
    ) -> Option<Ticket<T>> {
        let tenant = live(&mut self.tenants, id)?;
        let seat = &mut tenant.seats[resource.index()];
        let (slot, stage) = seat.stages[place];
        let epoch = self.chains[slot as usize].epoch;
        let chain = self.chains[slot as usize].value.as_mut()?;
        let here = &mut chain.stages[stage as usize];
        let QueuedJob { bytes, item } = here.take()?;
        let (executor, free) = (here.executor, chain.free);
        let before = (stage as usize).checked_sub(1).map(|before| chain.stages[before].executor);

        let state = &mut self.resources[resource.index()];
        state.in_service += 1;
        state.served = state.served.max(seat.had);
        let charge = bytes as f64 * TICKS / self.executors[executor.index()].charged;
        // The conversion goes by way of 64 bits, since processors have none to 128 bits.
        seat.had += u128::from((charge / seat.weight.max(MIN_WEIGHT)) as u64);
        seat.turn = place + 1;
        if stage == 0
            && !free
            && let Some(bucket) = &mut tenant.bucket
        {
            bucket.take(bytes, now);
        }
        if self.has_queued(id, resource) {
            self.ready(id, executor);
        }
        // The queue in which this job waited has room now for a job of the stage before.
        if let Some(before) = before {
            self.ready(id, before);
        }
        let chain = ChainId { slot, epoch };
        let queued = bytes;
        Some(Ticket { item, bytes, executor, tenant: id, chain, stage, queued, charge })
    }

    /// Accounts for a job that ended: the executor's capacity, the tenant's throughput, and the
    /// error of the estimate by which the tenant was charged.
    fn account(&mut self, ticket: &Ticket<T>, busy: Duration, now: Duration) {
        let at = self.executors[ticket.executor.index()].resource.index();
        self.resources[at].in_service -= 1;
        self.measured(ticket.tenant, ticket.executor, ticket.bytes, busy, now, ticket.charge);
    }

    /// Accounts for `bytes` that an executor has handled for a tenant in `busy` (zero if unknown).
    /// `charged` is the number of ticks that the tenant was charged beforehand; the difference to
    /// the time spent is owed.
    fn measured(
        &mut self,
        id: TenantId,
        executor: ExecutorId,
        bytes: u64,
        busy: Duration,
        now: Duration,
        charged: f64,
    ) {
        let state = &mut self.executors[executor.index()];
        state.capacity.add(bytes, busy);
        let at = state.resource.index();
        if let Some(tenant) = live(&mut self.tenants, id) {
            // Whole nanoseconds convert quickly.
            let nanos = match busy.as_nanos() as u64 {
                0 => (bytes as f64 * 1e9 / state.charged) as u64,
                nanos => {
                    tenant.seats[at].owed += nanos as f64 * (TICKS / 1e9) - charged;
                    nanos
                }
            };
            tenant.done[executor.index()].add(bytes, now);
            tenant.spent[executor.index()].add(nanos, now);
        }
        self.follow(now);
    }
}
