//! The bits about speculative execution, and about other flaws, that every template leaves as KVM
//! offers them on the host.
//!
//! Some say that the processor lacks a flaw, others that it has a way around one. Without the
//! former a guest assumes the flaw, and is slower than it could be; without the latter it has the
//! flaw and no way around it. And Intel's RRSBA says that a usual way around (retpolines) does not
//! help. A value that fits all hosts would be wrong on each in one of these directions. So guests
//! of hosts with other flaws, or with other microcode, differ in these bits and in no others, and a
//! machine that was saved with some goes on only where they are the same.
//!
//! AMD's processors have no `IA32_ARCH_CAPABILITIES`. Kernels before 6.16 offer one that says that
//! they lack Intel's flaws, which guests know by the vendor; no template has it.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::Register::{Eax, Ebx, Ecx, Edx};
use crate::{Leaf, Vendor, Word};

/// The bit of the register `IA32_ARCH_CAPABILITIES`.
pub const ARCH_CAPABILITIES_BIT: (Word, u32) = (LEAF_7, 1 << 29);

const LEAF_7: Word = Word(7, 0, Edx);

/// The words, and the bits of flaws in them (Intel SDM, volume 2, CPUID; AMD64 APM, volume 3,
/// appendix E.4):
/// - 7, EDX: `SRBDS_CTRL`, `MD_CLEAR`, `SPEC_CTRL`, `STIBP`, `FLUSH_L1D`, `SSBD`;
/// - 7, index 2, EDX: controls of predictors (`PSFD` to `MCDT_NO`);
/// - 0x8000_0008, EBX: `XSAVEERPTR`; `IBPB`; `IBRS`, `STIBP` and how to use them; `SSBD`,
///   `VIRT_SSBD`, `SSB_NO`; `PSFD`; `BTC_NO`; `IBPB_RET`;
/// - 0x8000_0021, EAX: `LFENCE_RDTSC`, `VERW_CLEAR`, `NULL_SEL_CLR_BASE`, `AUTOIBRS`, `SBPB`,
///   `IBPB_BRTYPE`, `SRSO_NO`, `SRSO_USER_KERNEL_NO`; ECX: `TSA_SQ_NO`, `TSA_L1_NO`.
const WORDS: [(Word, u32); 5] = [
    (LEAF_7, 1 << 9 | 1 << 10 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 31),
    (Word(7, 2, Edx), 0x3f),
    (Word(0x8000_0008, 0, Ebx), 1 << 2 | 1 << 12 | 0x3f << 14 | 0x7f << 24),
    (Word(0x8000_0021, 0, Eax), 1 << 2 | 1 << 5 | 1 << 6 | 1 << 8 | 0xf << 27),
    (Word(0x8000_0021, 0, Ecx), 1 << 1 | 1 << 2),
];

/// Returns the bits of a word that a guest has since the host has them. 0 if the word has none.
pub fn bits(word: Word, vendor: Vendor, host: &[Leaf]) -> u32 {
    let known = WORDS.iter().find(|(other, _)| *other == word);
    let mut mask = known.map_or(0, |(_, mask)| *mask);
    if vendor == Vendor::Intel && word == ARCH_CAPABILITIES_BIT.0 {
        mask |= ARCH_CAPABILITIES_BIT.1;
    }
    word.of(host) & mask
}

/// Returns what a guest with these `leaves` is told about speculative execution, as text:
/// hexadecimal words, and the value of `IA32_ARCH_CAPABILITIES`, 0 without such a register.
pub fn speculation(leaves: &[Leaf], arch_capabilities: u64) -> String {
    let word = |(word, mask): &(Word, u32)| word.of(leaves) & mask;
    let words = WORDS.iter().map(|known| format!("{:x}", word(known)));
    let all = words.chain([format!("{arch_capabilities:x}")]);
    all.collect::<Vec<_>>().join(":")
}
