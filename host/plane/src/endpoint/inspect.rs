//! The view of an endpoint.

use super::{FunctionKind, Served};
use crate::door::Door;
use crate::views::{EndpointView, PlacedThread};

impl Served {
    /// Returns a view of the endpoint, in which those of its controller's threads are still
    /// missing, and the means to ask the controller for them, if there is one.
    pub fn inspect(&self) -> (EndpointView, Option<Door>) {
        let (kind, door) = match &self.kind {
            FunctionKind::Nvme(nvme) => ("nvme", Some(nvme.door.clone())),
            FunctionKind::Network(_) => ("network", None),
            FunctionKind::Hardware => ("hardware", None),
        };
        let threads: &[usize] = if door.is_some() { &self.reactors } else { &[] };
        let thread = |reactor: &usize| PlacedThread { reactor: *reactor, view: None };
        let view = EndpointView {
            id: self.id.clone(),
            kind: kind.to_owned(),
            reactor: self.reactors.first().copied(),
            server: self.control.inspect(),
            threads: threads.iter().map(thread).collect(),
        };
        (view, door)
    }
}
