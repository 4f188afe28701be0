//! Configuration space of a PCI function, as far as a function and its host read it: the type 0
//! header, base address registers (BARs), and the capabilities for PCI Express and MSI-X.
//!
//! Citations are of *PCI Local Bus Specification 3.0* and *PCI Express Base Specification 5.0*
//! (PCIe). Offsets are bytes from the start of configuration space, or of a capability.
//!
//! Not here: bridges, MSI, power management's registers, extended capabilities.
//!
//! No dependencies.
#![no_std]

use core::iter;

/// Bytes of a PCI Express function's configuration space (PCIe 7.2.2).
pub const CONFIG_SIZE: usize = 4096;

/// Returns the 16 bits at byte `at` of a configuration space, which is little-endian (PCI Local Bus
/// 3.0, 6.1).
///
/// # Panics
/// If the bits end behind the space.
pub fn word(space: &[u8; CONFIG_SIZE], at: usize) -> u16 {
    u16::from_le_bytes([space[at], space[at + 1]])
}

/// Returns the 32 bits at byte `at` of a configuration space, which is little-endian (PCI Local Bus
/// 3.0, 6.1).
///
/// # Panics
/// If the bits end behind the space.
pub fn dword(space: &[u8; CONFIG_SIZE], at: usize) -> u32 {
    u32::from(word(space, at)) | u32::from(word(space, at + 2)) << 16
}

/// Writes bytes to a configuration space, from byte `at` on.
///
/// # Panics
/// If the bytes end behind the space.
pub fn put(space: &mut [u8; CONFIG_SIZE], at: usize, value: &[u8]) {
    space[at..at + value.len()].copy_from_slice(value);
}

/// Registers of the type 0 header (6.1 and figure 6-1).
pub mod register {
    /// Vendor ID.
    pub const VENDOR: usize = 0x00;
    /// Device ID.
    pub const DEVICE: usize = 0x02;
    /// Command.
    pub const COMMAND: usize = 0x04;
    /// Status.
    pub const STATUS: usize = 0x06;
    /// Revision ID.
    pub const REVISION: usize = 0x08;
    /// Class code, three bytes.
    pub const CLASS: usize = 0x09;
    /// Cache Line Size.
    pub const CACHE_LINE_SIZE: usize = 0x0c;
    /// BAR 0; BAR `n` is 4 `n` bytes further.
    pub const BAR0: usize = 0x10;
    /// Subsystem vendor ID.
    pub const SUBSYSTEM_VENDOR: usize = 0x2c;
    /// Subsystem ID.
    pub const SUBSYSTEM: usize = 0x2e;
    /// Expansion ROM Base Address.
    pub const EXPANSION_ROM: usize = 0x30;
    /// Capabilities Pointer.
    pub const CAPABILITIES: usize = 0x34;
    /// Interrupt Line.
    pub const INTERRUPT_LINE: usize = 0x3c;
    /// Interrupt Pin.
    pub const INTERRUPT_PIN: usize = 0x3d;
    /// The first byte after the header.
    pub const END: usize = 0x40;
    /// The registers whose 32-bit words have all identifiers of a function.
    pub const IDENTITY: [usize; 3] = [VENDOR, REVISION, SUBSYSTEM_VENDOR];
}

/// The number of BARs.
pub const BARS: usize = 6;

/// Bits of Command (6.2.2).
pub mod command {
    /// BARs of ports answer.
    pub const IO_SPACE: u16 = 1;
    /// BARs of memory answer.
    pub const MEMORY_SPACE: u16 = 1 << 1;
    /// The function may reach memory and send messages.
    pub const BUS_MASTER: u16 = 1 << 2;
    /// Parity Error Response.
    pub const PARITY_ERROR_RESPONSE: u16 = 1 << 6;
    /// SERR# Enable.
    pub const SERR_ENABLE: u16 = 1 << 8;
    /// The function must not assert its pin.
    pub const INTERRUPT_DISABLE: u16 = 1 << 10;
    /// The bits that software may change. [`IO_SPACE`] is writable only with a BAR of ports.
    pub const WRITABLE: u16 =
        MEMORY_SPACE | BUS_MASTER | PARITY_ERROR_RESPONSE | SERR_ENABLE | INTERRUPT_DISABLE;
}

/// Bits of Status (6.2.3).
pub mod status {
    /// Interrupt Status.
    pub const INTERRUPT: u8 = 1 << 3;
    /// Capabilities List.
    pub const CAPABILITIES_LIST: u16 = 1 << 4;
}

/// Interrupt Pin: INTA#, the pin of a function that has a single one (6.2.4).
pub const PIN_A: u8 = 1;

/// The low bits of a BAR, which describe it and are read-only (6.2.5.1).
pub mod bar {
    /// The BAR has ports, of which bits 1:0 describe it.
    pub const PORTS: u32 = 1;
    /// Type: 64-bit memory. The next BAR register is the upper half.
    pub const WIDE: u32 = 0b10 << 1;
    /// The bits of an address of memory.
    pub const ADDRESS: u64 = !0xf;
    /// The bits of an address of ports.
    pub const PORT_ADDRESS: u64 = !0b11;

    /// Returns the address in a BAR, whose register holds `low`, and the next one `high`.
    pub fn address(low: u32, high: u32) -> u64 {
        if low & PORTS != 0 {
            return u64::from(low) & PORT_ADDRESS;
        }
        let high = if low & WIDE != 0 { high } else { 0 };
        (u64::from(high) << 32 | u64::from(low)) & ADDRESS
    }
}

/// Capability IDs (PCI Code and ID Assignment Specification, chapter 2).
pub mod capability {
    /// Power management.
    pub const POWER_MANAGEMENT: u8 = 0x01;
    /// Vendor-specific; the third byte is the capability's length.
    pub const VENDOR: u8 = 0x09;
    /// PCI Express.
    pub const EXPRESS: u8 = 0x10;
    /// MSI-X.
    pub const MSIX: u8 = 0x11;
}

/// Most capabilities: as many as fit into the 192 bytes behind the header.
const MAX_CAPABILITIES: usize = 48;

/// Returns the capabilities of a function (6.7), each as its offset and its first word: ID, offset
/// of the next one, two bytes of its own. `read` returns the 32-bit word at an offset. A list that
/// goes in a circle ends.
pub fn capabilities(read: impl Fn(usize) -> u32) -> impl Iterator<Item = (usize, u32)> {
    let pointer = read(register::CAPABILITIES);
    let follow = move |pointer: u32| {
        let at = pointer as usize & 0xfc;
        (at >= register::END).then(|| (at, read(at)))
    };
    let first = follow(pointer);
    iter::successors(first, move |(_, header)| follow(header >> 8)).take(MAX_CAPABILITIES)
}

/// The PCI Express capability (PCIe 7.5.3).
pub mod express {
    /// Device Control.
    pub const DEVICE_CONTROL: usize = 0x08;
    /// Initiate Function Level Reset, a bit of the high byte of Device Control. It reads as zero.
    pub const INITIATE_RESET: u8 = 1 << 7;

    /// Returns whether a write of `bytes` at `offset` asks for a function-level reset (PCIe
    /// 7.5.3.4) of a function whose capability is at `capability`.
    pub fn asks_for_reset(capability: usize, offset: usize, bytes: &[u8]) -> bool {
        let at = (capability + DEVICE_CONTROL + 1).checked_sub(offset);
        at.and_then(|at| bytes.get(at)).is_some_and(|byte| byte & INITIATE_RESET != 0)
    }
}

/// The MSI-X capability and its structures in memory (6.8.2).
pub mod msix {
    /// Message Control.
    pub const CONTROL: usize = 2;
    /// Message Control: MSI-X Enable.
    pub const ENABLE: u16 = 1 << 15;
    /// Message Control: Function Mask.
    pub const FUNCTION_MASK: u16 = 1 << 14;
    /// Place of the table: offset, and the BAR in bits 2:0.
    pub const TABLE: usize = 4;
    /// Place of the pending bit array (PBA), in the same form.
    pub const PBA: usize = 8;
    /// Bytes of the capability.
    pub const LEN: usize = 12;
    /// Most vectors: Table Size has 11 bits.
    pub const MAX_VECTORS: u16 = 2048;

    /// Bytes of an entry of the table.
    pub const ENTRY: usize = 16;
    /// Vector Control, in an entry. Message address and data lie before it.
    pub const VECTOR_CONTROL: usize = 12;
    /// Vector Control: Mask Bit.
    pub const MASKED: u32 = 1;

    /// The number of vectors, and the places of table and PBA, each as a BAR and an offset in it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct VectorLayout {
        /// The number of vectors.
        pub vectors: u16,
        /// The table.
        pub table: (u8, u64),
        /// The pending bit array.
        pub pba: (u8, u64),
    }

    impl VectorLayout {
        /// Reads the capability at `at`. `read` returns the 32-bit word at an offset.
        pub fn read(at: usize, read: impl Fn(usize) -> u32) -> Self {
            let place = |offset: usize| {
                let word = read(at + offset);
                (word as u8 & 7, u64::from(word & !7))
            };
            let vectors = (read(at) >> 16 & 0x7ff) as u16 + 1;
            Self { vectors, table: place(TABLE), pba: place(PBA) }
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use super::*;

    /// Returns the word at `at` of a space with these words.
    fn space(words: &[(usize, u32)]) -> impl Fn(usize) -> u32 {
        move |at| words.iter().find(|(offset, _)| *offset == at).map_or(0, |(_, word)| *word)
    }

    #[test]
    fn capabilities_are_followed_to_their_end() {
        let read = space(&[(0x34, 0x41), (0x40, 0x8042_5010), (0x50, 0x0003_0011)]);
        let found: Vec<_> = capabilities(read).collect();
        assert_eq!(found, [(0x40, 0x8042_5010), (0x50, 0x0003_0011)]);
        assert_eq!(capabilities(space(&[(0x34, 0x3c)])).count(), 0, "a pointer into the header");
        let circle = space(&[(0x34, 0x40), (0x40, 0x4009)]);
        assert_eq!(capabilities(circle).count(), MAX_CAPABILITIES);
    }

    #[test]
    fn a_bar_has_as_many_bits_as_its_type_tells() {
        assert_eq!(bar::address(0xfebf_000c, 1), 0x1_febf_0000);
        assert_eq!(bar::address(0xfebf_0000, 1), 0xfebf_0000);
        assert_eq!(bar::address(0xc001, 1), 0xc000);
    }

    #[test]
    fn a_reset_is_asked_for_by_one_bit_whatever_the_width() {
        for (offset, bytes) in [(0x49, &[0x80][..]), (0x48, &[0, 0x80]), (0x48, &[0, 0x80, 0, 0])] {
            assert!(express::asks_for_reset(0x40, offset, bytes));
        }
        for (offset, bytes) in [(0x48, &[0x80][..]), (0x4a, &[0x80]), (0x49, &[0x7f]), (0x40, &[])]
        {
            assert!(!express::asks_for_reset(0x40, offset, bytes));
        }
    }

    #[test]
    fn table_and_pending_bits_have_a_bar_and_an_offset() {
        let read = space(&[(0x60, 0x8007_0011), (0x64, 0x2004), (0x68, 0x3001)]);
        let places = msix::VectorLayout { vectors: 8, table: (4, 0x2000), pba: (1, 0x3000) };
        assert_eq!(msix::VectorLayout::read(0x60, read), places);
    }
}
