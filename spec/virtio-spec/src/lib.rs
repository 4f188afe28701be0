//! Wire formats of *Virtual I/O Device (VIRTIO) Version 1.2* (OASIS, 2022): the parts that
//! devices over PCI and their drivers share. Section numbers are of that document.
//!
//! - [`pci`]: identities, capabilities and registers of the PCI transport (section 4.1);
//! - [`queue`]: split virtqueues (section 2.7);
//! - [`net`], [`console`], [`entropy`], [`balloon`], [`fs`], [`mem`], [`pmem`]: the network device
//!   (section 5.1), the console (5.3), the entropy device (5.4), the memory balloon (5.5), the file
//!   system device (5.11), the memory device (5.15) and the persistent memory device (5.19);
//! - this module: the device status field, and feature bits that no device type owns.
//!
//! Not here: packed virtqueues, other transports and device types, the legacy interface.
//!
//! Dependencies: `zerocopy` for views of bytes as structures, `bitflags` for sets of bits.
#![no_std]

pub mod balloon;
pub mod console;
pub mod entropy;
pub mod fs;
pub mod mem;
pub mod net;
pub mod pci;
pub mod pmem;
pub mod queue;

pub use zerocopy::little_endian::{U16, U32, U64};

bitflags::bitflags! {
    /// Device status field (section 2.1).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Status: u8 {
        /// The driver has found the device.
        const ACKNOWLEDGE = 1;
        /// The driver knows how to drive the device.
        const DRIVER = 2;
        /// The driver is ready: the device may use its queues.
        const DRIVER_OK = 4;
        /// The driver has accepted features; the device clears the bit if it cannot work with them.
        const FEATURES_OK = 8;
        /// The device cannot go on until it is reset.
        const DEVICE_NEEDS_RESET = 64;
        /// The driver has given up.
        const FAILED = 128;
    }
}

bitflags::bitflags! {
    /// Feature bits that no device type owns (section 6).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct RingFeatures: u64 {
        /// VIRTIO_F_INDIRECT_DESC: descriptors may refer to tables of descriptors (section
        /// 2.7.5.3).
        const INDIRECT_DESC = 1 << 28;
        /// VIRTIO_F_EVENT_IDX: each side stores the index from which on it wants to be notified
        /// (sections 2.7.7 and 2.7.10).
        const EVENT_IDX = 1 << 29;
        /// VIRTIO_F_VERSION_1: the device follows this specification and no legacy one.
        const VERSION_1 = 1 << 32;
        /// VIRTIO_F_ACCESS_PLATFORM: addresses are the platform's DMA addresses, which may differ
        /// from the guest's physical ones.
        const ACCESS_PLATFORM = 1 << 33;
        /// VIRTIO_F_RING_RESET: each queue can be reset alone (section 2.6.1).
        const RING_RESET = 1 << 40;
    }
}
