//! The features that a host gives a CPU with a template.

use kvm_bindings::CpuId;

use crate::speculation::ARCH_CAPABILITIES_BIT;
use crate::{Error, Host, Result, Template, level, whole};

impl Host {
    /// Returns the features of CPU `cpu`, of `cpus` CPUs at most, of a machine with this template.
    ///
    /// # Errors
    /// [`Error`] if the host cannot give the template.
    pub fn features(&self, template: Template, cpu: u32, cpus: u32) -> Result<CpuId> {
        let leaves = match template {
            Template::Host => whole::of_cpu(self, cpu, cpus),
            Template::Level(level) => level::of_cpu(self, level, cpu, cpus)?,
        };
        CpuId::from_entries(&leaves).map_err(|_| Error::TooMany(leaves.len()))
    }

    /// Checks that the host can give the template.
    ///
    /// # Errors
    /// [`Error`] with the reason.
    pub fn check(&self, template: Template) -> Result<()> {
        self.features(template, 0, 1).map(drop)
    }

    /// Returns the value of `IA32_ARCH_CAPABILITIES` that a guest with these features reads. 0 if
    /// it has no such register.
    pub fn arch_capabilities(&self, features: &CpuId) -> u64 {
        let (word, bit) = ARCH_CAPABILITIES_BIT;
        if word.of(features.as_slice()) & bit == 0 { 0 } else { self.arch_capabilities }
    }
}
