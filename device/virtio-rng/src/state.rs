//! Saved state: the transport's. The device has none of its own, and a successor's bytes come from
//! the successor's source.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio::state::{TransportState, decode, encode};

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-rng";

/// The device's own state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Own {}

pub(crate) fn save(transport: TransportState) -> Vec<u8> {
    encode(DEVICE, STATE_VERSION, transport, Own {})
}

pub(crate) fn load(bytes: &[u8]) -> Result<TransportState, StateError> {
    let (transport, Own {}) = decode(DEVICE, STATE_VERSION, bytes)?;
    Ok(transport)
}
