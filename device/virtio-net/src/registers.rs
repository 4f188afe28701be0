//! The common configuration (section 4.1.4.3): what the driver selects, sets and reads back.

use serde::{Deserialize, Serialize};
use slipway_virtio_spec::net::Features;
use slipway_virtio_spec::pci::{COMMON_SIZE, NO_VECTOR, common};
use slipway_virtio_spec::queue::{DESCRIPTOR_ALIGN, available, used};
use slipway_virtio_spec::{RingFeatures, Status};

use crate::queue::Layout;
use crate::{Settings, parts};

/// One queue as the driver configured it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueRegisters {
    pub size: u16,
    pub vector: u16,
    pub enabled: bool,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    /// `true` if the driver has reset the queue, and the port may still use it.
    pub resetting: bool,
}

impl QueueRegisters {
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

/// The purpose of a queue (section 5.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Receive(usize),
    Transmit(usize),
    Control,
    /// There is no such queue with the negotiated features.
    None,
}

/// The action that a register write asks for, beyond storing a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    pub device_feature_select: u32,
    pub driver_feature_select: u32,
    pub driver_features: u64,
    pub config_vector: u16,
    pub status: Status,
    pub generation: u8,
    pub queue_select: u16,
    pub queues: Vec<QueueRegisters>,
    /// The features that the device offers.
    pub offered: u64,
    vectors: u16,
    largest: u16,
    pairs: u16,
}

impl Registers {
    pub fn new(settings: &Settings, vectors: u16) -> Self {
        let queues = 2 * usize::from(settings.pairs) + 1;
        Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: Status::empty(),
            generation: 0,
            queue_select: 0,
            queues: vec![QueueRegisters::new(settings.queue_size); queues],
            offered: offered(settings),
            vectors,
            largest: settings.queue_size,
            pairs: settings.pairs,
        }
    }

    /// Returns to the state after construction. Only the generation goes on, so that the driver
    /// never sees an old one again.
    pub fn reset(&mut self) {
        let generation = self.generation.wrapping_add(1);
        let queues = vec![QueueRegisters::new(self.largest); self.queues.len()];
        *self = Self {
            device_feature_select: 0,
            driver_feature_select: 0,
            driver_features: 0,
            config_vector: NO_VECTOR,
            status: Status::empty(),
            generation,
            queue_select: 0,
            queues,
            ..*self
        };
    }

    pub fn features(&self) -> Features {
        Features::from_bits_truncate(self.driver_features)
    }

    pub fn ring_features(&self) -> RingFeatures {
        RingFeatures::from_bits_truncate(self.driver_features)
    }

    /// Returns the purpose of queue `number`. Without MQ the control queue follows the one pair.
    pub fn role(&self, number: u16) -> Role {
        let features = self.features();
        let pairs = if features.contains(Features::MQ) { self.pairs } else { 1 };
        let pair = usize::from(number / 2);
        match number {
            _ if number < 2 * pairs && number.is_multiple_of(2) => Role::Receive(pair),
            _ if number < 2 * pairs => Role::Transmit(pair),
            _ if number == 2 * pairs && features.contains(Features::CTRL_VQ) => Role::Control,
            _ => Role::None,
        }
    }

    fn selected(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// Reads from the structure; bytes past its end are zero.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let image = self.image();
        for (at, byte) in (offset..).zip(into) {
            *byte = usize::try_from(at).ok().and_then(|at| image.get(at)).copied().unwrap_or(0);
        }
    }

    fn image(&self) -> [u8; COMMON_SIZE] {
        let mut image = [0; COMMON_SIZE];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        put(common::DEVICE_FEATURE_SELECT, &self.device_feature_select.to_le_bytes());
        put(common::DEVICE_FEATURE, &half(self.offered, self.device_feature_select));
        put(common::DRIVER_FEATURE_SELECT, &self.driver_feature_select.to_le_bytes());
        put(common::DRIVER_FEATURE, &half(self.driver_features, self.driver_feature_select));
        put(common::CONFIG_VECTOR, &self.config_vector.to_le_bytes());
        put(common::NUM_QUEUES, &(self.queues.len() as u16).to_le_bytes());
        put(common::DEVICE_STATUS, &[self.status.bits()]);
        put(common::CONFIG_GENERATION, &[self.generation]);
        put(common::QUEUE_SELECT, &self.queue_select.to_le_bytes());
        // A queue that does not exist has size 0.
        let Some(queue) = self.selected() else { return image };
        put(common::QUEUE_SIZE, &queue.size.to_le_bytes());
        put(common::QUEUE_VECTOR, &queue.vector.to_le_bytes());
        put(common::QUEUE_ENABLE, &u16::from(queue.enabled).to_le_bytes());
        put(common::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
        put(common::QUEUE_DESC, &queue.descriptors.to_le_bytes());
        put(common::QUEUE_DRIVER, &queue.available.to_le_bytes());
        put(common::QUEUE_DEVICE, &queue.used.to_le_bytes());
        put(common::QUEUE_NOTIFY_DATA, &self.queue_select.to_le_bytes());
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
            (common::DEVICE_FEATURE_SELECT, 4) => self.device_feature_select = value as u32,
            (common::DRIVER_FEATURE_SELECT, 4) => self.driver_feature_select = value as u32,
            (common::DRIVER_FEATURE, 4) => self.accept(value as u32),
            (common::CONFIG_VECTOR, 2) => {
                self.config_vector = self.vector(value as u16);
                return Effect::Vector;
            }
            (common::DEVICE_STATUS, 1) => return self.write_status(value as u8),
            (common::QUEUE_SELECT, 2) => self.queue_select = value as u16,
            _ => return self.write_queue(offset, from.len(), value),
        }
        Effect::None
    }

    fn accept(&mut self, value: u32) {
        if self.status.contains(Status::FEATURES_OK) {
            return;
        }
        // The feature bits have two words (section 4.1.4.3); the driver may select any number.
        if self.driver_feature_select < 2 {
            let shift = 32 * self.driver_feature_select;
            let kept = self.driver_features & !(u64::from(u32::MAX) << shift);
            self.driver_features = kept | u64::from(value) << shift;
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
        if !self.status.contains(Status::FEATURES_OK) && !self.may_accept() {
            wanted -= Status::FEATURES_OK;
        }
        if !(self.status | wanted).contains(Status::FEATURES_OK) {
            wanted -= Status::DRIVER_OK;
        }
        let new = wanted - self.status;
        self.status |= wanted;
        if new.is_empty() { Effect::None } else { Effect::Status(new) }
    }

    /// Returns whether the device accepts the features that the driver chose (sections 2.2.2 and
    /// 5.1.3.1).
    pub fn may_accept(&self) -> bool {
        let features = self.features();
        let needs =
            |these: Features, one: Features| !features.intersects(these) || features.contains(one);
        let control = Features::CTRL_RX
            | Features::CTRL_VLAN
            | Features::CTRL_RX_EXTRA
            | Features::GUEST_ANNOUNCE
            | Features::MQ
            | Features::CTRL_MAC_ADDR
            | Features::CTRL_GUEST_OFFLOADS;
        let guest_cut = Features::GUEST_TSO4
            | Features::GUEST_TSO6
            | Features::GUEST_USO4
            | Features::GUEST_USO6;
        let host_cut = Features::HOST_TSO4 | Features::HOST_TSO6 | Features::HOST_USO;
        self.driver_features & !self.offered == 0
            && self.ring_features().contains(RingFeatures::VERSION_1)
            && needs(control, Features::CTRL_VQ)
            && needs(guest_cut, Features::GUEST_CSUM)
            && needs(host_cut, Features::CSUM)
    }

    fn write_queue(&mut self, offset: u64, len: usize, value: u64) -> Effect {
        let (select, largest) = (self.queue_select, self.largest);
        let resets = self.ring_features().contains(RingFeatures::RING_RESET);
        let vector = self.vector(value as u16);
        let Some(queue) = self.queues.get_mut(usize::from(select)) else { return Effect::None };
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

/// Returns the features that a device with these settings offers.
fn offered(settings: &Settings) -> u64 {
    let ring = RingFeatures::all();
    let mut net = Features::MTU
        | Features::MAC
        | Features::MRG_RXBUF
        | Features::STATUS
        | Features::CTRL_VQ
        | Features::CTRL_RX
        | Features::CTRL_VLAN
        | Features::CTRL_RX_EXTRA
        | Features::GUEST_ANNOUNCE
        | Features::CTRL_MAC_ADDR
        | Features::SPEED_DUPLEX;
    if settings.pairs > 1 {
        net |= Features::MQ;
    }
    if settings.offloads {
        net |= Features::CSUM
            | Features::HOST_TSO4
            | Features::HOST_TSO6
            | Features::HOST_ECN
            | Features::HOST_USO
            | Features::CTRL_GUEST_OFFLOADS
            | Features::GUEST_OFFLOADS;
    }
    ring.bits() | net.bits()
}

const _: () = assert!(parts::MAX_QUEUE <= slipway_virtio_spec::queue::MAX_SIZE);
