//! The hot-plug memory of a microVM whose guest or VMM is hostile, or not.

use std::sync::Mutex;

use slipway_hypervisor::{Error, HotRegion, MemoryDevice, Result, VmSpec};

/// The bytes of a block.
pub const BLOCK: u64 = 2 << 20;
/// The bytes of a block that no guest has.
const TERABYTE: u64 = 1 << 40;

/// Regions, with a behaviour chosen by the name of their sandbox.
#[derive(Debug)]
pub struct HotMemory {
    kind: MemoryGuestKind,
    devices: Mutex<Vec<MemoryDevice>>,
}

#[derive(Debug, PartialEq, Eq)]
enum MemoryGuestKind {
    /// The guest does what it is asked to do.
    Follows,
    /// The guest plugs what it is asked to plug, and gives back nothing.
    KeepsAll,
    /// The guest gives back one block between two looks at the VMM's list.
    GivesSlowly,
    /// The VMM lists all of each region as plugged.
    ClaimsAll,
    /// The VMM tells of regions and blocks of a terabyte.
    ClaimsLargeBlocks,
    /// The VMM answers nothing more from the first change on.
    FallsSilent,
}

impl HotMemory {
    /// Returns the regions of a machine, or `None` if it has none.
    pub fn of(spec: &VmSpec) -> Option<Self> {
        if spec.hot_memory.is_empty() {
            return None;
        }
        let kind = match spec.name.as_str() {
            "keeps-all" => MemoryGuestKind::KeepsAll,
            "gives-slowly" => MemoryGuestKind::GivesSlowly,
            "claims-all" => MemoryGuestKind::ClaimsAll,
            "claims-large-blocks" => MemoryGuestKind::ClaimsLargeBlocks,
            "memory-silent" => MemoryGuestKind::FallsSilent,
            _ => MemoryGuestKind::Follows,
        };
        let device = |&HotRegion { bytes, node }: &HotRegion| {
            let plugged = if kind == MemoryGuestKind::ClaimsAll { bytes } else { 0 };
            let (bytes, block) = match kind {
                MemoryGuestKind::ClaimsLargeBlocks => (TERABYTE, TERABYTE),
                _ => (bytes, BLOCK),
            };
            MemoryDevice { bytes, node, block, requested: 0, plugged }
        };
        let devices = Mutex::new(spec.hot_memory.iter().map(device).collect());
        Some(Self { kind, devices })
    }

    pub fn list(&self) -> Result<Vec<MemoryDevice>> {
        let mut all = self.devices.lock().unwrap();
        let devices = all.clone();
        if self.kind == MemoryGuestKind::GivesSlowly {
            for device in all.iter_mut().filter(|device| device.plugged > device.requested) {
                device.plugged -= BLOCK;
            }
        }
        let changed = devices.iter().any(|device| device.requested > 0);
        match self.kind {
            MemoryGuestKind::FallsSilent if changed => Err(Error::Control("no answer".into())),
            _ => Ok(devices),
        }
    }

    pub fn ask(&self, device: usize, bytes: u64) -> Result<()> {
        let mut devices = self.devices.lock().unwrap();
        let state = &mut devices[device];
        state.requested = bytes;
        match self.kind {
            MemoryGuestKind::Follows | MemoryGuestKind::ClaimsLargeBlocks => state.plugged = bytes,
            MemoryGuestKind::KeepsAll | MemoryGuestKind::GivesSlowly => {
                state.plugged = state.plugged.max(bytes)
            }
            MemoryGuestKind::ClaimsAll | MemoryGuestKind::FallsSilent => {}
        }
        Ok(())
    }
}

/// Returns the limit of the memory of a sandbox's VMM in bytes, or `None` without control groups.
pub fn limit(id: &str) -> Option<u64> {
    let unified = std::fs::read_to_string(format!("/sys/fs/cgroup/slipway/{id}/memory.max"));
    let text = unified.or_else(|_| {
        std::fs::read_to_string(format!("/sys/fs/cgroup/memory/slipway/{id}/memory.limit_in_bytes"))
    });
    text.ok()?.trim().parse().ok()
}
