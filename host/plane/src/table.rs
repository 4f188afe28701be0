//! The table of endpoints.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use crate::endpoint::Served;

/// The record of an id, which is also taken while its endpoint is made or removed.
pub(crate) enum Slot {
    /// The endpoint is being made or removed; it counts towards the load of these reactors.
    Reserved(Vec<usize>),
    Served(Box<Served>),
}

impl Slot {
    /// Returns the numbers of the endpoint's reactors.
    pub fn reactors(&self) -> &[usize] {
        match self {
            Self::Reserved(reactors) => reactors,
            Self::Served(served) => served.reactors(),
        }
    }
}

/// All endpoints, by id.
#[derive(Default)]
pub(crate) struct Endpoints(Mutex<BTreeMap<String, Slot>>);

impl Endpoints {
    pub fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
