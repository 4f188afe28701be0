//! A disk that does nothing, to measure everything else.

use crate::check::{admit, complete};
use crate::{Completion, Disk, Geometry, Operation, Request};

/// Reads leave the spans as they are, writes are dropped, everything succeeds at once.
#[derive(Debug)]
pub struct NullDisk(Geometry);

impl NullDisk {
    /// A disk of this shape.
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
            let result = admit(&self.0, &request).map(drop);
            completions.push(complete(request, result));
        }
    }

    fn poll(&mut self, _: &mut Vec<Completion>) {}

    fn copies(&self, _: Operation) -> bool {
        false
    }
}
