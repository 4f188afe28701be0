//! The CPUID instruction of x86-64 processors: its leaves, and tables of what it tells a guest with
//! one of Slipway's CPU templates.
//!
//! - This module: leaves ([`Leaf`]), and words of feature bits in them ([`Word`]);
//! - [`template`]: the names of templates;
//! - [`features`]: the features of each level of the x86-64 psABI;
//! - [`vendor`]: vendors, and the signatures of the processors that templates show;
//! - [`xsave`]: the sizes and places of the extended state;
//! - [`leaves`]: caches and topology;
//! - [`machine`]: the bits that describe the machine;
//! - [`speculation`]: the bits that tell of flaws in speculative execution.
//!
//! Sources: Intel 64 and IA-32 Architectures Software Developer's Manual (SDM), volume 2, *CPUID*;
//! AMD64 Architecture Programmer's Manual (APM), volume 3, appendix E; *x86-64 Application Binary
//! Interface*; Linux, *Documentation/virt/kvm/x86/cpuid.rst*.
//!
//! Not here: which template a host can give, and the leaves of a whole CPU.
//!
//! No dependencies.
#![no_std]

extern crate alloc;

pub mod features;
pub mod leaves;
pub mod machine;
pub mod speculation;
pub mod template;
pub mod vendor;
pub mod xsave;

pub use template::{Level, Template};
pub use vendor::{ProcessorKind, Vendor};

/// The result of the CPUID instruction for one leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leaf {
    /// The leaf's number, EAX of the request.
    pub function: u32,
    /// The index of the sub-leaf, ECX of the request; 0 where there are none.
    pub index: u32,
    /// `true` if the leaf has sub-leaves.
    pub is_indexed: bool,
    /// EAX of the result.
    pub eax: u32,
    /// EBX of the result.
    pub ebx: u32,
    /// ECX of the result.
    pub ecx: u32,
    /// EDX of the result.
    pub edx: u32,
}

impl Leaf {
    /// Makes leaf `function`, without sub-leaves, of EAX, EBX, ECX and EDX.
    pub fn new(function: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> Self {
        Self { function, eax, ebx, ecx, edx, ..Self::default() }
    }

    /// Makes sub-leaf `index` of leaf `function`.
    pub fn indexed(function: u32, index: u32, words: [u32; 4]) -> Self {
        Self { index, is_indexed: true, ..Self::new(function, words) }
    }
}

/// A register of a leaf's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// A word of feature bits: leaf, index, register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub u32, pub u32, pub Register);

impl Word {
    /// Returns the value of the word among `leaves`; 0 if the leaf is not there.
    pub fn of(self, leaves: &[Leaf]) -> u32 {
        let Self(function, index, register) = self;
        let mut all = leaves.iter();
        let leaf = all.find(|leaf| leaf.function == function && leaf.index == index);
        leaf.map_or(0, |leaf| match register {
            Register::Eax => leaf.eax,
            Register::Ebx => leaf.ebx,
            Register::Ecx => leaf.ecx,
            Register::Edx => leaf.edx,
        })
    }
}
