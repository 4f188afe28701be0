//! The bodies of the fuzz targets.

use crate::{Access, Bar, CONFIG_SIZE, ConfigSpace, Description, Identity, Msix, MsixLayout};

/// Runs `data` as a sequence of accesses to configuration space and the MSI-X table, and checks the
/// invariants that hold after any accesses.
///
/// An access is four bytes: kind and length, offset (two bytes), and the value of every byte.
///
/// # Panics
/// When an invariant does not hold: that is the finding.
pub fn config_space(data: &[u8]) {
    let identity = Identity {
        vendor: 0x1b36,
        device: 0x10,
        subsystem_vendor: 0,
        subsystem: 0,
        class: 0x01_08_02,
        revision: 1,
    };
    let bar = Bar {
        index: 0,
        size: 16 << 10,
        wide: true,
        ports: false,
        doorbells: None,
        notifications: None,
    };
    let description = Description { bars: vec![bar], vectors: 33, pin: true };
    let layout = MsixLayout::new(0, 33, 0x2000, 0x3000);
    let mut config = ConfigSpace::new(&identity, &description, Some(&layout));
    let mut msix = Msix::new(layout);
    for access in data.chunks_exact(4) {
        let [kind, low, high, value] = [access[0], access[1], access[2], access[3]];
        let offset = u16::from_le_bytes([low, high]);
        let mut bytes = vec![value; usize::from(kind >> 2)];
        match kind & 3 {
            0 => config.read(offset, &mut bytes),
            1 => drop(config.write(offset, &bytes)),
            2 => drop(msix.read(0, u64::from(offset), &mut bytes)),
            _ => drop(msix.write(0, u64::from(offset), &bytes)),
        }
        let route = msix.raise(offset, config.msix_control());
        if let crate::Route::Deliver(message) = route {
            assert_eq!(message.address % 4, 0);
        }
    }
    check_config(&mut config);
    let state = msix.save();
    assert!(msix.restore(&state).is_ok() && msix.save() == state);
    assert_eq!(msix.read(0, 0x1fff, &mut [0]), Access::Refused);
}

/// Checks that read-only registers kept their values, and that a saved state can be restored.
fn check_config(config: &mut ConfigSpace) {
    let mut header = [0; 12];
    config.read(0, &mut header);
    assert_eq!(header[..4], [0x36, 0x1b, 0x10, 0]);
    assert_eq!(header[8..], [1, 2, 8, 1]);
    let mut extended = [0xff; CONFIG_SIZE - 256];
    config.read(256, &mut extended);
    assert!(extended.iter().all(|&byte| byte == 0));
    assert_eq!(config.bar_address(0) % (16 << 10), 0);
    let state = config.save();
    assert!(config.restore(&state).is_ok() && config.save() == state);
}

#[cfg(test)]
mod tests {
    #[test]
    fn config_space_survives_pseudo_random_accesses() {
        for data in slipway_ram::fuzz::inputs(1, 4096).take(200) {
            super::config_space(&data);
        }
    }
}
