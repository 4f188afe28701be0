//! Saved state: registers, PHY, EEPROM interface, interrupts, statistics and the rings' places. The
//! rings themselves are in the guest's memory. A frame whose descriptors were not all read is read
//! again from its first one, unless it has too many: the rest of such a frame is dropped.
//!
//! The address that the host gave a device stays the device's own when it takes over a state of a
//! device with another one: in the EEPROM, and in the receive address that was read from there.

use serde::{Deserialize, Serialize};
use slipway_e1000_spec::{Context, DESCRIPTOR, Transmit};
use slipway_pci::StateError;
use slipway_pci::state::ConfigState;
use slipway_switch::Mac;

use crate::Device;
use crate::eeprom::Wires;
use crate::moderation::ModeratorState;
use crate::phy::{Phy, PhyState};
use crate::transmit::{Contexts, TransmitState};

/// Version of the types in this module. A state of version 1 is taken over, too: its types are the
/// same, but its device has no register CSBK, which a driver of version 2 may use.
pub const STATE_VERSION: u32 = 2;

/// The versions that are taken over.
const KNOWN: std::ops::RangeInclusive<u32> = 1..=STATE_VERSION;

/// Longest state in bytes; a full one has about a sixth of this.
pub(crate) const MAX_LEN: usize = 65_536;
/// The mark of a state of this kind of device.
const DEVICE: &str = "e1000";
/// The largest value of a head or tail register.
const LARGEST: u32 = 0xffff;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    device: String,
    version: u32,
    /// The address of the device, and whether it has the communication status block.
    mac: [u8; 6],
    csb: bool,
    pci: ConfigState,
    registers: Vec<u32>,
    wires: Wires,
    eerd: u32,
    mdic: u32,
    /// The address at the I/O ports.
    address: u32,
    phy: PhyState,
    link: bool,
    interrupts: ModeratorState,
    statistics: Vec<u64>,
    /// Heads and tails: transmit, receive.
    heads: [u32; 2],
    tails: [u32; 2],
    /// Contexts of segmentation and of checksums, as descriptors.
    contexts: [[u8; DESCRIPTOR]; 2],
    /// `true` if the transmit head lies within a frame with too many descriptors. It is written
    /// only then, so that earlier programs can read the states of all other devices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    overlong: bool,
}

pub(crate) fn save(device: &Device) -> Vec<u8> {
    let (now, shared) = (device.now(), &device.shared);
    let TransmitState { contexts, overlong } = device.transmit;
    let Contexts { segmentation, checksum } = contexts;
    let state = SavedState {
        device: DEVICE.into(),
        version: STATE_VERSION,
        mac: device.settings.mac.0,
        csb: device.settings.csb,
        pci: device.config.save(),
        registers: device.registers.save(),
        wires: device.wires.clone(),
        eerd: device.eerd,
        mdic: device.mdic,
        address: device.address,
        phy: device.phy.save(now),
        link: device.link,
        interrupts: shared.line.with(|line| line.save(now)),
        statistics: device.cleared.save(&shared.statistics),
        heads: device.saved_heads(),
        tails: [shared.tdt(), shared.rdt()],
        contexts: [segmentation, checksum].map(|context| Transmit::Context(context).bytes()),
        overlong,
    };
    // Numbers and vectors of numbers can always be written.
    serde_json::to_vec(&state).unwrap_or_default()
}

fn inconsistent(what: &str) -> StateError {
    StateError::Inconsistent(what.into())
}

/// Reads a saved context.
fn context(bytes: &[u8; DESCRIPTOR]) -> Result<Context, StateError> {
    match Transmit::read(bytes) {
        Transmit::Context(context) => Ok(context),
        _ => Err(inconsistent("a context that is none")),
    }
}

pub(crate) fn restore(device: &mut Device, bytes: &[u8]) -> Result<(), StateError> {
    if bytes.len() > MAX_LEN {
        return Err(StateError::Unknown("too long".into()));
    }
    let state: SavedState =
        serde_json::from_slice(bytes).map_err(|error| StateError::Unknown(error.to_string()))?;
    if state.device != DEVICE || !KNOWN.contains(&state.version) {
        return Err(StateError::Unknown(format!("{} {}", state.device, state.version)));
    }
    if state.csb != device.settings.csb {
        return Err(inconsistent("another kind of e1000"));
    }
    let indexes = state.heads.iter().chain(&state.tails);
    if indexes.copied().any(|index| index > LARGEST) || !state.wires.is_sound() {
        return Err(inconsistent("registers with values that they cannot have"));
    }
    let now = device.now();
    let phy = Phy::restored(now, &state.phy).ok_or_else(|| inconsistent("the PHY"))?;
    let [segmentation, checksum] = [context(&state.contexts[0])?, context(&state.contexts[1])?];
    device.config.restore(&state.pci)?;
    let shared = &device.shared;
    if !device.registers.restore(&state.registers)
        || !shared.line.with(|line| line.restore(now, &state.interrupts))
        || !device.cleared.restore(&shared.statistics, &state.statistics)
    {
        return Err(inconsistent("registers with values that they cannot have"));
    }
    device.registers.readdress(Mac(state.mac), device.settings.mac);
    shared.store_tails(state.tails);
    device.tail = state.tails[0];
    (device.wires, device.eerd, device.mdic) = (state.wires, state.eerd, state.mdic);
    device.address = state.address;
    (device.phy, device.link) = (phy, state.link);
    device.heads = state.heads;
    let contexts = Contexts { segmentation, checksum };
    device.transmit = TransmitState { contexts, overlong: state.overlong };
    device.restored();
    Ok(())
}

impl Device {
    /// Ends a restore: the rings go on with `heads`.
    fn restored(&mut self) {
        self.epochs = self.epochs.map(|epoch| epoch.wrapping_add(1));
        self.store_heads();
        self.set_delays();
        self.config_changed();
    }
}
