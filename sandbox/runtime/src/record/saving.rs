//! The saves of a sandbox's machine, as its record has them.

use serde::{Deserialize, Serialize};

/// The saves of a sandbox's machine: as a snapshot, to a file of its own, or as a template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Saving {
    /// Set while the sandbox stands still to be saved as a snapshot. A daemon that finds it set has
    /// the sandbox go on.
    #[serde(rename = "saving")]
    pub under_way: bool,
    /// Set while the sandbox is paused and its memory is in a file (`to_file`): it has no VMM
    /// then. A later daemon finds it so, and ends a VMM with which it was about to come back.
    pub in_file: bool,
    /// The name of the template that the sandbox is made for. It ends once its machine is saved.
    #[serde(rename = "saves")]
    pub as_template: Option<String>,
}

impl Saving {
    /// Returns whether the sandbox is made for a template.
    pub fn is_for_template(&self) -> bool {
        self.as_template.is_some()
    }
}
