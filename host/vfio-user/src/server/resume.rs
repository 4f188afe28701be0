//! Functions that go on for a client that connects again: `VFIO_USER_DEVICE_FEATURE`.
//!
//! An endpoint with a keeper either keeps the client's connection ([`crate::kept`]), or, if the
//! client can connect again by itself, the function's state alone. Both agree on the latter when
//! they negotiate (capability `slipway_resume`, an extension). Then the endpoint that succeeds this
//! one *holds* the function: it has its predecessor's state and does not run. The client
//! 1. connects and negotiates, and finds the device's state to be STOP;
//! 2. maps its memory and routes its interrupts, as it had before;
//! 3. sets the device's state to RUNNING, and the function goes on.
//!
//! A client that accesses the function before that gets it in its state after a reset, and so does
//! a client of another user or one that does not resume.

use rustix::io::Errno;
use slipway_vfio_user_spec::{
    Command, DeviceFeature, DeviceState, RegionAccess, U32, device_state, feature, region,
};
use zerocopy::{FromBytes, IntoBytes};

use super::{Answer, Session, exactly, prefix};
use crate::device::Device;

impl Session {
    /// Returns whether the client can resume the function after a replacement of the server.
    pub(super) fn is_resumable(&self, device: &Device) -> bool {
        // Lanes take a predecessor's commands up when they are made, before any client is there.
        (self.kept.is_some() || self.released.is_some()) && !device.has_lanes
    }

    /// Reads or sets the device's state: STOP if the function is held, or RUNNING.
    pub(super) fn device_feature(
        &mut self,
        device: &mut Device,
        payload: &[u8],
    ) -> Result<Answer, Errno> {
        let (request, data): (DeviceFeature, _) = prefix(payload)?;
        let flags = request.flags.get();
        let resumes = self.negotiated.is_some_and(|agreed| agreed.resume);
        if !resumes || flags & feature::NUMBER != feature::DEVICE_STATE {
            return Err(Errno::NOTSUP);
        }
        match flags & !feature::NUMBER {
            feature::GET => {
                let state = if device.held { device_state::STOP } else { device_state::RUNNING };
                Ok(reply(flags, state))
            }
            feature::SET => {
                let wanted: DeviceState = exactly(data)?;
                if wanted.state.get() != device_state::RUNNING {
                    return Err(Errno::NOTSUP);
                }
                if device.held {
                    device.resume().map_err(|_| Errno::STALE)?;
                }
                Ok(reply(flags, device_state::RUNNING))
            }
            _ => Err(Errno::NOTSUP),
        }
    }
}

fn reply(flags: u32, state: u32) -> Answer {
    let len = size_of::<DeviceFeature>() + size_of::<DeviceState>();
    let head = DeviceFeature { argsz: U32::new(len as u32), flags: U32::new(flags) };
    let state = DeviceState { state: U32::new(state), ..DeviceState::default() };
    Answer::Reply([head.as_bytes(), state.as_bytes()].concat())
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
