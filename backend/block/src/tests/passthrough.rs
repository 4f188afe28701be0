//! Tests of the disk on an NVMe namespace. They need a namespace whose content may be destroyed;
//! `tests/e2e/29-nvme-passthrough.sh` runs them in a guest that has one.

use std::path::Path;

use slipway_ram::Span;

use super::{against_model, read, refuses_the_impossible, request, write};
use crate::model::one;
use crate::{
    Disk, DiskError, FileOptions, OpenError, Operation, PassthroughDisk, Request, SharedDisk,
    open_file,
};

/// The environment variable with the path (/dev/ngXnY) of a namespace that a test may write to.
const VARIABLE: &str = "SLIPWAY_TEST_NVME";

#[test]
fn a_namespace_equals_its_model() {
    let Ok(path) = std::env::var(VARIABLE) else {
        println!("SKIPPED: a_namespace_equals_its_model: needs an NVMe namespace in {VARIABLE}");
        return;
    };
    let path = Path::new(&path);
    for block_size in [512, 4096] {
        let options = FileOptions { block_size, ..FileOptions::default() };
        let mut disk = match PassthroughDisk::open(path, &options) {
            Ok(disk) => disk,
            Err(OpenError::Namespace { why, .. }) if block_size == 512 => {
                println!("not in blocks of 512 bytes: {why}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        assert!(matches!(open_file(path, &options), Err(OpenError::InUse(_))));
        refuses_the_impossible(&mut disk);
        let blocks = disk.geometry().blocks;
        let all = request(Operation::WriteZeroes, 0, blocks as u32, Vec::new());
        assert_eq!(one(&mut disk, all), Ok(()));
        let bytes = vec![0; disk.geometry().bytes() as usize];
        against_model(&mut disk, bytes.clone(), 1, 11);
        let discard = request(Operation::Discard, 0, blocks as u32, Vec::new());
        assert_eq!(one(&mut disk, discard), Ok(()));
        // Spans aligned to a page, as drivers lend them, so that nothing is copied on the way.
        against_model(&mut disk, bytes, 4096, 12);
        longer_than_a_command(&mut disk, blocks);
        drop(disk);
        protected(path, block_size);
        shared(path, block_size);
    }
}

/// Tests several disks on one open namespace: they share its content and its size, and the
/// namespace is free when the last of them is closed.
fn shared(path: &Path, block_size: u32) {
    let options = FileOptions { block_size, ..FileOptions::default() };
    let medium = SharedDisk::file(path, &options).unwrap();
    let shape = medium.geometry();
    let [mut one, mut two] = [false, true].map(|read_only| medium.open(read_only).unwrap());
    assert!(matches!(SharedDisk::file(path, &options), Err(OpenError::InUse(_))));
    for round in 1..=3 {
        let data = vec![round; 3 * block_size as usize];
        write(&mut *one, 5, &data).unwrap();
        assert_eq!(read(&mut *two, 5, 3).unwrap(), data);
    }
    assert_eq!(write(&mut *two, 5, &vec![1; block_size as usize]), Err(DiskError::ReadOnly));
    let end = shape.blocks - 1;
    medium.resize(Some(end * u64::from(block_size))).unwrap();
    read(&mut *one, end, 1).unwrap();
    assert_eq!(one.refresh().blocks, end);
    assert_eq!(read(&mut *one, end, 1), Err(DiskError::OutOfRange));
    let larger = medium.resize(Some(shape.bytes() + u64::from(block_size)));
    assert!(matches!(larger, Err(OpenError::Fixed(_))));
    medium.resize(None).unwrap();
    medium.trim().unwrap();
    assert_eq!([one.refresh(), two.refresh()].map(|found| found.blocks), [shape.blocks; 2]);
    drop((one, medium));
    read(&mut *two, end, 1).unwrap();
    assert!(matches!(SharedDisk::file(path, &options), Err(OpenError::InUse(_))));
    drop(two);
    SharedDisk::file(path, &options).unwrap();
}

/// Sends a request longer than several commands, with spans of various lengths.
fn longer_than_a_command(disk: &mut PassthroughDisk, blocks: u64) {
    let block = disk.geometry().block_size as usize;
    let len = (3 << 20).min(blocks as usize * block) / block * block;
    let data: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
    let whole = Span::heap(len);
    whole.write(0, &data).unwrap();
    let mut spans = Vec::new();
    let mut at = 0;
    for part in [1, 511, 512, 4096, 100_000, 65_536, 3, 1 << 20, len] {
        let part = part.min(len - at);
        spans.extend((part > 0).then(|| whole.slice(at, part)));
        at += part;
    }
    let durable =
        Request { durable: true, ..request(Operation::Write, 0, (len / block) as u32, spans) };
    assert_eq!(one(disk, durable), Ok(()));
    let small = one(disk, request(Operation::Flush, 0, 0, Vec::new()));
    assert_eq!(small, Ok(()));
    let mut found = Vec::new();
    for lba in (0..len / block).step_by(64) {
        let count = 64.min(len / block - lba);
        found.extend(read(disk, lba as u64, count as u32).unwrap());
    }
    assert!(found == data);
}

/// Checks that read-only disks share a namespace and refuse writes.
fn protected(path: &Path, block_size: u32) {
    let options = FileOptions { block_size, read_only: true, ..FileOptions::default() };
    let mut readers = [0, 1].map(|_| PassthroughDisk::open(path, &options).unwrap());
    for reader in &mut readers {
        read(reader, 0, 1).unwrap();
        let refused = write(reader, 0, &vec![1; block_size as usize]);
        assert_eq!(refused, Err(DiskError::ReadOnly));
        assert_eq!(one(reader, request(Operation::Flush, 0, 0, Vec::new())), Ok(()));
    }
    let writer = FileOptions { read_only: false, ..options };
    assert!(matches!(PassthroughDisk::open(path, &writer), Err(OpenError::InUse(_))));
}

#[test]
fn what_is_no_namespace_is_refused() {
    for path in ["/dev/null", "/dev/zero"] {
        let opened = open_file(Path::new(path), &FileOptions::default());
        assert!(matches!(opened, Err(OpenError::Kind(_))), "{path}");
    }
}
