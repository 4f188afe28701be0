//! The EEPROM: 64 words of 16 bits (section 5.6), read by the Microwire protocol of a 93C46
//! (section 5.5), most significant bit first.

/// Words of the EEPROM.
pub const WORDS: usize = 64;
/// Words of the Ethernet address, two bytes in each, the first in the low byte.
pub const ADDRESS: usize = 0x00;
/// Initialization Control Word 1.
pub const CONTROL1: usize = 0x0a;
/// Subsystem ID.
pub const SUBSYSTEM: usize = 0x0b;
/// Subsystem vendor ID.
pub const SUBSYSTEM_VENDOR: usize = 0x0c;
/// Device ID.
pub const DEVICE: usize = 0x0d;
/// Vendor ID.
pub const VENDOR: usize = 0x0e;
/// The checksum.
pub const CHECKSUM: usize = 0x3f;
/// The sum of all words, the checksum included.
pub const SUM: u16 = 0xbaba;
/// Initialization Control Word 1: the signature of a valid EEPROM, bits 15:14, and loading of
/// device and subsystem IDs, bits 1:0.
pub const CONTROL1_VALUE: u16 = 0x4003;

/// Bits of an address.
pub const ADDRESS_BITS: u32 = 6;
/// The start bit and the operation code of a read.
pub const READ: u16 = 0b110;
/// Bits of start and operation code.
pub const OPERATION_BITS: u32 = 3;

/// Returns the checksum of an EEPROM's words.
pub fn checksum(words: &[u16; WORDS]) -> u16 {
    let sum = words[..CHECKSUM].iter().fold(0_u16, |sum, word| sum.wrapping_add(*word));
    SUM.wrapping_sub(sum)
}
