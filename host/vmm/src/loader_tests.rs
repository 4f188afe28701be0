//! Kernels of all kinds that are no kernel.

use slipway_pvh_spec::elf::MACHINE_X86_64;

use super::*;
use crate::memory::tests::sealed;

const CODE_AT: u64 = 0x10_0000;

fn file(bytes: &[u8]) -> File {
    let file = rustix::fs::memfd_create(c"kernel", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, bytes).unwrap();
    file.into()
}

fn header(count: u16) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[18..20].copy_from_slice(&MACHINE_X86_64.to_le_bytes());
    bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
    bytes[54..56].copy_from_slice(&56u16.to_le_bytes());
    bytes[56..58].copy_from_slice(&count.to_le_bytes());
    bytes
}

fn segment(kind: u32, offset: u64, at: u64, (file, memory): (u64, u64)) -> Vec<u8> {
    let header = ProgramHeader {
        kind: kind.into(),
        flags: 0.into(),
        offset: offset.into(),
        virtual_address: 0.into(),
        physical_address: at.into(),
        file_size: file.into(),
        memory_size: memory.into(),
        align: 0.into(),
    };
    header.as_bytes().to_vec()
}

fn note(name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    for word in [name.len() as u32, description.len() as u32, kind] {
        note.extend(word.to_le_bytes());
    }
    for part in [name, description] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// Returns a kernel with one segment of four bytes and the given notes.
fn kernel(notes: &[u8]) -> Vec<u8> {
    let data = 64 + 2 * 56;
    let mut bytes = header(2);
    bytes.extend(segment(SEGMENT_LOAD, data, CODE_AT, (4, 8)));
    let len = notes.len() as u64;
    bytes.extend(segment(SEGMENT_NOTE, data + 4, 0, (len, len)));
    bytes.extend(b"code");
    bytes.extend(notes);
    bytes
}

fn load(bytes: &[u8]) -> Result<Kernel> {
    let ram = GuestRam::new(sealed(64 * MIB))?;
    load_kernel(&ram, &file(bytes))
}

fn refused(bytes: &[u8]) -> String {
    load(bytes).expect_err("refused").to_string()
}

#[test]
fn a_kernel_is_loaded_where_it_says() {
    let notes = [note(b"GNU\0", 3, b"12345"), note(b"Xen\0", 18, &0x10_0002u32.to_le_bytes())];
    let bytes = kernel(&notes.concat());
    let ram = GuestRam::new(sealed(64 * MIB)).unwrap();
    let loaded = load_kernel(&ram, &file(&bytes)).unwrap();
    assert_eq!(loaded, Kernel { entry: 0x10_0002, end: CODE_AT + 8 });
    let mut code = [0; 4];
    ram.memory().read(CODE_AT, &mut code).unwrap();
    assert_eq!(&code, b"code");
}

#[test]
fn what_is_no_kernel_is_refused_with_the_reason() {
    assert!(refused(b"").contains("ends too early"));
    assert!(refused(&[0; 64]).contains("not an ELF"));
    let mut bzimage = vec![0; 0x300];
    bzimage[0x202..0x206].copy_from_slice(b"HdrS");
    assert!(refused(&bzimage).contains("bzImage"));
    let mut other = kernel(&note(b"Xen\0", 18, &[0; 4]));
    other[18] = 0xb7;
    assert!(refused(&other).contains("not for x86-64"));
    assert!(refused(&kernel(&note(b"GNU\0", 18, &[0; 4]))).contains("CONFIG_PVH"));
    assert!(refused(&kernel(&note(b"Xen\0", 18, &[0; 3]))).contains("CONFIG_PVH"));
    assert!(refused(&kernel(&[0xff; 12])).contains("CONFIG_PVH"));
    assert!(refused(&kernel(&[])[..100]).contains("ends too early"));
}

#[test]
fn segments_outside_of_memory_are_refused() {
    let with = |segment: Vec<u8>| [header(1), segment].concat();
    let at = |at, size| refused(&with(segment(SEGMENT_LOAD, 0, at, size)));
    assert!(at(0x1000, (4, 4)).contains("outside of memory"));
    assert!(at(u64::MAX - 1, (4, 4)).contains("outside of memory"));
    assert!(at(CODE_AT, (4, 64 * MIB)).contains("no room"));
    assert!(at(CODE_AT, (1 << 20, 0)).contains("ends too early"));
    let notes = segment(SEGMENT_NOTE, 0, 0, (MAX_NOTES + 1, 0));
    assert!(refused(&with(notes)).contains("too long"));
    let mut many = header(1);
    many[56..58].copy_from_slice(&1000u16.to_le_bytes());
    assert!(refused(&many).contains("program headers"));
    let mut far = header(1);
    far[32..40].copy_from_slice(&(u64::MAX - 8).to_le_bytes());
    assert!(refused(&far).contains("program headers"));
}

#[test]
fn an_initramfs_lies_above_the_kernel_or_is_refused() {
    let ram = GuestRam::new(sealed(64 * MIB)).unwrap();
    let kernel = Kernel { entry: 0, end: 60 * MIB };
    let small = file(&[7; 5000]);
    let at = load_initramfs(&ram, &small, kernel).unwrap();
    assert_eq!(at, Initramfs { start: 64 * MIB - 8192, len: 5000 });
    let large = file(&[]);
    rustix::fs::ftruncate(&large, 5 * MIB).unwrap();
    let error = load_initramfs(&ram, &large, kernel).unwrap_err().to_string();
    assert!(error.contains("5 MiB") && error.contains("leave 4 MiB"), "{error}");
    let empty = file(&[]);
    assert!(load_initramfs(&ram, &empty, kernel).is_err());
}

#[test]
fn a_command_line_that_linux_would_cut_is_refused() {
    let ram = GuestRam::new(sealed(64 * MIB)).unwrap();
    assert!(write_start_info(&ram, &"x".repeat(2047), None, 0).is_ok());
    for bad in ["x".repeat(2048), "a\0b".to_owned()] {
        assert!(write_start_info(&ram, &bad, None, 0).is_err());
    }
}
