//! BAR0, and the capabilities that describe it (section 4.1.4).

use std::ops::Range;

use slipway_pci::{
    Bar, ConfigSpace, Description, Identity, MsixLayout, Notifications, VendorCapability,
};
use slipway_virtio_spec::pci::{
    COMMON_SIZE, Capability, ConfigCapability, DEVICE_BASE, NotifyCapability, VENDOR, config_type,
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
/// Notifications, [`NOTIFY_MULTIPLIER`] bytes for each queue, see [`notification`]. Nothing else
/// lies in this page, and its writes change no state.
pub const NOTIFY: Range<u64> = 0x3000..0x4000;
/// Bytes from one queue's notification to the next one's.
pub const NOTIFY_MULTIPLIER: u32 = 4;
pub(crate) const MSIX_TABLE: u64 = 0x4000;
const MSIX_PENDING: u64 = 0x5000;

/// The type of a device, as configuration space tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceKind {
    /// Device type (section 5).
    pub device_type: u16,
    /// PCI class code: base class, subclass, programming interface.
    pub class: u32,
    /// Bytes of the device-specific configuration, at most 4096; 0 if there is none.
    pub config_size: usize,
}

impl DeviceKind {
    /// Returns the PCI identity of a modern device (section 4.1.2). A revision of 1 or more, and a
    /// subsystem ID from 0x40 on, keep legacy drivers away (4.1.2.1).
    fn identity(&self) -> Identity {
        Identity {
            vendor: VENDOR,
            device: DEVICE_BASE + self.device_type,
            subsystem_vendor: VENDOR,
            subsystem: DEVICE_BASE + self.device_type,
            class: self.class,
            revision: 1,
        }
    }
}

/// Returns the offset in BAR0 at which queue `queue` is notified, by a write of 2 or 4 bytes. The
/// four bytes from there on belong to this queue alone, so that a host may have its kernel turn the
/// writes into an eventfd. The host then calls `poll` in place of the write.
pub const fn notification(queue: u16) -> u64 {
    NOTIFY.start + NOTIFY_MULTIPLIER as u64 * queue as u64
}

/// Describes a function with `queues` queues, each of which has a notification register.
pub(crate) fn description(vectors: u16, queues: usize) -> Description {
    let stride = u64::from(NOTIFY_MULTIPLIER);
    let range = NOTIFY.start..NOTIFY.start + stride * queues as u64;
    let notifications = Some(Notifications { range, stride });
    let bar =
        Bar { index: 0, size: BAR_SIZE, wide: true, ports: false, doorbells: None, notifications };
    Description { bars: vec![bar], vectors, pin: false }
}

pub(crate) fn msix(vectors: u16) -> MsixLayout {
    MsixLayout::new(0, vectors, MSIX_TABLE, MSIX_PENDING)
}

fn capability(config_type: u8, at: &Range<u64>, length: usize) -> Capability {
    Capability::new(config_type, 0, at.start as u32, length as u32)
}

/// Makes the configuration space with virtio's capabilities, for `queues` queues. Returns it with
/// the offset of the window capability (section 4.1.4.9).
pub(crate) fn config_space(
    kind: &DeviceKind,
    description: &Description,
    msix: &MsixLayout,
    queues: usize,
) -> (ConfigSpace, u16) {
    let notify = NotifyCapability {
        capability: capability(config_type::NOTIFY, &NOTIFY, queues * NOTIFY_MULTIPLIER as usize),
        multiplier: NOTIFY_MULTIPLIER.into(),
    };
    let common = capability(config_type::COMMON, &COMMON, COMMON_SIZE);
    let isr = capability(config_type::ISR, &ISR, 1);
    let device = capability(config_type::DEVICE, &DEVICE, kind.config_size);
    let mut capabilities = vec![
        VendorCapability::fixed(common.as_bytes()),
        VendorCapability::fixed(notify.as_bytes()),
        VendorCapability::fixed(isr.as_bytes()),
    ];
    if kind.config_size > 0 {
        capabilities.push(VendorCapability::fixed(device.as_bytes()));
    }
    let window = capabilities.len();
    capabilities.push(window_capability());
    let pci = ConfigSpace::with_vendor(&kind.identity(), description, Some(msix), &capabilities);
    let window = pci.vendor_capability(window);
    (pci, window)
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

/// Returns the offset of the window's data in configuration space. `window` is the offset of the
/// window capability.
pub(crate) fn window_data(window: u16) -> u16 {
    window + std::mem::offset_of!(ConfigCapability, data) as u16
}

/// Returns the part of BAR0 that the window shows: offset, bytes. Returns `None` if the driver's
/// choice is outside of BAR0, or no access of 1, 2 or 4 bytes (section 4.1.4.9.1).
pub(crate) fn shown(pci: &ConfigSpace, window: u16) -> Option<(u64, usize)> {
    let mut bytes = [0; size_of::<Capability>()];
    pci.read(window, &mut bytes);
    let chosen = Capability::read_from_bytes(&bytes).ok()?;
    let (offset, len) = (u64::from(chosen.offset.get()), chosen.length.get());
    let sound = chosen.bar == 0
        && matches!(len, 1 | 2 | 4)
        && offset.is_multiple_of(len.into())
        && offset + u64::from(len) <= BAR_SIZE;
    sound.then_some((offset, len as usize))
}
