//! The PCI transport (section 4.1).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::U32;

/// Vendor ID of all virtio devices (section 4.1.2).
pub const VENDOR: u16 = 0x1af4;
/// Device ID of type 0; the device ID of another type is this plus the type (section 4.1.2).
pub const DEVICE_BASE: u16 = 0x1040;
/// Vector of an event without interrupt, and the value read back if a vector is not available
/// (section 4.1.5.1.2).
pub const NO_VECTOR: u16 = 0xffff;

/// Types of the structures that capabilities point to (section 4.1.4).
pub mod config_type {
    /// Common configuration.
    pub const COMMON: u8 = 1;
    /// Notifications.
    pub const NOTIFY: u8 = 2;
    /// ISR status.
    pub const ISR: u8 = 3;
    /// Device-specific configuration.
    pub const DEVICE: u8 = 4;
    /// PCI configuration access.
    pub const PCI: u8 = 5;
}

/// PCI ID of vendor-specific capabilities, which all virtio capabilities are.
pub const CAPABILITY_ID: u8 = 9;

/// `struct virtio_pci_cap` (section 4.1.4).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Capability {
    /// Generic PCI field: [`CAPABILITY_ID`].
    pub id: u8,
    /// Generic PCI field: next pointer.
    pub next: u8,
    /// Generic PCI field: bytes of the capability.
    pub len: u8,
    /// The type of the structure that the capability points to: [`config_type`].
    pub config_type: u8,
    /// BAR number, 0 to 5.
    pub bar: u8,
    /// Number that distinguishes capabilities of the same type.
    pub number: u8,
    /// Padding to full dwords.
    pub padding: [u8; 2],
    /// Offset within the BAR.
    pub offset: U32,
    /// Length of the structure, in bytes.
    pub length: U32,
}

impl Capability {
    /// Makes the capability of a structure of this type, of `length` bytes, at `offset` of BAR
    /// `bar`.
    pub fn new(config_type: u8, bar: u8, offset: u32, length: u32) -> Self {
        Self {
            id: CAPABILITY_ID,
            next: 0,
            len: size_of::<Self>() as u8,
            config_type,
            bar,
            number: 0,
            padding: [0; 2],
            offset: offset.into(),
            length: length.into(),
        }
    }
}

/// `struct virtio_pci_notify_cap` (section 4.1.4.4).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct NotifyCapability {
    /// The capability.
    pub capability: Capability,
    /// Multiplier for `queue_notify_off`, in bytes.
    pub multiplier: U32,
}

/// `struct virtio_pci_cfg_cap` (section 4.1.4.9): a window for software that cannot reach BARs.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ConfigCapability {
    /// The capability; BAR, offset and length are written by the driver.
    pub capability: Capability,
    /// Data for BAR access.
    pub data: [u8; 4],
}

/// Bytes of the common configuration, up to and including `queue_reset` (section 4.1.4.3).
pub const COMMON_SIZE: usize = 60;

/// Offsets in the common configuration structure (section 4.1.4.3).
pub mod common {
    /// device_feature_select, 32 bits: the half of the feature bits in `DEVICE_FEATURE`.
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    /// device_feature, 32 bits, read-only.
    pub const DEVICE_FEATURE: u64 = 4;
    /// driver_feature_select, 32 bits: the half of the feature bits in `DRIVER_FEATURE`.
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    /// driver_feature, 32 bits.
    pub const DRIVER_FEATURE: u64 = 12;
    /// config_msix_vector, 16 bits.
    pub const CONFIG_VECTOR: u64 = 16;
    /// num_queues, 16 bits, read-only.
    pub const NUM_QUEUES: u64 = 18;
    /// device_status, 8 bits; writing 0 resets the device.
    pub const DEVICE_STATUS: u64 = 20;
    /// config_generation, 8 bits, read-only.
    pub const CONFIG_GENERATION: u64 = 21;
    /// queue_select, 16 bits: the queue of the following fields.
    pub const QUEUE_SELECT: u64 = 22;
    /// queue_size, 16 bits; 0 if there is no such queue.
    pub const QUEUE_SIZE: u64 = 24;
    /// queue_msix_vector, 16 bits.
    pub const QUEUE_VECTOR: u64 = 26;
    /// queue_enable, 16 bits.
    pub const QUEUE_ENABLE: u64 = 28;
    /// queue_notify_off, 16 bits, read-only.
    pub const QUEUE_NOTIFY_OFF: u64 = 30;
    /// queue_desc, 64 bits: address of the descriptor area.
    pub const QUEUE_DESC: u64 = 32;
    /// queue_driver, 64 bits: address of the driver area.
    pub const QUEUE_DRIVER: u64 = 40;
    /// queue_device, 64 bits: address of the device area.
    pub const QUEUE_DEVICE: u64 = 48;
    /// queue_notify_data, 16 bits, read-only.
    pub const QUEUE_NOTIFY_DATA: u64 = 56;
    /// queue_reset, 16 bits: 1 until the reset has finished.
    pub const QUEUE_RESET: u64 = 58;
}

/// Bits of the ISR status (section 4.1.4.5).
pub mod isr {
    /// A queue interrupt is pending.
    pub const QUEUE: u8 = 1;
    /// The device configuration changed.
    pub const CONFIG: u8 = 2;
}
