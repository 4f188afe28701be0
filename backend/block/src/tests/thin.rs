//! Tests of files that leave a part of their file system to others.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::file::directory;
use super::*;
use crate::{FileDisk, FileOptions, Reserve, create_sparse};

const SIZE: u64 = 1 << 20;

/// Opens a disk that leaves `bytes` to others, and the number of times that this was reported.
fn open(path: &Path, bytes: u64) -> (FileDisk, Arc<AtomicU32>) {
    let reports = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&reports);
    let report = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    let reserve = Some(Reserve::new(bytes, report));
    let options = FileOptions { reserve, ..FileOptions::default() };
    (FileDisk::open(path, &options).unwrap(), reports)
}

/// Makes a disk of which the first 64 KiB are written.
fn begun() -> (tempfile::TempDir, PathBuf) {
    let directory = directory();
    let path = directory.path().join("disk");
    create_sparse(&path, SIZE).unwrap();
    let (mut disk, reports) = open(&path, 0);
    write(&mut disk, 0, &[1; 64 << 10]).unwrap();
    assert_eq!(reports.load(Ordering::Relaxed), 0);
    (directory, path)
}

#[test]
fn a_full_file_system_takes_writes_to_what_is_there_only() {
    let (_directory, path) = begun();
    let (mut disk, reports) = open(&path, u64::MAX);
    write(&mut disk, 8, &[2; 4096]).unwrap();
    write(&mut disk, 3, &[2; 512]).unwrap();
    for lba in [128, 120] {
        assert_eq!(write(&mut disk, lba, &[3; 2 * 4096]), Err(DiskError::NoSpace), "{lba}");
    }
    assert_eq!(read(&mut disk, 120, 8).unwrap(), [1; 4096], "nothing of it was written");
    let content = disk.content(&path).unwrap();
    assert_eq!((content.refused_writes(), reports.load(Ordering::Relaxed)), (2, 1));
    // A hole that is made there is one from then on.
    one(&mut disk, request(Operation::Discard, 8, 8, Vec::new())).unwrap();
    assert_eq!(write(&mut disk, 8, &[4; 4096]), Err(DiskError::NoSpace));
    assert_eq!(read(&mut disk, 8, 8).unwrap(), [0; 4096]);
    write(&mut disk, 16, &[5; 4096]).unwrap();
    drop(disk);
    assert_eq!(content.refused_writes(), 0);
}

#[test]
fn zeros_give_their_space_back_and_take_none() {
    let (_directory, path) = begun();
    let blocks = || std::fs::metadata(&path).unwrap().blocks();
    let before = blocks();
    let (mut disk, _) = open(&path, u64::MAX);
    let all = (SIZE / 512) as u32;
    one(&mut disk, request(Operation::WriteZeroes, 0, all, Vec::new())).unwrap();
    assert_eq!(read(&mut disk, 0, 8).unwrap(), [0; 4096]);
    assert!(blocks() < before, "{before} {}", blocks());
}

#[test]
fn blocks_that_a_write_has_taken_are_there_for_the_next() {
    let (_directory, path) = begun();
    let (mut disk, _) = open(&path, 1);
    write(&mut disk, 1024, &[6; 4096]).unwrap();
    drop(disk);
    let (mut disk, _) = open(&path, u64::MAX);
    write(&mut disk, 1024, &[7; 4096]).unwrap();
    assert_eq!(read(&mut disk, 1024, 8).unwrap(), [7; 4096]);
}
