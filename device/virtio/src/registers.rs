//! The common configuration (section 4.1.4.3): what the driver selects, sets and reads back.

use serde::{Deserialize, Serialize};
use slipway_pci::StateError;
use slipway_virtio_spec::pci::{COMMON_SIZE, NO_VECTOR, common};
use slipway_virtio_spec::queue::{DESCRIPTOR_ALIGN, available, used};
use slipway_virtio_spec::{RingFeatures, Status};

use crate::queue::Layout;

/// One queue as the driver configured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueRegisters {
    /// The number of entries, a power of two.
    pub size: u16,
    /// The MSI-X vector, or `NO_VECTOR`.
    pub vector: u16,
    /// `true` if the driver has enabled the queue.
    pub enabled: bool,
    /// The address of the descriptor area.
    pub descriptors: u64,
    /// The address of the driver area: the available ring.
    pub available: u64,
    /// The address of the device area: the used ring.
    pub used: u64,
    /// `true` if the driver has reset the queue, and the device may still use it.
    pub resetting: bool,
}

impl QueueRegisters {
    /// Returns the registers of a queue that the driver has not configured, with `size` entries.
    pub fn new(size: u16) -> Self {
        Self {
            size,
            vector: NO_VECTOR,
            enabled: false,
            descriptors: 0,
            available: 0,
            used: 0,
            resetting: false,
        }
    }

    /// Returns the queue's size and addresses.
    pub fn layout(&self) -> Layout {
        let Self { size, descriptors, available, used, .. } = *self;
        Layout { size, descriptors, available, used }
    }

    /// Returns whether a queue can have this size and these addresses (section 2.7).
    pub fn is_sound(&self, largest: u16) -> bool {
        self.size.is_power_of_two()
            && self.size <= largest
            && self.descriptors.is_multiple_of(DESCRIPTOR_ALIGN)
            && self.available.is_multiple_of(available::ALIGN)
            && self.used.is_multiple_of(used::ALIGN)
    }
}

/// The action that a register write asks for, beyond storing a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// The driver resets the device.
    Reset,
    /// These status bits were set and had been clear.
    Status(Status),
    /// This queue was enabled.
    Enable(u16),
    /// The driver resets this queue.
    ResetQueue(u16),
    /// A vector has changed.
    Vector,
}

/// The queues and features that a device offers its driver.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    /// The number of queues, 1 to 1024.
    pub queues: u16,
    /// Most entries of a queue, a power of two.
    pub queue_size: u16,
    /// Feature bits, [`RingFeatures`] and those of the device type.
    pub features: u64,
    /// Returns whether these feature bits, which were all offered and include VERSION_1, fit
    /// together: a feature may require another one.
    pub accepts: fn(u64) -> bool,
}

impl Offer {
    /// One queue without entries, and nothing optional but event indexes: where most devices begin.
    pub const SINGLE: Self = Self {
        queues: 1,
        queue_size: 0,
        features: RingFeatures::VERSION_1.union(RingFeatures::EVENT_IDX).bits(),
        accepts: |_| true,
    };
}

/// The registers of the common configuration that change, as they are saved for a successor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegistersState {
    /// The half of the feature bits that the driver reads.
    pub device_feature_select: u32,
    /// The half of the feature bits that the driver writes.
    pub driver_feature_select: u32,
    /// The feature bits that the driver chose.
    pub driver_features: u64,
    /// The MSI-X vector of configuration changes, or `NO_VECTOR`.
    pub config_vector: u16,
    /// The bits of [`Registers::status`].
    pub status: u8,
    /// The version of the configuration.
    pub generation: u8,
    /// The queue that the driver selected.
    pub queue_select: u16,
    /// The queues, by number.
    pub queues: Vec<QueueRegisters>,
}

impl RegistersState {
    /// Makes the state after power-on.
    fn new(offer: &Offer) -> Self {
        Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: 0,
            generation: 0,
            queue_select: 0,
            queues: vec![QueueRegisters::new(offer.queue_size); usize::from(offer.queues)],
        }
    }
}

/// The common configuration of one device.
#[derive(Clone, Debug)]
pub struct Registers {
    /// The registers that change.
    pub state: RegistersState,
    offer: Offer,
    vectors: u16,
}

impl Registers {
    /// Makes the registers of a device with `vectors` MSI-X vectors, in their state after
    /// power-on.
    pub fn new(offer: &Offer, vectors: u16) -> Self {
        Self { state: RegistersState::new(offer), offer: *offer, vectors }
    }

    /// Returns to the state after construction. Only the generation goes on, so that the driver
    /// never sees an old one again.
    pub fn reset(&mut self) {
        let generation = self.state.generation.wrapping_add(1);
        self.state = RegistersState { generation, ..RegistersState::new(&self.offer) };
    }

    /// Returns the device status.
    pub fn status(&self) -> Status {
        Status::from_bits_truncate(self.state.status)
    }

    /// Returns the queues and features that the device offers.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns whether the driver is ready, and the device needs no reset.
    pub fn is_live(&self) -> bool {
        self.has_started() && !self.status().contains(Status::DEVICE_NEEDS_RESET)
    }

    /// Returns whether the driver has been ready since the last reset.
    pub fn has_started(&self) -> bool {
        self.status().contains(Status::DRIVER_OK)
    }

    /// Returns the chosen features that no device type owns, of those that are offered.
    pub fn ring_features(&self) -> RingFeatures {
        RingFeatures::from_bits_truncate(self.state.driver_features & self.offer.features)
    }

    /// Reads from the structure; bytes past its end are zero.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        copy_from(&self.image(), offset, into);
    }

    fn image(&self) -> [u8; COMMON_SIZE] {
        let mut image = [0; COMMON_SIZE];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        let state = &self.state;
        put(common::DEVICE_FEATURE_SELECT, &state.device_feature_select.to_le_bytes());
        put(common::DEVICE_FEATURE, &half(self.offer.features, state.device_feature_select));
        put(common::DRIVER_FEATURE_SELECT, &state.driver_feature_select.to_le_bytes());
        put(common::DRIVER_FEATURE, &half(state.driver_features, state.driver_feature_select));
        put(common::CONFIG_VECTOR, &state.config_vector.to_le_bytes());
        put(common::NUM_QUEUES, &(state.queues.len() as u16).to_le_bytes());
        put(common::DEVICE_STATUS, &[state.status]);
        put(common::CONFIG_GENERATION, &[state.generation]);
        put(common::QUEUE_SELECT, &state.queue_select.to_le_bytes());
        // A queue that does not exist has size 0.
        let selected = state.queues.get(usize::from(state.queue_select));
        let Some(queue) = selected else { return image };
        put(common::QUEUE_SIZE, &queue.size.to_le_bytes());
        put(common::QUEUE_VECTOR, &queue.vector.to_le_bytes());
        put(common::QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
        put(common::QUEUE_NOTIFY_OFF, &state.queue_select.to_le_bytes());
        put(common::QUEUE_DESC, &queue.descriptors.to_le_bytes());
        put(common::QUEUE_DRIVER, &queue.available.to_le_bytes());
        put(common::QUEUE_DEVICE, &queue.used.to_le_bytes());
        put(common::QUEUE_NOTIFY_DATA, &state.queue_select.to_le_bytes());
        put(common::QUEUE_RESET, &u16::from(queue.resetting).to_le_bytes());
        image
    }

    /// Writes a field, or one half of a 64-bit field. Writes of other shapes, and to read-only
    /// fields, are ignored.
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Effect {
        let value = match *from {
            [a] => u64::from(a),
            [a, b] => u16::from_le_bytes([a, b]).into(),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]).into(),
            [a, b, c, d, e, f, g, h] => u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => return Effect::None,
        };
        match (offset, from.len()) {
            (common::DEVICE_FEATURE_SELECT, 4) => self.state.device_feature_select = value as u32,
            (common::DRIVER_FEATURE_SELECT, 4) => self.state.driver_feature_select = value as u32,
            (common::DRIVER_FEATURE, 4) => self.accept(value as u32),
            (common::CONFIG_VECTOR, 2) => {
                self.state.config_vector = self.vector(value as u16);
                return Effect::Vector;
            }
            (common::DEVICE_STATUS, 1) => return self.write_status(value as u8),
            (common::QUEUE_SELECT, 2) => self.state.queue_select = value as u16,
            _ => return self.write_queue(offset, from.len(), value),
        }
        Effect::None
    }

    fn accept(&mut self, value: u32) {
        if self.status().contains(Status::FEATURES_OK) {
            return;
        }
        // The feature bits have two words (section 4.1.4.3); the driver may select any number.
        if self.state.driver_feature_select < 2 {
            let shift = 32 * self.state.driver_feature_select;
            let kept = self.state.driver_features & !(u64::from(u32::MAX) << shift);
            self.state.driver_features = kept | u64::from(value) << shift;
        }
    }

    /// Returns the vector if it exists, and else `NO_VECTOR` (section 4.1.5.1.2.1).
    fn vector(&self, wanted: u16) -> u16 {
        if wanted < self.vectors { wanted } else { NO_VECTOR }
    }

    fn write_status(&mut self, value: u8) -> Effect {
        if value == 0 {
            return Effect::Reset;
        }
        // The driver sets bits and clears none. DEVICE_NEEDS_RESET is the device's to set.
        let mut wanted = Status::from_bits_truncate(value) - Status::DEVICE_NEEDS_RESET;
        if !self.status().contains(Status::FEATURES_OK) && !self.may_accept() {
            wanted -= Status::FEATURES_OK;
        }
        if !(self.status() | wanted).contains(Status::FEATURES_OK) {
            wanted -= Status::DRIVER_OK;
        }
        let new = wanted - self.status();
        self.state.status |= wanted.bits();
        if new.is_empty() { Effect::None } else { Effect::Status(new) }
    }

    /// Returns whether the device accepts the features that the driver chose (section 2.2.2).
    pub fn may_accept(&self) -> bool {
        self.state.driver_features & !self.offer.features == 0
            && self.ring_features().contains(RingFeatures::VERSION_1)
            && (self.offer.accepts)(self.state.driver_features)
    }

    fn write_queue(&mut self, offset: u64, len: usize, value: u64) -> Effect {
        let (select, largest) = (self.state.queue_select, self.offer.queue_size);
        let resets = self.ring_features().contains(RingFeatures::RING_RESET);
        let vector = self.vector(value as u16);
        let queue = self.state.queues.get_mut(usize::from(select));
        let Some(queue) = queue else { return Effect::None };
        match (offset, len) {
            (common::QUEUE_VECTOR, 2) => {
                queue.vector = vector;
                return Effect::Vector;
            }
            (common::QUEUE_ENABLE, 2) if value == 1 && !queue.enabled && !queue.resetting => {
                queue.enabled = true;
                return Effect::Enable(select);
            }
            (common::QUEUE_RESET, 2) if value == 1 && resets && queue.enabled => {
                (queue.enabled, queue.resetting) = (false, true);
                return Effect::ResetQueue(select);
            }
            // The layout of a queue in use stays as it is.
            _ if queue.enabled || queue.resetting => {}
            (common::QUEUE_SIZE, 2) => {
                let size = value as u16;
                if size.is_power_of_two() && size <= largest {
                    queue.size = size;
                }
            }
            _ => {
                set_half(&mut queue.descriptors, common::QUEUE_DESC, (offset, len, value));
                set_half(&mut queue.available, common::QUEUE_DRIVER, (offset, len, value));
                set_half(&mut queue.used, common::QUEUE_DEVICE, (offset, len, value));
            }
        }
        Effect::None
    }
}

/// Sets the field at `at`, or a half of it, if the write has its offset and length.
fn set_half(field: &mut u64, at: u64, (offset, len, value): (u64, usize, u64)) {
    let low = u64::from(u32::MAX);
    match (offset.wrapping_sub(at), len) {
        (0, 8) => *field = value,
        (0, 4) => *field = *field & !low | value,
        (4, 4) => *field = *field & low | value << 32,
        _ => {}
    }
}

/// Returns the 32 bits that a select register chooses; zeros for words that do not exist.
fn half(bits: u64, select: u32) -> [u8; 4] {
    let shifted = if select < 2 { bits >> (32 * select) } else { 0 };
    (shifted as u32).to_le_bytes()
}

fn inconsistent(what: &str) -> StateError {
    StateError::Inconsistent(what.into())
}

impl Registers {
    /// Returns the state for a successor.
    pub fn save(&self) -> RegistersState {
        self.state.clone()
    }

    /// Takes over a saved state of registers with the same offer.
    ///
    /// # Errors
    /// [`StateError::Inconsistent`] for a state that no driver could have left. The registers keep
    /// their values then.
    pub fn restore(&mut self, state: RegistersState) -> Result<(), StateError> {
        let status = Status::from_bits(state.status).ok_or(inconsistent("an unknown status"))?;
        if state.queues.len() != self.state.queues.len() {
            return Err(inconsistent("another number of queues"));
        }
        let known = |vector: u16| vector < self.vectors || vector == NO_VECTOR;
        let largest = self.offer.queue_size;
        let sound = |queue: &QueueRegisters| {
            let place = queue.is_sound(largest) || !queue.enabled && queue.size <= largest;
            known(queue.vector) && place && !(queue.enabled && queue.resetting)
        };
        if !known(state.config_vector) || !state.queues.iter().all(sound) {
            return Err(inconsistent("a queue that cannot be"));
        }
        let restored = Self { state, ..*self };
        if status.contains(Status::FEATURES_OK) && !restored.may_accept() {
            return Err(inconsistent("features that are not offered"));
        }
        if status.contains(Status::DRIVER_OK) && !status.contains(Status::FEATURES_OK) {
            return Err(inconsistent("a driver that runs without features"));
        }
        *self = restored;
        Ok(())
    }
}

/// Copies from byte `offset` of `image`; bytes past its end are zero.
pub(crate) fn copy_from(image: &[u8], offset: u64, into: &mut [u8]) {
    for (at, byte) in (offset..).zip(into) {
        *byte = usize::try_from(at).ok().and_then(|at| image.get(at)).copied().unwrap_or(0);
    }
}
