//! The snapshot with which a sandbox began.

use serde::{Deserialize, Serialize};

use super::{Needs, Record};

/// The traits of a saved sandbox that those have which begin with its snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The id by which the guest knows its disks: that of the sandbox that booted.
    pub disks: String,
    /// The number of functions that can be added to the machine.
    pub slots: usize,
    /// The parts of the initramfs that the guest booted.
    pub needs: Needs,
}

impl Record {
    /// Returns the id by which the guest knows its disks.
    pub fn disks_id(&self) -> &str {
        self.origin.as_ref().map_or(&self.id, |origin| &origin.disks)
    }

    /// Returns the parts of the initramfs that the guest booted.
    pub fn booted_needs(&self) -> Needs {
        let reporting = || self.booted.as_ref().is_some_and(|booted| booted.reporting);
        match &self.origin {
            Some(origin) => origin.needs,
            None if self.template.is_some() => Needs {
                memory: self.hot_bytes() > 0,
                reporting: reporting(),
                ..Needs::of_template(self.plugged.fork_socket_slot)
            },
            None => Needs::of(self),
        }
    }
}
