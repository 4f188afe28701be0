//! A guest of a few instructions, as a kernel file that VMMs load.
//!
//! The file is a 64-bit ELF executable with a PVH entry (Xen, *public/elfnote.h*,
//! `XEN_ELFNOTE_PHYS32_ENTRY`), the direct boot that QEMU, Firecracker, Cloud Hypervisor and
//! Slipway's own VMM know. A VMM enters it in 32-bit mode without paging. Its instructions mean the
//! same in 64-bit mode, for a VMM that starts at the ELF entry in place of the note's.

/// The byte that the guest writes to the serial port. It is no text, so that no message of a VMM
/// on the same stream is taken for it.
pub const BYTE: u8 = 1;
/// The port that the byte is written to: the data register of the first serial port.
pub const SERIAL_PORT: u16 = 0x3f8;
/// The address of the guest's first instruction: the start of memory that no firmware uses.
pub const ENTRY: u64 = 0x10_0000;

/// The byte that a guest which waits writes when it is a fork.
pub const FORK_BYTE: u8 = 2;

/// The guest's instructions. The write to port 0xf4 ends a VMM that has a device for that there.
pub const CODE: [u8; 13] = [
    0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
    0xb0, BYTE, // mov al, 1
    0xee, // out dx, al
    0xe6, 0xf4, // out 0xf4, al
    0xfa, // cli
    0xf4, // again: hlt
    0xeb, 0xfd, // jmp again
];

/// The address of the VM generation ID as the instructions of [`waiting`] have it.
const GENERATION: [u8; 4] = (slipway_vmm::layout::GENERATION_ID as u32).to_le_bytes();

/// Returns the instructions of a guest that waits until it is a fork: `slipway-vmm` gives each fork
/// another VM generation ID, in the guest's memory.
fn waiting() -> Vec<u8> {
    let first = [
        0x66, 0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xb0, BYTE, // mov al, 1
        0xee, // out dx, al
        0xbb, // mov ebx, GENERATION
    ];
    let rest = [
        0x8b, 0x0b, // mov ecx, [ebx]
        0xf3, 0x90, // again: pause
        0x39, 0x0b, // cmp [ebx], ecx
        0x74, 0xfa, // je again
        0xb0, FORK_BYTE, // mov al, 2
        0xee,      // out dx, al
        0xfa,      // cli
        0xf4,      // stop: hlt
        0xeb, 0xfd, // jmp stop
    ];
    [&first[..], &GENERATION, &rest].concat()
}

/// The end of the addresses below the PCI window, at which a guest's memory may go on.
const LOW: u64 = 3 << 30;

/// Returns the instructions of a guest that writes a word to every `step` bytes of its memory, from
/// 2 MiB to `bytes` or [`LOW`], then [`BYTE`], and runs on.
fn touching(bytes: u64, step: u32) -> Vec<u8> {
    let end = bytes.min(LOW) as u32;
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    code.extend([0xbf, 0x00, 0x00, 0x20, 0x00]); // mov edi, 0x200000
    code.extend([0x89, 0x3f]); // next: mov [edi], edi
    code.extend([0x81, 0xc7]); // add edi, step
    code.extend(step.to_le_bytes());
    code.extend([0x81, 0xff]); // cmp edi, end
    code.extend(end.to_le_bytes());
    code.extend([0x72, 0xf0]); // jb next
    code.extend([0xb0, BYTE, 0xee]); // mov al, 1; out dx, al
    code.extend([0xf3, 0x90, 0xeb, 0xfc]); // again: pause; jmp again
    code
}

/// Bytes of an ELF header, and of a program header (*System V ABI*, ELF-64 object file format).
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// The place of the note in the file, behind two program headers.
const NOTE: usize = HEADER + 2 * PROGRAM_HEADER;
/// The place of the instructions in the file: `ENTRY` and this are equal modulo the page size.
const TEXT: usize = 0x1000;

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const READ_EXECUTE: u32 = 5;
const READ: u32 = 4;
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Returns the kernel file of a guest that writes its byte and halts.
pub fn elf() -> Vec<u8> {
    elf_of(&CODE)
}

/// Returns the kernel file of a guest that writes [`BYTE`], waits until it is a fork, and then
/// writes [`FORK_BYTE`] and halts. It is for `slipway-vmm`.
pub fn waiting_elf() -> Vec<u8> {
    elf_of(&waiting())
}

/// Returns the kernel file of a guest that writes a word to every `step` bytes of its memory of
/// `bytes` bytes below the PCI window, then writes [`BYTE`], and runs on.
pub fn touching_elf(bytes: u64, step: u32) -> Vec<u8> {
    elf_of(&touching(bytes, step))
}

fn elf_of(code: &[u8]) -> Vec<u8> {
    let note = note();
    let mut file = Vec::with_capacity(TEXT + code.len());
    file.extend(header());
    file.extend(program_header(PT_LOAD, READ_EXECUTE, TEXT, ENTRY, code.len(), 0x1000));
    file.extend(program_header(PT_NOTE, READ, NOTE, 0, note.len(), 4));
    file.extend(note);
    file.resize(TEXT, 0);
    file.extend(code);
    file
}

/// Makes the ELF header: 64 bits, little-endian, an executable for x86-64, two program headers and
/// no sections.
fn header() -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
    bytes.resize(16, 0);
    for half in [2u16, 62] {
        bytes.extend(half.to_le_bytes());
    }
    bytes.extend(1u32.to_le_bytes());
    for word in [ENTRY, HEADER as u64, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(0u32.to_le_bytes());
    for half in [HEADER as u16, PROGRAM_HEADER as u16, 2, 0, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    bytes
}

fn program_header(
    kind: u32,
    flags: u32,
    offset: usize,
    address: u64,
    len: usize,
    align: u64,
) -> Vec<u8> {
    let mut bytes = [kind.to_le_bytes(), flags.to_le_bytes()].concat();
    for word in [offset as u64, address, address, len as u64, len as u64, align] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Makes the note that names the 32-bit entry. Its value has eight bytes, as in Linux's own file.
fn note() -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [4u32, 8, XEN_ELFNOTE_PHYS32_ENTRY] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(b"Xen\0");
    bytes.extend(ENTRY.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
        bytes[at..at + len].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// Reads the file as a loader does, by nothing but offsets of the ELF format.
    #[test]
    fn a_loader_finds_instructions_and_entry() {
        let file = elf();
        assert_eq!(&file[..4], b"\x7fELF");
        assert_eq!((file[4], file[5], file[6]), (2, 1, 1));
        // Type, machine, entry, size of the header.
        assert_eq!((number(&file, 16, 2), number(&file, 18, 2)), (2, 62));
        assert_eq!((number(&file, 24, 8), number(&file, 52, 2)), (ENTRY, 64));
        let (first, size, count) =
            (number(&file, 32, 8), number(&file, 54, 2), number(&file, 56, 2));
        assert_eq!((size, count), (56, 2));
        let header = |index: u64, field: u64, len| {
            number(&file, (first + index * size + field) as usize, len) as usize
        };
        // The loaded segment holds the instructions, and has its address in both fields.
        assert_eq!(header(0, 0, 4), 1);
        let (offset, len) = (header(0, 8, 8), header(0, 32, 8));
        assert_eq!(file[offset..offset + len], CODE);
        assert_eq!((header(0, 16, 8), header(0, 24, 8)), (0x10_0000, 0x10_0000));
        assert_eq!((header(0, 40, 8), offset + len), (len, file.len()));
        assert_eq!(offset % header(0, 48, 8), header(0, 16, 8) % header(0, 48, 8));
        // The note: name, value, type.
        assert_eq!(header(1, 0, 4), 4);
        let note = &file[header(1, 8, 8)..][..header(1, 32, 8)];
        let fields = (number(note, 0, 4), number(note, 4, 4), number(note, 8, 4));
        assert_eq!(fields, (4, 8, 18));
        assert_eq!((&note[12..16], number(note, 16, 8)), (&b"Xen\0"[..], ENTRY));
    }

    #[test]
    fn a_guest_that_waits_looks_at_the_generation_and_jumps_where_it_should() {
        let code = waiting();
        assert_eq!(code[8..12], GENERATION);
        let target = |at: usize| at as i64 + 2 + i64::from(code[at + 1] as i8);
        // The pause, and the halt.
        assert_eq!((code[18], target(18)), (0x74, 14));
        assert_eq!((code[25], target(25)), (0xeb, 24));
        assert_eq!((code[14..16].to_vec(), code[24]), (vec![0xf3, 0x90], 0xf4));
    }

    #[test]
    fn a_guest_that_touches_its_memory_jumps_where_it_should() {
        let code = touching(8 << 30, 4096);
        let target = |at: usize| at as i64 + 2 + i64::from(code[at + 1] as i8);
        assert_eq!((code[9..11].to_vec(), code[23], target(23)), (vec![0x89, 0x3f], 0x72, 9));
        assert_eq!(code[19..23], 0xc000_0000_u32.to_le_bytes());
        assert_eq!((code[28], code[30], target(30)), (0xf3, 0xeb, 28));
    }

    #[test]
    fn the_byte_goes_to_the_serial_port() {
        assert_eq!(CODE[..2], [0x66, 0xba]);
        assert_eq!(CODE[2..4], SERIAL_PORT.to_le_bytes());
        assert_eq!(CODE[4..7], [0xb0, BYTE, 0xee]);
        // The jump at the end leads back to the halt before it.
        let jump = CODE.len() as i64 + i64::from(CODE[12] as i8);
        assert_eq!(CODE[jump as usize], 0xf4);
    }
}
