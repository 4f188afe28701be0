//! Bits that describe the machine instead of its processor: whoever makes a guest's leaves sets or
//! clears them.

/// Leaf 1, ECX.
pub mod leaf1 {
    /// MONITOR and MWAIT.
    pub const MONITOR: u32 = 1 << 3;
    /// Intel's virtualisation.
    pub const VMX: u32 = 1 << 5;
    /// The capabilities of the performance counters.
    pub const PDCM: u32 = 1 << 15;
    /// The local APIC's timer can interrupt at a deadline of the time-stamp counter.
    pub const TSC_DEADLINE: u32 = 1 << 24;
    /// A hypervisor.
    pub const HYPERVISOR: u32 = 1 << 31;
}

/// Leaf 1, EDX: several logical processors in a package.
pub const HTT: u32 = 1 << 28;

/// Leaf 6, EAX: the local APIC's timer never stops. Linux uses timers of high resolution only with
/// it.
pub const ALWAYS_RUNNING_TIMER: u32 = 1 << 2;

/// Leaf 0x8000_0001, ECX, of AMD.
pub mod amd {
    /// Several cores in a package.
    pub const CMP_LEGACY: u32 = 1 << 1;
    /// AMD's virtualisation.
    pub const SVM: u32 = 1 << 2;
    /// Leaves 0x8000_001d and 0x8000_001e.
    pub const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    /// Performance counters of the cores.
    pub const PERFCTR_CORE: u32 = 1 << 23;
    /// Performance counters of the northbridge.
    pub const PERFCTR_NB: u32 = 1 << 24;
    /// Performance counters of the last cache.
    pub const PERFCTR_LLC: u32 = 1 << 28;
}
