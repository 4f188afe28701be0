//! Faults where a test wants them.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::check::complete;
use crate::{Completion, Disk, DiskError, Geometry, Operation, Request};

/// Which requests fail, and how.
#[derive(Clone, Debug)]
pub struct FaultRule {
    /// Only this operation; None: any.
    pub operation: Option<Operation>,
    /// Only requests that touch one of these blocks; None: any, flushes included.
    pub blocks: Option<Range<u64>>,
    /// Requests that match and still pass.
    pub skip: u64,
    /// Requests that fail then; after them the rule is over.
    pub count: u64,
    /// How they fail.
    pub error: DiskError,
}

impl FaultRule {
    /// Every request fails with `error`.
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

    /// How this request fails, if it does; counts it.
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

/// A disk that fails requests by rules, in `submit`, without the inner disk seeing them.
pub struct FaultDisk<D> {
    inner: D,
    rules: Vec<FaultRule>,
    /// Used again by every `submit`.
    passing: Vec<Request>,
}

impl<D: Disk> FaultDisk<D> {
    /// `inner` with these rules; the first that strikes decides.
    pub fn new(inner: D, rules: Vec<FaultRule>) -> Self {
        Self { inner, rules, passing: Vec::new() }
    }

    /// The rules, to change them between requests.
    pub fn rules(&mut self) -> &mut Vec<FaultRule> {
        &mut self.rules
    }
}

impl<D: Disk> Disk for FaultDisk<D> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn release(&mut self) {
        self.inner.release();
    }

    fn refresh(&mut self) -> Geometry {
        self.inner.refresh()
    }

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

    fn copies(&self, operation: Operation) -> bool {
        self.inner.copies(operation)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wake_descriptor()
    }
}
