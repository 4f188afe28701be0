//! Saved state: everything but the queues' indexes, which are in the guest's memory. Buffers are
//! used in order, so the used index says how far a queue came. A frame that was sent and not
//! reported is sent again. A frame that was received and not reported is overwritten. A command of
//! the control queue that was not acknowledged is carried out again; every command sets something,
//! so doing it twice does no harm.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_pci::state::{ConfigState, MsixState};
use slipway_virtio_spec::Status;
use slipway_virtio_spec::net::Features;
use slipway_virtio_spec::pci::NO_VECTOR;

use crate::Device;
use crate::driven::Driven;
use crate::registers::QueueRegisters;

/// Version of the types in this module, and of a journal's contents. A state of another version is
/// refused.
pub const STATE_VERSION: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    device: String,
    version: u32,
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
    let mut after = device.registers.clone();
    let mut driven = device.driven.clone();
    if device.is_resetting() {
        after.reset();
        driven = Driven::new(device.settings.mac, device.settings.pairs);
    }
    let registers = &after;
    let state = SavedState {
        device: DEVICE.into(),
        version: STATE_VERSION,
        pci: device.pci.save(),
        msix: device.msix.save(),
        device_feature_select: registers.device_feature_select,
        driver_feature_select: registers.driver_feature_select,
        driver_features: registers.driver_features,
        config_vector: registers.config_vector,
        status: registers.status.bits(),
        generation: registers.generation,
        queue_select: registers.queue_select,
        queues: registers.queues.clone(),
        driven,
        isr: device.isr,
    };
    // Numbers and vectors of numbers can always be written.
    serde_json::to_vec(&state).unwrap_or_default()
}

fn inconsistent(what: &str) -> StateError {
    StateError::Inconsistent(what.into())
}

pub(crate) fn restore(device: &mut Device, bytes: &[u8]) -> Result<(), StateError> {
    let state: SavedState =
        serde_json::from_slice(bytes).map_err(|error| StateError::Unknown(error.to_string()))?;
    if state.device != DEVICE || state.version != STATE_VERSION {
        return Err(StateError::Unknown(format!("{} {}", state.device, state.version)));
    }
    let status = Status::from_bits(state.status).ok_or(inconsistent("an unknown status"))?;
    let vectors = device.interrupts.len() as u16;
    let known = |vector: u16| vector < vectors || vector == NO_VECTOR;
    if state.queues.len() != device.registers.queues.len() {
        return Err(inconsistent("another number of queues"));
    }
    let largest = device.settings.queue_size;
    let sound = |queue: &QueueRegisters| {
        let place = queue.is_sound(largest) || !queue.enabled && queue.size <= largest;
        known(queue.vector) && place && !(queue.enabled && queue.resetting)
    };
    if !known(state.config_vector) || !state.queues.iter().all(sound) {
        return Err(inconsistent("a queue that cannot be"));
    }
    let features = Features::from_bits_truncate(state.driver_features);
    if !state.driven.is_sound(features, device.settings.pairs) {
        return Err(inconsistent("settings that cannot be"));
    }
    device.pci.restore(&state.pci)?;
    device.msix.restore(&state.msix)?;
    let registers = &mut device.registers;
    registers.device_feature_select = state.device_feature_select;
    registers.driver_feature_select = state.driver_feature_select;
    registers.driver_features = state.driver_features;
    if status.contains(Status::FEATURES_OK) && !registers.may_accept() {
        return Err(inconsistent("features that are not offered"));
    }
    if status.contains(Status::DRIVER_OK) && !status.contains(Status::FEATURES_OK) {
        return Err(inconsistent("a driver that runs without features"));
    }
    registers.config_vector = state.config_vector;
    registers.status = status;
    registers.generation = state.generation;
    registers.queue_select = state.queue_select;
    registers.queues = state.queues;
    device.driven = state.driven;
    device.isr = state.isr;
    (device.changed, device.resumes) = (true, true);
    device.announce_again();
    Ok(())
}

impl Device {
    /// Makes the driver announce its new place to the network, if it can (section 5.1.6.5.4).
    fn announce_again(&mut self) {
        let announces = self.registers.features().contains(Features::GUEST_ANNOUNCE);
        if self.runs() && announces {
            self.driven.announce = true;
            self.need_announcement();
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
