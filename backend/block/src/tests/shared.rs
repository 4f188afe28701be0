use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::{FileOptions, OpenError, SharedDisk};

const BYTES: u64 = 1 << 20;

/// Makes a file of zeros and a shared disk on it. Returns `None` after printing why the test is
/// skipped.
fn on_file(test: &str) -> Option<(tempfile::TempDir, std::path::PathBuf, SharedDisk)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    crate::create_sparse(&path, BYTES).unwrap();
    let shared = SharedDisk::file(&path, &FileOptions::default()).unwrap();
    match shared.open(false) {
        Ok(_) => Some((folder, path, shared)),
        Err(OpenError::Ring(error)) => {
            eprintln!("SKIPPED: {test}: needs io_uring ({error})");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Tests the common behaviour of all shared disks that keep bytes.
fn shares_bytes_and_size(shared: &SharedDisk) {
    let (mut one, mut two) = (shared.open(false).unwrap(), shared.open(true).unwrap());
    refuses_the_impossible(&mut one);
    write(&mut one, 5, &[7; 1024]).unwrap();
    assert_eq!(read(&mut two, 5, 2).unwrap(), [7; 1024]);
    assert_eq!(write(&mut two, 5, &[1; 512]), Err(DiskError::ReadOnly));
    super::one(&mut one, request(Operation::Discard, 6, 1, Vec::new())).unwrap();
    assert_eq!(read(&mut two, 5, 2).unwrap(), [[7; 512], [0; 512]].concat());

    let blocks = BYTES / 512;
    let last = |disk: &mut dyn Disk, lba: u64| read(disk, lba, 1);
    shared.resize(Some(2 * BYTES)).unwrap();
    assert_eq!(last(&mut one, blocks), Err(DiskError::OutOfRange), "not before it refreshed");
    assert_eq!(one.refresh().blocks, 2 * blocks);
    write(&mut one, 2 * blocks - 1, &[9; 512]).unwrap();
    assert_eq!(two.geometry().blocks, blocks);
    assert!(two.refresh().read_only);
    assert_eq!(last(&mut two, 2 * blocks - 1).unwrap(), [9; 512]);
    assert_eq!(last(&mut two, 5).unwrap(), [7; 512]);

    // The disk shrinks, but nothing is cut before `trim`.
    shared.resize(Some(512)).unwrap();
    assert_eq!(last(&mut two, 2 * blocks - 1).unwrap(), [9; 512]);
    for disk in [&mut one, &mut two] {
        assert_eq!(disk.refresh().blocks, 1);
        assert_eq!(last(disk, 5), Err(DiskError::OutOfRange));
    }
    shared.trim().unwrap();
    shared.trim().unwrap();
    shared.resize(Some(2 * BYTES)).unwrap();
    one.refresh();
    assert_eq!(read(&mut one, 5, 2).unwrap(), [0; 1024]);
    assert_eq!(last(&mut one, 2 * blocks - 1).unwrap(), [0; 512]);

    for bytes in [0, 511, 513, u64::MAX, u64::MAX - 511] {
        assert!(shared.resize(Some(bytes)).is_err(), "{bytes}");
        assert_eq!(shared.geometry().blocks, 2 * blocks);
    }
}

#[test]
fn ram_is_shared() {
    shares_bytes_and_size(&SharedDisk::ram(BYTES, 512, None).unwrap());
}

#[test]
fn a_file_is_shared() {
    let Some((_folder, path, shared)) = on_file("a_file_is_shared") else { return };
    shares_bytes_and_size(&shared);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * BYTES);
}

#[test]
fn null_changes_its_size() {
    let shared = SharedDisk::null(BYTES, 4096).unwrap();
    let (mut one, mut two) = (shared.open(false).unwrap(), shared.open(true).unwrap());
    refuses_the_impossible(&mut one);
    shared.resize(Some(2 * BYTES)).unwrap();
    assert_eq!((one.refresh().blocks, two.geometry().blocks), (512, 256));
    assert_eq!(write(&mut two, 0, &[1; 4096]), Err(DiskError::ReadOnly));
    assert!(shared.resize(Some(100)).is_err());
    assert!(SharedDisk::null(0, 512).is_err() && SharedDisk::null(512, 100).is_err());
}

#[test]
fn each_equals_its_model() {
    let shared = SharedDisk::ram(BYTES, 512, None).unwrap();
    against_model(&mut shared.open(false).unwrap(), vec![0; BYTES as usize], 1, 11);
    let Some((_folder, _path, shared)) = on_file("each_equals_its_model") else { return };
    against_model(&mut shared.open(false).unwrap(), vec![0; BYTES as usize], 512, 12);
}

#[test]
fn what_somebody_appended_is_theirs() {
    let Some((_folder, path, shared)) = on_file("what_somebody_appended_is_theirs") else { return };
    let mut disk = shared.open(false).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(2 * BYTES + 100).unwrap();
    shared.trim().unwrap();
    shared.resize(None).unwrap();
    assert_eq!(disk.refresh().bytes(), 2 * BYTES);
    shared.trim().unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * BYTES + 100);
    file.set_len(100).unwrap();
    assert!(matches!(shared.resize(None), Err(OpenError::Size { bytes: 100, .. })));
    assert!(matches!(shared.resize(Some(1 << 60)), Err(OpenError::TooLarge { .. })));
}

#[test]
fn a_shared_file_is_locked_while_anybody_has_it() {
    let Some((_folder, path, shared)) = on_file("a_shared_file_is_locked") else { return };
    let again = || SharedDisk::file(&path, &FileOptions::default());
    let disk = shared.open(false).unwrap();
    drop(shared);
    assert!(matches!(again(), Err(OpenError::InUse(_))));
    drop(disk);
    assert!(again().is_ok());
}

#[test]
fn a_lost_flush_is_lost_for_all() {
    let Some((_folder, path, _)) = on_file("a_lost_flush_is_lost_for_all") else { return };
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    drop(SharedDisk::file(&path, &options).unwrap().open(false).unwrap());
    let common = Arc::new(crate::file::Common::open(&path, &FileOptions::default()).unwrap());
    let mut two = crate::FileDisk::over(common.clone(), false).unwrap();
    let flush = || request(Operation::Flush, 0, 0, Vec::new());
    assert_eq!(super::one(&mut two, flush()), Ok(()));
    common.users.lose(DiskError::Io(5));
    assert_eq!(super::one(&mut two, flush()), Err(DiskError::Io(5)));
}

#[test]
fn a_disk_that_closes_before_its_flush_began_has_lost_nothing() {
    let test = "a_disk_that_closes_before_its_flush_began";
    let Some((_folder, _path, shared)) = on_file(test) else { return };
    let (mut one, mut two) = (shared.open(false).unwrap(), shared.open(false).unwrap());
    // A durable request of this kind flushes after its range was zeroed. The first one finds out
    // how the file can be zeroed.
    let zero = || Request { durable: true, ..request(Operation::WriteZeroes, 0, 8, Vec::new()) };
    assert_eq!(super::one(&mut one, zero()), Ok(()));
    one.submit(&mut vec![zero()], &mut Vec::new());
    drop(one);
    assert_eq!(super::one(&mut two, request(Operation::Flush, 0, 0, Vec::new())), Ok(()));
}

/// Threads use one disk, each in blocks of its own, while the size changes.
#[test]
fn many_threads_disturb_nobody() {
    let shared = SharedDisk::ram(BYTES, 512, None).unwrap();
    let rounds = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for number in 0..4u64 {
            let (shared, rounds) = (&shared, &rounds);
            scope.spawn(move || {
                let mut disk = shared.open(false).unwrap();
                for round in 0..200u64 {
                    let data = [(number * 50 + round) as u8; 4096];
                    write(&mut disk, number * 8, &data).unwrap();
                    disk.refresh();
                    assert_eq!(read(&mut disk, number * 8, 8).unwrap(), data);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for size in 1..100 {
            shared.resize(Some(BYTES + size % 7 * 4096)).unwrap();
            shared.trim().unwrap();
        }
    });
    assert_eq!(rounds.into_inner(), 800);
}

#[test]
fn who_shares_a_file_has_few_requests_with_the_kernel() {
    let Some((_folder, path, shared)) = on_file("who_shares_a_file_has_few") else { return };
    drop(shared);
    let common = Arc::new(crate::file::Common::open(&path, &FileOptions::default()).unwrap());
    let over = || crate::FileDisk::over(common.clone(), false).unwrap();
    // Returns how many of `count` requests of `blocks` blocks are in the kernel at most, and at the
    // end.
    let most = |disk: &mut crate::FileDisk, count: u64, blocks: u32| {
        let span = || vec![Span::heap(blocks as usize * 512)];
        let mut requests = (0..count)
            .map(|tag| Request { tag, ..request(Operation::Read, 0, blocks, span()) })
            .collect();
        let mut ended = Vec::new();
        disk.submit(&mut requests, &mut ended);
        let mut most = disk.running();
        while ended.len() < count as usize {
            disk.poll(&mut ended);
            most = most.max(disk.running());
        }
        assert!(ended.iter().all(|one| one.result.is_ok()));
        (most, disk.running())
    };
    let mut one = over();
    assert_eq!(most(&mut one, 200, 8), (200, 0), "alone: no limit but the ring's");
    let mut two = over();
    assert_eq!(most(&mut one, 200, 8), (32, 0), "requests");
    assert_eq!(most(&mut two, 50, 512), (4, 0), "bytes: 1 MiB");
    assert_eq!(most(&mut two, 3, 2048), (1, 0), "a large one passes, alone");
    drop(two);
    assert_eq!(most(&mut one, 200, 8), (200, 0));
}
