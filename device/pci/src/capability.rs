//! The capabilities of a function, as bytes and as masks of the bits that software may change.

use slipway_pci_spec::{capability as id, express, msix};

use crate::MsixLayout;

/// A capability structure (PCI Local Bus 3.0, 6.7): ID, link, which is filled in when the structure
/// is chained, and registers. A vendor-specific one (appendix H) has its length behind the link: ID
/// and length are filled in, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// The bytes, at least 3 and at most 255 of a vendor-specific capability.
    pub bytes: Vec<u8>,
    /// The bits of each byte that software may change; as many bytes as in `bytes`.
    pub writable: Vec<u8>,
}

impl Capability {
    fn new(id: u8, len: usize) -> Self {
        let mut bytes = vec![0; len];
        bytes[0] = id;
        Self { bytes, writable: vec![0; len] }
    }

    fn u16(mut self, offset: usize, value: u16, writable: u16) -> Self {
        self.bytes[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
        self.writable[offset..offset + 2].copy_from_slice(&writable.to_le_bytes());
        self
    }

    fn u32(mut self, offset: usize, value: u32) -> Self {
        self.bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    /// Makes a vendor-specific capability that software can only read.
    pub fn fixed(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), writable: vec![0; bytes.len()] }
    }
}

/// Returns the vendor-specific capability with the right ID and length filled in.
///
/// # Panics
/// If the capability is too short or too long, or its mask has another length: a constant of a
/// device.
pub(crate) fn vendor(from: &Capability) -> Capability {
    assert!((3..=255).contains(&from.bytes.len()), "a vendor-specific capability's length");
    assert!(from.bytes.len() == from.writable.len(), "a mask for each byte");
    let mut capability = from.clone();
    capability.bytes[..3].copy_from_slice(&[id::VENDOR, 0, from.bytes.len() as u8]);
    capability.writable[..3].fill(0);
    capability
}

/// PCI Power Management (PCI Bus Power Management 1.2, 3.2): D0 and D3hot, no PME, state kept over
/// D3hot. PCI Express requires the capability (PCIe Base 5.0, 7.5.2).
pub(crate) fn power_management() -> Capability {
    /// PMC: version 3, which is that of revision 1.2.
    const VERSION: u16 = 3;
    /// PMCSR: PowerState, bits 1:0.
    const POWER_STATE: u16 = 0b11;
    /// PMCSR: No_Soft_Reset, so that going back to D0 asks nothing of the device.
    const NO_SOFT_RESET: u16 = 1 << 3;
    Capability::new(id::POWER_MANAGEMENT, 8).u16(2, VERSION, 0).u16(4, NO_SOFT_RESET, POWER_STATE)
}

/// PCI Express capability of an endpoint, version 2 (PCIe Base 5.0, 7.5.3).
///
/// The link that it reports is a fiction for tools that print one (16 GT/s, four lanes, up): there
/// is no link. No error is ever detected, so Device Status and its write-one-to-clear bits stay 0.
pub(crate) fn express_endpoint() -> Capability {
    /// Capability version 2, Device/Port Type 0: PCI Express endpoint (7.5.3.2).
    const EXPRESS_CAPABILITIES: u16 = 2;
    /// Device Capabilities (7.5.3.3): 128 byte payloads, 8-bit tags, Role-Based Error Reporting
    /// (required), Function Level Reset.
    const DEVICE_CAPABILITIES: u32 = 1 << 5 | 1 << 15 | 1 << 28;
    /// Device Control (7.5.3.4): relaxed ordering, no snoop and 512 byte read requests are the
    /// values after reset.
    const DEVICE_CONTROL: u16 = 1 << 4 | 1 << 11 | 0b010 << 12;
    /// Error reporting enables, relaxed ordering, payload size, extended tag, no snoop, read
    /// request size.
    const DEVICE_CONTROL_WRITABLE: u16 =
        0b1111 | 1 << 4 | 0b111 << 5 | 1 << 8 | 1 << 11 | 0b111 << 12;
    /// Link Capabilities (7.5.3.6): 16 GT/s, x4, ASPM Optionality Compliance (required).
    const LINK_CAPABILITIES: u32 = 4 | 4 << 4 | 1 << 22;
    /// Link Control (7.5.3.7): Read Completion Boundary, Common Clock Configuration.
    const LINK_CONTROL_WRITABLE: u16 = 1 << 3 | 1 << 6;
    /// Link Status (7.5.3.8): 16 GT/s, x4, Slot Clock Configuration.
    const LINK_STATUS: u16 = 4 | 4 << 4 | 1 << 12;
    /// Device Capabilities 2 (7.5.3.15) and Device Control 2 (7.5.3.16): Completion Timeout
    /// Disable.
    const COMPLETION_TIMEOUT_DISABLE: u16 = 1 << 4;
    /// Link Capabilities 2 (7.5.3.18): 2.5 to 16 GT/s.
    const LINK_SPEEDS: u32 = 0b1111 << 1;
    /// Link Control 2 (7.5.3.19): target speed.
    const TARGET_SPEED: u16 = 4;
    Capability::new(id::EXPRESS, 0x3c)
        .u16(0x02, EXPRESS_CAPABILITIES, 0)
        .u32(0x04, DEVICE_CAPABILITIES)
        .u16(express::DEVICE_CONTROL, DEVICE_CONTROL, DEVICE_CONTROL_WRITABLE)
        .u32(0x0c, LINK_CAPABILITIES)
        .u16(0x10, 0, LINK_CONTROL_WRITABLE)
        .u16(0x12, LINK_STATUS, 0)
        .u32(0x24, u32::from(COMPLETION_TIMEOUT_DISABLE))
        .u16(0x28, 0, COMPLETION_TIMEOUT_DISABLE)
        .u32(0x2c, LINK_SPEEDS)
        .u16(0x30, TARGET_SPEED, 0)
}

/// MSI-X capability (PCI Local Bus 3.0, 6.8.2): Table Size is vectors - 1; table and PBA as
/// offset (a multiple of 8) with the BAR number in bits 2:0 (6.8.2.4 and 6.8.2.5).
pub(crate) fn msix(layout: &MsixLayout) -> Capability {
    let place = |offset: u64| offset as u32 | u32::from(layout.bar());
    Capability::new(id::MSIX, msix::LEN)
        .u16(msix::CONTROL, layout.vectors() - 1, msix::ENABLE | msix::FUNCTION_MASK)
        .u32(msix::TABLE, place(layout.table_range().start))
        .u32(msix::PBA, place(layout.pba_range().start))
}
