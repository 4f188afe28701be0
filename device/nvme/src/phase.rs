//! The states of a controller between resets.

use serde::{Deserialize, Serialize};

/// The state of a controller between resets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// CC.EN is 0, or was 0 at the last look. There are no queues.
    Disabled,
    /// CSTS.RDY is 1.
    Enabled,
    /// The controller waits for the disks after CC.EN fell, or after a function-level reset.
    Resetting,
    /// The controller could not be enabled; CSTS.CFS is 1.
    Refused,
}

/// The progress of a shutdown (section 7.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shutdown {
    None,
    /// The controller waits for commands in flight.
    Draining,
    /// The controller waits for the flush of every disk.
    Flushing,
    Complete,
}
