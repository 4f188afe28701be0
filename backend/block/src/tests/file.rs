//! Tests of disks in files.
//!
//! Over 500 lines: tests that share the set-up of a disk.

use std::path::{Path, PathBuf};

use std::os::fd::AsFd;

use slipway_ram::{Access, DmaMap, Fault, Memory, Permissions, Region};
use tempfile::TempDir;

use super::*;
use crate::model::await_completions;
use crate::{FileDisk, FileOptions, OpenError, OverlayDisk, create_sparse};

const SIZE: usize = 1 << 20;

/// Makes a directory on the file system of the build, which is more likely to have O_DIRECT than
/// /tmp.
pub(super) fn directory() -> TempDir {
    let parent = std::env::current_exe().unwrap();
    tempfile::tempdir_in(parent.parent().unwrap()).unwrap()
}

fn fresh(bytes: u64) -> (TempDir, PathBuf) {
    let directory = directory();
    let path = directory.path().join("disk");
    create_sparse(&path, bytes).unwrap();
    (directory, path)
}

fn open(path: &Path, direct: bool) -> FileDisk {
    FileDisk::open(path, &FileOptions { direct, ..FileOptions::default() }).unwrap()
}

/// Opens the disk in direct mode. Returns `None` after printing why the test is skipped.
fn direct(path: &Path, test: &str) -> Option<FileDisk> {
    let disk = open(path, true);
    if !disk.is_direct() {
        println!("SKIPPED: {test}: needs a build directory on a file system with O_DIRECT");
        return None;
    }
    Some(disk)
}

#[test]
fn an_overlay_holds_one_descriptor_of_its_base() {
    let (_directory, path) = fresh(SIZE as u64);
    let path = path.canonicalize().unwrap();
    let overlay = OverlayDisk::new(open(&path, false), None).unwrap();
    let held = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        all.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path)).count()
    };
    assert_eq!(held(), 1);
    drop(overlay);
    assert_eq!(held(), 0);
}

#[test]
fn buffered_equals_its_model() {
    let (_directory, path) = fresh(SIZE as u64);
    let mut disk = open(&path, false);
    assert!(!disk.is_direct());
    refuses_the_impossible(&mut disk);
    against_model(&mut disk, vec![0; SIZE], 1, 4);
}

#[test]
fn direct_equals_its_model_with_spans_of_any_alignment() {
    for (seed, grain) in [(5, 1), (6, 4), (7, 512), (8, 4096)] {
        let (_directory, path) = fresh(SIZE as u64);
        let Some(mut disk) = direct(&path, "direct_equals_its_model") else { return };
        refuses_the_impossible(&mut disk);
        against_model(&mut disk, vec![0; SIZE], grain, seed);
    }
}

#[test]
fn tmpfs_equals_its_model() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        println!("SKIPPED: tmpfs_equals_its_model: needs /dev/shm");
        return;
    };
    let path = directory.path().join("disk");
    create_sparse(&path, SIZE as u64).unwrap();
    against_model(&mut open(&path, true), vec![0; SIZE], 1, 9);
}

/// Writes, then reads back, `count` requests submitted at once on disjoint blocks.
fn deep(disk: &mut dyn Disk, count: usize, grain: usize) {
    let memory = Memory::heap(count * 4096 + grain);
    let requests = |operation| -> Vec<Request> {
        (0..count)
            .map(|index| {
                let mut spans = Vec::new();
                let at = (index * 4096 + grain) as u64;
                memory.pin(at, 4096, Access::Write, &mut spans).unwrap();
                Request { tag: index as u64, ..request(operation, index as u64 * 8, 8, spans) }
            })
            .collect()
    };
    let data = |index: usize| vec![index as u8 ^ (index >> 8) as u8; 4096];
    for index in 0..count {
        memory.write((index * 4096 + grain) as u64, &data(index)).unwrap();
    }
    for operation in [Operation::Write, Operation::Read] {
        let mut ended = Vec::new();
        disk.submit(&mut requests(operation), &mut ended);
        await_completions(disk, count, &mut ended);
        assert!(ended.iter().all(|completion| completion.result.is_ok()));
        let mut tags: Vec<u64> = ended.iter().map(|completion| completion.tag).collect();
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..count as u64), "each request ends once");
        if operation == Operation::Write {
            memory.write(0, &vec![0; count * 4096 + grain]).unwrap();
        }
    }
    let mut found = vec![0; 4096];
    for index in 0..count {
        memory.read((index * 4096 + grain) as u64, &mut found).unwrap();
        assert!(found == data(index), "request {index}");
    }
}

#[test]
fn two_thousand_requests_are_in_flight_at_once() {
    for direct in [true, false] {
        for grain in [0, 4] {
            let (_directory, path) = fresh(2_000 * 4096);
            deep(&mut open(&path, direct), 2_000, grain);
        }
    }
}

#[test]
fn a_request_of_more_spans_than_a_call_takes_goes_on() {
    let (_directory, path) = fresh(4 << 20);
    for direct in [false, true] {
        let mut disk = open(&path, direct);
        let memory = Memory::heap(4 << 20);
        let mut spans = Vec::new();
        // Use every other 512 bytes, so that no two spans are adjacent.
        for index in 0..4000 {
            memory.write(index * 1024, &[index as u8; 512]).unwrap();
            memory.pin(index * 1024, 512, Access::Read, &mut spans).unwrap();
        }
        one(&mut disk, request(Operation::Write, 3, 4000, spans.clone())).unwrap();
        memory.write(0, &vec![0; 4 << 20]).unwrap();
        one(&mut disk, request(Operation::Read, 3, 4000, spans)).unwrap();
        let mut found = [0; 512];
        for index in 0..4000 {
            memory.read(index * 1024, &mut found).unwrap();
            assert_eq!(found, [index as u8; 512], "span {index}");
        }
    }
}

#[test]
fn what_is_on_the_disk_is_in_the_file() {
    for direct in [true, false] {
        let (_directory, path) = fresh(SIZE as u64);
        let mut disk = open(&path, direct);
        let durable =
            Request { durable: true, ..request(Operation::WriteZeroes, 100, 100, Vec::new()) };
        write(&mut disk, 0, &[0x5a; 200 * 512]).unwrap();
        one(&mut disk, durable).unwrap();
        one(&mut disk, request(Operation::Flush, 0, 0, Vec::new())).unwrap();
        drop(disk);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), SIZE);
        assert!(
            bytes[..100 * 512] == [0x5a; 100 * 512] && bytes[100 * 512..] == [0; SIZE][51200..]
        );
    }
}

#[test]
fn a_discard_gives_the_files_space_back() {
    use std::os::unix::fs::MetadataExt;
    let (_directory, path) = fresh(SIZE as u64);
    let mut disk = open(&path, true);
    write(&mut disk, 0, &vec![1; SIZE]).unwrap();
    one(&mut disk, request(Operation::Flush, 0, 0, Vec::new())).unwrap();
    let full = std::fs::metadata(&path).unwrap().blocks();
    one(&mut disk, request(Operation::Discard, 0, SIZE as u32 / 512, Vec::new())).unwrap();
    let left = std::fs::metadata(&path).unwrap().blocks();
    println!("{full} sectors before, {left} after");
    assert!(read(&mut disk, 0, SIZE as u32 / 512).unwrap() == vec![0; SIZE]);
    assert!(left < full, "{full} sectors before, {left} after");
}

#[test]
fn a_truncated_file_gives_errors_and_never_stale_bytes() {
    for direct in [true, false] {
        let (_directory, path) = fresh(SIZE as u64);
        let mut disk = open(&path, direct);
        write(&mut disk, 0, &vec![7; SIZE]).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        // The new end is within a page and within a block.
        file.set_len(1000 * 512 + 100).unwrap();
        assert_eq!(read(&mut disk, 999, 1).unwrap(), [7; 512]);
        for (lba, blocks) in [(1000, 1), (990, 30), (1001, 1), (2047, 1), (0, 2048)] {
            assert_eq!(read(&mut disk, lba, blocks), Err(DiskError::Io(0)), "{lba}+{blocks}");
        }
        file.set_len(SIZE as u64).unwrap();
        assert_eq!(read(&mut disk, 1001, 1).unwrap(), [0; 512], "grown again it is zeros");
    }
}

#[test]
fn a_file_truncated_under_load_ends_every_request() {
    let (_directory, path) = fresh(SIZE as u64);
    let mut disk = open(&path, true);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let span = Span::heap(8 * 4096);
    for round in 0..50 {
        let mut requests: Vec<Request> = (0..200_u64)
            .map(|tag| {
                let operation = if tag % 2 == 0 { Operation::Read } else { Operation::Write };
                let spans = vec![span.slice(8 * (tag as usize % 2), 4096)];
                Request { tag, ..request(operation, tag * 8, 8, spans) }
            })
            .collect();
        let mut ended = Vec::new();
        disk.submit(&mut requests, &mut ended);
        file.set_len(if round % 2 == 0 { 50 * 512 } else { SIZE as u64 }).unwrap();
        await_completions(&mut disk, 200, &mut ended);
        for completion in ended {
            assert!(matches!(completion.result, Ok(()) | Err(DiskError::Io(0))));
        }
    }
}

#[test]
fn vanished_guest_memory_is_a_memory_fault() {
    for (direct, offset) in [(true, 0), (true, 4), (false, 4)] {
        let (_directory, path) = fresh(SIZE as u64);
        let mut disk = open(&path, direct);
        write(&mut disk, 0, &[3; 8192]).unwrap();
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 3 * 4096).unwrap();
        let mut map = DmaMap::new();
        let region = Region::mapped(fd.as_fd(), 0, 3 * 4096, Permissions::READ_WRITE).unwrap();
        map.add(0x1000, region).unwrap();
        let mut spans = Vec::new();
        map.memory().pin(0x1000 + offset, 4096, Access::Write, &mut spans).unwrap();
        rustix::fs::ftruncate(&fd, 0).unwrap();
        let gone = Err(DiskError::Memory(Fault::Gone { iova: 0x1000 + offset }));
        for operation in [Operation::Read, Operation::Write] {
            assert_eq!(one(&mut disk, request(operation, 8, 8, spans.clone())), gone);
        }
        assert_eq!(read(&mut disk, 8, 8).unwrap(), [3; 4096], "and nothing was written");
    }
}

#[test]
fn dropping_a_disk_waits_for_what_is_in_flight() {
    for direct in [true, false] {
        let (_directory, path) = fresh(1000 * 4096);
        let mut map = DmaMap::new();
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::pwrite(&fd, &[1; 4096], 0).unwrap();
        let region = Region::mapped(fd.as_fd(), 0, 4096, Permissions::READ_WRITE).unwrap();
        map.add(0, region).unwrap();
        let mut disk = open(&path, direct);
        let requests = (0..1000_u64).map(|tag| {
            let mut spans = Vec::new();
            map.memory().pin(0, 4096, Access::Write, &mut spans).unwrap();
            Request { tag, ..request(Operation::Write, tag * 8, 8, spans) }
        });
        disk.submit(&mut requests.collect(), &mut Vec::new());
        let removed = map.remove(0, 4096).unwrap();
        drop(disk);
        // The memory's next owner writes to it.
        rustix::io::pwrite(&fd, &[2; 4096], 0).unwrap();
        assert!(removed.is_idle(), "no span outlives the disk");
        drop(open(&path, direct));
        let file = std::fs::read(&path).unwrap();
        assert!(file.iter().all(|&byte| byte < 2), "no write took the next owner's bytes");
        assert!(file.contains(&1), "some writes were under way");
    }
}

#[test]
fn a_file_is_locked_against_a_second_writer() {
    let (_directory, path) = fresh(SIZE as u64);
    let reader = FileOptions { read_only: true, ..FileOptions::default() };
    let writer = FileOptions::default();
    let try_open = |options| FileDisk::open(&path, options);
    let first = try_open(&reader).unwrap();
    let second = try_open(&reader).unwrap();
    assert!(matches!(try_open(&writer), Err(OpenError::InUse(_))));
    drop((first, second));
    let first = try_open(&writer).unwrap();
    for options in [&reader, &writer] {
        let error = try_open(options).err().unwrap().to_string();
        assert!(error.contains("in use"), "{error}");
    }
    drop(first);
    try_open(&writer).unwrap();
}

#[test]
fn a_read_only_disk_refuses_every_change() {
    let (_directory, path) = fresh(SIZE as u64);
    let options = FileOptions { read_only: true, ..FileOptions::default() };
    let mut disk = FileDisk::open(&path, &options).unwrap();
    assert!(disk.geometry().read_only);
    for operation in [Operation::WriteZeroes, Operation::Discard] {
        let request = request(operation, 0, 1, Vec::new());
        assert_eq!(one(&mut disk, request), Err(DiskError::ReadOnly));
    }
    assert_eq!(write(&mut disk, 0, &[1; 512]), Err(DiskError::ReadOnly));
    assert_eq!(one(&mut disk, request(Operation::Flush, 0, 0, Vec::new())), Ok(()));
    assert_eq!(read(&mut disk, 0, 1).unwrap(), [0; 512]);
}

#[test]
fn what_cannot_be_a_disk_is_refused() {
    let directory = directory();
    let path = directory.path().join("disk");
    let open = |options: &FileOptions| FileDisk::open(&path, options).err();
    let options = FileOptions::default();
    let error = open(&options).unwrap().to_string();
    assert!(error.contains("disk") && error.contains("No such file"), "{error}");
    std::fs::write(&path, [0; 511]).unwrap();
    assert!(matches!(open(&options), Some(OpenError::Size { bytes: 511, .. })));
    let odd = FileOptions { block_size: 520, ..options.clone() };
    assert!(matches!(open(&odd), Some(OpenError::BlockSize(520))));
    let here = FileOptions { read_only: true, ..options };
    assert!(matches!(FileDisk::open(directory.path(), &here), Err(OpenError::Kind(_))));
    assert!(matches!(FileDisk::open(Path::new("/dev/null"), &here), Err(OpenError::Kind(_))));
    let fifo = directory.path().join("fifo");
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert!(matches!(FileDisk::open(&fifo, &here), Err(OpenError::Kind(_))));
}

#[test]
fn a_file_with_a_part_of_a_block_is_rounded_down() {
    let directory = directory();
    let path = directory.path().join("disk");
    std::fs::write(&path, [1; 5000]).unwrap();
    let mut disk = open(&path, true);
    assert_eq!(disk.geometry().blocks, 9);
    assert_eq!(read(&mut disk, 8, 1).unwrap(), [1; 512]);
}

#[test]
fn a_sparse_file_larger_than_its_file_system_is_refused() {
    let directory = directory();
    let path = directory.path().join("disk");
    let error = create_sparse(&path, 1 << 60).unwrap_err();
    let OpenError::TooLarge { wanted, capacity, .. } = error else { panic!("{error}") };
    assert!(wanted == 1 << 60 && capacity > 0 && capacity < wanted);
    let text = error.to_string();
    assert!(text.contains(&wanted.to_string()) && text.contains(&capacity.to_string()), "{text}");
    assert!(!path.exists());
    create_sparse(&path, 1 << 30).unwrap();
    assert!(matches!(create_sparse(&path, 1 << 20), Err(OpenError::File { .. })), "it exists");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 30, "and was left alone");
}

/// Runs one test of this binary in a process of its own, so that it can change the process's
/// limits.
fn in_a_process_of_its_own(test: &str, body: impl FnOnce()) {
    if std::env::var_os("SLIPWAY_TEST_CHILD").is_some() {
        return body();
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("SLIPWAY_TEST_CHILD", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

#[test]
fn a_write_beyond_what_the_host_allows_is_no_space() {
    in_a_process_of_its_own("tests::file::a_write_beyond_what_the_host_allows_is_no_space", || {
        // SAFETY: sets a signal's disposition to "ignore"; no handler runs.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        for direct in [true, false] {
            let (_directory, path) = fresh(SIZE as u64);
            let mut disk = open(&path, direct);
            let limit = rustix::process::Rlimit { current: Some(64 * 512), maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
            assert_eq!(write(&mut disk, 0, &[1; 64 * 512]), Ok(()));
            assert_eq!(write(&mut disk, 64, &[1; 512]), Err(DiskError::NoSpace));
            assert_eq!(write(&mut disk, 60, &[2; 8 * 512]), Err(DiskError::NoSpace));
            assert_eq!(read(&mut disk, 0, 60).unwrap(), [1; 60 * 512]);
            assert_eq!(read(&mut disk, 64, 1).unwrap(), [0; 512]);
            let limit = rustix::process::Rlimit { current: None, maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).unwrap();
        }
    });
}

/// A small tmpfs in a mount namespace of this thread's own.
struct SmallTmpfs(TempDir);

impl SmallTmpfs {
    fn new(bytes: u64) -> Option<Self> {
        use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
        let directory = directory();
        let alone = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        let options = std::ffi::CString::new(format!("size={bytes}")).unwrap();
        // SAFETY: a new mount namespace for this thread takes no descriptor or memory away.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.ok()?;
        mount_change("/", alone).ok()?;
        mount("slipway", directory.path(), "tmpfs", MountFlags::empty(), options.as_c_str())
            .ok()?;
        Some(Self(directory))
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn needs_root_a_full_file_system_is_no_space() {
    let Some(SmallTmpfs(directory)) = &SmallTmpfs::new(1 << 20) else {
        println!("SKIPPED: needs_root_a_full_file_system_is_no_space: needs root (to mount tmpfs)");
        return;
    };
    let path = directory.path().join("disk");
    let refused = create_sparse(&path, 2 << 20);
    assert!(matches!(refused, Err(OpenError::TooLarge { capacity: 0x10_0000, .. })), "{refused:?}");
    create_sparse(&path, 1 << 20).unwrap();
    std::fs::write(directory.path().join("other"), vec![0; 512 << 10]).unwrap();
    let mut disk = open(&path, true);
    let mut kept = 0;
    let full = (0..256).find(|index| {
        let result = write(&mut disk, index * 8, &[*index as u8 + 1; 4096]);
        kept += u64::from(result.is_ok());
        result == Err(DiskError::NoSpace)
    });
    assert!(full.is_some() && kept > 100, "{kept} writes before {full:?}");
    for index in 0..kept {
        assert_eq!(read(&mut disk, index * 8, 8).unwrap(), [index as u8 + 1; 4096]);
    }
    one(&mut disk, request(Operation::Discard, 0, 8, Vec::new())).unwrap();
    assert_eq!(write(&mut disk, kept * 8, &[9; 4096]), Ok(()), "a discard makes room");
}

/// A loop device over a sparse file, removed on drop.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Option<Self> {
        let mut losetup = std::process::Command::new("losetup");
        let output = losetup.args(["--find", "--show"]).arg(file).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(Self(String::from_utf8(output.stdout).ok()?.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

#[test]
fn needs_root_a_block_device_equals_its_model() {
    let (_directory, path) = fresh(SIZE as u64);
    let Some(device) = Loop::new(&path) else {
        println!(
            "SKIPPED: needs_root_a_block_device_equals_its_model: needs root and loop devices"
        );
        return;
    };
    for (seed, direct) in [(30, true), (31, false)] {
        let mut disk = open(&device.0, direct);
        assert_eq!(disk.is_direct(), direct);
        assert!(matches!(
            FileDisk::open(&device.0, &FileOptions::default()),
            Err(OpenError::InUse(_))
        ));
        let blocks = SIZE as u32 / 512;
        one(&mut disk, request(Operation::WriteZeroes, 0, blocks, Vec::new())).unwrap();
        against_model(&mut disk, vec![0; SIZE], 4, seed);
    }
}

#[test]
fn what_waits_for_a_place_in_the_kernel_can_be_given_up() {
    let (_directory, path) = fresh(SIZE as u64);
    let mut disk = open(&path, false);
    let zeroes =
        |tag: u64| Request { tag, ..request(Operation::WriteZeroes, tag % 256 * 8, 8, Vec::new()) };
    let mut completions = Vec::new();
    disk.submit(&mut (0..1000).map(zeroes).collect(), &mut completions);
    // The last request has certainly not reached the kernel.
    assert!(disk.cancel(999, &mut completions));
    assert!(!disk.cancel(999, &mut completions), "it is given up already");
    assert!(!disk.cancel(5000, &mut completions), "there is none");
    let mut cancelled = vec![999];
    for tag in (0..999).step_by(7) {
        if disk.cancel(tag, &mut completions) {
            cancelled.push(tag);
        }
    }
    let flush = Request { tag: 1000, ..request(Operation::Flush, 0, 0, Vec::new()) };
    disk.submit(&mut vec![flush], &mut completions);
    disk.cancel(1000, &mut completions);
    while completions.len() < 1001 {
        disk.poll(&mut completions);
    }
    completions.sort_by_key(|one| one.tag);
    for (tag, completion) in (0..).zip(&completions) {
        assert_eq!(completion.tag, tag, "each ends once");
        let expected = match cancelled.contains(&tag) {
            true => Err(DiskError::Cancelled),
            false => Ok(()),
        };
        assert!(completion.result == expected || tag == 1000, "{completion:?}");
    }
    // A cancelled flush must not fail later flushes.
    disk.submit(
        &mut vec![Request { tag: 1, ..request(Operation::Flush, 0, 0, Vec::new()) }],
        &mut completions,
    );
    while completions.len() < 1002 {
        disk.poll(&mut completions);
    }
    assert_eq!(completions[1001].result, Ok(()));
}
