//! Guest-physical addresses and ports of the machine. Every address that the guest can see is here.
//!
//! ```text
//!          0 .. 640 KiB     RAM (boot data at the bottom)
//!  0xe_0000 .. 1 MiB        ACPI tables, written before the first instruction
//!     1 MiB .. 3 GiB        RAM, as far as the guest has it
//!     3 GiB .. 3.5 GiB      BARs of PCI functions
//! 0xe000_0000 + 1 MiB       configuration space of bus 0 (ECAM)
//! 0xfec0_0000 + 4 KiB       IOAPIC
//! 0xfee0_0000 + 4 KiB       local APICs, in the kernel
//!     4 GiB ..              the rest of the RAM
//! whole GiB ..              shared pages, see [`shared_pages`]
//! whole 2 GiB ..            regions of hot-plug memory, see [`hot_memory`]
//! ```

use std::ops::Range;

use slipway_machine::MAX_HOT_REGIONS;

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;
/// Bytes of a GiB.
pub const GIB: u64 = 1 << 30;

/// Bytes of a huge page of x86-64.
pub const HUGE_PAGE: u64 = 2 * MIB;

/// The least guest memory in bytes.
pub const MIN_MEMORY: u64 = 64 * MIB;
/// The largest guest memory in bytes.
pub const MAX_MEMORY: u64 = 256 * GIB;
/// The largest number of virtual CPUs.
pub const MAX_CPUS: u32 = 32;

/// The end of conventional memory (640 KiB).
pub const LOW_MEMORY_END: u64 = 0xa_0000;
/// The start information of the PVH boot protocol.
pub const START_INFO: u64 = 0x6000;
/// The memory map of the PVH boot protocol.
pub const MEMORY_MAP: u64 = 0x7000;
/// The kernel's command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// The largest command line in bytes, the final zero included: `COMMAND_LINE_SIZE` of Linux for
/// x86 is 2048.
pub const COMMAND_LINE_SIZE: usize = 2048;
/// ACPI tables; the RSDP comes first.
pub const ACPI: Range<u64> = 0xe_0000..0x10_0000;
/// The page of the VM generation ID, within the range of the ACPI tables.
pub const GENERATION_ID: u64 = 0xf_f000;
/// The reset vector in real mode, at which a kernel that restarts by firmware ends up.
pub const RESET_VECTOR: u64 = 0xf_fff0;
/// The start of memory above the first MiB.
pub const HIGH_MEMORY: u64 = MIB;

/// BARs of PCI functions. RAM above this address continues at [`RAM_ABOVE_4G`].
pub const PCI_WINDOW: Range<u64> = 3 * GIB..0xe000_0000;
/// Configuration space of bus 0: 4 KiB for each of 32 devices with 8 functions.
pub const ECAM: Range<u64> = 0xe000_0000..0xe010_0000;
/// The bits of an offset in ECAM at which the number of the device begins, and that of the function
/// (PCIe Base 5.0, 7.2.2). Below are those of the register.
pub const DEVICE_SHIFT: u32 = 15;
/// See [`DEVICE_SHIFT`].
pub const FUNCTION_SHIFT: u32 = 12;
/// The PCI devices of every machine: the console, and the source of random numbers.
pub const OWN_DEVICES: Range<u8> = 1..3;
/// The number of KVM's memory slot with configuration space; the first ones have RAM.
pub const CONFIG_MEMORY_SLOT: u32 = 16;
/// The IOAPIC's registers.
pub const IOAPIC: Range<u64> = 0xfec0_0000..0xfec0_1000;
/// The local APICs' registers, which the kernel emulates.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// The part of the RAM that has no room below [`PCI_WINDOW`].
pub const RAM_ABOVE_4G: u64 = 4 * GIB;

/// The first serial port (COM1).
pub const SERIAL: Range<u16> = 0x3f8..0x400;
/// The panic device: the guest's kernel writes here when it panics (`pvpanic` of Linux).
pub const PANIC_PORT: u16 = 0x505;
/// Registers of the power management: see [`crate::power`].
pub const POWER: Range<u16> = 0x600..0x608;
/// Registers of the bus's slots: a bank of [`crate::plug`].
pub const FUNCTION_SLOTS: Range<u16> = 0x610..0x620;
/// Registers of the CPUs that can be plugged: a bank of [`crate::plug`].
pub const CPU_SLOTS: Range<u16> = 0x620..0x630;

/// Pins of the IOAPIC. Linux reads and writes each of them at boot, about a dozen exits a pin.
pub const PINS: usize = 7;
/// The serial port's pin.
pub const SERIAL_PIN: u8 = 4;
/// The pin of the ACPI generic event device.
pub const EVENT_PIN: u8 = 5;
/// Pins of INTA# of PCI functions: device number modulo 4 is the index.
pub const PCI_PINS: [u8; 4] = [1, 2, 3, 6];

/// Returns the IOAPIC pin that INTA# of PCI device `device` leads to.
pub fn pci_pin(device: u8) -> u8 {
    PCI_PINS[usize::from(device) % PCI_PINS.len()]
}

/// The unit of the size of shared pages: Linux maps such memory by huge pages of 2 MiB alone.
pub const SHARED_PAGES_UNIT: u64 = 2 * MIB;
/// The most bytes of shared pages.
pub const MAX_SHARED_PAGES: u64 = 64 * GIB;

/// Returns the guest-physical address of the pages that a guest of `bytes` bytes of RAM shares with
/// others: behind the RAM, at a whole GiB, so that no section (128 MiB) of Linux's memory map has
/// both.
pub fn shared_pages(bytes: u64) -> u64 {
    let end = ram(bytes).last().map_or(0, |(range, _)| range.end);
    end.max(RAM_ABOVE_4G).next_multiple_of(GIB)
}

/// The unit of the size of a region of hot-plug memory: a block of Linux's memory hot plug.
pub const HOT_MEMORY_UNIT: u64 = 128 * MIB;
/// The unit of the start of a region of hot-plug memory: the largest block of Linux's memory hot
/// plug, which guests of 64 GiB and more use.
pub const HOT_MEMORY_ALIGN: u64 = 2 * GIB;
/// The bytes of RAM from which on a guest may have blocks of memory hot plug that are larger than
/// [`HOT_MEMORY_UNIT`]. Linux has them where addresses of RAM end behind 64 GiB.
pub const LARGE_MEMORY: u64 = 32 * GIB;
/// The most bytes of hot-plug memory in all regions.
pub const MAX_HOT_MEMORY: u64 = 256 * GIB;

/// Returns the guest-physical addresses of regions of hot-plug memory of these sizes, in a guest of
/// `bytes` bytes of RAM: behind the place of shared pages, whether or not there are any.
pub fn hot_memory(bytes: u64, sizes: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut next = shared_pages(bytes) + MAX_SHARED_PAGES;
    let mut place = |size| {
        let start = next.next_multiple_of(HOT_MEMORY_ALIGN);
        next = start + size;
        start
    };
    sizes.map(&mut place).collect()
}

/// Returns the bytes of the largest block of memory hot plug that Linux has in a guest of `bytes`
/// bytes of RAM.
pub fn hot_memory_block(bytes: u64) -> u64 {
    if bytes < LARGE_MEMORY { HOT_MEMORY_UNIT } else { HOT_MEMORY_ALIGN }
}

/// Returns the PCI device of region `index` of hot-plug memory. They are at the end of the bus, so
/// that functions have the same numbers with and without them. The device that a guest reports free
/// pages to has the number behind the last region's.
pub fn hot_memory_device(index: usize) -> u8 {
    31 - index.min(MAX_HOT_REGIONS) as u8
}

/// Returns the ranges of guest-physical addresses that hold RAM, each with its offset in the file
/// of the guest's memory, for a guest of `bytes` bytes.
pub fn ram(bytes: u64) -> Vec<(Range<u64>, u64)> {
    let low = bytes.min(PCI_WINDOW.start);
    let mut ranges = vec![(0..low, 0)];
    if bytes > low {
        ranges.push((RAM_ABOVE_4G..RAM_ABOVE_4G + (bytes - low), low));
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beside_the_window_continues_above_4_gib() {
        assert_eq!(ram(GIB), [(0..GIB, 0)]);
        assert_eq!(ram(3 * GIB), [(0..3 * GIB, 0)]);
        assert_eq!(ram(8 * GIB), [(0..3 * GIB, 0), (4 * GIB..9 * GIB, 3 * GIB)]);
    }

    #[test]
    fn shared_pages_are_behind_the_ram() {
        assert_eq!(shared_pages(64 * MIB), 4 * GIB);
        assert_eq!(shared_pages(3 * GIB), 4 * GIB);
        assert_eq!(shared_pages(3 * GIB + MIB), 5 * GIB);
        assert_eq!(shared_pages(MAX_MEMORY), 257 * GIB);
    }

    #[test]
    fn regions_of_hot_plug_memory_are_behind_shared_pages() {
        let places = |bytes, sizes: &[u64]| hot_memory(bytes, sizes.iter().copied());
        assert_eq!(places(64 * MIB, &[GIB, 3 * GIB, GIB]), [68 * GIB, 70 * GIB, 74 * GIB]);
        assert_eq!(places(8 * GIB, &[GIB]), [74 * GIB]);
        assert_eq!([8 * GIB, 64 * GIB].map(hot_memory_block), [128 * MIB, 2 * GIB]);
        let last = hot_memory_device(MAX_HOT_REGIONS - 1);
        assert_eq!((hot_memory_device(0), last), (31, 24));
    }

    #[test]
    fn pins_are_distinct_and_exist() {
        let mut pins = PCI_PINS.to_vec();
        pins.extend([SERIAL_PIN, EVENT_PIN]);
        pins.sort_unstable();
        pins.dedup();
        assert_eq!(pins.len(), 6);
        assert!(pins.iter().all(|&pin| usize::from(pin) < PINS));
    }
}
