//! Copies of overlays, whose bases and copies are memory files: these have holes of whole pages.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::MemfdFlags;

use super::*;
use crate::{FileDisk, FileOptions, OpenError, OverlayContent, OverlayDisk, overlay_file};

const SIZE: usize = 1 << 20;
const KIB: u64 = 1 << 10;

/// Makes a file of `len` bytes that is a hole except for `data` at `at`.
fn file(len: u64, at: u64, data: &[u8]) -> File {
    let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file.write_all_at(data, at).unwrap();
    file
}

fn open(base: &File, block_size: u32) -> (FileDisk, PathBuf) {
    let path = PathBuf::from(format!("/proc/self/fd/{}", base.as_raw_fd()));
    let options =
        FileOptions { read_only: true, block_size, direct: false, ..FileOptions::default() };
    (FileDisk::open(&path, &options).unwrap(), path)
}

/// Makes an overlay over `base`.
fn over(base: &File, block_size: u32) -> (OverlayDisk<FileDisk>, OverlayContent) {
    let (disk, path) = open(base, block_size);
    let identity = disk.identity().unwrap();
    let memory = overlay_file(&disk.geometry(), &identity).unwrap();
    let content = OverlayContent::new(memory, &disk, &path, identity);
    (OverlayDisk::of(disk, None, content.memory(), &identity).unwrap(), content)
}

/// Returns the bytes of a copy, the bytes of data that it is said to have, and those that it takes.
fn copy(content: &OverlayContent) -> (Vec<u8>, u64, u64) {
    let to = file(0, 0, &[]);
    let written = content.copy_to(&to, Path::new("copy")).unwrap();
    let metadata = to.metadata().unwrap();
    let mut bytes = vec![0; metadata.len() as usize];
    to.read_exact_at(&mut bytes, 0).unwrap();
    (bytes, written, metadata.blocks() * 512)
}

#[test]
fn a_copy_equals_what_the_disk_reads() {
    for (seed, block_size) in [(51, 512), (52, 1024), (53, 4096)] {
        // The base ends with a part of a block, which is not the disk's.
        let part = noise(seed, SIZE / 2);
        let base = file(SIZE as u64 + 300, 100_000, &part);
        let mut model = vec![0; SIZE];
        model[100_000..100_000 + SIZE / 2].copy_from_slice(&part);
        let (mut overlay, content) = over(&base, block_size);
        assert!(copy(&content).0 == model, "nothing was written yet");
        against_model(&mut overlay, model, 1, seed);
        let blocks = SIZE as u32 / block_size;
        let expected = read(&mut overlay, 0, blocks).unwrap();
        assert!(copy(&content).0 == expected);
        // The copy has changed nothing.
        assert!(read(&mut overlay, 0, blocks).unwrap() == expected);
        assert!(copy(&content).0 == expected);
    }
}

#[test]
fn holes_of_the_base_and_discarded_blocks_are_holes_of_the_copy() {
    let base = file(SIZE as u64, 256 * KIB, &[7; 64 << 10]);
    let (mut overlay, content) = over(&base, 512);
    let (_, written, taken) = copy(&content);
    assert_eq!((written, taken), (64 * KIB, 64 * KIB));
    write(&mut overlay, 3, &[9; 512]).unwrap();
    let discard = request(Operation::Discard, 512, 64, Vec::new());
    one(&mut overlay, discard).unwrap();
    let (bytes, written, taken) = copy(&content);
    assert_eq!((written, taken), (32 * KIB + 512, 32 * KIB + 4096));
    assert_eq!((bytes[1535], bytes[1536], bytes[2047], bytes[2048]), (0, 9, 9, 0));
    assert_eq!((bytes[(256 << 10) + 5], bytes[(288 << 10) - 1], bytes[288 << 10]), (0, 0, 7));
}

#[test]
fn blocks_of_one_page_are_the_layers_or_the_bases_each_by_itself() {
    let base = file(SIZE as u64, 0, &noise(61, SIZE));
    let (mut overlay, content) = over(&base, 512);
    // Zeros in a page that is used, zeros in one that is not, and data.
    write(&mut overlay, 8, &[1; 1024]).unwrap();
    one(&mut overlay, request(Operation::WriteZeroes, 9, 1, Vec::new())).unwrap();
    one(&mut overlay, request(Operation::WriteZeroes, 18, 3, Vec::new())).unwrap();
    let mut expected = noise(61, SIZE);
    expected[8 * 512..9 * 512].fill(1);
    expected[9 * 512..10 * 512].fill(0);
    expected[18 * 512..21 * 512].fill(0);
    assert!(copy(&content).0 == expected);
}

#[test]
fn what_a_predecessor_wrote_is_copied() {
    let base = file(SIZE as u64, 0, &noise(71, SIZE));
    let (mut overlay, content) = over(&base, 4096);
    write(&mut overlay, 5, &[5; 4096]).unwrap();
    drop(overlay);
    let (disk, _) = open(&base, 4096);
    let identity = disk.identity().unwrap();
    let mut overlay = OverlayDisk::of(disk, None, content.memory(), &identity).unwrap();
    write(&mut overlay, 6, &[6; 4096]).unwrap();
    let bytes = copy(&content).0;
    assert!(bytes == read(&mut overlay, 0, SIZE as u32 / 4096).unwrap());
    assert_eq!((bytes[5 * 4096], bytes[6 * 4096]), (5, 6));
    // The memory and the base outlast the disk.
    drop(overlay);
    assert!(copy(&content).0 == bytes);
}

#[test]
fn a_base_that_has_changed_and_a_file_that_cannot_be_written_are_errors() {
    let base = file(SIZE as u64, 0, &[1; 512]);
    let (_overlay, content) = over(&base, 512);
    let closed = File::open("/proc/self/exe").unwrap();
    let refused = content.copy_to(&closed, Path::new("/copy")).unwrap_err();
    assert!(matches!(&refused, OpenError::File { path, .. } if path == Path::new("/copy")));
    base.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let to = file(0, 0, &[]);
    let refused = content.copy_to(&to, Path::new("/copy")).unwrap_err();
    assert!(matches!(refused, OpenError::Changed(_)), "{refused}");
    assert_eq!(to.metadata().unwrap().len(), 0);
}
