//! The hot-plug memory of a microVM whose guest or VMM is hostile, or not.

use std::sync::Mutex;

use slipway_hypervisor::{Error, HotRegion, MemoryDevice, Result, VmSpec};

/// The bytes of a block.
pub const BLOCK: u64 = 2 << 20;

/// A region, with a behaviour chosen by the name of its sandbox.
#[derive(Debug)]
pub struct HotMemory {
    kind: Kind,
    state: Mutex<MemoryDevice>,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// The guest does what it is asked to do.
    Follows,
    /// The guest plugs what it is asked to plug, and gives back nothing.
    KeepsAll,
    /// The VMM lists all of the region as plugged.
    ClaimsAll,
    /// The VMM answers nothing more from the first change on.
    FallsSilent,
}

impl HotMemory {
    /// Returns the region of a machine, or `None` if it has none.
    pub fn of(spec: &VmSpec) -> Option<Self> {
        let HotRegion { bytes, node } = *spec.hot_memory.first()?;
        let kind = match spec.name.as_str() {
            "keeps-all" => Kind::KeepsAll,
            "claims-all" => Kind::ClaimsAll,
            "memory-silent" => Kind::FallsSilent,
            _ => Kind::Follows,
        };
        let plugged = if kind == Kind::ClaimsAll { bytes } else { 0 };
        let device = MemoryDevice { bytes, node, block: BLOCK, requested: 0, plugged };
        Some(Self { kind, state: Mutex::new(device) })
    }

    pub fn list(&self) -> Result<Vec<MemoryDevice>> {
        let state = *self.state.lock().unwrap();
        match self.kind {
            Kind::FallsSilent if state.requested > 0 => Err(Error::Control("no answer".into())),
            _ => Ok(vec![state]),
        }
    }

    pub fn ask(&self, bytes: u64) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        state.requested = bytes;
        match self.kind {
            Kind::Follows => state.plugged = bytes,
            Kind::KeepsAll => state.plugged = state.plugged.max(bytes),
            Kind::ClaimsAll | Kind::FallsSilent => {}
        }
        Ok(())
    }
}
