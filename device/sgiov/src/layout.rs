//! The function's BAR and configuration space.

use slipway_pci::{Bar, ConfigSpace, Description, Identity, MsixLayout, Notifications};
use slipway_sgiov_spec::function::{BAR, CLASS, DEVICE, VENDOR, register};

/// Offset in BAR 0 of the MSI-X table, behind the registers.
pub const MSIX_TABLE: u64 = 0x800;
/// Offset in BAR 0 of the MSI-X pending bits.
pub const MSIX_PENDING: u64 = 0x900;
/// End of the MSI-X pending bits in BAR 0.
pub const MSIX_END: u64 = 0xa00;

const IDENTITY: Identity = Identity {
    vendor: VENDOR,
    device: DEVICE,
    subsystem_vendor: VENDOR,
    subsystem: DEVICE,
    class: CLASS,
    revision: 1,
};

pub fn description() -> Description {
    let range = register::BELL..register::BELL + 4;
    let notifications = Some(Notifications { range, stride: 4 });
    let bar = Bar { index: 0, size: BAR, wide: true, ports: false, doorbells: None, notifications };
    Description { bars: vec![bar], vectors: 1, pin: true }
}

pub fn msix() -> MsixLayout {
    MsixLayout::new(0, 1, MSIX_TABLE, MSIX_PENDING)
}

pub fn config_space(description: &Description) -> ConfigSpace {
    ConfigSpace::new(&IDENTITY, description, Some(&msix()))
}
