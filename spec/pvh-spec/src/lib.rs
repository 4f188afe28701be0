//! The PVH boot protocol (Xen, *x86/HVM direct boot ABI*): the file of a kernel that is booted by
//! it, and the information that the kernel finds in memory.
//!
//! - [`elf`]: the parts of an ELF file that a loader reads (System V ABI, *Object Files* and
//!   *Program Loading*);
//! - this module: the start information and the memory map.
//!
//! Not here: sections, symbols and relocations; modules with command lines of their own.
//!
//! Dependency: `zerocopy` for views of bytes as structures.
#![no_std]

pub mod elf;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

/// [`StartInfo::magic`].
pub const START_MAGIC: u32 = 0x336e_c578;
/// [`MemoryMapEntry::kind`]: RAM.
pub const MEMORY_RAM: u32 = 1;
/// [`MemoryMapEntry::kind`]: reserved.
pub const MEMORY_RESERVED: u32 = 2;

/// The start information (`struct hvm_start_info`, version 1), with room for one module. Addresses
/// are physical.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct StartInfo {
    /// [`START_MAGIC`].
    pub magic: U32,
    /// 1.
    pub version: U32,
    /// Flags of Xen.
    pub flags: U32,
    /// The number of modules.
    pub modules: U32,
    /// The address of the modules.
    pub module_list: U64,
    /// The address of the command line, which ends with a zero byte.
    pub command_line: U64,
    /// The address of ACPI's root system description pointer.
    pub rsdp: U64,
    /// The address of the memory map.
    pub memory_map: U64,
    /// The number of [`MemoryMapEntry`]s.
    pub memory_map_entries: U32,
    /// Zero.
    pub reserved: U32,
    /// A module, if [`StartInfo::module_list`] refers to it.
    pub module: Module,
}

/// A module (`struct hvm_modlist_entry`). The first one is the initramfs.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct Module {
    /// The address.
    pub start: U64,
    /// The number of bytes.
    pub len: U64,
    /// The address of the module's own command line; 0 if it has none.
    pub command_line: U64,
    /// Zero.
    pub reserved: U64,
}

/// An entry of the memory map (`struct hvm_memmap_table_entry`).
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub struct MemoryMapEntry {
    /// The address.
    pub start: U64,
    /// The number of bytes.
    pub len: U64,
    /// The type, such as [`MEMORY_RAM`].
    pub kind: U32,
    /// Zero.
    pub reserved: U32,
}

impl MemoryMapEntry {
    /// Makes the entry of the addresses from `start` to `end`.
    pub fn new(start: u64, end: u64, kind: u32) -> Self {
        let (start, len) = (start.into(), (end - start).into());
        Self { start, len, kind: kind.into(), reserved: 0.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(core::mem::offset_of!(StartInfo, module), 56);
        assert_eq!(size_of::<Module>(), 32);
        assert_eq!(size_of::<MemoryMapEntry>(), 24);
    }
}
