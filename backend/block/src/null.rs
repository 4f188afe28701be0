//! A disk that does nothing, to measure everything else.

use slipway_ram::Span;

use crate::check::{check_request, check_transfer, complete};
use crate::{Completion, Disk, Geometry, Operation, Request, Transferred};

/// Reads leave the spans as they are, writes are dropped, everything succeeds at once.
#[derive(Debug)]
pub struct NullDisk(Geometry);

impl NullDisk {
    /// Creates a disk of this shape.
    pub fn new(geometry: Geometry) -> Self {
        Self(geometry)
    }
}

impl Disk for NullDisk {
    fn geometry(&self) -> Geometry {
        self.0
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        for request in requests.drain(..) {
            let result = check_request(&self.0, &request).map(drop);
            completions.push(complete(request, result));
        }
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        Some(check_transfer(&self.0, operation, at, spans).map(drop))
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}

    fn copies(&self, _: Operation) -> bool {
        false
    }
}
