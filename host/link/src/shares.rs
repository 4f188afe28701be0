//! Who is next: what [`slipway_warp::share`] decides for the connections of an engine.
//!
//! The thread's core is one resource, and what it does there are two executors: *seal* (copy from FIFOs into
//! records, seal, give to the socket) and *open* (receive, open, copy into FIFOs). The way to each other engine is a
//! resource of its own with an executor *transport*. A connection is in a queue of its tenant for each of the two
//! directions, once; who is chosen may do one quantum, and its tenant pays what that took of the core's time.
//!
//! A way whose rate the settings say is paced: the tenants of its connections are chosen for it first, and for
//! the core then, so that both are shared. One whose rate nobody says has what the kernel makes of it: only
//! what it carries while sockets take no more is measured, and shown.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_warp::Class;
use slipway_warp::share::{
    ChainId, ExecutorId, LimitedBy, ResourceId, Scheduler, TenantId, TenantOptions, Ticket,
};

use crate::settings::Settings;

/// What the core is taken to do in a second before it is measured.
const GUESS: u64 = 1_500_000_000;
/// What a way is taken to carry before it is: so much that nobody is limited by it.
const FAST: u64 = 12_500_000_000;
/// A quantum is taken to need no more of the core than this: if it did, somebody else had the core meanwhile.
const QUANTUM: Duration = Duration::from_millis(1);
/// For so long a paced way that was not used may be used at once later.
const BURST: Duration = Duration::from_millis(10);

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

#[derive(Clone, Copy, Debug)]
struct Job {
    connection: u32,
    direction: Direction,
}

/// A connection that was chosen, and for what. It goes back by [`Shares::done`].
#[must_use = "the core waits for it"]
pub(crate) struct Turn {
    pub(crate) connection: u32,
    pub(crate) direction: Direction,
    ticket: Ticket<Job>,
}

/// The way to another engine.
struct Way {
    resource: ResourceId,
    transport: ExecutorId,
    /// Bytes per second that the settings say.
    rate: Option<u64>,
    /// When a paced one has carried what it was given.
    free_at: Duration,
    /// Until when it was measured while a socket took no more.
    measured: Option<Duration>,
}

/// A connection's place in a queue.
struct Place {
    chain: ChainId,
    queued: bool,
    /// Bytes that the last quantum moved: what the next is taken to move.
    bytes: u64,
}

struct Member {
    tenant: TenantId,
    way: usize,
    places: [Place; 2],
    /// In the queue of its way.
    link: ChainId,
    /// Its way has chosen it.
    chosen: Option<Ticket<Job>>,
}

struct Tenant {
    id: TenantId,
    connections: usize,
}

pub(crate) struct Shares {
    scheduler: Scheduler<Job>,
    core: ResourceId,
    /// By [`Direction`].
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

    /// A tenant's weight, within what a scheduler takes.
    pub(crate) fn set_weight(&mut self, tenant: &str, weight: f64) {
        self.change(tenant, |options| options.weight = weight);
    }

    /// What a tenant may send, for the formula: the cap itself is kept where sent bytes are counted.
    pub(crate) fn set_cap(&mut self, tenant: &str, cap: u64) {
        self.change(tenant, |options| options.cap = Some(cap));
    }

    fn change(&mut self, tenant: &str, change: impl FnOnce(&mut TenantOptions)) {
        let options = self.options.entry(tenant.into()).or_default();
        change(options);
        if let Some(there) = self.tenants.get(tenant) {
            // The weight is in range, and the tenant is there.
            let _ = self.scheduler.set_options(there.id, *options);
        }
    }

    /// A connection to engine `way` is up.
    pub(crate) fn join(&mut self, connection: u32, tenant: &str, way: usize) {
        let Some(transport) = self.ways.get(way).map(|way| way.transport) else { return };
        let Some(id) = self.tenant(tenant) else { return };
        let open = |scheduler: &mut Scheduler<Job>, executor| scheduler.open_free(id, &[executor]);
        let chains = [self.executors[0], self.executors[1], transport]
            .map(|executor| open(&mut self.scheduler, executor));
        let [Ok(incoming), Ok(outgoing), Ok(link)] = chains else { return };
        let place = |chain| Place { chain, queued: false, bytes: 4096 };
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

    /// A connection is no more.
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

    /// A connection has something to do, or may have.
    pub(crate) fn want(&mut self, connection: u32, direction: Direction) {
        let Some(member) = self.members.get_mut(&connection) else { return };
        let (way, link) = (&self.ways[member.way], member.link);
        let place = &mut member.places[direction as usize];
        if std::mem::replace(&mut place.queued, true) {
            return;
        }
        let paced = direction == Direction::Out && way.rate.is_some();
        let chain = if paced { link } else { place.chain };
        // The chains are there as long as the connection is.
        let _ = self.scheduler.push(chain, place.bytes, Job { connection, direction });
    }

    /// Whose turn it is. None: nobody has anything to do that may be done now.
    pub(crate) fn next(&mut self, now: Duration) -> Option<Turn> {
        if self.paced {
            self.choose_for_ways(now);
        }
        let ticket = self.scheduler.next(self.core, now)?;
        let Job { connection, direction } = ticket.item;
        Some(Turn { connection, direction, ticket })
    }

    /// Who is chosen for a way that is free waits for the core.
    fn choose_for_ways(&mut self, now: Duration) {
        for way in self.ways.iter().filter(|way| way.rate.is_some() && way.free_at <= now) {
            // One at a time: what it carries says when the next may.
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

    /// A turn is over: it moved `bytes` and took `busy`. `blocked`: the socket takes no more now.
    pub(crate) fn done(
        &mut self,
        turn: Turn,
        bytes: u64,
        busy: Duration,
        blocked: bool,
        now: Duration,
    ) {
        let Turn { connection, direction, mut ticket } = turn;
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
                    // Never nothing at all, or what it was taken to move would stand.
                    let time = nanos(bytes, rate).max(Duration::from_nanos(1));
                    way.free_at = way.free_at.max(now.saturating_sub(BURST)) + time;
                    ticket.bytes = bytes;
                    self.scheduler.failed(ticket, time, now);
                }
                _ => way.measure(&mut self.scheduler, member.tenant, bytes, blocked, now),
            }
        }
    }

    /// Until when a connection waits for its way.
    pub(crate) fn held(&self, connection: u32, now: Duration) -> Option<Duration> {
        if !self.paced {
            return None;
        }
        let member = self.members.get(&connection)?;
        let way = &self.ways[member.way];
        let waits = member.places[Direction::Out as usize].queued && member.chosen.is_none();
        (waits && way.rate.is_some() && way.free_at > now).then_some(way.free_at)
    }

    /// The shares now, for people.
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
    /// One that is not paced: what it carries is booked, and while a socket took no more its capacity is measured.
    fn measure(
        &mut self,
        scheduler: &mut Scheduler<Job>,
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

/// Who has how much of what, at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// The core, and the ways to other engines.
    pub resources: Vec<ResourceShare>,
    /// What uses them.
    pub executors: Vec<ExecutorCapacity>,
    /// Tenants with a connection to another engine, by name.
    pub tenants: Vec<TenantShare>,
}

/// Something that is shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResourceShare {
    /// `core`, or the other engine's name.
    pub name: String,
    /// The part of it that is used, 0 to 1, of the last second or so.
    pub used: f64,
    /// Bytes per second that the settings say.
    pub rate: Option<u64>,
}

/// What uses a resource, and how fast it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecutorCapacity {
    /// `seal`, `open` or `transport`.
    pub name: String,
    /// Whose time it takes.
    pub resource: String,
    /// Bytes per second of its own time, as measured.
    pub capacity: f64,
}

/// What a tenant has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantShare {
    /// Its name.
    pub tenant: String,
    /// Its weight.
    pub weight: f64,
    /// Bytes per second that it may send.
    pub cap: Option<u64>,
    /// Bytes in both directions, as records have them, since its first connection.
    pub bytes: u64,
    /// Bytes per second of the last second or so.
    pub rate: f64,
    /// Bytes per second that the formula gives it, among those who have something to send.
    pub formula: f64,
    /// The parts of the resources that it has, 0 to 1, in the order of [`View::resources`].
    pub resources: Vec<f64>,
    /// The largest of them.
    pub dominant: f64,
    /// What the formula says that is.
    pub dominant_by_formula: f64,
    /// What keeps it from more: a resource, `cap`, or `demand` (it has nothing more to send).
    pub limited_by: String,
}
