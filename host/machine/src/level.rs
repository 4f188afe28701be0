//! The processor of a level: the same on all hosts of a kind, but for what `speculation` leaves.

use slipway_cpuid_spec::Register::{self, Eax, Ebx, Ecx, Edx};
use slipway_cpuid_spec::features::{self, KVM, PV_EOI};
use slipway_cpuid_spec::leaves::{amd_caches, bits, caches, intel_cache, topology};
use slipway_cpuid_spec::machine::{HTT, amd, leaf1};
use slipway_cpuid_spec::{Leaf, Level, ProcessorKind, Template, Vendor, Word, speculation, xsave};

use crate::{Error, Host, Result};

/// Bits of a guest-physical address with a level's template: 1 TiB, four times the largest memory
/// of a machine. Every server processor has more.
pub const PHYSICAL_BITS: u32 = 40;
/// Bits of a linear address: four levels of page tables.
const LINEAR_BITS: u32 = 48;
/// Both, as in leaf 0x8000_0008, EAX.
const ADDRESSES: u32 = PHYSICAL_BITS | LINEAR_BITS << 8;

/// The last basic leaf, and the last extended ones.
const LAST: u32 = 0x0d;
const LAST_INTEL: u32 = 0x8000_0008;
const LAST_AMD: u32 = 0x8000_0021;
/// The last of KVM's leaves.
const LAST_KVM: u32 = 0x4000_0001;

/// Units of 8 bytes that CLFLUSH writes back, in leaf 1, EBX.
const FLUSH_UNITS: u32 = 8 << 8;
/// The descriptor in Intel's leaf 2 which says that leaf 4 has the caches.
const SEE_LEAF_4: u32 = 0xff01;

/// A CPU with the template of a level.
struct Cpu<'a> {
    host: &'a Host,
    level: Level,
    kind: ProcessorKind,
    cpu: u32,
    cpus: u32,
}

/// Returns the leaves of CPU `cpu` of `cpus`.
///
/// # Errors
/// [`Error`] if the host cannot give the level.
pub fn of_cpu(host: &Host, level: Level, cpu: u32, cpus: u32) -> Result<Vec<Leaf>> {
    let kind = check(host, level)?;
    Ok(Cpu { host, level, kind, cpu, cpus }.leaves())
}

/// Checks that the host can give the level. Returns the kind of its processor.
fn check(host: &Host, level: Level) -> Result<ProcessorKind> {
    let template = Template::Level(level);
    let unfit = |reason: String| Error::Processor { template, reason };
    let find = |function| host.leaves.iter().find(move |entry| entry.function == function);
    let [zero, one] = [0, 1].map(|function| find(function).copied().unwrap_or_default());
    let kind = ProcessorKind::of(&zero, &one).map_err(unfit)?;
    let optional = if host.is_emulated { PV_EOI } else { 0 };
    let mut missing = features::missing(&host.leaves, level, kind.vendor, optional);
    if !host.deadline_timer {
        missing.push("tsc_deadline_timer");
    }
    if !missing.is_empty() {
        return Err(Error::Lacks { template, missing: missing.join(", ") });
    }
    let physical = Word(0x8000_0008, 0, Eax).of(&host.leaves) & 0xff;
    if physical < PHYSICAL_BITS {
        let reason = format!("its physical addresses have {physical} bits, of {PHYSICAL_BITS}");
        return Err(unfit(reason));
    }
    match xsave::differs(&host.leaves, level, kind.vendor) {
        Some(reason) => Err(unfit(reason)),
        None => Ok(kind),
    }
}

impl Cpu<'_> {
    fn vendor(&self) -> Vendor {
        self.kind.vendor
    }

    /// Returns the bits of a word that the level has, and those that the host decides.
    fn bits(&self, function: u32, index: u32, register: Register) -> u32 {
        let word = Word(function, index, register);
        let own = features::bits(word, self.level, self.vendor());
        own | speculation::bits(word, self.vendor(), &self.host.leaves)
    }

    fn leaves(&self) -> Vec<Leaf> {
        let mut all = vec![self.zero(LAST, 0), self.one()];
        if self.vendor() == Vendor::Intel {
            all.push(Leaf::new(2, [SEE_LEAF_4, 0, 0, 0]));
            all.extend(caches(4, self.cpus, true));
        }
        all.push(Leaf::new(6, [self.bits(6, 0, Eax), 0, 0, 0]));
        // The highest index is 2.
        all.push(Leaf::indexed(7, 0, [2, self.bits(7, 0, Ebx), 0, self.bits(7, 0, Edx)]));
        all.push(Leaf::indexed(7, 1, [0; 4]));
        all.push(Leaf::indexed(7, 2, [0, 0, 0, self.bits(7, 2, Edx)]));
        all.extend(topology(self.cpu, self.cpus));
        all.extend(xsave::leaves(self.level, self.vendor(), self.bits(0x0d, 1, Eax)));
        all.extend(self.of_kvm());
        all.extend(match self.vendor() {
            Vendor::Intel => self.extended_of_intel(),
            Vendor::Amd => self.extended_of_amd(),
        });
        all
    }

    /// A leaf with the last leaf of a range and, in those that have it, the vendor.
    fn zero(&self, last: u32, function: u32) -> Leaf {
        let [ebx, ecx, edx] =
            [Ebx, Ecx, Edx].map(|register| Word(0, 0, register).of(&self.host.leaves));
        Leaf::new(function, [last, ebx, ecx, edx])
    }

    /// Leaf 1: signature, numbers, features. KVM keeps OSXSAVE and the bit of the local APIC.
    fn one(&self) -> Leaf {
        let numbers = FLUSH_UNITS | self.cpus << 16 | self.cpu << 24;
        let ecx = self.bits(1, 0, Ecx) | leaf1::TSC_DEADLINE | leaf1::HYPERVISOR;
        let edx = self.bits(1, 0, Edx) | if self.cpus > 1 { HTT } else { 0 };
        Leaf::new(1, [self.kind.signature(self.level), numbers, ecx, edx])
    }

    fn of_kvm(&self) -> [Leaf; 2] {
        const SIGNATURE: &[u8; 12] = b"KVMKVMKVM\0\0\0";
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| SIGNATURE[at + i]));
        let mut own = features::bits(KVM, self.level, self.vendor());
        if self.host.is_emulated {
            own &= !PV_EOI;
        }
        let first = Leaf::new(0x4000_0000, [LAST_KVM, word(0), word(4), word(8)]);
        [first, Leaf::new(LAST_KVM, [own, 0, 0, 0])]
    }

    fn extended_of_intel(&self) -> Vec<Leaf> {
        let [ecx, edx] = [Ecx, Edx].map(|register| self.bits(0x8000_0001, 0, register));
        let flaws = self.bits(LAST_INTEL, 0, Ebx);
        let mut all = vec![Leaf::new(0x8000_0000, [LAST_INTEL, 0, 0, 0])];
        all.push(Leaf::new(0x8000_0001, [0, 0, ecx, edx]));
        all.extend(self.name());
        all.extend([intel_cache(), Leaf::new(LAST_INTEL, [ADDRESSES, flaws, 0, 0])]);
        all
    }

    fn extended_of_amd(&self) -> Vec<Leaf> {
        let signature = self.kind.signature(self.level);
        let several = if self.cpus > 1 { amd::CMP_LEGACY } else { 0 };
        let ecx = self.bits(0x8000_0001, 0, Ecx) | several | amd::TOPOLOGY_EXTENSIONS;
        let mut all = vec![self.zero(LAST_AMD, 0x8000_0000)];
        all.push(Leaf::new(0x8000_0001, [signature, 0, ecx, self.bits(0x8000_0001, 0, Edx)]));
        all.extend(self.name());
        all.extend(amd_caches());
        // Number of CPUs less one, and bits of an APIC ID.
        let numbers = (self.cpus - 1) | bits(self.cpus) << 12;
        all.push(Leaf::new(0x8000_0008, [ADDRESSES, self.bits(0x8000_0008, 0, Ebx), numbers, 0]));
        all.extend(caches(0x8000_001d, self.cpus, false));
        // APIC ID; core, with one thread; node 0 of one.
        all.push(Leaf::new(0x8000_001e, [self.cpu, self.cpu, 0, 0]));
        let [eax, ecx] = [Eax, Ecx].map(|register| self.bits(LAST_AMD, 0, register));
        all.push(Leaf::new(LAST_AMD, [eax, 0, ecx, 0]));
        all
    }

    /// The name of the processor: that of the template.
    fn name(&self) -> [Leaf; 3] {
        let mut text = [0; 48];
        let name = format!("Slipway {}", self.level.as_str());
        text.iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| text[at + i]));
        [0, 1, 2].map(|part| {
            let at = part * 16;
            let words = [word(at), word(at + 4), word(at + 8), word(at + 12)];
            Leaf::new(0x8000_0002 + part as u32, words)
        })
    }
}
