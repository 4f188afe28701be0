//! A decorator that makes requests fail by rules, for tests.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::check::complete;
use crate::{Completion, Disk, DiskError, Operation, Request};

/// A rule for which requests fail, and how.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// The operation that fails, or `None` for any.
    pub operation: Option<Operation>,
    /// The blocks of which a request must touch one to fail, or `None` for any request, flushes
    /// included.
    pub blocks: Option<Range<u64>>,
    /// The number of matching requests that pass first.
    pub skip: u64,
    /// The number of requests that fail then; after them the rule has no effect.
    pub count: u64,
    /// The error with which they fail.
    pub error: DiskError,
}

impl FaultRule {
    /// Returns a rule by which every request fails with `error`.
    pub fn always(error: DiskError) -> Self {
        Self { operation: None, blocks: None, skip: 0, count: u64::MAX, error }
    }

    fn matches(&self, request: &Request) -> bool {
        let end = request.lba.saturating_add(u64::from(request.blocks));
        let touches = |range: &Range<u64>| request.lba < range.end && range.start < end;
        self.operation.is_none_or(|operation| operation == request.operation)
            && self
                .blocks
                .as_ref()
                .is_none_or(|range| request.operation != Operation::Flush && touches(range))
    }

    /// Counts a request and returns its error, or `None` if the rule does not make it fail.
    fn strikes(&mut self, request: &Request) -> Option<DiskError> {
        if self.count == 0 || !self.matches(request) {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.count -= 1;
        Some(self.error)
    }
}

/// A disk that fails requests by rules, in `submit`; the inner disk does not see them.
pub struct FaultDisk<D> {
    inner: D,
    rules: Vec<FaultRule>,
    /// A vector that every `submit` reuses.
    passing: Vec<Request>,
}

impl<D: Disk> FaultDisk<D> {
    /// Wraps `inner` with these rules; the first that applies to a request decides.
    pub fn new(inner: D, rules: Vec<FaultRule>) -> Self {
        Self { inner, rules, passing: Vec::new() }
    }

    /// Returns the rules, which may be changed between requests.
    pub fn rules(&mut self) -> &mut Vec<FaultRule> {
        &mut self.rules
    }
}

impl<D: Disk> Disk for FaultDisk<D> {
    super::forward_to_inner!();

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.drain(..) {
            match self.rules.iter_mut().find_map(|rule| rule.strikes(&request)) {
                Some(error) => completions.push(complete(request, Err(error))),
                None => self.passing.push(request),
            }
        }
        self.inner.submit(&mut self.passing, completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inner.poll(completions);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        self.inner.cancel(tag, completions)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_descriptor()
    }
}
