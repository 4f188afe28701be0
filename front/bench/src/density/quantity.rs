//! Parts of the memory that sandboxes take.

use super::Taken;

/// A figure of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The PSS of Slipway's processes, with the huge pages of guests.
    Pss,
    /// Pages that are mapped by one process only.
    Private,
    /// The guest's memory, as far as it counts for the VMM.
    Guest,
    /// The VMM's own: heap, stacks, its part of programs.
    Vmm,
    /// The daemon's own, in which the plane is.
    Plane,
    /// The daemon's part of files in memory: volatile layers, and what it maps of guests' memory.
    Mapped,
    /// Other processes: the keeper, `slipway-fs`.
    Others,
    /// Decrease of the host's available memory, with what the kernel needs for the others.
    Host,
}

impl Quantity {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 8] = [
        Self::Pss,
        Self::Private,
        Self::Guest,
        Self::Vmm,
        Self::Plane,
        Self::Mapped,
        Self::Others,
        Self::Host,
    ];

    /// Returns the heading in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pss => "PSS",
            Self::Private => "private",
            Self::Guest => "guest",
            Self::Vmm => "VMM",
            Self::Plane => "plane",
            Self::Mapped => "mapped",
            Self::Others => "others",
            Self::Host => "host",
        }
    }

    /// Returns the figure of all processes together, bytes.
    pub(super) fn of(self, taken: &Taken) -> f64 {
        let Taken { vmms, daemon, others, available, .. } = taken;
        match self {
            // Huge pages of guests, which the daemon maps too, count for their VMMs.
            Self::Pss => (vmms.all() + daemon.pss + others.pss) as f64,
            Self::Private => (vmms.private + daemon.private + others.private) as f64,
            Self::Guest => (vmms.pss_shmem + vmms.hugetlb) as f64,
            Self::Vmm => vmms.pss as f64 - vmms.pss_shmem as f64,
            Self::Plane => daemon.pss as f64 - daemon.pss_shmem as f64,
            Self::Mapped => daemon.pss_shmem as f64,
            Self::Others => others.pss as f64,
            Self::Host => -(*available as f64),
        }
    }
}
