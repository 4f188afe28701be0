//! Saved state: everything but the queues' indexes, which are in the guest's memory. Buffers are
//! used in order, so the used index says how far a queue came.
//!
//! The types follow the device's own version: a device that embeds them raises its version when
//! they change.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_pci::state::{ConfigState, MsixState};

use crate::registers::RegistersState;

/// The saved state of a [`Transport`](crate::Transport).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    /// Configuration space.
    pub pci: ConfigState,
    /// MSI-X table and pending bits.
    pub msix: MsixState,
    /// The common configuration.
    pub registers: RegistersState,
    /// The ISR status.
    pub isr: u8,
}

/// The saved state of a device whose own part is a `T`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceState<T> {
    device: String,
    version: u32,
    transport: TransportState,
    own: T,
}

/// Encodes the state of a device: its name, the version of `T`, the transport, the device's own
/// part.
pub fn encode<T: Serialize>(
    device: &str,
    version: u32,
    transport: TransportState,
    own: T,
) -> Vec<u8> {
    let state = DeviceState { device: device.into(), version, transport, own };
    // Numbers, vectors and names can always be written.
    serde_json::to_vec(&state).unwrap_or_default()
}

/// Decodes what [`encode`] has made for the same device and version. The parts are not checked yet.
///
/// # Errors
/// [`StateError::Unknown`].
pub fn decode<T: DeserializeOwned>(
    device: &str,
    version: u32,
    bytes: &[u8],
) -> Result<(TransportState, T), StateError> {
    let state: DeviceState<T> =
        serde_json::from_slice(bytes).map_err(|error| StateError::Unknown(error.to_string()))?;
    if state.device != device || state.version != version {
        return Err(StateError::Unknown(format!("{} {}", state.device, state.version)));
    }
    Ok((state.transport, state.own))
}
