//! Tests of files with registered (pinned) memory.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};

use super::file::directory;
use super::*;
use crate::{FileDisk, FileOptions, SharedDisk, create_sparse};

const DISK: u64 = 8 << 20;
const MEMORY: usize = 7 << 20;
const PAGE: usize = 4096;

/// Returns memory as a guest has it, and its file.
fn guest(seals: SealFlags) -> (OwnedFd, Span) {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("pinned", flags).unwrap();
    rustix::fs::ftruncate(&file, MEMORY as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    let span = Span::file(file.as_fd(), 0, MEMORY).unwrap();
    (file, span)
}

/// Opens a disk with pinned memory. Returns `None` after printing why the test is skipped.
fn disk(test: &str) -> Option<(tempfile::TempDir, FileDisk)> {
    let directory = directory();
    let path = directory.path().join("disk");
    create_sparse(&path, DISK).unwrap();
    let options = FileOptions { pin: true, ..FileOptions::default() };
    let mut disk = FileDisk::open(&path, &options).unwrap();
    let (_file, memory) = guest(SealFlags::SHRINK);
    assert_eq!(one(&mut disk, request(Operation::Read, 0, 8, vec![memory.slice(0, PAGE)])), Ok(()));
    if disk.pinned() == 0 {
        println!("SKIPPED: {test}: needs a file system with O_DIRECT, and the right to pin memory");
        return None;
    }
    disk.release();
    assert_eq!(disk.pinned(), 0);
    Some((directory, disk))
}

/// Writes a pattern made from `seed` to the disk from one end of `memory`, and reads it back at the
/// other, in pieces of various lengths, some of them across a multiple of 2 MiB.
fn everything(disk: &mut dyn Disk, memory: &Span, seed: usize) {
    let (mut at, mut lba) = (0, 0);
    for turn in 0.. {
        let pages = [1, 3, 32, 1, 100, 128][turn % 6];
        let (len, end) = (pages * PAGE, MEMORY - pages * PAGE);
        if at + len > MEMORY / 2 {
            return;
        }
        let data: Vec<u8> = (0..len).map(|byte| (byte / 64 + at + seed) as u8).collect();
        let (from, to) = (memory.slice(at, len), memory.slice(end - at, len));
        from.write(0, &data).unwrap();
        let blocks = (len / 512) as u32;
        let durable = turn % 3 == 0;
        let write = Request { durable, ..request(Operation::Write, lba, blocks, vec![from]) };
        assert_eq!(one(disk, write), Ok(()));
        let read = request(Operation::Read, lba, blocks, vec![to.clone()]);
        assert_eq!(one(disk, read), Ok(()));
        let mut found = vec![0; len];
        to.read(0, &mut found).unwrap();
        assert!(found == data, "{len} bytes at {at}");
        (at, lba) = (at + len, lba + u64::from(blocks));
    }
}

#[test]
fn memory_stays_pinned_until_it_is_let_go() {
    let Some((_directory, mut disk)) = disk("memory_stays_pinned") else { return };
    // Use other memory each round, often at the same address.
    for round in 0..5 {
        let (file, memory) = guest(SealFlags::SHRINK);
        for seed in 0..3 {
            everything(&mut disk, &memory, 7 * seed + round);
        }
        // 7 MiB contain three or four piece boundaries.
        assert!((4..=5).contains(&disk.pinned()), "{}", disk.pinned());
        let other = guest(SealFlags::SHRINK);
        everything(&mut disk, &other.1, 100);
        // Two adjacent mappings share a unit, and so have a piece less.
        assert!((7..=10).contains(&disk.pinned()), "{}", disk.pinned());
        disk.release();
        assert_eq!(disk.pinned(), 0);
        everything(&mut disk, &memory, 50);
        disk.release();
        drop((file, memory, other));
    }
}

#[test]
fn what_its_owner_may_take_away_is_not_pinned() {
    let Some((_directory, mut disk)) = disk("what_its_owner_may_take_away") else { return };
    let (file, memory) = guest(SealFlags::empty());
    everything(&mut disk, &memory, 1);
    assert_eq!(disk.pinned(), 0);
    rustix::fs::ftruncate(&file, 0).unwrap();
    let gone = one(&mut disk, request(Operation::Read, 0, 8, vec![memory.slice(0, PAGE)]));
    assert!(matches!(gone, Err(DiskError::Memory(_))), "{gone:?}");
    // Memory of this process, and requests of several spans, are not registered.
    let data = vec![3; 2 * PAGE];
    write(&mut disk, 0, &data).unwrap();
    assert_eq!(read(&mut disk, 0, 16).unwrap(), data);
    let (_file, sealed) = guest(SealFlags::SHRINK);
    let two = vec![sealed.slice(0, PAGE), sealed.slice(3 * PAGE, PAGE)];
    assert_eq!(one(&mut disk, request(Operation::Read, 0, 16, two)), Ok(()));
    assert_eq!(disk.pinned(), 0);
    // Memory that is not aligned for O_DIRECT takes a bounce buffer, which is not registered.
    let odd = request(Operation::Read, 0, 8, vec![sealed.slice(1, PAGE)]);
    assert_eq!(one(&mut disk, odd), Ok(()));
    let mut found = vec![0; PAGE];
    sealed.read(1, &mut found).unwrap();
    assert_eq!(found, data[..PAGE]);
}

#[test]
fn pinned_equals_its_model() {
    for (seed, grain) in [(21, 512), (22, 4096)] {
        let Some((_directory, mut disk)) = disk("pinned_equals_its_model") else { return };
        refuses_the_impossible(&mut disk);
        against_model(&mut disk, vec![0; DISK as usize], grain, seed);
    }
}

#[test]
fn disks_that_share_a_file_pin_memory_each() {
    let directory = directory();
    let path = directory.path().join("disk");
    create_sparse(&path, DISK).unwrap();
    let options = FileOptions { pin: true, ..FileOptions::default() };
    let medium = SharedDisk::file(&path, &options).unwrap();
    let mut disks = [0, 1].map(|_| medium.open(false).unwrap());
    let (_file, memory) = guest(SealFlags::SHRINK);
    for disk in &mut disks {
        everything(disk, &memory, 9);
    }
    disks[0].release();
    for disk in &mut disks {
        everything(disk, &memory, 11);
    }
}
