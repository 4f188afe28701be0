//! Saved state: everything but the queues' indexes, which are in the guest's memory. Buffers are
//! used in order, so the used index says how far a queue came. A frame that was sent and not
//! reported is sent again. A frame that was received and not reported is overwritten. A command of
//! the control queue that was not acknowledged is carried out again; every command sets something,
//! so doing it twice does no harm.
//!
//! The MAC address that the host gave a device stays the device's own when it takes over a state of
//! a device with another one. The address that a driver has set itself is part of the state.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_pci::state::{ConfigState, MsixState};
use slipway_virtio::registers::{QueueRegisters, RegistersState};
use slipway_virtio::state::TransportState;
use slipway_virtio_spec::net::Features;

use crate::Device;
use crate::driven::Driven;
use crate::parts::max_state;

/// Version of the types in this module, and of a journal's contents. A state of another version is
/// refused.
pub const STATE_VERSION: u32 = 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    device: String,
    version: u32,
    /// The address that the host gave the device.
    mac: [u8; 6],
    pci: ConfigState,
    msix: MsixState,
    device_feature_select: u32,
    driver_feature_select: u32,
    driver_features: u64,
    config_vector: u16,
    status: u8,
    generation: u8,
    queue_select: u16,
    queues: Vec<QueueRegisters>,
    driven: Driven,
    isr: u8,
}

/// The mark of a state of this kind of device.
const DEVICE: &str = "virtio-net";

pub(crate) fn save(device: &Device) -> Vec<u8> {
    // For a successor, a reset that waits for the port is over: the successor's port never had the
    // queues.
    let TransportState { pci, msix, mut registers, isr } = device.transport.save();
    let mut driven = device.driven.clone();
    if device.is_resetting() {
        let mut after = device.transport.registers.clone();
        after.reset();
        registers = after.save();
        driven = Driven::new(device.host_mac(), device.settings.pairs);
    }
    let state = SavedState {
        device: DEVICE.into(),
        version: STATE_VERSION,
        mac: device.host_mac().0,
        pci,
        msix,
        device_feature_select: registers.device_feature_select,
        driver_feature_select: registers.driver_feature_select,
        driver_features: registers.driver_features,
        config_vector: registers.config_vector,
        status: registers.status,
        generation: registers.generation,
        queue_select: registers.queue_select,
        queues: registers.queues,
        driven,
        isr,
    };
    // Numbers and vectors of numbers can always be written.
    serde_json::to_vec(&state).unwrap_or_default()
}

pub(crate) fn restore(device: &mut Device, bytes: &[u8]) -> Result<(), StateError> {
    if bytes.len() > max_state(device.settings.pairs) {
        return Err(StateError::Unknown("too long".into()));
    }
    let state: SavedState =
        serde_json::from_slice(bytes).map_err(|error| StateError::Unknown(error.to_string()))?;
    if state.device != DEVICE || state.version != STATE_VERSION {
        return Err(StateError::Unknown(format!("{} {}", state.device, state.version)));
    }
    let features = Features::from_bits_truncate(state.driver_features);
    if !state.driven.is_sound(features, device.settings.pairs) {
        return Err(StateError::Inconsistent("settings that cannot be".into()));
    }
    let registers = RegistersState {
        device_feature_select: state.device_feature_select,
        driver_feature_select: state.driver_feature_select,
        driver_features: state.driver_features,
        config_vector: state.config_vector,
        status: state.status,
        generation: state.generation,
        queue_select: state.queue_select,
        queues: state.queues,
    };
    let (pci, msix, isr) = (state.pci, state.msix, state.isr);
    device.transport.restore(TransportState { pci, msix, registers, isr })?;
    device.driven = state.driven;
    (device.queues_changed, device.resumes, device.link) = (true, true, None);
    let own = device.host_mac().0;
    if device.driven.filter.mac == state.mac {
        device.driven.filter.mac = own;
    }
    // A driver that still has another device's address must not announce that one.
    if state.mac == own {
        device.announce_again();
    }
    device.checkpoint();
    Ok(())
}

impl Device {
    /// Makes the driver announce its new place to the network, if it can (section 5.1.6.5.4).
    fn announce_again(&mut self) {
        let announces = self.features().contains(Features::GUEST_ANNOUNCE);
        if self.runs() && announces {
            self.driven.announce = true;
            // The driver reads the configuration, and finds that it shall announce itself.
            self.transport.config_changed();
        }
    }

    /// Stores the state for a successor, if there is a journal.
    pub(crate) fn checkpoint(&mut self) {
        let Some(journal) = &self.journal else { return };
        if !journal.store(&save(self)) {
            // The last snapshot would be wrong after a restart. No successor is better than a wrong
            // one.
            debug_assert!(false, "a snapshot has room for every state");
            self.journal = None;
        }
    }

    /// Goes on where a predecessor with the same journal was killed. The client's memory must be
    /// mapped. With an empty journal the device stays as it was made.
    ///
    /// # Errors
    /// [`StateError`] if the state is refused. The device is then in its state after a reset.
    pub fn recover(&mut self) -> Result<(), StateError> {
        let left = self.journal.as_ref().and_then(slipway_ram::Snapshots::load);
        match left {
            Some(state) => slipway_pci::Function::restore(self, &state),
            None => Ok(()),
        }
    }
}
