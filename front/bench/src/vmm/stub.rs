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

/// The first address that a guest which touches its memory writes to. What it runs is below.
const TOUCHED: u64 = 2 << 20;
/// The gap in the addresses of a guest's memory, as `slipway-vmm` lays it out.
const GAP: std::ops::Range<u64> =
    slipway_vmm::layout::PCI_WINDOW.start..slipway_vmm::layout::RAM_ABOVE_4G;

/// Bytes of a page, and of a page that an entry of a page directory maps.
const PAGE: u64 = 4096;
const LARGE_PAGE: u64 = 2 << 20;
/// Bits of an entry of a page table: present and writable, and a page in place of a table (Intel
/// SDM, volume 3, 4.5.4).
const WRITABLE: u64 = 3;
const IS_PAGE: u64 = 1 << 7;

/// The places of the descriptors and of the 64-bit code among the instructions of [`long_mode`].
const GDT: u32 = 56;
const GDTR: u32 = 72;
const LONG: u32 = 78;

/// Returns page tables of long mode, at the address `at`, that map each address below `end` to
/// itself.
fn page_tables(at: u64, end: u64) -> Vec<u8> {
    let directories = end.div_ceil(1 << 30);
    let mut words = vec![(at + PAGE) | WRITABLE];
    words.resize(512, 0);
    words.extend((0..directories).map(|number| (at + (2 + number) * PAGE) | WRITABLE));
    words.resize(1024, 0);
    words.extend((0..directories * 512).map(|number| (number * LARGE_PAGE) | WRITABLE | IS_PAGE));
    words.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// Returns the instructions that take a CPU from 32-bit mode without paging to 64-bit mode, with
/// the page tables at `tables`. What follows them runs there (Intel SDM, volume 3, 9.8.5).
fn long_mode(tables: u64) -> Vec<u8> {
    let at = |place: u32| (ENTRY as u32 + place).to_le_bytes();
    let mut code = vec![0xb8]; // mov eax, tables
    code.extend((tables as u32).to_le_bytes());
    code.extend([0x0f, 0x22, 0xd8]); // mov cr3, eax
    code.extend([0x0f, 0x20, 0xe0]); // mov eax, cr4
    code.extend([0x83, 0xc8, 0x20]); // or eax, PAE
    code.extend([0x0f, 0x22, 0xe0]); // mov cr4, eax
    code.extend([0xb9, 0x80, 0x00, 0x00, 0xc0]); // mov ecx, IA32_EFER
    code.extend([0x0f, 0x32]); // rdmsr
    code.extend([0x0d, 0x00, 0x01, 0x00, 0x00]); // or eax, LME
    code.extend([0x0f, 0x30]); // wrmsr
    code.extend([0x0f, 0x20, 0xc0]); // mov eax, cr0
    code.extend([0x0d, 0x00, 0x00, 0x00, 0x80]); // or eax, PG
    code.extend([0x0f, 0x22, 0xc0]); // mov cr0, eax
    code.extend([0x0f, 0x01, 0x15]); // lgdt [GDTR]
    code.extend(at(GDTR));
    code.push(0xea); // jmp 8:LONG
    code.extend(at(LONG));
    code.extend([0x08, 0x00]);
    // Descriptors: none, and one of 64-bit code.
    code.extend([0u64, 0x0020_9b00_0000_0000].into_iter().flat_map(u64::to_le_bytes));
    code.extend([0x0f, 0x00]); // The last byte of both.
    code.extend(at(GDT));
    code
}

/// Returns the instructions of 64-bit mode that write a word to every `step` bytes of `range`.
fn touching_range(range: &std::ops::Range<u64>, step: u32) -> Vec<u8> {
    let mut code = vec![0x48, 0xbf]; // mov rdi, start
    code.extend(range.start.to_le_bytes());
    code.extend([0x48, 0xb9]); // mov rcx, end
    code.extend(range.end.to_le_bytes());
    code.extend([0x48, 0x89, 0x3f]); // next: mov [rdi], rdi
    code.extend([0x48, 0x81, 0xc7]); // add rdi, step
    code.extend(step.to_le_bytes());
    code.extend([0x48, 0x39, 0xcf]); // cmp rdi, rcx
    code.extend([0x72, 0xf1]); // jb next
    code
}

/// Returns the instructions of a guest that writes a word to every `step` bytes of its memory of
/// `bytes` bytes, from [`TOUCHED`] on, then [`BYTE`], and runs on. Its page tables are behind them.
fn touching(bytes: u64, step: u32) -> Vec<u8> {
    let tables = ENTRY + PAGE;
    let above = GAP.end..GAP.end + bytes.saturating_sub(GAP.start);
    let mut code = long_mode(tables);
    for range in [TOUCHED..bytes.min(GAP.start), above.clone()] {
        if !range.is_empty() {
            code.extend(touching_range(&range, step));
        }
    }
    code.extend([0x66, 0xba, 0xf8, 0x03]); // mov dx, 0x3f8
    code.extend([0xb0, BYTE, 0xee]); // mov al, 1; out dx, al
    code.extend([0xf3, 0x90, 0xeb, 0xfc]); // again: pause; jmp again
    code.resize(PAGE as usize, 0);
    code.extend(page_tables(tables, above.end));
    assert!(ENTRY + code.len() as u64 <= TOUCHED, "the page tables are in what is written to");
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
/// `bytes` bytes, but for the first 2 MiB, then writes [`BYTE`], and runs on. It is for
/// `slipway-vmm`.
///
/// # Panics
/// With more than some 250 GiB of memory: there is no room for page tables.
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
    fn a_guest_that_touches_its_memory_finds_what_its_instructions_name() {
        let code = touching(8 << 30, 4096);
        let address = |place: u32| number(&(ENTRY as u32 + place).to_le_bytes(), 0, 4);
        // The tables, the descriptors, and the jump to 64-bit mode.
        assert_eq!(number(&code, 1, 4), ENTRY + PAGE);
        assert_eq!((code[42..45].to_vec(), number(&code, 45, 4)), (vec![15, 1, 21], address(GDTR)));
        let jump = (number(&code, 50, 4), number(&code, 54, 2));
        assert_eq!((code[49], jump), (0xea, (address(LONG), 8)));
        assert_eq!(number(&code, GDT as usize + 8, 8), 0x20_9b00_0000_0000);
        let (gdtr, long) = (GDTR as usize, LONG as usize);
        assert_eq!((number(&code, gdtr, 2), number(&code, gdtr + 2, 4)), (15, address(GDT)));
        // Two loops, each from its start to its end, and the end of the program.
        let ranges = [(2 << 20, 3 << 30), (4 << 30, 9 << 30)];
        for (number_of, (start, end)) in ranges.into_iter().enumerate() {
            let at = long + number_of * 35;
            assert_eq!((number(&code, at + 2, 8), number(&code, at + 12, 8)), (start, end));
            assert_eq!((code[at + 20..at + 23].to_vec(), code[at + 33]), (vec![72, 137, 63], 0x72));
            assert_eq!(at as i64 + 35 + i64::from(code[at + 34] as i8), at as i64 + 20);
        }
        let end = long + 70;
        assert_eq!(code[end + 4..end + 7], [0xb0, BYTE, 0xee]);
        assert_eq!(code[end + 9], 0xeb);
        assert_eq!(end as i64 + 11 + i64::from(code[end + 10] as i8), end as i64 + 7);
        assert_eq!(touching(1 << 30, 4096)[long + 35..][..4], [0x66, 0xba, 0xf8, 0x03]);
    }

    /// Walks the tables as a CPU does.
    #[test]
    fn page_tables_map_each_address_to_itself() {
        let (code, tables) = (touching(8 << 30, 4096), ENTRY + PAGE);
        let entry = |table: u64, index: u64| {
            let at = (table - ENTRY + index % 512 * 8) as usize;
            Some(number(&code, at, 8)).filter(|entry| entry & 3 == 3)
        };
        let page = |address: u64| {
            let directories = entry(tables, address >> 39)? & !0xfff;
            let directory = entry(directories, address >> 30)? & !0xfff;
            entry(directory, address >> 21).filter(|entry| entry & IS_PAGE != 0)
        };
        for address in [0, ENTRY, TOUCHED, GAP.start - 8, GAP.end, (9 << 30) - 8] {
            let base = address & !(LARGE_PAGE - 1);
            assert_eq!(page(address).map(|entry| entry & !0xfff), Some(base), "{address:#x}");
        }
        assert_eq!(page(9 << 30), None);
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
