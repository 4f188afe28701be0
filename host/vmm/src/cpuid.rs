//! The processor that the guest sees: what KVM supports on this host, less the features that a
//! guest of this machine cannot use, with the host's name of it and the machine's own topology.
//!
//! Hidden are nested virtualisation, the performance counters (their emulation costs an exit for
//! each access, and no sandbox needs them), MONITOR/MWAIT, the power and thermal sensors, and, on
//! a host whose processor QEMU emulates, KVM's paravirtual end of interrupts.
//! Topology: one socket, a core for each CPU, no threads.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::{Error, Result};

/// Bits of leaf 1, ECX.
mod leaf1 {
    pub const MONITOR: u32 = 1 << 3;
    pub const VMX: u32 = 1 << 5;
    pub const PDCM: u32 = 1 << 15;
    pub const TSC_DEADLINE: u32 = 1 << 24;
    pub const HYPERVISOR: u32 = 1 << 31;
}

/// Bits of leaf 1, EDX: several logical processors in a package.
const HTT: u32 = 1 << 28;

/// Bits of leaf 0x8000_0001, ECX.
mod amd {
    /// Several cores in a package.
    pub const CMP_LEGACY: u32 = 1 << 1;
    pub const SVM: u32 = 1 << 2;
    pub const PERFCTR_CORE: u32 = 1 << 23;
    pub const PERFCTR_NB: u32 = 1 << 24;
    pub const PERFCTR_LLC: u32 = 1 << 28;
}

/// The leaf that names the hypervisor below this host.
const SIGNATURE: u32 = 0x4000_0000;
/// KVM's leaf of paravirtual features (Linux, *Documentation/virt/kvm/x86/cpuid.rst*).
const KVM_FEATURES: u32 = 0x4000_0001;
/// In EAX of [`KVM_FEATURES`]: the guest may end an interrupt by a write to memory.
const PV_EOI: u32 = 1 << 6;

/// Values of a topology level's type (Intel SDM, volume 2, CPUID leaf 0x0b).
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// The features that KVM supports on this host.
///
/// # Errors
/// [`Error::Kvm`].
pub fn supported(kvm: &Kvm) -> Result<CpuId> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::kvm("tell which CPU features it supports"))
}

/// Leaves of the processor's name (AMD64 APM, volume 3, *Processor Name*). KVM leaves them zero.
const NAME: std::ops::RangeInclusive<u32> = 0x8000_0002..=0x8000_0004;

/// Returns the host's value of a leaf.
fn host(function: u32) -> kvm_cpuid_entry2 {
    let std::arch::x86_64::CpuidResult { eax, ebx, ecx, edx } =
        std::arch::x86_64::__cpuid(function);
    kvm_cpuid_entry2 { function, eax, ebx, ecx, edx, ..Default::default() }
}

/// Returns whether QEMU's software emulation is the processor of a host with this `leaf`
/// [`SIGNATURE`].
///
/// After it has injected an interrupt (VMRUN), QEMU keeps the vector as the number of an exception,
/// and delivers it once more if a timer of the host expires before the guest leaves for KVM, even
/// where the guest has interrupts off, which then waits for ever for a lock that it has itself.
/// Guests without [`PV_EOI`] leave at the beginning of each handler. Seen with QEMU 11.1
/// (`helper_vmrun` in *target/i386/tcg/system/svm_helper.c*).
fn is_emulated(leaf: &kvm_cpuid_entry2) -> bool {
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
}

/// Returns the features of CPU `cpu` of `cpus` of the machine.
///
/// # Errors
/// [`Error::Config`] if the list becomes longer than KVM allows.
pub fn of_cpu(supported: &CpuId, cpu: u32, cpus: u32, deadline_timer: bool) -> Result<CpuId> {
    let mut entries = Vec::with_capacity(supported.as_slice().len() + 2);
    for entry in supported.as_slice() {
        // The topology leaves are written anew.
        if !matches!(entry.function, 0x0b | 0x1f) {
            let is_name = NAME.contains(&entry.function);
            let mut entry = if is_name { host(entry.function) } else { *entry };
            adapt(&mut entry, cpu, cpus, deadline_timer);
            entries.push(entry);
        }
    }
    if supported.as_slice().iter().any(|entry| entry.function == 0x0b) {
        entries.extend(topology(cpu, cpus));
    }
    CpuId::from_entries(&entries).map_err(|_| Error::Config("too many CPU features".into()))
}

/// Returns the number of bits that the numbers of `cpus` CPUs need.
fn bits(cpus: u32) -> u32 {
    cpus.next_power_of_two().trailing_zeros()
}

fn adapt(entry: &mut kvm_cpuid_entry2, cpu: u32, cpus: u32, deadline_timer: bool) {
    match entry.function {
        1 => {
            // EBX: APIC ID in bits 31:24, logical processors in bits 23:16.
            entry.ebx = entry.ebx & 0xffff | cpus << 16 | cpu << 24;
            entry.ecx &= !(leaf1::MONITOR | leaf1::VMX | leaf1::PDCM | leaf1::TSC_DEADLINE);
            entry.ecx |= leaf1::HYPERVISOR;
            if deadline_timer {
                entry.ecx |= leaf1::TSC_DEADLINE;
            }
            set(&mut entry.edx, HTT, cpus > 1);
        }
        // Cache parameters: bits 31:26 are the cores of the package, 25:14 those that share the
        // cache; private except for the last level.
        4 if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 { cpus - 1 } else { 0 };
            let cores = (1 << bits(cpus)) - 1;
            entry.eax = entry.eax & 0x3fff | shared << 14 | cores << 26;
        }
        // Monitor/Mwait, thermal and power management, performance counters.
        5 | 6 | 0x0a => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        0x8000_0001 => {
            let hidden = amd::SVM | amd::PERFCTR_CORE | amd::PERFCTR_NB | amd::PERFCTR_LLC;
            entry.ecx &= !hidden;
            set(&mut entry.ecx, amd::CMP_LEGACY, cpus > 1);
        }
        // Number of cores less one, and bits of an APIC ID.
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | (cpus - 1) | bits(cpus) << 12,
        // Secure virtual machines, and extended performance counters.
        0x8000_000a | 0x8000_0022 => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        KVM_FEATURES if is_emulated(&host(SIGNATURE)) => entry.eax &= !PV_EOI,
        // Extended APIC ID; core ID, one thread in each core; one node.
        0x8000_001e => {
            (entry.eax, entry.ebx, entry.ecx) = (cpu, cpu, 0);
        }
        // Extended topology: without levels, but with the number of the host's CPU.
        0x8000_0026 => entry.edx = cpu,
        _ => {}
    }
}

fn set(bits: &mut u32, bit: u32, on: bool) {
    if on { *bits |= bit } else { *bits &= !bit }
}

/// Leaf 0x0b: one thread in a core, all cores in one package.
fn topology(cpu: u32, cpus: u32) -> [kvm_cpuid_entry2; 3] {
    let level = |index, shift, count, kind| kvm_cpuid_entry2 {
        function: 0x0b,
        index,
        flags: kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: index | kind << 8,
        edx: cpu,
        ..Default::default()
    };
    [level(0, 0, 1, LEVEL_THREAD), level(1, bits(cpus), cpus, LEVEL_CORE), level(2, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, ebx: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, ebx, ecx, ..Default::default() }
    }

    #[test]
    fn a_cpu_has_its_number_and_no_hidden_feature() {
        let host = [leaf(0, 0, 0), leaf(1, 0xff02_1234, u32::MAX), leaf(0x0b, 9, 9)];
        let supported = CpuId::from_entries(&host).unwrap();
        let guest = of_cpu(&supported, 2, 3, false).unwrap();
        let find = |function, index| {
            let mut all = guest.as_slice().iter();
            *all.find(|entry| entry.function == function && entry.index == index).unwrap()
        };
        let one = find(1, 0);
        assert_eq!(one.ebx, 0x0203_1234);
        assert_eq!(one.ecx & (leaf1::VMX | leaf1::TSC_DEADLINE), 0);
        assert_ne!(one.ecx & leaf1::HYPERVISOR, 0);
        let cores = find(0x0b, 1);
        assert_eq!((cores.eax, cores.ebx, cores.edx), (2, 3, 2));
        assert_eq!(guest.as_slice().iter().filter(|entry| entry.function == 0x0b).count(), 3);
    }

    #[test]
    fn an_emulated_processor_is_known_by_its_signature() {
        let mut entry = leaf(SIGNATURE, 0x5447_4354, 0x4354_4743);
        entry.edx = 0x4743_5447;
        assert!(is_emulated(&entry));
        entry.edx = 0;
        assert!(!is_emulated(&entry));
    }
}
