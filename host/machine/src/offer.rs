//! The features that a host gives a CPU with a template.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use slipway_cpuid_spec::speculation::ARCH_CAPABILITIES_BIT;
use slipway_cpuid_spec::{Leaf, Template};

use crate::{Error, Host, Result, level, whole};

impl Host {
    /// Returns what CPU `cpu`, of `cpus` CPUs at most, of a machine with this template is told by
    /// the CPUID instruction.
    ///
    /// # Errors
    /// [`Error`] if the host cannot give the template.
    pub fn cpu(&self, template: Template, cpu: u32, cpus: u32) -> Result<Vec<Leaf>> {
        match template {
            Template::Host => Ok(whole::of_cpu(self, cpu, cpus)),
            Template::Level(level) => level::of_cpu(self, level, cpu, cpus),
        }
    }

    /// Returns the leaves of [`Host::cpu`] as KVM takes them.
    ///
    /// # Errors
    /// [`Error`] if the host cannot give the template.
    pub fn features(&self, template: Template, cpu: u32, cpus: u32) -> Result<CpuId> {
        let entries: Vec<_> = self.cpu(template, cpu, cpus)?.iter().map(for_kvm).collect();
        CpuId::from_entries(&entries).map_err(|_| Error::TooMany(entries.len()))
    }

    /// Checks that the host can give the template.
    ///
    /// # Errors
    /// [`Error`] with the reason.
    pub fn check(&self, template: Template) -> Result<()> {
        self.features(template, 0, 1).map(drop)
    }

    /// Returns the value of `IA32_ARCH_CAPABILITIES` that a guest with these leaves reads. 0 if it
    /// has no such register.
    pub fn arch_capabilities(&self, leaves: &[Leaf]) -> u64 {
        let (word, bit) = ARCH_CAPABILITIES_BIT;
        if word.of(leaves) & bit == 0 { 0 } else { self.arch_capabilities }
    }
}

/// Returns a leaf as KVM takes it.
fn for_kvm(leaf: &Leaf) -> kvm_cpuid_entry2 {
    let Leaf { function, index, is_indexed, eax, ebx, ecx, edx } = *leaf;
    let flags = if is_indexed { KVM_CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 };
    kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, ..Default::default() }
}
