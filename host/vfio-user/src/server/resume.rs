//! Functions that go on for a client that connects again.
//!
//! An endpoint with a keeper either keeps the client's connection ([`crate::kept`]), or, if the
//! client can connect again by itself, the function's state alone. Both agree on the latter when
//! they negotiate (capability `slipway_resume`, an extension). Then the endpoint that succeeds this
//! one *holds* the function: it has its predecessor's state and does not run. The client
//! 1. connects and negotiates, and finds the device's state to be STOP;
//! 2. maps its memory and routes its interrupts, as it had before;
//! 3. sets the device's state to RUNNING ([`super::migration`]), and the function goes on.
//!
//! A client that had stopped the function sets its state to STOP instead, and it stays stopped.
//!
//! A client that accesses the function before that gets it in its state after a reset, and so does
//! a client of another user or one that does not resume.

use slipway_vfio_user_spec::{Command, RegionAccess, region};
use zerocopy::FromBytes;

use super::Session;
use crate::device::Device;

impl Session {
    /// Returns whether the client can resume the function after a replacement of the server.
    pub(super) fn is_resumable(&self, device: &Device) -> bool {
        // Lanes take a predecessor's commands up when they are made, before any client is there.
        (self.kept.is_some() || self.released.is_some()) && !device.has_lanes
    }
}

/// Returns whether a request depends on the function's state. Reads of configuration space do not:
/// a client compares the function's identity before it resumes the function.
pub(super) fn touches(command: Command, payload: &[u8]) -> bool {
    match command {
        Command::RegionRead => {
            let request = RegionAccess::read_from_prefix(payload);
            request.is_ok_and(|(request, _)| request.region.get() != region::CONFIG)
        }
        Command::RegionWrite | Command::RegionWriteMulti | Command::DeviceReset => true,
        _ => false,
    }
}
