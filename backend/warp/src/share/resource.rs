//! A resource that executors share, and its tenants.

use std::time::Duration;

use super::heap::Heap;

/// A resource: what has a number of jobs in service at once.
pub(super) struct Resource {
    pub(super) name: String,
    /// The largest number of jobs that it has at once.
    pub(super) depth: usize,
    pub(super) in_service: usize,
    /// Tenants with a job to do, by the ticks that they have had.
    pub(super) ready: Heap<u128>,
    /// Tenants that wait for their cap, by the time at which it lets them begin.
    pub(super) held: Heap<Duration>,
    /// The ticks that the tenant served last had had: a tenant that comes back begins no earlier.
    pub(super) served: u128,
}
