//! Fair shares: who gets how much of which executor.
//!
//! The policy is SG-IOV's: dominant resource fairness where a tenant moves the same bytes through all
//! executors of its chain ([`formula`]). What enforces it is weighted fair queueing on every resource by
//! itself: [`Scheduler`] has a queue for each tenant and executor, and picks the tenant that has had the
//! least of the resource for its weight there. The weight of tenant *t* on resource *r* is
//!
//! > φ(t, r) = w(t) · d(t, r) / max over r' of d(t, r')
//!
//! with *d* the time that *r* spends on one of *t*'s bytes. Where each executor is a resource of its own that
//! is Z(t) / C(r), so that tenants get bytes in the proportion of their Z wherever they meet; the queues between
//! the stages of a chain are short, so what a tenant cannot get on one resource it does not take on another, and
//! others do. This converges to what progressive filling says, nobody computes it, and nothing is left idle
//! that somebody could use.
//!
//! Executors that share a core are one resource, the core's time: a job costs its bytes by the executor's
//! capacity, and the difference to the time that it took is settled when it ends. Capacities are measured
//! ([`Capacity`]): bytes per busy second, the last tenth of a second of work counting most.

pub mod formula;
mod heap;
mod meter;
mod pick;
mod scheduler;
mod snapshot;
mod tenant;

pub use meter::{Capacity, Throughput};
pub use pick::Ticket;
pub use scheduler::Scheduler;
pub use snapshot::{ExecutorShare, LimitedBy, Share, Shares};
pub use tenant::TenantOptions;

/// Something that is used up in time: a core, an accelerator, a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(pub(crate) u32);

impl ResourceId {
    /// Its place among the resources, in the order in which they were added.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// An executor of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExecutorId(pub(crate) u32);

impl ExecutorId {
    /// Its place among the executors, in the order in which they were added.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A tenant of a scheduler. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// A chain of a tenant: what some of its pipes have in common. Never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChainId {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// Why a scheduler refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// No such tenant, or no longer.
    #[error("no such tenant")]
    NoTenant,
    /// No such chain, or no longer.
    #[error("no such chain")]
    NoChain,
    /// A chain without an executor, with one that is not there, or with more than [`MAX_STAGES`].
    #[error("a chain has 1 to {MAX_STAGES} executors that are there")]
    Stages,
    /// A weight that is no number from [`MIN_WEIGHT`] to [`MAX_WEIGHT`].
    #[error("a weight is a number from {MIN_WEIGHT} to {MAX_WEIGHT}")]
    Weight,
}

/// Executors of a chain, at most.
pub const MAX_STAGES: usize = 8;
/// The least weight.
pub const MIN_WEIGHT: f64 = 0.001;
/// The greatest weight.
pub const MAX_WEIGHT: f64 = 1000.0;
