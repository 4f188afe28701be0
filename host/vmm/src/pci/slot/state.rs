//! The saved state of a device of the bus, beside its function's own.

use serde::{Deserialize, Serialize};
use slipway_pci_spec::register;

use super::{Moved, Slot};
use crate::lock::lock;
use crate::pci::vectors::VectorsState;
use crate::{Error, Result};

/// The saved state of a device of the bus. The addresses of BARs are in the function's
/// configuration space.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotState {
    shape: SavedShape,
    vectors: Option<VectorsState>,
}

/// The properties that a successor's function must have in common with the saved one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedShape {
    /// The device's number on the bus.
    number: u8,
    /// Vendor and device, class and revision, subsystem.
    identity: [u32; 3],
    /// Number and size of each BAR.
    bars: Vec<(u8, u64)>,
    /// The number of MSI-X vectors.
    vectors: u16,
}

impl Slot {
    fn saved_shape(&self) -> SavedShape {
        let vectors = self.vectors.as_ref().map_or(0, |vectors| lock(vectors).count());
        let identity = register::IDENTITY.map(|at| self.read_u32(at));
        SavedShape { number: self.number, identity, bars: self.bars.clone(), vectors }
    }

    /// Returns the state for a successor. The guest is stopped.
    pub fn save(&self) -> SlotState {
        let vectors = self.vectors.as_ref().map(|vectors| lock(vectors).save());
        SlotState { shape: self.saved_shape(), vectors }
    }

    /// Takes over the state of a predecessor. Configuration space has its saved values already;
    /// `moved` is called for each BAR that answers elsewhere now.
    ///
    /// # Errors
    /// [`Error::State`] if the function is another one than the saved one.
    pub(in crate::pci) fn restore(&self, saved: &SlotState, moved: Moved<'_>) -> Result<()> {
        let number = self.number;
        if self.saved_shape() != saved.shape {
            let what = format!("PCI device {number} is another function than the saved one");
            return Err(Error::State(what));
        }
        self.follow(&mut lock(&self.decoder), moved);
        match (&self.vectors, &saved.vectors) {
            (Some(vectors), Some(saved)) => {
                let control = self.read_msix_control();
                let restored = lock(vectors).restore(saved, control);
                restored.map_err(|error| Error::State(format!("PCI device {number}: {error}")))
            }
            (None, None) => Ok(()),
            _ => Err(Error::State(format!("PCI device {number}: MSI-X that cannot be"))),
        }
    }
}
