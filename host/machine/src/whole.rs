//! The processor of [`crate::Template::Host`]: what KVM supports on the host, less the features
//! that a guest of this machine cannot use, with the host's name of it and the machine's own
//! topology.
//!
//! Hidden are nested virtualisation, the performance counters (their emulation costs an exit for
//! each access, and no sandbox needs them), MONITOR/MWAIT, the power and thermal sensors, and, on
//! a host whose processor QEMU emulates, KVM's paravirtual end of interrupts.
//! Topology: one socket, a core for each CPU, no threads.

use slipway_cpuid_spec::Leaf;
use slipway_cpuid_spec::features::PV_EOI;
use slipway_cpuid_spec::leaves::{bits, topology};
use slipway_cpuid_spec::machine::{ALWAYS_RUNNING_TIMER, HTT, amd, leaf1};

use crate::Host;

/// KVM's leaf of paravirtual features (Linux, *Documentation/virt/kvm/x86/cpuid.rst*).
const KVM_FEATURES: u32 = 0x4000_0001;

/// Returns the leaves of CPU `cpu` of `cpus`.
pub fn of_cpu(host: &Host, cpu: u32, cpus: u32) -> Vec<Leaf> {
    // The topology leaves are written anew.
    let kept = host.leaves.iter().filter(|entry| !matches!(entry.function, 0x0b | 0x1f));
    let mut leaves: Vec<_> = kept.map(|entry| adapted(*entry, host, cpu, cpus)).collect();
    if host.leaves.iter().any(|entry| entry.function == 0x0b) {
        leaves.extend(topology(cpu, cpus));
    }
    leaves
}

fn adapted(mut entry: Leaf, host: &Host, cpu: u32, cpus: u32) -> Leaf {
    match entry.function {
        1 => {
            // EBX: APIC ID in bits 31:24, logical processors in bits 23:16.
            entry.ebx = entry.ebx & 0xffff | cpus << 16 | cpu << 24;
            entry.ecx &= !(leaf1::MONITOR | leaf1::VMX | leaf1::PDCM | leaf1::TSC_DEADLINE);
            entry.ecx |= leaf1::HYPERVISOR;
            if host.deadline_timer {
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
        // Thermal and power management.
        6 => {
            (entry.eax, entry.ebx) = (entry.eax & ALWAYS_RUNNING_TIMER, 0);
            (entry.ecx, entry.edx) = (0, 0);
        }
        // Monitor/Mwait, performance counters, secure virtual machines, extended performance
        // counters.
        5 | 0x0a | 0x8000_000a | 0x8000_0022 => {
            (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
        }
        0x8000_0001 => {
            let hidden = amd::SVM | amd::PERFCTR_CORE | amd::PERFCTR_NB | amd::PERFCTR_LLC;
            entry.ecx &= !hidden;
            set(&mut entry.ecx, amd::CMP_LEGACY, cpus > 1);
        }
        // Number of cores less one, and bits of an APIC ID.
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | (cpus - 1) | bits(cpus) << 12,
        KVM_FEATURES if host.is_emulated => entry.eax &= !PV_EOI,
        // Extended APIC ID; core ID, one thread in each core; one node.
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (cpu, cpu, 0),
        // Extended topology: without levels, but with the number of the host's CPU.
        0x8000_0026 => entry.edx = cpu,
        _ => {}
    }
    entry
}

fn set(bits: &mut u32, bit: u32, on: bool) {
    if on { *bits |= bit } else { *bits &= !bit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_has_its_number_and_no_hidden_feature() {
        let leaves = vec![
            Leaf::new(0, [0; 4]),
            Leaf::new(1, [0, 0xff02_1234, u32::MAX, 0]),
            Leaf::new(6, [u32::MAX, 1, 1, 1]),
            Leaf::new(0x0b, [0, 9, 9, 0]),
        ];
        let guest = of_cpu(&Host { leaves, ..Host::default() }, 2, 3);
        let find = |function, index| {
            let mut all = guest.iter();
            *all.find(|entry| entry.function == function && entry.index == index).unwrap()
        };
        let one = find(1, 0);
        assert_eq!(one.ebx, 0x0203_1234);
        assert_eq!(one.ecx & (leaf1::VMX | leaf1::TSC_DEADLINE), 0);
        assert_ne!(one.ecx & leaf1::HYPERVISOR, 0);
        assert_eq!(find(6, 0), Leaf::new(6, [ALWAYS_RUNNING_TIMER, 0, 0, 0]));
        let cores = find(0x0b, 1);
        assert_eq!((cores.eax, cores.ebx, cores.edx), (2, 3, 2));
        assert_eq!(guest.iter().filter(|entry| entry.function == 0x0b).count(), 3);
    }
}
