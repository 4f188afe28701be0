//! Saved state: the transport's, and what each port and the driver have told each other. The first
//! chain of a transmit queue that was not given back is begun again, behind the bytes that the host
//! has read.

use serde::{Deserialize, Serialize};

use crate::PortSettings;
use crate::port::Dialogue;

/// Version of the types in this module. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
pub(crate) const DEVICE: &str = "virtio-console";

/// The saved state of a port.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PortState {
    pub name: String,
    pub is_console: bool,
    pub dialogue: Dialogue,
    /// Bytes that the host has read of the oldest chain that was not given back.
    pub taken: u64,
}

impl PortState {
    /// Returns whether the state is of a port with these settings.
    pub fn is_of(&self, settings: &PortSettings) -> bool {
        self.name == settings.name && self.is_console == settings.is_console
    }

    /// Returns whether a driver could have led to this state that has started, and has control
    /// queues.
    pub fn is_sound(&self, started: bool, multiport: bool) -> bool {
        self.dialogue.is_sound()
            && (started || self.taken == 0)
            && (started && multiport || self.dialogue == Dialogue::default())
    }
}
