//! Loads a kernel and its initramfs, by the PVH boot protocol (Xen, *x86/HVM direct boot ABI*).
//!
//! The kernel is an uncompressed 64-bit ELF for x86-64 with a note that gives its 32-bit entry, as
//! Linux is if it was built with `CONFIG_PVH`. The file comes from the host, not from the guest,
//! but a wrong one must be refused with a reason: every offset and length is checked.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use slipway_pvh_spec::elf::{self, Header, HeaderError, ProgramHeader, SEGMENT_LOAD, SEGMENT_NOTE};
use slipway_pvh_spec::{
    MEMORY_RAM, MEMORY_RESERVED, MemoryMapEntry, Module, START_MAGIC, StartInfo,
};
use slipway_ram::Memory;
use zerocopy::{FromZeros, IntoBytes};

use crate::layout::{self, MIB};
use crate::memory::GuestRam;
use crate::{Error, Result, power};

/// The most program headers. Linux has five or six.
const MAX_SEGMENTS: u16 = 64;
/// The largest segment of notes in bytes. Linux has a few hundred.
const MAX_NOTES: u64 = 1 << 20;
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
pub fn load_kernel(ram: &GuestRam, file: &File) -> Result<Kernel> {
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
pub fn load_initramfs(ram: &GuestRam, file: &File, kernel: Kernel) -> Result<Initramfs> {
    let failed = |error: io::Error| Error::Initramfs(error.to_string());
    let len = file.metadata().map_err(failed)?.len();
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
    ram.load(file.as_fd(), 0, start, len).map_err(failed)?;
    Ok(Initramfs { start, len })
}

fn read(file: &File, offset: u64, into: &mut [u8]) -> Result<()> {
    file.read_exact_at(into, offset).map_err(unreadable)
}

fn unreadable(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Error::Kernel("the file ends too early".into()),
        _ => Error::Kernel(error.to_string()),
    }
}

/// Returns the program headers of an ELF file for x86-64.
fn segments(file: &File) -> Result<Vec<ProgramHeader>> {
    let mut header = Header::new_zeroed();
    read(file, 0, header.as_mut_bytes())?;
    let malformed = "its program headers are malformed";
    let (start, count) = header.program_headers().map_err(|error| {
        let what = match error {
            HeaderError::NotElf if is_bzimage(file) => {
                "it is a compressed bzImage; its uncompressed vmlinux is needed"
            }
            HeaderError::NotElf => "it is not an ELF file",
            HeaderError::OtherMachine => "it is not for x86-64",
            HeaderError::ProgramHeaders => malformed,
        };
        Error::Kernel(what.into())
    })?;
    if count > MAX_SEGMENTS {
        return Err(Error::Kernel(malformed.into()));
    }
    let mut segments = vec![ProgramHeader::new_zeroed(); usize::from(count)];
    read(file, start, segments.as_mut_bytes())?;
    Ok(segments)
}

fn is_bzimage(file: &File) -> bool {
    let mut found = [0; BZIMAGE.len()];
    read(file, BZIMAGE_AT, &mut found).is_ok() && found == BZIMAGE
}

/// Loads a segment and returns the guest-physical address behind it. The memory behind the part
/// that is in the file is zero, since nobody has written to the guest's memory yet.
fn load_segment(ram: &GuestRam, file: &File, segment: &ProgramHeader) -> Result<u64> {
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
    ram.load(file.as_fd(), segment.offset.get(), start, len).map_err(unreadable)?;
    Ok(end)
}

/// Returns the PVH entry, or `None` if it is not among the notes of `segment`.
fn entry_in_notes(file: &File, segment: &ProgramHeader) -> Result<Option<u64>> {
    let len = segment.file_size.get();
    if len > MAX_NOTES {
        return Err(Error::Kernel("its notes are too long".into()));
    }
    let mut bytes = vec![0; len as usize];
    read(file, segment.offset.get(), &mut bytes)?;
    Ok(elf::pvh_entry(&bytes).map(u64::from))
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
    let module_at = layout::START_INFO + std::mem::offset_of!(StartInfo, module) as u64;
    let info = StartInfo {
        magic: START_MAGIC.into(),
        version: 1.into(),
        modules: u32::from(initramfs.is_some()).into(),
        module_list: module_at.into(),
        command_line: layout::COMMAND_LINE.into(),
        rsdp: rsdp.into(),
        memory_map: layout::MEMORY_MAP.into(),
        memory_map_entries: (map.len() as u32).into(),
        module: Module {
            start: initramfs.map_or(0, |at| at.start).into(),
            len: initramfs.map_or(0, |at| at.len).into(),
            ..Module::default()
        },
        ..StartInfo::default()
    };
    let memory = ram.memory();
    put(&memory, layout::START_INFO, info.as_bytes())?;
    put(&memory, layout::MEMORY_MAP, map.as_bytes())?;
    put(&memory, layout::COMMAND_LINE, &[command_line.as_bytes(), &[0]].concat())
}

fn memory_map(bytes: u64) -> Vec<MemoryMapEntry> {
    let entry = MemoryMapEntry::new;
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
