//! Fair shares: how much of each executor each tenant gets.
//!
//! The policy is SG-IOV's: dominant resource fairness where a tenant moves the same bytes through
//! all executors of its chain ([`formula`]). Weighted fair queueing on each resource by itself
//! enforces it: [`Scheduler`] has a queue for each tenant and executor, and picks the tenant that
//! has had the least of the resource in proportion to its weight there. The weight of tenant *t* on
//! resource *r* is
//!
//! > φ(t, r) = w(t) · d(t, r) / max over r' of d(t, r')
//!
//! with *d* the time that *r* spends on one of *t*'s bytes. Where each executor is a resource of
//! its own, the weight is w(t) · Z(t) / C(r) (for Z and C see [`formula`]), so tenants get bytes in
//! proportion to w · Z wherever they meet. The queues between the stages of a chain are short, so a
//! tenant that is limited on one resource leaves its share of the others to other tenants. The
//! shares converge to those of progressive filling without anybody computing them, and no resource
//! is idle while a tenant could use it.
//!
//! Executors that share a core are one resource, the core's time. A job is charged its bytes
//! divided by the executor's capacity when it starts; the difference to the time that it took is
//! settled when it ends. Capacities are measured ([`Capacity`]): bytes per busy second, in which
//! the last tenth of a second of work counts most.

mod class;
pub mod formula;
mod heap;
mod meter;
mod pick;
mod resource;
mod scheduler;
mod snapshot;
mod tenant;

pub use class::Class;
pub use meter::{Capacity, Throughput};
pub use pick::Ticket;
pub use scheduler::Scheduler;
pub use snapshot::{ExecutorShare, LimitedBy, Share, Shares};
pub use tenant::TenantOptions;

/// A resource that is used up in time: a core, an accelerator, a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(pub(crate) u32);

impl ResourceId {
    /// Returns the index of the resource, in the order in which resources were added.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// An executor of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecutorId(pub(crate) u32);

impl ExecutorId {
    /// Returns the index of the executor, in the order in which executors were added.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A tenant of a scheduler. Not reused before 2^32 more tenants and chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// A chain of a tenant: the stages that some of its pipes share. Not reused before 2^32 more
/// tenants and chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainId {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// The reason why a scheduler refuses a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// The tenant does not exist, or no longer.
    #[error("no such tenant")]
    NoTenant,
    /// The chain does not exist, or no longer.
    #[error("no such chain")]
    NoChain,
    /// The chain has no executor, an unknown executor, or more than [`MAX_STAGES`].
    #[error("a chain has 1 to {MAX_STAGES} executors that are there")]
    Stages,
    /// The weight is not a number from [`MIN_WEIGHT`] to [`MAX_WEIGHT`].
    #[error("a weight is a number from {MIN_WEIGHT} to {MAX_WEIGHT}")]
    Weight,
}

/// The largest number of executors in a chain.
pub const MAX_STAGES: usize = 8;
/// The smallest weight.
pub const MIN_WEIGHT: f64 = 0.001;
/// The largest weight.
pub const MAX_WEIGHT: f64 = 1000.0;
