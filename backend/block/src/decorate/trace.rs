//! A decorator that counts a disk's requests.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use slipway_telemetry::Clock;

use crate::{Completion, Disk, Operation, Request};

/// The counters of one operation. Each is exact; read together, they may be from slightly different
/// times.
#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    errors: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
    longest: AtomicU64,
}

/// The counters of a disk, per operation; any thread may read them.
#[derive(Debug, Default)]
pub struct DiskStats([Counters; 5]);

/// A snapshot of the counters of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// The number of requests that ended.
    pub requests: u64,
    /// The number of those that failed.
    pub errors: u64,
    /// The bytes of the successful requests; 0 for flushes.
    pub bytes: u64,
    /// The sum of the times from submission to the poll that saw the completion.
    pub total: Duration,
    /// The longest of these times.
    pub longest: Duration,
}

fn index(operation: Operation) -> usize {
    match operation {
        Operation::Read => 0,
        Operation::Write => 1,
        Operation::Flush => 2,
        Operation::WriteZeroes => 3,
        Operation::Discard => 4,
    }
}

impl DiskStats {
    /// Returns the figures of one operation.
    pub fn figures(&self, operation: Operation) -> Figures {
        let counters = &self.0[index(operation)];
        Figures {
            requests: counters.requests.load(Relaxed),
            errors: counters.errors.load(Relaxed),
            bytes: counters.bytes.load(Relaxed),
            total: Duration::from_nanos(counters.nanoseconds.load(Relaxed)),
            longest: Duration::from_nanos(counters.longest.load(Relaxed)),
        }
    }

    fn count(&self, request: &Pending, failed: bool, now: Duration) {
        let counters = &self.0[index(request.operation)];
        let took = now.saturating_sub(request.submitted).as_nanos() as u64;
        counters.requests.fetch_add(1, Relaxed);
        counters.errors.fetch_add(u64::from(failed), Relaxed);
        counters.bytes.fetch_add(if failed { 0 } else { request.bytes }, Relaxed);
        counters.nanoseconds.fetch_add(took, Relaxed);
        counters.longest.fetch_max(took, Relaxed);
    }
}

/// A request in flight.
struct Pending {
    operation: Operation,
    bytes: u64,
    submitted: Duration,
}

/// A disk that counts its requests.
pub struct TraceDisk<D> {
    inner: D,
    clock: Arc<dyn Clock>,
    stats: Arc<DiskStats>,
    pending: HashMap<u64, Pending>,
}

impl<D: Disk> TraceDisk<D> {
    /// Wraps `inner`; requests are timed by `clock`.
    pub fn new(inner: D, clock: Arc<dyn Clock>) -> Self {
        Self { inner, clock, stats: Arc::default(), pending: HashMap::new() }
    }

    /// Returns the counters, which stay up to date.
    pub fn stats(&self) -> Arc<DiskStats> {
        Arc::clone(&self.stats)
    }

    fn count(&mut self, ended: &[Completion]) {
        if ended.is_empty() {
            return;
        }
        let now = self.clock.now();
        for completion in ended {
            if let Some(request) = self.pending.remove(&completion.tag) {
                self.stats.count(&request, completion.result.is_err(), now);
            }
        }
    }
}

impl<D: Disk> Disk for TraceDisk<D> {
    super::forward_to_inner!();

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        let submitted = self.clock.now();
        let block = u64::from(self.geometry().block_size);
        for request in requests.iter() {
            let operation = request.operation;
            let blocks = if operation == Operation::Flush { 0 } else { request.blocks };
            let bytes = u64::from(blocks) * block;
            self.pending.insert(request.tag, Pending { operation, bytes, submitted });
        }
        let before = completions.len();
        self.inner.submit(requests, completions);
        self.count(&completions[before..]);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let before = completions.len();
        self.inner.poll(completions);
        self.count(&completions[before..]);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let before = completions.len();
        let cancelled = self.inner.cancel(tag, completions);
        self.count(&completions[before..]);
        cancelled
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_descriptor()
    }
}
