//! The features of each level, as one table.
//!
//! A feature is in the table if all server processors have it for which the level is meant, and if
//! KVM offers it to guests of kernels from 6.1 on:
//!
//! | level | Intel | AMD |
//! |---|---|---|
//! | x86-64-v2 | from Ivy Bridge on | from Zen on |
//! | x86-64-v3 | from Broadwell on | from Zen on |
//! | x86-64-v4 | from Skylake on | from Zen 4 on |
//!
//! Left out:
//! - features that KVM emulates at the cost of frequent exits: `TSC_ADJUST`, a register that Linux
//!   reads once a second on each CPU, and `UMIP` on older Intel processors;
//! - the invariant TSC: it promises a constant rate, which another host that goes on with the
//!   machine need not keep. Guests have kvm-clock;
//! - performance counters, MONITOR, nested virtualisation, sensors, protection keys;
//! - PCID on AMD: Zen 1 and Zen 2 lack it. Linux gains most from it where it isolates page tables,
//!   which is on Intel;
//! - the virtual-8086 extensions and some others, which the servers that QEMU emulates lack:
//!   `lab/cpus` tries guests on such servers.
//!
//! A change of the table changes what guests see of a template. So machines that were saved with
//! it, templates and snapshots, are refused (`Shown` of `host/vmm`) and made anew, and hosts that
//! lack the feature cannot give the level any more. `host/machine/tests/templates.rs` has the
//! leaves of recorded hosts, `lab/cpus` tries guests; `docs/vmm.md`, "CPU templates".

use alloc::vec::Vec;

use crate::Register::{Eax, Ebx, Ecx, Edx};
use crate::{Leaf, Level, Vendor, Word};

/// The level from which on the processors of each vendor have a feature.
#[derive(Clone, Copy)]
struct Since {
    intel: Option<Level>,
    amd: Option<Level>,
}

/// From x86-64-v2 on.
const V2: Since = Since { intel: Some(Level::V2), amd: Some(Level::V2) };
/// From x86-64-v3 on.
const V3: Since = Since { intel: Some(Level::V3), amd: Some(Level::V3) };
/// With x86-64-v4 only.
const V4: Since = Since { intel: Some(Level::V4), amd: Some(Level::V4) };
/// Intel's from x86-64-v2 on.
const INTEL_V2: Since = Since { amd: None, ..V2 };
/// Intel's from x86-64-v3 on.
const INTEL_V3: Since = Since { amd: None, ..V3 };
/// AMD's from x86-64-v2 on.
const AMD_V2: Since = Since { intel: None, ..V2 };
/// AMD's from x86-64-v2 on, Intel's from x86-64-v3 on.
const AMD_V2_INTEL_V3: Since = Since { intel: Some(Level::V3), ..V2 };
/// AMD's from x86-64-v2 on, Intel's with x86-64-v4 only.
const AMD_V2_INTEL_V4: Since = Since { intel: Some(Level::V4), ..V2 };

/// Leaf 1, EDX. AMD repeats many of them in leaf 0x8000_0001.
const BASE: Word = Word(1, 0, Edx);
/// The features of leaf 1, EDX, that AMD repeats (AMD64 APM, volume 3, appendix E.4.2).
const REPEATED: u32 = 0x0183_f3ff;
const EXTENDED: Word = Word(0x8000_0001, 0, Edx);

/// KVM's features for its guests (Linux, *Documentation/virt/kvm/x86/cpuid.rst*): the ones that all
/// kernels from 6.1 on offer.
pub const KVM: Word = Word(0x4000_0001, 0, Eax);
/// The bit of [`KVM`] by which a guest may end an interrupt by a write to memory.
pub const PV_EOI: u32 = 1 << 6;

/// A feature: its bit, and its name, which is that of Linux's /proc/cpuinfo.
type Feature = (u32, &'static str, Since);

const TABLE: [(Word, &[Feature]); 8] = [
    (
        BASE,
        &[
            (0, "fpu", V2),
            (2, "de", V2),
            (3, "pse", V2),
            (4, "tsc", V2),
            (5, "msr", V2),
            (6, "pae", V2),
            (7, "mce", V2),
            (8, "cx8", V2),
            (9, "apic", V2),
            (11, "sep", V2),
            (12, "mtrr", V2),
            (13, "pge", V2),
            (14, "mca", V2),
            (15, "cmov", V2),
            (16, "pat", V2),
            (17, "pse36", V2),
            (19, "clflush", V2),
            (23, "mmx", V2),
            (24, "fxsr", V2),
            (25, "sse", V2),
            (26, "sse2", V2),
        ],
    ),
    (
        Word(1, 0, Ecx),
        &[
            (0, "pni", V2),
            (1, "pclmulqdq", V2),
            (9, "ssse3", V2),
            (12, "fma", V3),
            (13, "cx16", V2),
            (17, "pcid", INTEL_V2),
            (19, "sse4_1", V2),
            (20, "sse4_2", V2),
            (21, "x2apic", V2),
            (22, "movbe", V3),
            (23, "popcnt", V2),
            (25, "aes", V2),
            (26, "xsave", V3),
            (28, "avx", V3),
            (29, "f16c", V3),
            (30, "rdrand", V2),
        ],
    ),
    (
        Word(7, 0, Ebx),
        &[
            (0, "fsgsbase", V2),
            (3, "bmi1", V3),
            (5, "avx2", V3),
            (7, "smep", V2),
            (8, "bmi2", V3),
            (9, "erms", INTEL_V2),
            (10, "invpcid", INTEL_V3),
            (16, "avx512f", V4),
            (17, "avx512dq", V4),
            (18, "rdseed", AMD_V2_INTEL_V3),
            (19, "adx", V3),
            (20, "smap", AMD_V2_INTEL_V3),
            (23, "clflushopt", AMD_V2_INTEL_V4),
            (24, "clwb", V4),
            (28, "avx512cd", V4),
            (29, "sha_ni", AMD_V2),
            (30, "avx512bw", V4),
            (31, "avx512vl", V4),
        ],
    ),
    (Word(6, 0, Eax), &[(2, "arat", V2)]),
    (
        Word(0x0d, 1, Eax),
        &[(0, "xsaveopt", V3), (1, "xsavec", V4), (2, "xgetbv1", V4), (3, "xsaves", V4)],
    ),
    (
        Word(0x8000_0001, 0, Ecx),
        &[
            (0, "lahf_lm", V2),
            (4, "cr8_legacy", AMD_V2),
            (5, "abm", V3),
            (6, "sse4a", AMD_V2),
            (8, "3dnowprefetch", AMD_V2_INTEL_V3),
        ],
    ),
    (
        EXTENDED,
        &[
            (11, "syscall", V2),
            (20, "nx", V2),
            (22, "mmxext", AMD_V2),
            (26, "pdpe1gb", V2),
            (27, "rdtscp", V2),
            (29, "lm", V2),
        ],
    ),
    (
        KVM,
        &[
            (0, "kvm:clocksource", V2),
            (1, "kvm:nop_io_delay", V2),
            (3, "kvm:clocksource2", V2),
            (4, "kvm:async_pf", V2),
            (5, "kvm:steal_time", V2),
            (6, "kvm:pv_eoi", V2),
            (7, "kvm:pv_unhalt", V2),
            (9, "kvm:pv_tlb_flush", V2),
            (10, "kvm:async_pf_vmexit", V2),
            (11, "kvm:pv_send_ipi", V2),
            (12, "kvm:poll_control", V2),
            (13, "kvm:pv_sched_yield", V2),
            (14, "kvm:async_pf_int", V2),
            (24, "kvm:clocksource_stable", V2),
        ],
    ),
];

fn has(since: Since, level: Level, vendor: Vendor) -> bool {
    let since = match vendor {
        Vendor::Intel => since.intel,
        Vendor::Amd => since.amd,
    };
    since.is_some_and(|since| since <= level)
}

/// Returns the bits of a word that a processor of `level` has.
pub fn bits(word: Word, level: Level, vendor: Vendor) -> u32 {
    let words = TABLE.iter().filter(|(other, _)| *other == word);
    let features = words.flat_map(|(_, features)| *features);
    let own = features.filter(|(_, _, since)| has(*since, level, vendor));
    let own = own.fold(0, |bits, (bit, ..)| bits | 1 << bit);
    match vendor {
        Vendor::Amd if word == EXTENDED => own | bits(BASE, level, vendor) & REPEATED,
        _ => own,
    }
}

/// Returns the names of features that a processor of `level` has and `offered` lacks. Those of
/// `optional` in [`KVM`] may be missing.
pub fn missing(offered: &[Leaf], level: Level, vendor: Vendor, optional: u32) -> Vec<&'static str> {
    let mut names = Vec::new();
    for (word, features) in TABLE {
        let there = word.of(offered) | if word == KVM { optional } else { 0 };
        let repeated = vendor == Vendor::Amd && word == BASE;
        let there = there & if repeated { EXTENDED.of(offered) | !REPEATED } else { u32::MAX };
        let absent = features
            .iter()
            .filter(|(bit, _, since)| has(*since, level, vendor) && there & 1 << bit == 0);
        names.extend(absent.map(|(_, name, _)| *name));
    }
    names
}
