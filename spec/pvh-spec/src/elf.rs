//! ELF files for x86-64: the header, program headers, and the note with the entry.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
/// [`Header::machine`] of x86-64.
pub const MACHINE_X86_64: u16 = 62;
/// [`ProgramHeader::kind`]: bytes that are loaded.
pub const SEGMENT_LOAD: u32 = 1;
/// [`ProgramHeader::kind`]: notes.
pub const SEGMENT_NOTE: u32 = 4;
/// Type of Xen's note with the 32-bit entry (`XEN_ELFNOTE_PHYS32_ENTRY`).
pub const NOTE_PHYS32_ENTRY: u32 = 18;

/// The header of an ELF file for 64 bits.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    magic: [u8; 4],
    class: u8,
    data: u8,
    rest: [u8; 10],
    /// The type of the file.
    pub kind: U16,
    /// The architecture.
    pub machine: U16,
    version: U32,
    /// The entry, which PVH does not use.
    pub entry: U64,
    program_headers: U64,
    section_headers: U64,
    flags: U32,
    size: U16,
    program_header_size: U16,
    program_header_count: U16,
    unused: [u8; 6],
}

/// The reason for which a header is none of an ELF file for x86-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderError {
    /// The file is not an ELF file.
    NotElf,
    /// The file is for another architecture.
    OtherMachine,
    /// Program headers have another size, or end behind 64 bits.
    ProgramHeaders,
}

impl Header {
    /// Returns the offset of the program headers in the file, and their number.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn program_headers(&self) -> Result<(u64, u16), HeaderError> {
        if self.magic != MAGIC {
            return Err(HeaderError::NotElf);
        }
        let Self { class, data, machine, .. } = self;
        if (*class, *data, machine.get()) != (CLASS_64, LITTLE_ENDIAN, MACHINE_X86_64) {
            return Err(HeaderError::OtherMachine);
        }
        let (start, count) = (self.program_headers.get(), self.program_header_count.get());
        let len = size_of::<ProgramHeader>() as u64 * u64::from(count);
        let fits = start.checked_add(len).is_some();
        if usize::from(self.program_header_size.get()) != size_of::<ProgramHeader>() || !fits {
            return Err(HeaderError::ProgramHeaders);
        }
        Ok((start, count))
    }
}

/// A program header.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct ProgramHeader {
    /// The type of the segment, such as [`SEGMENT_LOAD`].
    pub kind: U32,
    /// Permissions.
    pub flags: U32,
    /// The offset of the first byte in the file.
    pub offset: U64,
    /// The virtual address.
    pub virtual_address: U64,
    /// The physical address.
    pub physical_address: U64,
    /// The number of bytes in the file.
    pub file_size: U64,
    /// The number of bytes in memory. Those that the file lacks are zero.
    pub memory_size: U64,
    /// The alignment.
    pub align: U64,
}

/// Returns the PVH entry in a list of notes, or `None` if there is none. Each note has the lengths
/// of name and description, a type, and both padded to 4 bytes (System V ABI, *Note Section*).
pub fn pvh_entry(mut notes: &[u8]) -> Option<u32> {
    loop {
        let (header, rest) = <[U32; 3]>::read_from_prefix(notes).ok()?;
        let [name_len, len, kind] = header.map(|word| word.get() as usize);
        let padded = |len: usize| len.checked_next_multiple_of(4);
        let name = rest.get(..name_len)?;
        let rest = rest.get(padded(name_len)?..)?;
        let description = rest.get(..len)?;
        if name == b"Xen\0" && kind == NOTE_PHYS32_ENTRY as usize {
            return match *description {
                [a, b, c, d] => Some(u32::from_le_bytes([a, b, c, d])),
                [a, b, c, d, 0, 0, 0, 0] => Some(u32::from_le_bytes([a, b, c, d])),
                _ => None,
            };
        }
        notes = rest.get(padded(len)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_specified_ones() {
        assert_eq!(size_of::<Header>(), 64);
        assert_eq!(size_of::<ProgramHeader>(), 56);
    }

    #[test]
    fn the_entry_is_found_behind_other_notes() {
        let mut notes = [0; 44];
        notes[..12].copy_from_slice(&[4, 0, 0, 0, 5, 0, 0, 0, 18, 0, 0, 0]);
        notes[12..16].copy_from_slice(b"GNU\0");
        notes[24..36].copy_from_slice(&[4, 0, 0, 0, 4, 0, 0, 0, 18, 0, 0, 0]);
        notes[36..40].copy_from_slice(b"Xen\0");
        notes[40..].copy_from_slice(&0x10_0000_u32.to_le_bytes());
        assert_eq!(pvh_entry(&notes), Some(0x10_0000));
        for len in 0..notes.len() {
            assert_eq!(pvh_entry(&notes[..len]), None, "{len}");
        }
        notes[4] = 0xff;
        assert_eq!(pvh_entry(&notes), None, "a note that is longer than the list");
    }
}
