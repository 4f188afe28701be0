//! Saved state: the transport's, the place of the region, which a successor has to be made with,
//! the size that was asked for, and the plugged blocks. The bytes of the blocks are the host's to
//! save.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio::state::{TransportState, decode, encode};

use crate::Geometry;
use crate::region::Region;

/// Version of the saved state. A state of another version is refused.
pub const STATE_VERSION: u32 = 1;

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-mem";

/// The device's own state.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceState {
    address: u64,
    bytes: u64,
    block: u64,
    node: u16,
    requested: u64,
    /// The plugged blocks, as ranges of their numbers, ascending: first, behind the last.
    plugged: Vec<[usize; 2]>,
}

/// The part of a saved state that is the device's own, checked as far as it can be alone.
pub(crate) struct Loaded {
    pub transport: TransportState,
    pub requested: u64,
    pub plugged: Vec<Range<usize>>,
}

pub(crate) fn save(transport: TransportState, region: &Region) -> Vec<u8> {
    let Geometry { address, bytes, block, node } = region.geometry;
    let plugged = region.blocks.runs().into_iter().map(|run| [run.start, run.end]).collect();
    let own = DeviceState { address, bytes, block, node, requested: region.requested, plugged };
    encode(DEVICE, STATE_VERSION, transport, own)
}

/// Decodes the state of a device with this geometry.
pub(crate) fn load(state: &[u8], own: &Geometry) -> Result<Loaded, StateError> {
    let (transport, saved): (_, DeviceState) = decode(DEVICE, STATE_VERSION, state)?;
    let DeviceState { address, bytes, block, node, requested, plugged } = saved;
    let found = Geometry { address, bytes, block, node };
    if found != *own {
        return Err(StateError::Inconsistent(format!("{found:?} in place of {own:?}")));
    }
    let plugged = plugged.into_iter().map(|[start, end]| start..end).collect();
    Ok(Loaded { transport, requested, plugged })
}
