//! BAR0, and the capabilities that describe it (section 4.1.4).

use std::ops::Range;

use slipway_pci::{Bar, ConfigSpace, Description, MsixLayout, Notifications, VendorCapability};
use slipway_virtio_spec::net::{Config, DEVICE_TYPE};
use slipway_virtio_spec::pci::{
    CAPABILITY_ID, COMMON_SIZE, Capability, ConfigCapability, DEVICE_BASE, NotifyCapability,
    VENDOR, config_type,
};
use zerocopy::{FromBytes, IntoBytes};

/// Bytes of BAR0, which has a page for each of the following parts.
pub const BAR_SIZE: u64 = 0x8000;
/// Common configuration.
pub const COMMON: Range<u64> = 0..0x1000;
/// ISR status.
pub const ISR: Range<u64> = 0x1000..0x2000;
/// Device configuration.
pub const DEVICE: Range<u64> = 0x2000..0x3000;
/// Notifications, four bytes for each queue. A host may take an event for a write.
pub const NOTIFY: Range<u64> = 0x3000..0x4000;
/// Bytes from one queue's notification to the next one's.
pub const NOTIFY_MULTIPLIER: u32 = 4;
pub(crate) const MSIX_TABLE: u64 = 0x4000;
const MSIX_PENDING: u64 = 0x5000;

/// PCI identity: a modern network device (section 4.1.2; class 02 00 00, Ethernet controller). A
/// revision of 1 or more, and a subsystem ID from 0x40 on, keep legacy drivers away (4.1.2.1).
const IDENTITY: slipway_pci::Identity = slipway_pci::Identity {
    vendor: VENDOR,
    device: DEVICE_BASE + DEVICE_TYPE,
    subsystem_vendor: VENDOR,
    subsystem: DEVICE_BASE + DEVICE_TYPE,
    class: 0x02_00_00,
    revision: 1,
};

/// The index of the window among the vendor-specific capabilities (section 4.1.4.9).
const WINDOW: usize = 4;

/// Describes a function with `queues` queues, each of which has a notification register.
pub(crate) fn description(vectors: u16, queues: usize) -> Description {
    let stride = u64::from(NOTIFY_MULTIPLIER);
    let range = NOTIFY.start..NOTIFY.start + stride * queues as u64;
    let notifications = Some(Notifications { range, stride });
    let bar = Bar { index: 0, size: BAR_SIZE, wide: true, doorbell_page: None, notifications };
    Description { bars: vec![bar], vectors, pin: false }
}

pub(crate) fn msix(vectors: u16) -> MsixLayout {
    MsixLayout::new(0, vectors, MSIX_TABLE, MSIX_PENDING)
}

fn capability(config_type: u8, at: &Range<u64>, length: usize) -> Capability {
    Capability {
        id: CAPABILITY_ID,
        next: 0,
        len: size_of::<Capability>() as u8,
        config_type,
        bar: 0,
        number: 0,
        padding: [0; 2],
        offset: (at.start as u32).into(),
        length: (length as u32).into(),
    }
}

/// Makes the configuration space with virtio's capabilities, for `queues` queues.
pub(crate) fn config_space(
    description: &Description,
    msix: &MsixLayout,
    queues: usize,
) -> ConfigSpace {
    let notify = NotifyCapability {
        capability: capability(config_type::NOTIFY, &NOTIFY, queues * NOTIFY_MULTIPLIER as usize),
        multiplier: NOTIFY_MULTIPLIER.into(),
    };
    let common = capability(config_type::COMMON, &COMMON, COMMON_SIZE);
    let isr = capability(config_type::ISR, &ISR, 1);
    let device = capability(config_type::DEVICE, &DEVICE, size_of::<Config>());
    let capabilities = [
        VendorCapability::fixed(common.as_bytes()),
        VendorCapability::fixed(notify.as_bytes()),
        VendorCapability::fixed(isr.as_bytes()),
        VendorCapability::fixed(device.as_bytes()),
        window_capability(),
    ];
    ConfigSpace::with_vendor(&IDENTITY, description, Some(msix), &capabilities)
}

/// Makes the window capability, in which the driver may write BAR, offset and length.
fn window_capability() -> VendorCapability {
    let empty =
        ConfigCapability { capability: capability(config_type::PCI, &(0..0), 0), data: [0; 4] };
    let mut writable = vec![0; size_of::<ConfigCapability>()];
    writable[4] = 0xff;
    writable[8..16].fill(0xff);
    VendorCapability { bytes: empty.as_bytes().to_vec(), writable }
}

/// Returns the offset of the window's data in configuration space.
pub(crate) fn window_data(pci: &ConfigSpace) -> u16 {
    pci.vendor_capability(WINDOW) + std::mem::offset_of!(ConfigCapability, data) as u16
}

/// Returns the part of BAR0 that the window shows: offset, bytes. Returns `None` if the driver's
/// choice is outside of BAR0, or no access of 1, 2 or 4 bytes (section 4.1.4.9.1).
pub(crate) fn window(pci: &ConfigSpace) -> Option<(u64, usize)> {
    let mut bytes = [0; size_of::<Capability>()];
    pci.read(pci.vendor_capability(WINDOW), &mut bytes);
    let chosen = Capability::read_from_bytes(&bytes).ok()?;
    let (offset, len) = (u64::from(chosen.offset.get()), chosen.length.get());
    let sound = chosen.bar == 0
        && matches!(len, 1 | 2 | 4)
        && offset.is_multiple_of(len.into())
        && offset + u64::from(len) <= BAR_SIZE;
    sound.then_some((offset, len as usize))
}
