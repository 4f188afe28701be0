//! Saved state: the transport's, and the identity of the file server's session.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio::state::{TransportState, decode, encode};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-fs";

/// The device's own state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceState {
    session: u64,
    /// `true` if requests were under way, which a successor cannot go on with.
    under_way: bool,
}

impl DeviceState {
    /// Returns an error if a device with this session cannot go on.
    pub(crate) fn check(&self, session: u64) -> Result<(), StateError> {
        if self.session != session {
            return Err(StateError::Inconsistent("a session of another file server".into()));
        }
        if self.under_way {
            return Err(StateError::Inconsistent("requests were under way".into()));
        }
        Ok(())
    }
}

pub(crate) fn save(transport: TransportState, session: u64, under_way: bool) -> Vec<u8> {
    encode(DEVICE, STATE_VERSION, transport, DeviceState { session, under_way })
}

pub(crate) fn load(bytes: &[u8]) -> Result<(TransportState, DeviceState), StateError> {
    decode(DEVICE, STATE_VERSION, bytes)
}
