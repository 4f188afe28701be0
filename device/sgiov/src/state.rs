//! Saved state: the registers. All other state is in the guest's memory and with the peer.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_pci::state::{ConfigState, MsixState};
use slipway_sgiov_spec::function::{BROKEN, RUNNING};

use crate::Device;

/// Version of the types in this module. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "sgiov";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    device: String,
    version: u32,
    pci: ConfigState,
    msix: MsixState,
    memory: u64,
    status: u32,
}

pub(crate) fn save(device: &Device) -> Vec<u8> {
    let state = SavedState {
        device: DEVICE.into(),
        version: STATE_VERSION,
        pci: device.pci.save(),
        msix: device.msix.save(),
        memory: device.at,
        status: device.exchange.state().status,
    };
    // Numbers and vectors of numbers can always be written.
    serde_json::to_vec(&state).unwrap_or_default()
}

pub(crate) fn restore(device: &mut Device, bytes: &[u8]) -> Result<(), StateError> {
    let state: SavedState =
        serde_json::from_slice(bytes).map_err(|error| StateError::Unknown(error.to_string()))?;
    if state.device != DEVICE || state.version != STATE_VERSION {
        return Err(StateError::Unknown(format!("{} {}", state.device, state.version)));
    }
    let broken = state.status & 0xffff == BROKEN && (1..=6).contains(&(state.status >> 16));
    if state.status != 0 && state.status != RUNNING && !broken {
        return Err(StateError::Inconsistent(format!("status {:#x}", state.status)));
    }
    device.pci.restore(&state.pci)?;
    device.msix.restore(&state.msix)?;
    device.at = state.memory;
    device.set_status(state.status);
    device.route();
    Ok(())
}
