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
    self, ChainId, ExecutorId, LimitedBy, ResourceId, Scheduler, ShareError, TenantId,
    TenantOptions, Ticket,
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

/// A connection that has or may have something to do in one direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) connection: u32,
    pub(crate) direction: Direction,
}

/// The outcome of a turn: the bytes that it moved, and the time that it took.
#[derive(Default)]
pub(crate) struct Served {
    pub(crate) bytes: u64,
    pub(crate) busy: Duration,
    /// `true` if the socket's send buffer is full.
    pub(crate) blocked: bool,
}

/// The way to another engine.
struct Way {
    resource: ResourceId,
    transport: ExecutorId,
    pace: Pace,
}

#[derive(Clone, Copy)]
enum Pace {
    /// The settings say how many bytes per second the way carries.
    Rate {
        per_second: u64,
        /// The time at which the way has carried all that it was given.
        free_at: Duration,
    },
    /// The kernel paces the way; its capacity is measured.
    Kernel {
        /// The end of the last turn, if the socket was full then: the time since counts as busy.
        full_since: Option<Duration>,
    },
}

/// A connection's jobs for the core, in one direction.
struct CoreQueue {
    chain: ChainId,
    /// `true` if a job is queued, for the core or for the way, or being served.
    has_job: bool,
    /// Bytes that the last turn moved: the estimate for the next.
    estimate: u64,
}

struct Member {
    tenant: TenantId,
    /// The index in [`Shares::ways`].
    way: usize,
    /// Indexed by [`Direction`].
    queues: [CoreQueue; 2],
    /// The connection's chain at its way.
    way_chain: ChainId,
    /// The job that a paced way has chosen, until the core has served it.
    way_ticket: Option<Ticket<Transfer>>,
}

struct Tenant {
    id: TenantId,
    connections: usize,
}

pub(crate) struct Shares {
    scheduler: Scheduler<Transfer>,
    core: ResourceId,
    /// The executors of the core, indexed by [`Direction`].
    executors: [ExecutorId; 2],
    ways: Vec<Way>,
    /// `true` if any way has a rate.
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
        let ways: Vec<Way> = settings
            .engine
            .iter()
            .map(|peer| Way::new(&mut scheduler, &peer.name, peer.bytes_per_second()))
            .collect();
        let paced = ways.iter().any(|way| matches!(way.pace, Pace::Rate { .. }));
        let (members, tenants, options) = (HashMap::new(), HashMap::new(), HashMap::new());
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

    /// Changes the options of a tenant, which need not have a connection yet.
    fn change(&mut self, tenant: &str, change: impl FnOnce(&mut TenantOptions)) {
        let options = self.options.entry(tenant.into()).or_default();
        change(options);
        if let Some(there) = self.tenants.get(tenant) {
            // Cannot fail: the weight is in range, and the tenant exists.
            let _ = self.scheduler.set_options(there.id, *options);
        }
    }

    /// Adds a connection to engine `way` that is up.
    ///
    /// # Errors
    /// [`ShareError`], for options or a way that cannot be. The connection would never be served:
    /// the caller ends it.
    pub(crate) fn join(
        &mut self,
        connection: u32,
        tenant: &str,
        way: usize,
    ) -> Result<(), ShareError> {
        let transport = self.ways.get(way).map(|way| way.transport).ok_or(ShareError::Stages)?;
        let id = self.tenant(tenant)?;
        let [open, seal] = self.executors;
        // These do not fail: the tenant and the executors exist.
        let incoming = self.scheduler.open_free(id, &[open])?;
        let outgoing = self.scheduler.open_free(id, &[seal])?;
        let way_chain = self.scheduler.open_free(id, &[transport])?;
        let queues =
            [incoming, outgoing].map(|chain| CoreQueue { chain, has_job: false, estimate: 4096 });
        let member = Member { tenant: id, way, queues, way_chain, way_ticket: None };
        self.members.insert(connection, member);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.connections += 1;
        }
        Ok(())
    }

    /// Returns the scheduler's tenant `name`, which is added if it has no connection yet.
    ///
    /// # Errors
    /// [`ShareError::Weight`].
    fn tenant(&mut self, name: &str) -> Result<TenantId, ShareError> {
        if let Some(there) = self.tenants.get(name) {
            return Ok(there.id);
        }
        let options = self.options.get(name).copied().unwrap_or_default();
        let id = self.scheduler.add_tenant(options)?;
        self.tenants.insert(name.into(), Tenant { id, connections: 0 });
        Ok(id)
    }

    /// Removes a connection, and its tenant with the tenant's last connection.
    pub(crate) fn part(&mut self, connection: u32, now: Duration) {
        let Some(member) = self.members.remove(&connection) else { return };
        if let Some(ticket) = member.way_ticket {
            self.scheduler.failed(ticket, Duration::ZERO, now);
        }
        let [incoming, outgoing] = member.queues.map(|queue| queue.chain);
        for chain in [incoming, outgoing, member.way_chain] {
            self.scheduler.close(chain);
        }
        let (id, mut all) = (member.tenant, self.tenants.values_mut());
        let Some(tenant) = all.find(|tenant| tenant.id == id) else { return };
        tenant.connections -= 1;
        if tenant.connections == 0 {
            self.tenants.retain(|_, tenant| tenant.id != id);
            self.scheduler.remove_tenant(id);
        }
    }

    /// Queues a connection that has or may have something to do.
    pub(crate) fn want(&mut self, connection: u32, direction: Direction) {
        let Some(member) = self.members.get_mut(&connection) else { return };
        let queue = &mut member.queues[direction as usize];
        if std::mem::replace(&mut queue.has_job, true) {
            return;
        }
        let chain = match self.ways[member.way].pace {
            Pace::Rate { .. } if direction == Direction::Out => member.way_chain,
            _ => queue.chain,
        };
        // The chains exist as long as the connection.
        let _ = self.scheduler.push(chain, queue.estimate, Transfer { connection, direction });
    }

    /// Chooses the next connection, which the caller serves and returns by [`Shares::done`]: the
    /// core waits for it. Returns `None` if no connection has anything to do that may be done now.
    pub(crate) fn next(&mut self, now: Duration) -> Option<Ticket<Transfer>> {
        if self.paced {
            self.choose_for_ways(now);
        }
        self.scheduler.next(self.core, now)
    }

    /// Chooses a connection for each paced way that is free, and queues it for the core.
    fn choose_for_ways(&mut self, now: Duration) {
        let is_free = |way: &&Way| matches!(way.pace, Pace::Rate { free_at, .. } if free_at <= now);
        for way in self.ways.iter().filter(is_free) {
            // One connection at a time: the bytes that it sends say when the way is free again.
            let Some(ticket) = self.scheduler.next(way.resource, now) else { continue };
            let job = ticket.item;
            let Some(member) = self.members.get_mut(&job.connection) else {
                self.scheduler.failed(ticket, Duration::ZERO, now);
                continue;
            };
            let chain = member.queues[Direction::Out as usize].chain;
            let _ = self.scheduler.push(chain, ticket.bytes, job);
            member.way_ticket = Some(ticket);
        }
    }

    /// Ends a turn.
    pub(crate) fn done(&mut self, mut turn: Ticket<Transfer>, served: Served, now: Duration) {
        let Transfer { connection, direction } = turn.item;
        turn.bytes = served.bytes;
        self.scheduler.done(turn, served.bytes, served.busy.min(QUANTUM), now);
        let Some(member) = self.members.get_mut(&connection) else { return };
        let queue = &mut member.queues[direction as usize];
        queue.has_job = false;
        if served.bytes > 0 {
            queue.estimate = served.bytes;
        }
        if direction == Direction::Out {
            self.ways[member.way].sent(&mut self.scheduler, member, &served, now);
        }
    }

    /// Returns until when a connection waits for its paced way, or `None` if it need not wait.
    pub(crate) fn held(&self, connection: u32, now: Duration) -> Option<Duration> {
        if !self.paced {
            return None;
        }
        let member = self.members.get(&connection)?;
        let Pace::Rate { free_at, .. } = self.ways[member.way].pace else { return None };
        let waits = member.queues[Direction::Out as usize].has_job && member.way_ticket.is_none();
        (waits && free_at > now).then_some(free_at)
    }

    /// Returns the shares now, for display.
    pub(crate) fn view(&self, now: Duration) -> View {
        let shares = self.scheduler.shares(now);
        let tenants = shares.tenants.iter().map(|share| self.tenant_share(share, &shares));
        let mut tenants: Vec<TenantShare> = tenants.collect();
        tenants.sort_by(|a, b| a.tenant.cmp(&b.tenant));
        let resources = shares.resources.iter().enumerate().map(|(at, name)| ResourceShare {
            name: name.clone(),
            used: tenants.iter().map(|tenant| tenant.resources[at]).sum(),
            rate: self.ways.iter().find_map(|way| match way.pace {
                Pace::Rate { per_second, .. } if way.resource.index() == at => Some(per_second),
                _ => None,
            }),
        });
        let of_core = self.executors.into_iter().map(|id| (id, self.core));
        let of_ways = self.ways.iter().map(|way| (way.transport, way.resource));
        let executors = of_core.chain(of_ways).map(|(id, resource)| ExecutorCapacity {
            name: shares.capacities[id.index()].0.clone(),
            resource: shares.resources[resource.index()].clone(),
            capacity: shares.capacities[id.index()].1,
        });
        View { resources: resources.collect(), executors: executors.collect(), tenants }
    }

    fn tenant_share(&self, share: &share::Share, all: &share::Shares) -> TenantShare {
        let found = self.tenants.iter().find(|(_, tenant)| tenant.id == share.tenant);
        TenantShare {
            tenant: found.map_or_else(String::new, |(name, _)| name.clone()),
            weight: share.weight,
            cap: share.cap,
            bytes: share.bytes,
            rate: share.rate,
            formula: share.formula,
            resources: share.parts.clone(),
            dominant: share.dominant,
            dominant_by_formula: share.dominant_by_formula,
            limited_by: match share.limited_by {
                LimitedBy::Resource(resource) => all.resources[resource.index()].clone(),
                LimitedBy::Cap => "cap".into(),
                LimitedBy::Demand => "demand".into(),
            },
        }
    }
}

impl Way {
    /// Makes a way that carries `rate` bytes per second; `None` leaves the pace to the kernel.
    fn new(scheduler: &mut Scheduler<Transfer>, name: &str, rate: Option<u64>) -> Self {
        let resource = scheduler.add_resource(name, 1);
        let guess = rate.unwrap_or(FAST);
        let transport = scheduler.add_executor("transport", Class::Z, resource, guess);
        let paced = |per_second| Pace::Rate { per_second, free_at: Duration::ZERO };
        let pace = rate.map_or(Pace::Kernel { full_since: None }, paced);
        Self { resource, transport, pace }
    }

    /// Accounts for a turn in which `member` sent. The capacity of a way without a rate is measured
    /// while the socket is full.
    fn sent(
        &mut self,
        scheduler: &mut Scheduler<Transfer>,
        member: &mut Member,
        served: &Served,
        now: Duration,
    ) {
        match &mut self.pace {
            Pace::Rate { per_second, free_at } => {
                let Some(mut ticket) = member.way_ticket.take() else { return };
                // At least 1 ns: for no time at all, the estimate of the bytes would stay charged.
                let time = nanos(served.bytes, *per_second).max(Duration::from_nanos(1));
                *free_at = (*free_at).max(now.saturating_sub(BURST)) + time;
                ticket.bytes = served.bytes;
                scheduler.failed(ticket, time, now);
            }
            Pace::Kernel { full_since } => {
                let busy = full_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
                *full_since = served.blocked.then_some(now);
                if served.bytes > 0 {
                    scheduler.book(member.tenant, self.transport, served.bytes, busy, now);
                }
            }
        }
    }
}

/// Returns the time that `bytes` take at `rate` bytes per second.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_without_a_share_is_an_error() {
        let text = r#"
            name = "left"
            listen = "0.0.0.0:4790"
            certificate = "/etc/slipway/left.pem"
            key = "/etc/slipway/left.key"
            authority = "/etc/slipway/ca.pem"
            [[engine]]
            name = "right"
            at = "192.0.2.2:4790"
        "#;
        let mut shares = Shares::new(&toml::from_str(text).unwrap());
        shares.set_weight("heavy", f64::INFINITY);
        assert_eq!(shares.join(1, "heavy", 0), Err(ShareError::Weight));
        assert_eq!(shares.join(1, "light", 1), Err(ShareError::Stages));
        assert_eq!(shares.join(1, "light", 0), Ok(()));
        shares.part(1, Duration::ZERO);
        assert!(shares.members.is_empty() && shares.tenants.is_empty());
    }
}
