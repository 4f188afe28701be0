//! The vendor and the model of the processor that a template shows.
//!
//! The vendor is the host's: the same instructions differ between vendors (SYSCALL, segments), and
//! kernels choose their code by it. Family, model and stepping are fixed. Linux decides by them
//! which flaws a processor has (`cpu_vuln_blacklist` in *arch/x86/kernel/cpu/common.c*), so a
//! template may only show a processor that has every flaw that a host of its kind can have:
//! - Intel: Cascade Lake (model 0x55, stepping 7). Of all server processors Linux's list has the
//!   most for it: MMIO stale data, RETBleed, gather data sampling, indirect target selection. What
//!   older processors have beside these (Meltdown, L1TF, MDS, ...) Linux assumes of every Intel
//!   processor that does not say otherwise in `IA32_ARCH_CAPABILITIES`, which is the host's own.
//! - AMD: there is no such processor, so there are two kinds. Families 0x19 and later: RETBleed is
//!   unknown to them, and a guest of theirs must not believe to be a Zen 2, since Linux takes one
//!   without threads as safe from SRSO. They show family 0x19. Family 0x17: Zen 1, whose leak of
//!   divisions a Zen 2 lacks.

use alloc::format;
use alloc::string::String;

use crate::{Leaf, Level};

/// A vendor of processors for which there are templates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// Intel.
    Intel,
    /// AMD.
    Amd,
}

/// The kind of a host's processor: what a template's guests see is the same on all hosts of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessorKind {
    /// The vendor.
    pub vendor: Vendor,
    /// Value of leaf 1, EAX, that the guest sees.
    signature: [u32; 2],
}

/// Leaf 1, EAX, of family 6, model 0x55, stepping 7.
const CASCADE_LAKE: u32 = 0x0005_0657;
/// Leaf 1, EAX, of family 0x17, model 1, stepping 2: an EPYC of the first generation.
const NAPLES: u32 = 0x0080_0f12;
/// Leaf 1, EAX, of family 0x19, model 1, stepping 1: an EPYC of the third generation.
const MILAN: u32 = 0x00a0_0f11;
/// Leaf 1, EAX, of family 0x19, model 0x11, stepping 1: an EPYC of the fourth generation, the first
/// with AVX-512.
const GENOA: u32 = 0x00a1_0f11;

impl ProcessorKind {
    /// Returns the kind of a processor with these values of leaves 0 and 1.
    ///
    /// # Errors
    /// The reason for which there is no template for it, as a clause.
    pub fn of(zero: &Leaf, one: &Leaf) -> Result<Self, String> {
        let name = [zero.ebx, zero.edx, zero.ecx].map(u32::to_le_bytes);
        let family = family(one.eax);
        match (name.as_flattened(), family) {
            (b"GenuineIntel", 6 | 18..) => {
                Ok(Self { vendor: Vendor::Intel, signature: [CASCADE_LAKE; 2] })
            }
            (b"AuthenticAMD", 0x17) => Ok(Self { vendor: Vendor::Amd, signature: [NAPLES; 2] }),
            (b"AuthenticAMD", 0x19..) => {
                Ok(Self { vendor: Vendor::Amd, signature: [MILAN, GENOA] })
            }
            (name, family) => Err(format!(
                "its processor is {} of family {family:#x}; templates are for Intel's from family \
                 6 on, and for AMD's of families 0x17 and from 0x19 on",
                name.escape_ascii()
            )),
        }
    }

    /// Returns leaf 1, EAX, of the processor that a guest of `level` sees.
    pub fn signature(self, level: Level) -> u32 {
        self.signature[usize::from(level == Level::V4)]
    }
}

/// Returns the family of a processor with this value of leaf 1, EAX.
pub fn family(signature: u32) -> u32 {
    let base = signature >> 8 & 0xf;
    if base == 0xf { base + (signature >> 20 & 0xff) } else { base }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &[u8; 12], signature: u32) -> Result<ProcessorKind, String> {
        let word = |at: usize| u32::from_le_bytes(name[at..at + 4].try_into().unwrap());
        let zero = Leaf { ebx: word(0), edx: word(4), ecx: word(8), ..Leaf::default() };
        let one = Leaf { eax: signature, ..Leaf::default() };
        ProcessorKind::of(&zero, &one)
    }

    #[test]
    fn processors_with_the_same_flaws_are_of_a_kind() {
        let amd = |signature| of(b"AuthenticAMD", signature).unwrap();
        let (rome, turin) = (0x0083_0f10, 0x00b0_0f21);
        assert_eq!(amd(rome), amd(NAPLES));
        assert_eq!(amd(turin), amd(GENOA));
        assert_ne!(amd(rome), amd(MILAN));
        assert_eq!(amd(turin).signature(Level::V3), MILAN);
        assert_eq!(amd(turin).signature(Level::V4), GENOA);
        let sapphire_rapids = of(b"GenuineIntel", 0x000c_06f2).unwrap();
        assert_eq!(sapphire_rapids.signature(Level::V4), CASCADE_LAKE);
    }

    #[test]
    fn other_processors_have_no_template() {
        let bulldozer = of(b"AuthenticAMD", 0x0060_0f12).unwrap_err();
        assert!(bulldozer.contains("AuthenticAMD of family 0x15"), "{bulldozer}");
        assert!(of(b"HygonGenuine", 0x0090_0f02).is_err());
        assert!(of(b"GenuineIntel", 0x0000_0f43).is_err(), "a Pentium 4");
        assert!(of(b"\n\0\xff\x1b[2Jabcde", 0).unwrap_err().is_ascii());
    }
}
