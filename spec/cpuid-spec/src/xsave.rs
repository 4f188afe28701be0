//! The extended state that a level has (leaf 0x0d): the sizes and places of the registers that
//! XSAVE stores.
//!
//! The places in the standard format are the processor's, not KVM's: Intel leaves a gap where its
//! bound registers were, AMD does not. So they are fixed for each vendor, and a host whose
//! processor has others cannot give the level.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use crate::Register::{Eax, Ebx};
use crate::{Leaf, Level, Vendor, Word};

const LEAF: u32 = 0x0d;
/// Bytes of the legacy region and the header, with x87 and SSE.
const BASE_BYTES: u32 = 576;
/// Components 0 and 1: x87 and SSE.
const BASE_COMPONENTS: u32 = 0b11;

/// A component of the extended state.
struct Component {
    number: u32,
    bytes: u32,
    /// The offsets with Intel and with AMD.
    offsets: [u32; 2],
    since: Level,
}

const COMPONENTS: [Component; 4] = [
    // The upper halves of the AVX registers.
    Component { number: 2, bytes: 256, offsets: [576, 576], since: Level::V3 },
    // The mask registers of AVX-512, the upper halves of the first 16 registers, the others.
    Component { number: 5, bytes: 64, offsets: [1088, 832], since: Level::V4 },
    Component { number: 6, bytes: 512, offsets: [1152, 896], since: Level::V4 },
    Component { number: 7, bytes: 1024, offsets: [1664, 1408], since: Level::V4 },
];

impl Component {
    fn offset(&self, vendor: Vendor) -> u32 {
        self.offsets[usize::from(vendor == Vendor::Amd)]
    }
}

fn components(level: Level) -> impl Iterator<Item = &'static Component> {
    COMPONENTS.iter().filter(move |component| component.since <= level)
}

/// Returns the leaf of a level, whose XSAVE has the `instructions` (index 1, EAX). KVM keeps the
/// size of what a CPU has switched on (EBX).
pub fn leaves(level: Level, vendor: Vendor, instructions: u32) -> Vec<Leaf> {
    if level < Level::V3 {
        return vec![Leaf::indexed(LEAF, 0, [0; 4]), Leaf::indexed(LEAF, 1, [0; 4])];
    }
    let all = components(level).fold(BASE_COMPONENTS, |all, component| all | 1 << component.number);
    let end = components(level).map(|component| component.offset(vendor) + component.bytes);
    let end = end.max().unwrap_or(BASE_BYTES);
    let mut leaves = vec![
        Leaf::indexed(LEAF, 0, [all, BASE_BYTES, end, 0]),
        Leaf::indexed(LEAF, 1, [instructions, BASE_BYTES, 0, 0]),
    ];
    leaves.extend(components(level).map(|component| {
        let words = [component.bytes, component.offset(vendor), 0, 0];
        Leaf::indexed(LEAF, component.number, words)
    }));
    leaves
}

/// Returns the first component of a level that a host lacks, or has elsewhere.
pub fn differs(host: &[Leaf], level: Level, vendor: Vendor) -> Option<String> {
    let there = Word(LEAF, 0, Eax).of(host);
    if level >= Level::V3 && there & BASE_COMPONENTS != BASE_COMPONENTS {
        return Some("its KVM does not save components 0 and 1 of the CPU's state".to_owned());
    }
    components(level).find_map(|component| {
        let number = component.number;
        let wanted = (component.bytes, component.offset(vendor));
        let found = (Word(LEAF, number, Eax).of(host), Word(LEAF, number, Ebx).of(host));
        if there & 1 << number == 0 {
            return Some(format!("its KVM does not save component {number} of the CPU's state"));
        }
        (found != wanted).then(|| {
            let ((bytes, at), (own, own_at)) = (wanted, found);
            format!(
                "component {number} of the CPU's state has {own} bytes at {own_at}, not {bytes} at \
                 {at}"
            )
        })
    })
}
