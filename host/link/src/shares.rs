//! The order in which an engine's connections are served, as [`slipway_warp::share`] decides.
//!
//! The thread's core is one resource, and its work there is two executors: *seal* (copy from FIFOs
//! into records, seal, give to the socket) and *open* (receive, open, copy into FIFOs). The way to
//! each other engine is a resource of its own with an executor *transport*. A connection is at most
//! once in its tenant's queue for each of the two directions; a chosen connection may do one
//! quantum, and its tenant pays for the core's time that the quantum took.
//!
//! A way whose rate the settings say is paced: its connections are first chosen for the way, and
//! then for the core, so that both are shared. A way without a rate is left to the kernel: its
//! capacity is only measured, while sockets are full, and shown.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_warp::Class;
use slipway_warp::share::{
    ChainId, ExecutorId, LimitedBy, ResourceId, Scheduler, TenantId, TenantOptions, Ticket,
};

use crate::settings::Settings;

/// Bytes per second that an executor of the core is assumed to process before it is measured.
const GUESS: u64 = 1_500_000_000;
/// Bytes per second that a way without a rate is assumed to carry before it is measured: so many
/// that they limit nobody.
const FAST: u64 = 12_500_000_000;
/// The most time of the core that a quantum is charged for: if it took longer, another thread had
/// the core meanwhile.
const QUANTUM: Duration = Duration::from_millis(1);
/// Unused time of a paced way that may be made up later, at once.
const BURST: Duration = Duration::from_millis(10);

/// The direction in which bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

#[derive(Clone, Copy, Debug)]
struct WaitingJob {
    connection: u32,
    direction: Direction,
}

/// A connection that was chosen, and the direction. The caller returns it by [`Shares::done`].
#[must_use = "the core waits for it"]
pub(crate) struct ChosenTurn {
    pub(crate) connection: u32,
    pub(crate) direction: Direction,
    ticket: Ticket<WaitingJob>,
}

/// The way to another engine.
struct Way {
    resource: ResourceId,
    transport: ExecutorId,
    /// Bytes per second that the settings say; `None` if the way is not paced.
    rate: Option<u64>,
    /// When a paced way has carried all that it was given.
    free_at: Duration,
    /// The end of the last turn, if the socket was full then: the time since counts as busy.
    measured: Option<Duration>,
}

/// A connection's place in a queue.
struct JobEnd {
    chain: ChainId,
    queued: bool,
    /// Bytes that the last quantum moved: the estimate for the next.
    bytes: u64,
}

struct Member {
    tenant: TenantId,
    way: usize,
    places: [JobEnd; 2],
    /// The connection's chain in the queue of its way.
    link: ChainId,
    /// The ticket of the way that has chosen the connection, until the core has served it.
    chosen: Option<Ticket<WaitingJob>>,
}

struct Tenant {
    id: TenantId,
    connections: usize,
}

pub(crate) struct Shares {
    scheduler: Scheduler<WaitingJob>,
    core: ResourceId,
    /// Indexed by [`Direction`].
    executors: [ExecutorId; 2],
    ways: Vec<Way>,
    paced: bool,
    members: HashMap<u32, Member>,
    tenants: HashMap<String, Tenant>,
    options: HashMap<String, TenantOptions>,
}

impl Shares {
    pub(crate) fn new(settings: &Settings) -> Self {
        let mut scheduler = Scheduler::new();
        let core = scheduler.add_resource("core", 1);
        let executors = [("open", Class::L), ("seal", Class::I)]
            .map(|(name, class)| scheduler.add_executor(name, class, core, GUESS));
        let ways: Vec<_> = settings
            .engine
            .iter()
            .map(|peer| {
                let rate = peer.bytes_per_second();
                let resource = scheduler.add_resource(&peer.name, 1);
                let guess = rate.unwrap_or(FAST);
                let transport = scheduler.add_executor("transport", Class::Z, resource, guess);
                Way { resource, transport, rate, free_at: Duration::ZERO, measured: None }
            })
            .collect();
        let paced = ways.iter().any(|way| way.rate.is_some());
        let (members, tenants, options) = Default::default();
        Self { scheduler, core, executors, ways, paced, members, tenants, options }
    }

    /// Sets a tenant's weight, which is within the scheduler's range.
    pub(crate) fn set_weight(&mut self, tenant: &str, weight: f64) {
        self.change(tenant, |options| options.weight = weight);
    }

    /// Sets the bytes per second that a tenant may send, for the formula only: the cap itself is
    /// kept where sent bytes are counted.
    pub(crate) fn set_cap(&mut self, tenant: &str, cap: u64) {
        self.change(tenant, |options| options.cap = Some(cap));
    }

    fn change(&mut self, tenant: &str, change: impl FnOnce(&mut TenantOptions)) {
        let options = self.options.entry(tenant.into()).or_default();
        change(options);
        if let Some(there) = self.tenants.get(tenant) {
            // Cannot fail: the weight is in range, and the tenant exists.
            let _ = self.scheduler.set_options(there.id, *options);
        }
    }

    /// Adds a connection to engine `way` that is up.
    pub(crate) fn join(&mut self, connection: u32, tenant: &str, way: usize) {
        let Some(transport) = self.ways.get(way).map(|way| way.transport) else { return };
        let Some(id) = self.tenant(tenant) else { return };
        let open =
            |scheduler: &mut Scheduler<WaitingJob>, executor| scheduler.open_free(id, &[executor]);
        let chains = [self.executors[0], self.executors[1], transport]
            .map(|executor| open(&mut self.scheduler, executor));
        let [Ok(incoming), Ok(outgoing), Ok(link)] = chains else { return };
        let place = |chain| JobEnd { chain, queued: false, bytes: 4096 };
        let places = [place(incoming), place(outgoing)];
        let member = Member { tenant: id, way, places, link, chosen: None };
        self.members.insert(connection, member);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.connections += 1;
        }
    }

    fn tenant(&mut self, name: &str) -> Option<TenantId> {
        if let Some(there) = self.tenants.get(name) {
            return Some(there.id);
        }
        let options = self.options.get(name).copied().unwrap_or_default();
        let id = self.scheduler.add_tenant(options).ok()?;
        self.tenants.insert(name.into(), Tenant { id, connections: 0 });
        Some(id)
    }

    /// Removes a connection.
    pub(crate) fn part(&mut self, connection: u32, now: Duration) {
        let Some(member) = self.members.remove(&connection) else { return };
        if let Some(ticket) = member.chosen {
            self.scheduler.failed(ticket, Duration::ZERO, now);
        }
        let [incoming, outgoing] = member.places.map(|place| place.chain);
        for chain in [incoming, outgoing, member.link] {
            self.scheduler.close(chain);
        }
        let Some((name, tenant)) =
            self.tenants.iter_mut().find(|(_, tenant)| tenant.id == member.tenant)
        else {
            return;
        };
        tenant.connections -= 1;
        if tenant.connections == 0 {
            let name = name.clone();
            self.tenants.remove(&name);
            self.scheduler.remove_tenant(member.tenant);
        }
    }

    /// Queues a connection that has or may have something to do.
    pub(crate) fn want(&mut self, connection: u32, direction: Direction) {
        let Some(member) = self.members.get_mut(&connection) else { return };
        let (way, link) = (&self.ways[member.way], member.link);
        let place = &mut member.places[direction as usize];
        if std::mem::replace(&mut place.queued, true) {
            return;
        }
        let paced = direction == Direction::Out && way.rate.is_some();
        let chain = if paced { link } else { place.chain };
        // The chains exist as long as the connection.
        let _ = self.scheduler.push(chain, place.bytes, WaitingJob { connection, direction });
    }

    /// Chooses the next connection. Returns `None` if no connection has anything to do that may be
    /// done now.
    pub(crate) fn next(&mut self, now: Duration) -> Option<ChosenTurn> {
        if self.paced {
            self.choose_for_ways(now);
        }
        let ticket = self.scheduler.next(self.core, now)?;
        let WaitingJob { connection, direction } = ticket.item;
        Some(ChosenTurn { connection, direction, ticket })
    }

    /// Chooses a connection for each paced way that is free, and queues it for the core.
    fn choose_for_ways(&mut self, now: Duration) {
        for way in self.ways.iter().filter(|way| way.rate.is_some() && way.free_at <= now) {
            // One connection at a time: the bytes that it sends say when the way is free again.
            if let Some(ticket) = self.scheduler.next(way.resource, now) {
                let job = ticket.item;
                let Some(member) = self.members.get_mut(&job.connection) else {
                    self.scheduler.failed(ticket, Duration::ZERO, now);
                    continue;
                };
                let chain = member.places[Direction::Out as usize].chain;
                let _ = self.scheduler.push(chain, ticket.bytes, job);
                member.chosen = Some(ticket);
            }
        }
    }

    /// Ends a turn that moved `bytes` and took `busy`. `blocked` says that the socket's send buffer
    /// is full.
    pub(crate) fn done(
        &mut self,
        turn: ChosenTurn,
        bytes: u64,
        busy: Duration,
        blocked: bool,
        now: Duration,
    ) {
        let ChosenTurn { connection, direction, mut ticket } = turn;
        ticket.bytes = bytes;
        self.scheduler.done(ticket, bytes, busy.min(QUANTUM), now);
        let Some(member) = self.members.get_mut(&connection) else { return };
        let place = &mut member.places[direction as usize];
        place.queued = false;
        if bytes > 0 {
            place.bytes = bytes;
        }
        if direction == Direction::Out {
            let way = &mut self.ways[member.way];
            match (member.chosen.take(), way.rate) {
                (Some(mut ticket), Some(rate)) => {
                    // At least 1 ns: for no time at all, the estimate of the bytes would stay
                    // charged.
                    let time = nanos(bytes, rate).max(Duration::from_nanos(1));
                    way.free_at = way.free_at.max(now.saturating_sub(BURST)) + time;
                    ticket.bytes = bytes;
                    self.scheduler.failed(ticket, time, now);
                }
                _ => way.measure(&mut self.scheduler, member.tenant, bytes, blocked, now),
            }
        }
    }

    /// Returns until when a connection waits for its paced way, or `None` if it need not wait.
    pub(crate) fn held(&self, connection: u32, now: Duration) -> Option<Duration> {
        if !self.paced {
            return None;
        }
        let member = self.members.get(&connection)?;
        let way = &self.ways[member.way];
        let waits = member.places[Direction::Out as usize].queued && member.chosen.is_none();
        (waits && way.rate.is_some() && way.free_at > now).then_some(way.free_at)
    }

    /// Returns the shares now, for display.
    pub(crate) fn view(&self, now: Duration) -> View {
        let shares = self.scheduler.shares(now);
        let name = |id: TenantId| {
            let found = self.tenants.iter().find(|(_, tenant)| tenant.id == id);
            found.map_or_else(String::new, |(name, _)| name.clone())
        };
        let mut tenants: Vec<TenantShare> = shares
            .tenants
            .iter()
            .map(|share| TenantShare {
                tenant: name(share.tenant),
                weight: share.weight,
                cap: share.cap,
                bytes: share.bytes,
                rate: share.rate,
                formula: share.formula,
                resources: share.parts.clone(),
                dominant: share.dominant,
                dominant_by_formula: share.dominant_by_formula,
                limited_by: match share.limited_by {
                    LimitedBy::Resource(resource) => shares.resources[resource.index()].clone(),
                    LimitedBy::Cap => "cap".into(),
                    LimitedBy::Demand => "demand".into(),
                },
            })
            .collect();
        tenants.sort_by(|a, b| a.tenant.cmp(&b.tenant));
        let rate = |resource: usize| {
            let way = self.ways.iter().find(|way| way.resource.index() == resource);
            way.and_then(|way| way.rate)
        };
        let resources = shares.resources.iter().enumerate().map(|(at, name)| ResourceShare {
            name: name.clone(),
            used: tenants.iter().map(|tenant| tenant.resources[at]).sum(),
            rate: rate(at),
        });
        let executors = self
            .executors
            .into_iter()
            .map(|id| (id, self.core))
            .chain(self.ways.iter().map(|way| (way.transport, way.resource)));
        let executors = executors.map(|(id, resource)| ExecutorCapacity {
            name: shares.capacities[id.index()].0.clone(),
            resource: shares.resources[resource.index()].clone(),
            capacity: shares.capacities[id.index()].1,
        });
        let (resources, executors) = (resources.collect(), executors.collect());
        View { resources, executors, tenants }
    }
}

impl Way {
    /// Books the bytes of a way that is not paced, and measures its capacity while the socket is
    /// full.
    fn measure(
        &mut self,
        scheduler: &mut Scheduler<WaitingJob>,
        tenant: TenantId,
        bytes: u64,
        blocked: bool,
        now: Duration,
    ) {
        let since = self.measured.take().map(|before| now.saturating_sub(before));
        self.measured = blocked.then_some(now);
        if bytes > 0 {
            scheduler.book(tenant, self.transport, bytes, since.unwrap_or_default(), now);
        }
    }
}

fn nanos(bytes: u64, rate: u64) -> Duration {
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// The shares of all tenants at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// The core, and the ways to other engines.
    pub resources: Vec<ResourceShare>,
    /// The executors that use the resources.
    pub executors: Vec<ExecutorCapacity>,
    /// Tenants with a connection to another engine, by name.
    pub tenants: Vec<TenantShare>,
}

/// A resource that tenants share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResourceShare {
    /// `core`, or the name of the other engine.
    pub name: String,
    /// The part of the resource that was used in the last second or so, 0 to 1.
    pub used: f64,
    /// Bytes per second that the settings say, for a paced way.
    pub rate: Option<u64>,
}

/// An executor, which uses a resource, and its speed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutorCapacity {
    /// `seal`, `open` or `transport`.
    pub name: String,
    /// The resource whose time the executor uses.
    pub resource: String,
    /// Bytes per second of the executor's own time, as measured.
    pub capacity: f64,
}

/// The share of one tenant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantShare {
    /// The tenant's name.
    pub tenant: String,
    /// The tenant's weight.
    pub weight: f64,
    /// Bytes per second that the tenant may send, if it has a cap.
    pub cap: Option<u64>,
    /// Bytes of the tenant's records in both directions, since its first connection.
    pub bytes: u64,
    /// Bytes per second in the last second or so.
    pub rate: f64,
    /// Bytes per second that the formula gives the tenant, among those that have something to send.
    pub formula: f64,
    /// The tenant's parts of the resources, 0 to 1, in the order of [`View::resources`].
    pub resources: Vec<f64>,
    /// The largest of the parts.
    pub dominant: f64,
    /// The largest part according to the formula.
    pub dominant_by_formula: f64,
    /// The reason why the tenant does not get more: a resource, `cap`, or `demand` (it has nothing
    /// more to send).
    pub limited_by: String,
}
