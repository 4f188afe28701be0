//! A host: what its KVM offers.

use kvm_bindings::{
    KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_cpuid_entry2, kvm_msr_entry,
};
use kvm_ioctls::{Cap, Kvm};
use slipway_cpuid_spec::Leaf;
use slipway_cpuid_spec::vendor::family;

use crate::{Error, Result};

/// `IA32_ARCH_CAPABILITIES`: flaws that the processor does not have, and ways around those that it
/// has (Intel SDM, volume 4).
const MSR_ARCH_CAPABILITIES: u32 = 0x10a;
/// The leaf that names the hypervisor below this host.
const SIGNATURE: u32 = 0x4000_0000;
/// Leaves of the processor's name (AMD64 APM, volume 3, *Processor Name*). KVM leaves them zero.
const NAME: std::ops::RangeInclusive<u32> = 0x8000_0002..=0x8000_0004;

/// The features that KVM offers on a host.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The leaves that KVM supports, with the name of the host's processor.
    pub leaves: Vec<Leaf>,
    /// The local APIC's timer can interrupt at a deadline of the time-stamp counter.
    pub deadline_timer: bool,
    /// The value of `IA32_ARCH_CAPABILITIES` that KVM gives a guest that has the register.
    pub arch_capabilities: u64,
    /// QEMU's software emulation is the host's processor. Guests then do not end interrupts by a
    /// write to memory:
    ///
    /// After it has injected an interrupt (VMRUN), QEMU keeps the vector as the number of an
    /// exception, and delivers it once more if a timer of the host expires before the guest leaves
    /// for KVM, even where the guest has interrupts off, which then waits for ever for a lock that
    /// it has itself. Guests without that feature leave at the beginning of each handler. Seen
    /// with QEMU 11.1 (`helper_vmrun` in *target/i386/tcg/system/svm_helper.c*).
    pub is_emulated: bool,
}

impl Host {
    /// Returns this host.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn of(kvm: &Kvm) -> Result<Self> {
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let supported = supported.map_err(Error::kvm("which CPU features it supports"))?;
        let leaves = supported.as_slice().iter().map(|entry| {
            if NAME.contains(&entry.function) { leaf(entry.function) } else { of_kvm(entry) }
        });
        Ok(Self {
            leaves: leaves.collect(),
            deadline_timer: kvm.check_extension(Cap::TscDeadlineTimer),
            arch_capabilities: arch_capabilities(kvm)?,
            is_emulated: is_emulated(&leaf(SIGNATURE)),
        })
    }
}

/// Returns this processor's value of a leaf.
fn leaf(function: u32) -> Leaf {
    let std::arch::x86_64::CpuidResult { eax, ebx, ecx, edx } =
        std::arch::x86_64::__cpuid(function);
    Leaf::new(function, [eax, ebx, ecx, edx])
}

/// Returns a leaf as KVM tells it.
fn of_kvm(entry: &kvm_cpuid_entry2) -> Leaf {
    let kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, .. } = *entry;
    let is_indexed = flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX != 0;
    Leaf { function, index, is_indexed, eax, ebx, ecx, edx }
}

/// Returns vendor, family, model and stepping of this processor (Intel SDM, volume 2, CPUID leaves
/// 0 and 1).
pub fn processor() -> String {
    let vendor = leaf(0);
    let vendor = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat();
    let vendor = String::from_utf8_lossy(&vendor);
    let signature = leaf(1).eax;
    let (family, stepping) = (family(signature), signature & 0xf);
    let model = signature >> 4 & 0xf | signature >> 12 & 0xf0;
    format!("{vendor} family {family} model {model} stepping {stepping}")
}

/// Returns whether QEMU's software emulation is the processor of a host with this `leaf`
/// [`SIGNATURE`].
fn is_emulated(leaf: &Leaf) -> bool {
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
}

/// Returns KVM's own value of the register. 0 if KVM does not know it.
fn arch_capabilities(kvm: &Kvm) -> Result<u64> {
    if !kvm.check_extension(Cap::GetMsrFeatures) {
        return Ok(0);
    }
    let entry = kvm_msr_entry { index: MSR_ARCH_CAPABILITIES, ..Default::default() };
    let mut one = Msrs::from_entries(&[entry]).map_err(|_| Error::TooMany(1))?;
    let count = kvm.get_msrs(&mut one).map_err(Error::kvm("which flaws the processor has"))?;
    Ok(if count == 1 { one.as_slice()[0].data } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_emulated_processor_is_known_by_its_signature() {
        let mut entry = Leaf::new(SIGNATURE, [0, 0x5447_4354, 0x4354_4743, 0x4743_5447]);
        assert!(is_emulated(&entry));
        entry.edx = 0;
        assert!(!is_emulated(&entry));
    }
}
