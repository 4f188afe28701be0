//! Saved state: the transport's, the place of the region, which a successor has to be made with,
//! the size that was asked for, the usable part of the region, and the plugged blocks. The bytes of
//! the blocks are the host's to save.

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
pub(crate) struct DeviceState {
    address: u64,
    bytes: u64,
    block: u64,
    node: u16,
    pub requested: u64,
    /// The bytes in which blocks can be plugged; `None` for all: the state is of a device whose
    /// usable part did not grow.
    #[serde(default)]
    pub usable: Option<u64>,
    /// The plugged blocks, as ranges of their numbers, ascending: first, behind the last.
    pub plugged: Vec<[usize; 2]>,
}

pub(crate) fn save(transport: TransportState, region: &Region) -> Vec<u8> {
    let Geometry { address, bytes, block, node, .. } = region.geometry;
    let plugged = region.blocks.runs().into_iter().map(|run| [run.start, run.end]).collect();
    let (requested, usable) = (region.requested, Some(region.usable));
    let own = DeviceState { address, bytes, block, node, requested, usable, plugged };
    encode(DEVICE, STATE_VERSION, transport, own)
}

/// Decodes the state of a device with this geometry. Its own part is checked as far as it can be
/// alone.
pub(crate) fn load(
    state: &[u8],
    own: &Geometry,
) -> Result<(TransportState, DeviceState), StateError> {
    let (transport, saved): (_, DeviceState) = decode(DEVICE, STATE_VERSION, state)?;
    let DeviceState { address, bytes, block, node, .. } = saved;
    let found = Geometry { address, bytes, block, node, unit: own.unit };
    if found != *own {
        return Err(StateError::Inconsistent(format!("{found:?} in place of {own:?}")));
    }
    Ok((transport, saved))
}
