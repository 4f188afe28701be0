//! Saved state: the transport's, and the range of the memory, which a successor has to be made
//! with.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio::state::{TransportState, decode, encode};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-pmem";

/// The device's own state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceState {
    start: u64,
    bytes: u64,
}

pub(crate) fn save(transport: TransportState, (start, bytes): (u64, u64)) -> Vec<u8> {
    encode(DEVICE, STATE_VERSION, transport, DeviceState { start, bytes })
}

/// Returns the transport's state of a device whose memory is at `range`.
pub(crate) fn load(state: &[u8], range: (u64, u64)) -> Result<TransportState, StateError> {
    let (transport, DeviceState { start, bytes }) = decode(DEVICE, STATE_VERSION, state)?;
    if (start, bytes) != range {
        let (at, len) = range;
        let what = format!("memory {start:#x} + {bytes:#x} in place of {at:#x} + {len:#x}");
        return Err(StateError::Inconsistent(what));
    }
    Ok(transport)
}
