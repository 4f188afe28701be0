//! The handle to a switch.

use slipway_switch::Handle;

/// The control thread's handle to a switch. Clones refer to the same switch.
#[derive(Clone)]
pub struct SwitchHandle {
    /// The means to reach the switch.
    pub handle: Handle,
    /// The number of the switch's reactor.
    pub reactor: usize,
    /// The switch was made by a request. Otherwise it exists because an endpoint needs it.
    pub(crate) made: bool,
}
