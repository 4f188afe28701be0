//! Endpoints on an NVMe namespace by passthrough commands, if there is one that may be overwritten:
//! `tests/e2e/29-nvme-passthrough.sh` has one, in a guest, and does to it what a test asks for.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use slipway_disks::Error as DiskError;
use slipway_nvme::driver::{Driver, RegisterAccess, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use slipway_plane::Error;
use slipway_plane_api::v1::{self, disk::Kind};

use common::{Registers, Rig, round_trip};

/// The environment variable for the generic character device, /dev/ngXnY, of a namespace that a
/// test may write to; the namespace has blocks of 512 bytes and 16 MiB.
const VARIABLE: &str = "SLIPWAY_TEST_NVME";
const BYTES: u64 = 16 << 20;
const BLOCK: usize = 512;
/// The Deallocate bit of Dataset Management, in dword 11.
const DEALLOCATE: u32 = 1 << 2;
/// The time for a whole test, whose machine is emulated.
const PATIENCE: Duration = Duration::from_secs(500);

/// A buffer for direct I/O, which needs aligned memory.
#[repr(C, align(4096))]
struct Page([u8; 64 << 10]);

/// The namespace: its generic device, and its block device with the expected content.
struct Namespace {
    generic: String,
    block: PathBuf,
    expected: Vec<u8>,
}

impl Namespace {
    fn find(test: &str) -> Option<Self> {
        let Ok(generic) = std::env::var(VARIABLE) else {
            println!("SKIPPED: {test}: needs an NVMe namespace in {VARIABLE}");
            return None;
        };
        let path = Path::new(&generic);
        let name = path.file_name().unwrap().to_str().unwrap().strip_prefix("ng").unwrap();
        let block = path.with_file_name(format!("nvme{name}"));
        Some(Self { generic, block, expected: vec![0; BYTES as usize] })
    }

    fn kind(&self) -> Kind {
        Kind::File(v1::FileDisk { path: self.generic.clone(), ..Default::default() })
    }

    /// Opens the block device, without the guest's page cache.
    fn open(&self, flags: OFlags) -> std::io::Result<File> {
        let flags = (OFlags::DIRECT | flags).bits().cast_signed();
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(&self.block)
    }

    /// Checks that the block device has the expected content.
    fn check(&self) {
        let file = self.open(OFlags::empty()).unwrap();
        let mut page = Box::new(Page([0; _]));
        for (at, expected) in (0..).step_by(page.0.len()).zip(self.expected.chunks(page.0.len())) {
            file.read_exact_at(&mut page.0, at).unwrap();
            assert!(page.0 == expected, "64 KiB at byte {at}");
        }
    }

    /// Fills 64 KiB at byte `at` through the block device.
    fn fill(&mut self, at: usize, byte: u8) {
        let page = Box::new(Page([byte; _]));
        self.open(OFlags::empty()).unwrap().write_all_at(&page.0, at as u64).unwrap();
        self.expected[at..at + page.0.len()].copy_from_slice(&page.0);
    }

    /// Writes a pattern to `blocks` blocks through the driver, which reads it back.
    fn write(&mut self, driver: &mut Driver<Registers>, lba: u64, blocks: u32) {
        round_trip(driver, 1, lba, blocks);
        let (start, len) = (lba as usize * BLOCK, blocks as usize * BLOCK);
        let pattern = (0..len).map(|i| (i as u64 * 31 + lba) as u8);
        self.expected.splice(start..start + len, pattern);
    }
}

/// Makes an endpoint `id` on `disk` and a driver for it, with an I/O queue.
fn endpoint(rig: &mut Rig, id: &str, disk: Kind) -> Driver<Registers> {
    rig.socket = rig.dir.path().join(id);
    rig.plane.create(&rig.request(id, vec![disk])).unwrap();
    let mut driver = rig.drive();
    driver.create_pair(1, 64, None).unwrap();
    driver
}

fn status(driver: &mut Driver<Registers>, command: SubmissionEntry) -> Status {
    Status(driver.run(1, command).unwrap().status().code())
}

/// Has the script outside do `what`, and calls `meanwhile` until that is done.
fn ask(what: &str, mut meanwhile: impl FnMut()) {
    println!("please: {what}");
    let answer = std::env::temp_dir().join(what);
    let deadline = Instant::now() + PATIENCE;
    while !answer.exists() {
        assert!(Instant::now() < deadline, "nobody did: {what}");
        meanwhile();
    }
}

/// Commands in flight, at most 32 of 4 KiB, to a part of the disk that nothing else uses.
struct Load {
    buffer: u64,
    submitted: u64,
    ended: u64,
}

impl Load {
    fn new(driver: &mut Driver<Registers>) -> Self {
        Self { buffer: driver.arena.allocate(4096).unwrap(), submitted: 0, ended: 0 }
    }

    /// Submits as many commands as there is room for, and returns the statuses of those that have
    /// ended.
    fn turn(&mut self, driver: &mut Driver<Registers>, most: u64) -> Vec<Status> {
        while self.submitted - self.ended < most {
            let opcode =
                if self.submitted.is_multiple_of(2) { NvmOpcode::Write } else { NvmOpcode::Read };
            let command = io(opcode, 1, self.submitted / 2 % 64 * 8, 8);
            driver.submit(1, SubmissionEntry { prp1: self.buffer.into(), ..command }).unwrap();
            self.submitted += 1;
        }
        let mut entries = Vec::new();
        self.ended += driver.reap(1, &mut entries).unwrap() as u64;
        driver.registers.idle().unwrap();
        entries.iter().map(|entry| Status(entry.status().code())).collect()
    }

    /// Waits for all commands.
    fn drain(&mut self, driver: &mut Driver<Registers>) -> Vec<Status> {
        let mut found = Vec::new();
        while self.ended < self.submitted {
            found.append(&mut self.turn(driver, 0));
        }
        found
    }
}

#[test]
fn an_endpoint_serves_a_namespace_until_it_is_taken_away() {
    let Some(mut namespace) = Namespace::find("an_endpoint_serves_a_namespace") else { return };
    let mut rig = Rig::new();
    {
        // A namespace that another process has opened exclusively, for example mounted, is refused.
        let _held = namespace.open(OFlags::EXCL).unwrap();
        let refused = rig.plane.create(&rig.request("early", vec![namespace.kind()]));
        assert!(matches!(refused, Err(Error::Disk(DiskError::Open(_)))), "{refused:?}");
    }
    let disk = v1::Disk { block_size: 0, kind: Some(namespace.kind()) };
    let request = v1::CreateDiskRequest { name: "data".into(), disk: Some(disk) };
    assert_eq!(rig.plane.create_disk(&request).unwrap().size_bytes, BYTES);
    assert!(namespace.open(OFlags::EXCL).is_err(), "nobody mounts it now");
    let named = Kind::Named(v1::NamedDiskReference { name: "data".into(), read_only: false });
    let mut driver = endpoint(&mut rig, "one", named);
    same_by_both_ways(&mut namespace, &mut driver);
    a_reset_of_the_drive_is_no_error(&mut driver);
    smaller_beneath(&rig, &mut driver);
    gone(&rig, driver);
}

/// Data written through the block device is read through passthrough, and conversely.
fn same_by_both_ways(namespace: &mut Namespace, driver: &mut Driver<Registers>) {
    let all = io(NvmOpcode::WriteZeroes, 1, 0, (BYTES / 512) as u32);
    assert_eq!(status(driver, all), Status::SUCCESS);
    namespace.check();
    for (lba, blocks) in [(0, 1), (7, 3), (100, 256), (1000, 2048), (32_767, 1), (20_001, 999)] {
        namespace.write(driver, lba, blocks);
    }
    assert_eq!(status(driver, SubmissionEntry::new(NvmOpcode::Flush.0, 1)), Status::SUCCESS);
    namespace.check();

    namespace.fill(1 << 20, 0x5a);
    let (at, blocks) = ((1_u64 << 20) / 512, 128);
    let buffer = driver.arena.allocate(64 << 10).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, 1, at, blocks), (buffer, 64 << 10)).unwrap();
    let mut found = vec![0; 64 << 10];
    driver.arena.memory().read(buffer, &mut found).unwrap();
    assert!(found == vec![0x5a; 64 << 10], "what the block device wrote");

    assert_eq!(status(driver, io(NvmOpcode::WriteZeroes, 1, 1001, 77)), Status::SUCCESS);
    namespace.expected[1001 * BLOCK..1078 * BLOCK].fill(0);
    // Blocks 1,200 to 1,299 and 20,010.
    let ranges: Vec<u8> = [(100_u32, 1200_u64), (1, 20_010)]
        .iter()
        .flat_map(|(len, lba)| [&[0; 4][..], &len.to_le_bytes(), &lba.to_le_bytes()].concat())
        .collect();
    driver.arena.memory().write(buffer, &ranges).unwrap();
    let command = SubmissionEntry::new(NvmOpcode::DatasetManagement.0, 1)
        .with_dword(10, 1)
        .with_dword(11, DEALLOCATE);
    driver.transfer(1, command, (buffer, ranges.len())).unwrap();
    namespace.expected[1200 * BLOCK..1300 * BLOCK].fill(0);
    namespace.expected[20_010 * BLOCK..20_011 * BLOCK].fill(0);
    namespace.check();
    driver.arena.release(buffer, 64 << 10);
}

/// Linux returns commands of user space when it resets a drive; they are carried out again.
fn a_reset_of_the_drive_is_no_error(driver: &mut Driver<Registers>) {
    let mut load = Load::new(driver);
    for round in 0..3 {
        let mut ended = 0;
        ask(&format!("reset-{round}"), || {
            for status in load.turn(driver, 32) {
                assert_eq!(status, Status::SUCCESS, "reset {round}");
                ended += 1;
            }
        });
        println!("commands beside reset {round}: {ended}");
    }
    assert!(load.drain(driver).iter().all(|status| *status == Status::SUCCESS));
}

/// The namespace is made smaller, which the drive announces first.
fn smaller_beneath(rig: &Rig, driver: &mut Driver<Registers>) {
    ask("shrink", || std::thread::sleep(Duration::from_millis(50)));
    let end = BYTES / 2 / 512;
    let buffer = driver.arena.allocate(4096).unwrap();
    for opcode in [NvmOpcode::Read, NvmOpcode::Write] {
        for (lba, expected) in [(end, Status::LBA_OUT_OF_RANGE), (end - 8, Status::SUCCESS)] {
            let command = SubmissionEntry { prp1: buffer.into(), ..io(opcode, 1, lba, 8) };
            assert_eq!(status(driver, command), expected, "{opcode:?} at {lba}");
        }
    }
    let beyond = io(NvmOpcode::WriteZeroes, 1, end - 1, 2);
    assert_eq!(status(driver, beyond), Status::LBA_OUT_OF_RANGE);
    let request = v1::ResizeDiskRequest { name: "data".into(), size_bytes: 0, shrink: true };
    assert_eq!(rig.plane.resize_disk(&request).unwrap().size_bytes, BYTES / 2);
    assert_eq!(driver.identify_namespace(1).unwrap().size.get(), end);
    driver.arena.release(buffer, 4096);
}

/// The namespace is removed under running commands: each of them ends, with a media error, and so
/// do the endpoint and the disk.
fn gone(rig: &Rig, mut driver: Driver<Registers>) {
    let mut load = Load::new(&mut driver);
    let mut found = Vec::new();
    ask("detach", || found.append(&mut load.turn(&mut driver, 32)));
    let deadline = Instant::now() + PATIENCE;
    while !found.contains(&Status::WRITE_FAULT) || !found.contains(&Status::UNRECOVERED_READ_ERROR)
    {
        assert!(Instant::now() < deadline, "no error of {} commands", found.len());
        found.append(&mut load.turn(&mut driver, 32));
    }
    found.append(&mut load.drain(&mut driver));
    let known = [Status::SUCCESS, Status::WRITE_FAULT, Status::UNRECOVERED_READ_ERROR];
    assert!(found.iter().all(|status| known.contains(status)), "{found:?}");
    let first = found.iter().position(|status| *status != Status::SUCCESS).unwrap();
    let after = found[first..].iter().filter(|status| **status == Status::SUCCESS).count();
    println!(
        "{first} commands before the first error, {after} successes among {} after",
        found.len() - first
    );
    rig.plane.remove("one").unwrap();
    rig.plane.remove_disk("data").unwrap();
}
