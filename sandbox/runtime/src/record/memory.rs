//! The memory that a sandbox began with and can be given, as a whole or for one of its containers.

use serde::{Deserialize, Serialize};

/// The most containers of a pod with memory of their own at a time: RunD-V's best number of
/// containers in a sandbox, and the most regions that a machine has.
pub const BOUND_CONTAINERS: usize = 8;
/// The memory of a region beside its container's limit, bytes: the kernel keeps some of each node
/// free.
pub(crate) const REGION_MARGIN: u64 = 4 << 20;

/// The bounds of a sandbox's memory, all in bytes. The memory that it has now is
/// [`Record::memory_bytes`](super::Record::memory_bytes).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryBounds {
    /// The guest memory at the start; this much stays.
    pub boot_bytes: u64,
    /// The most guest memory that the sandbox can be given while it runs.
    pub max_bytes: u64,
    /// The guest memory that the control group of the VMM has room for; more than the guest has
    /// while it is being given memory.
    pub granted_bytes: u64,
    /// The memory that the control group has room for beside the guest's.
    pub overhead_bytes: u64,
    /// The size that a user gave the sandbox while it ran; 0: none. Updates of a pod's containers
    /// give back no memory below it.
    #[serde(default)]
    pub chosen_bytes: u64,
    /// Set if the caller named `max_bytes`, also as none beside `boot_bytes`.
    #[serde(default)]
    pub is_named: bool,
}

impl MemoryBounds {
    /// Returns the bounds of a sandbox that begins with `bytes`, and can have `max_bytes`.
    pub fn new(bytes: u64, max_bytes: u64) -> Self {
        Self { boot_bytes: bytes, max_bytes, granted_bytes: bytes, ..Self::default() }
    }

    /// Returns the bounds with at least so many bytes at the start.
    pub fn at_least(self, bytes: u64) -> Self {
        Self {
            boot_bytes: self.boot_bytes.max(bytes),
            max_bytes: self.max_bytes.max(bytes),
            granted_bytes: self.granted_bytes.max(bytes),
            ..self
        }
    }

    /// Returns the bounds of a sandbox whose machine begins with `plugged` bytes beside its memory,
    /// at most those that there is room for.
    pub fn with_plugged(self, plugged: u64) -> Self {
        let granted_bytes = self.boot_bytes.saturating_add(plugged.min(self.room()));
        Self { granted_bytes, ..self }
    }

    /// Returns the bytes that the sandbox can be given beside what it begins with.
    pub fn room(&self) -> u64 {
        self.max_bytes.saturating_sub(self.boot_bytes)
    }
}

/// The regions of hot-plug memory of a pod. Each has a NUMA node of its own, and is the memory of
/// one container at a time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundMemory {
    /// The size of each region in bytes; 0: the pod has none.
    pub region_bytes: u64,
    /// The bytes of each region that the control group of the VMM has room for: those that the
    /// guest has plugged or is asked to plug.
    pub granted_bytes: Vec<u64>,
}

impl BoundMemory {
    /// Returns the regions of a pod, each of `region_bytes` bytes, with nothing plugged. Returns
    /// none for 0.
    pub fn of_regions(region_bytes: u64) -> Self {
        let count = if region_bytes > 0 { BOUND_CONTAINERS } else { 0 };
        Self { region_bytes, granted_bytes: vec![0; count] }
    }

    /// Returns the largest limit in bytes of a container with a region; 0 if there is none.
    pub fn most_limit(&self) -> u64 {
        self.region_bytes.saturating_sub(REGION_MARGIN)
    }

    /// Returns the NUMA node of the guest with the memory of a region.
    pub fn node(region: u32) -> u8 {
        u8::try_from(region).unwrap_or(u8::MAX).saturating_add(1)
    }

    /// Returns the bytes of all regions.
    pub fn room(&self) -> u64 {
        self.region_bytes.saturating_mul(self.granted_bytes.len() as u64)
    }

    /// Returns the bytes that the guest may have of all regions.
    pub fn granted(&self) -> u64 {
        self.granted_bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}
