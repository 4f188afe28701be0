//! Loads a kernel and its initramfs, by the PVH boot protocol (Xen, *x86/HVM direct boot ABI*).
//!
//! The kernel is an uncompressed 64-bit ELF for x86-64 with a note that gives its 32-bit entry, as
//! Linux is if it was built with `CONFIG_PVH`. The file comes from the host, not from the guest,
//! but a wrong one must be refused with a reason: every offset and length is checked.

use std::io;
use std::os::fd::BorrowedFd;

use slipway_ram::Memory;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, little_endian as le};

use crate::layout::{self, MIB};
use crate::memory::GuestRam;
use crate::{Error, Result, power};

/// The header of an ELF file for 64 bits (System V ABI, *ELF Header*).
#[derive(FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ElfHeader {
    magic: [u8; 4],
    class: u8,
    data: u8,
    rest: [u8; 10],
    kind: le::U16,
    machine: le::U16,
    version: le::U32,
    entry: le::U64,
    program_headers: le::U64,
    section_headers: le::U64,
    flags: le::U32,
    size: le::U16,
    program_header_size: le::U16,
    program_header_count: le::U16,
    unused: [u8; 6],
}

/// A program header (System V ABI, *Program Header*).
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ProgramHeader {
    kind: le::U32,
    flags: le::U32,
    offset: le::U64,
    virtual_address: le::U64,
    physical_address: le::U64,
    file_size: le::U64,
    memory_size: le::U64,
    align: le::U64,
}

const MAGIC: [u8; 4] = *b"\x7fELF";
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_NOTE: u32 = 4;
/// The most program headers. Linux has five or six.
const MAX_SEGMENTS: u16 = 64;
/// The largest segment of notes in bytes. Linux has a few hundred.
const MAX_NOTES: u64 = 1 << 20;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: the entry of the PVH boot protocol.
const NOTE_PHYS32_ENTRY: u32 = 18;
/// The signature of a bzImage, at byte 0x202 (Linux, *The Linux/x86 Boot Protocol*).
const BZIMAGE: [u8; 4] = *b"HdrS";
const BZIMAGE_AT: u64 = 0x202;

/// A kernel in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The guest-physical address of the 32-bit entry.
    pub entry: u64,
    /// The end of the kernel's memory, as a guest-physical address.
    pub end: u64,
}

/// The place of the initramfs in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initramfs {
    /// The guest-physical address of the first byte.
    pub start: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Loads the kernel in `file`.
///
/// # Errors
/// [`Error::Kernel`] with what is wrong with the file.
pub fn load_kernel(ram: &GuestRam, file: BorrowedFd<'_>) -> Result<Kernel> {
    let segments = segments(file)?;
    let mut end = 0;
    for segment in segments.iter().filter(|segment| segment.kind == SEGMENT_LOAD) {
        end = end.max(load_segment(ram, file, segment)?);
    }
    let notes = segments.iter().filter(|segment| segment.kind == SEGMENT_NOTE);
    for segment in notes {
        if let Some(entry) = entry_in_notes(file, segment)? {
            return Ok(Kernel { entry, end });
        }
    }
    let what = "it has no PVH entry: it must be built with CONFIG_PVH";
    Err(Error::Kernel(what.into()))
}

/// Loads the initramfs in `file` as high below `PCI_WINDOW` as there is RAM, above the kernel.
///
/// # Errors
/// [`Error::Initramfs`]: it does not fit, or cannot be read.
pub fn load_initramfs(ram: &GuestRam, file: BorrowedFd<'_>, kernel: Kernel) -> Result<Initramfs> {
    let failed = |error: io::Error| Error::Initramfs(error.to_string());
    let found = rustix::fs::fstat(file).map_err(|errno| failed(errno.into()))?;
    let len = u64::try_from(found.st_size).unwrap_or(0);
    if len == 0 {
        return Err(Error::Initramfs("it is empty".into()));
    }
    let top = ram.bytes().min(layout::PCI_WINDOW.start);
    let start = top.checked_sub(len).map(|start| start & !0xfff).unwrap_or(0);
    if start < kernel.end {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        return Err(Error::Initramfs(format!(
            "it has {} MiB, and {} MiB of memory leave {} MiB above the kernel",
            mib(len),
            mib(ram.bytes()),
            top.saturating_sub(kernel.end) / MIB
        )));
    }
    ram.load(file, 0, start, len).map_err(failed)?;
    Ok(Initramfs { start, len })
}

/// Reads a structure at `offset` of `file`.
fn read<T: FromBytes + IntoBytes>(file: BorrowedFd<'_>, offset: u64) -> Result<T> {
    let mut value = T::new_zeroed();
    read_exact(file, offset, value.as_mut_bytes())?;
    Ok(value)
}

fn read_exact(file: BorrowedFd<'_>, mut offset: u64, mut into: &mut [u8]) -> Result<()> {
    while !into.is_empty() {
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut *into, offset));
        match read {
            Ok(0) => return Err(Error::Kernel("the file ends too early".into())),
            Ok(read) => {
                into = &mut into[read..];
                offset += read as u64;
            }
            Err(errno) => return Err(Error::Kernel(io::Error::from(errno).to_string())),
        }
    }
    Ok(())
}

/// Returns the program headers of an ELF file for x86-64.
fn segments(file: BorrowedFd<'_>) -> Result<Vec<ProgramHeader>> {
    let refuse = |what: &str| Err(Error::Kernel(what.into()));
    let mut bytes = [0; size_of::<ElfHeader>()];
    read_exact(file, 0, &mut bytes)?;
    let header = zerocopy::transmute_ref!(&bytes);
    let ElfHeader { magic, class, data, machine, .. } = header;
    if *magic != MAGIC {
        let is_bzimage = read::<[u8; 4]>(file, BZIMAGE_AT).is_ok_and(|found| found == BZIMAGE);
        return if is_bzimage {
            refuse("it is a compressed bzImage; its uncompressed vmlinux is needed")
        } else {
            refuse("it is not an ELF file")
        };
    }
    if (*class, *data, machine.get()) != (CLASS_64, LITTLE_ENDIAN, MACHINE_X86_64) {
        return refuse("it is not for x86-64");
    }
    let count = header.program_header_count.get();
    if usize::from(header.program_header_size.get()) != size_of::<ProgramHeader>()
        || count > MAX_SEGMENTS
    {
        return refuse("its program headers are malformed");
    }
    let start = header.program_headers.get();
    let mut segments = vec![ProgramHeader::new_zeroed(); usize::from(count)];
    if start.checked_add(segments.as_bytes().len() as u64).is_none() {
        return refuse("its program headers are malformed");
    }
    read_exact(file, start, segments.as_mut_bytes())?;
    Ok(segments)
}

/// Loads a segment and returns the guest-physical address behind it. The memory behind the part
/// that is in the file is zero, since nobody has written to the guest's memory yet.
fn load_segment(ram: &GuestRam, file: BorrowedFd<'_>, segment: &ProgramHeader) -> Result<u64> {
    let (start, len) = (segment.physical_address.get(), segment.file_size.get());
    let end = start.checked_add(segment.memory_size.get().max(len));
    let end = end.filter(|_| start >= layout::HIGH_MEMORY);
    let Some(end) = end else {
        return Err(Error::Kernel(format!("a segment at {start:#x} is outside of memory")));
    };
    if end > ram.bytes().min(layout::PCI_WINDOW.start) {
        let mib = ram.bytes() / MIB;
        return Err(Error::Kernel(format!("it has no room in {mib} MiB of memory")));
    }
    ram.load(file, segment.offset.get(), start, len).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::Kernel("the file ends too early".into()),
        _ => Error::Kernel(error.to_string()),
    })?;
    Ok(end)
}

/// Returns the PVH entry, or `None` if it is not among the notes of `segment`.
fn entry_in_notes(file: BorrowedFd<'_>, segment: &ProgramHeader) -> Result<Option<u64>> {
    let len = segment.file_size.get();
    if len > MAX_NOTES {
        return Err(Error::Kernel("its notes are too long".into()));
    }
    let mut bytes = vec![0; len as usize];
    read_exact(file, segment.offset.get(), &mut bytes)?;
    Ok(find_entry(&bytes))
}

/// Finds the PVH entry in a list of notes: each has the lengths of name and description, a type,
/// and both padded to 4 bytes (System V ABI, *Note Section*).
fn find_entry(mut notes: &[u8]) -> Option<u64> {
    loop {
        let (header, rest) = <[le::U32; 3]>::read_from_prefix(notes).ok()?;
        let [name_len, len, kind] = header.map(|word| word.get() as usize);
        let padded = |len: usize| len.checked_next_multiple_of(4);
        let name = rest.get(..name_len)?;
        let rest = rest.get(padded(name_len)?..)?;
        let description = rest.get(..len)?;
        if name == b"Xen\0" && kind == NOTE_PHYS32_ENTRY as usize {
            return match *description {
                [a, b, c, d] => Some(u32::from_le_bytes([a, b, c, d]).into()),
                [a, b, c, d, 0, 0, 0, 0] => Some(u32::from_le_bytes([a, b, c, d]).into()),
                _ => None,
            };
        }
        notes = rest.get(padded(len)?..)?;
    }
}

/// Writes a real-mode program to the reset vector that resets the machine. There is no firmware
/// that a kernel could restart by, and without the program such a kernel would run zeros for ever.
///
/// # Errors
/// [`Error::Memory`].
pub fn write_reset_vector(ram: &GuestRam) -> Result<()> {
    let [low, high] = (layout::POWER.start + power::RESET).to_le_bytes();
    // mov dx, PORT; mov al, VALUE; out dx, al; then hlt for ever.
    let code = [0xba, low, high, 0xb0, power::RESET_VALUE, 0xee, 0xf4, 0xeb, 0xfd];
    put(&ram.memory(), layout::RESET_VECTOR, &code)
}

/// `struct hvm_start_info` of the PVH boot protocol, version 1.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct StartInfo {
    magic: le::U32,
    version: le::U32,
    flags: le::U32,
    modules: le::U32,
    module_list: le::U64,
    command_line: le::U64,
    rsdp: le::U64,
    memory_map: le::U64,
    memory_map_entries: le::U32,
    reserved: le::U32,
    /// `struct hvm_modlist_entry` of the initramfs, which is the only module.
    module: [le::U64; 4],
}

/// `struct hvm_memmap_table_entry` of the PVH boot protocol.
#[derive(IntoBytes, Immutable)]
#[repr(C)]
struct MemoryMapEntry {
    start: le::U64,
    len: le::U64,
    kind: le::U32,
    reserved: le::U32,
}

const START_MAGIC: u32 = 0x336e_c578;
const MEMORY_RAM: u32 = 1;
const MEMORY_RESERVED: u32 = 2;

/// Writes the start information, the memory map and the command line.
///
/// # Errors
/// [`Error::Config`] if the command line is too long.
pub fn write_start_info(
    ram: &GuestRam,
    command_line: &str,
    initramfs: Option<Initramfs>,
    rsdp: u64,
) -> Result<()> {
    if command_line.len() >= layout::COMMAND_LINE_SIZE || command_line.contains('\0') {
        return Err(Error::Config(format!(
            "the kernel's command line has {} bytes; at most {} are possible, without a zero",
            command_line.len(),
            layout::COMMAND_LINE_SIZE - 1
        )));
    }
    let map = memory_map(ram.bytes());
    let module = initramfs.map_or([0; 4], |at| [at.start, at.len, 0, 0]);
    let module_at = layout::START_INFO + std::mem::offset_of!(StartInfo, module) as u64;
    let info = StartInfo {
        magic: START_MAGIC.into(),
        version: 1.into(),
        flags: 0.into(),
        modules: u32::from(initramfs.is_some()).into(),
        module_list: module_at.into(),
        command_line: layout::COMMAND_LINE.into(),
        rsdp: rsdp.into(),
        memory_map: layout::MEMORY_MAP.into(),
        memory_map_entries: (map.len() as u32).into(),
        reserved: 0.into(),
        module: module.map(Into::into),
    };
    let memory = ram.memory();
    put(&memory, layout::START_INFO, info.as_bytes())?;
    put(&memory, layout::MEMORY_MAP, map.as_bytes())?;
    put(&memory, layout::COMMAND_LINE, &[command_line.as_bytes(), &[0]].concat())
}

fn memory_map(bytes: u64) -> Vec<MemoryMapEntry> {
    let entry = |start: u64, end: u64, kind: u32| MemoryMapEntry {
        start: start.into(),
        len: (end - start).into(),
        kind: kind.into(),
        reserved: 0.into(),
    };
    let mut map = vec![
        entry(0, layout::LOW_MEMORY_END, MEMORY_RAM),
        entry(layout::ACPI.start, layout::ACPI.end, MEMORY_RESERVED),
    ];
    for (range, _) in layout::ram(bytes) {
        map.push(entry(range.start.max(layout::HIGH_MEMORY), range.end, MEMORY_RAM));
    }
    // Linux uses ECAM only where the memory map or ACPI says that the range is reserved.
    map.push(entry(layout::ECAM.start, layout::ECAM.end, MEMORY_RESERVED));
    map
}

/// Writes to RAM of the machine's own layout.
pub(crate) fn put(memory: &Memory, start: u64, bytes: &[u8]) -> Result<()> {
    memory.write(start, bytes).map_err(|fault| Error::Memory(fault.to_string()))
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;
