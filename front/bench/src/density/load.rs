//! Loads of density.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The things that a node has more and more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unit {
    /// Sandboxes with a container each.
    Sandbox,
    /// Containers of one pod.
    Replica,
}

impl Unit {
    /// Both, in the order of tables.
    pub const ALL: [Self; 2] = [Self::Sandbox, Self::Replica];

    /// Returns the names of one and of several, and the word for where they are.
    pub(super) fn names(self) -> [&'static str; 3] {
        match self {
            Self::Sandbox => ["sandbox", "sandboxes", "deployed"],
            Self::Replica => ["replica", "replicas", "in one pod"],
        }
    }
}

/// A load: so many sandboxes, or containers of one pod, are left alone, or further ones start
/// beside them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DensityLoad {
    /// The things that are counted.
    pub unit: Unit,
    /// The number of those that are there.
    pub count: u32,
    /// The number of sandboxes that start at once beside them, and are removed. 0: those that are
    /// there are left alone, and their memory is read.
    pub more: u32,
}

impl fmt::Display for DensityLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [_, _, there] = self.unit.names();
        write!(f, "{} {there}", self.count)?;
        if self.more > 0 { write!(f, ", {} more at once", self.more) } else { Ok(()) }
    }
}
