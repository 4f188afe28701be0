//! Reads and writes of all sizes and alignments, against a model; and the statuses of disks'
//! errors.

use std::sync::atomic::Ordering::Relaxed;

use slipway_block::{DiskError, FileDisk, FileOptions, OpenError, create_sparse};
use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;
use slipway_ram::{DmaMap, Fault, MessageMemory, Permissions, Region};
use std::sync::Arc;

use super::rig::{HeldDisk, MEMORY, Random, Requested, Rig, Setup, ram};
use crate::driver::{admin, io};

/// Runs random writes, zeroes, discards and reads, checked against plain bytes.
fn against_a_model(rig: &mut Rig, block: usize, seed: u64) {
    let blocks = (16 << 20) / block as u64;
    let mut model = vec![0u8; 16 << 20];
    let mut random = Random(seed);
    let room = (1 << 20) + 8192;
    let buffer = rig.buffer(room);
    let most = (1 << 20) / block as u64;
    for step in 0..300 {
        let count = if step % 3 == 0 { random.below(most) } else { random.below(16) } + 1;
        let lba = random.below(blocks - count + 1);
        let (from, len) = (lba as usize * block, count as usize * block);
        let address = buffer + 4 * random.below(1024);
        match random.below(8) {
            0..3 => {
                let data = random.bytes(len);
                rig.fill(address, &data);
                let write = io(NvmOpcode::Write, 1, lba, count as u32);
                rig.driver.transfer(1, write, (address, len)).unwrap();
                model[from..from + len].copy_from_slice(&data);
            }
            3 => {
                let zeroes = io(NvmOpcode::WriteZeroes, 1, lba, count as u32);
                assert_eq!(rig.status(1, zeroes), Status::SUCCESS);
                model[from..from + len].fill(0);
            }
            4 => {
                let mut range = [0; 16];
                range[4..8].copy_from_slice(&(count as u32).to_le_bytes());
                range[8..].copy_from_slice(&lba.to_le_bytes());
                rig.fill(address, &range);
                let discard = SubmissionEntry::new(9, 1).with_dword(11, 4);
                rig.driver.transfer(1, discard, (address, 16)).unwrap();
                model[from..from + len].fill(0);
            }
            _ => {
                // The bytes around the data must not change.
                let area = vec![0xa5; room];
                rig.fill(buffer, &area);
                let read = io(NvmOpcode::Read, 1, lba, count as u32);
                rig.driver.transfer(1, read, (address, len)).unwrap();
                let got = rig.bytes(buffer, room);
                let start = (address - buffer) as usize;
                assert!(got[start..start + len] == model[from..from + len], "step {step}");
                assert!(got[..start].iter().chain(&got[start + len..]).all(|byte| *byte == 0xa5));
            }
        }
        // Lists of this step are not needed any more; the arena does not take them back.
        if step % 64 == 63 {
            rig.driver.disable().unwrap();
            rig.driver.enable(32).unwrap();
            rig.driver.create_pair(1, 64, Some(1)).unwrap();
        }
    }
}

#[test]
fn all_sizes_and_alignments_of_512_byte_blocks() {
    against_a_model(&mut Setup::new().rig(), 512, 1);
}

#[test]
fn all_sizes_and_alignments_by_requests() {
    let disk = Box::new(Requested(ram(16 << 20, 512)));
    against_a_model(&mut Setup::new().disk(disk).rig(), 512, 3);
}

#[test]
fn all_sizes_and_alignments_of_4096_byte_blocks() {
    against_a_model(&mut Setup::new().disk(ram(16 << 20, 4096)).rig(), 4096, 2);
}

/// Needs io_uring, which a sandbox or an old kernel may not have.
#[test]
fn all_sizes_and_alignments_on_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    create_sparse(&path, 16 << 20).unwrap();
    match FileDisk::open(&path, &FileOptions::default()) {
        Ok(disk) => {
            let mut rig = Setup::new().disk(Box::new(disk)).rig();
            let block = rig.driver.identify_namespace(1).unwrap().block_size();
            against_a_model(&mut rig, block as usize, 6);
            rig.driver.shutdown().unwrap();
        }
        Err(OpenError::Ring(error)) => {
            eprintln!("SKIPPED: all_sizes_and_alignments_on_a_file: needs io_uring ({error})");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn lists_may_be_chained_and_start_anywhere() {
    let mut rig = Setup::new().rig();
    let data = rig.buffer(64 << 10);
    let pages: Vec<u64> = (1..16).map(|page| data + page * 4096).collect();
    let (first, second) = (rig.buffer(4096), rig.buffer(4096));
    let content = Random(3).bytes(64 << 10);
    rig.fill(data, &content);
    for place in [0u64, 8, 4096 - 24, 4096 - 16, 4096 - 8] {
        let room = ((4096 - place) / 8) as usize;
        let here = if pages.len() > room { room - 1 } else { pages.len() };
        let mut list: Vec<u8> = pages[..here].iter().flat_map(|page| page.to_le_bytes()).collect();
        if here < pages.len() {
            list.extend_from_slice(&second.to_le_bytes());
            let rest: Vec<u8> = pages[here..].iter().flat_map(|page| page.to_le_bytes()).collect();
            rig.fill(second, &rest);
        }
        rig.fill(first + place, &list);
        let mut write = io(NvmOpcode::Write, 1, place, 128);
        write.prp1 = data.into();
        write.prp2 = (first + place).into();
        assert_eq!(rig.status(1, write), Status::SUCCESS, "list at {place:#x}");
        let back = rig.buffer(64 << 10);
        let read = io(NvmOpcode::Read, 1, place, 128);
        rig.driver.transfer(1, read, (back, 64 << 10)).unwrap();
        assert!(rig.bytes(back, 64 << 10) == content, "list at {place:#x}");
    }
    // A chained list must start on a page.
    rig.fill(first + 4096 - 8, &(second + 8).to_le_bytes());
    let mut read = io(NvmOpcode::Read, 1, 0, 128);
    read.prp1 = data.into();
    read.prp2 = (first + 4096 - 8).into();
    assert_eq!(rig.status(1, read), Status::PRP_OFFSET_INVALID.dnr());
}

#[test]
fn errors_of_disks_have_a_status() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    gate.open();
    let mut rig = Setup::new().disk(disk).rig();
    let page = rig.buffer(4096);
    let cases = [
        (NvmOpcode::Read, DiskError::Io(5), Status::UNRECOVERED_READ_ERROR),
        (NvmOpcode::Read, DiskError::Io(0), Status::UNRECOVERED_READ_ERROR),
        (NvmOpcode::Write, DiskError::Io(5), Status::WRITE_FAULT),
        (NvmOpcode::WriteZeroes, DiskError::Io(5), Status::WRITE_FAULT),
        (NvmOpcode::Flush, DiskError::Io(5), Status::WRITE_FAULT),
        (NvmOpcode::Write, DiskError::NoSpace, Status::CAPACITY_EXCEEDED.dnr()),
        (NvmOpcode::Flush, DiskError::NoSpace, Status::CAPACITY_EXCEEDED.dnr()),
        (NvmOpcode::Write, DiskError::ReadOnly, Status::WRITE_PROTECTED.dnr()),
        (NvmOpcode::Read, DiskError::OutOfRange, Status::LBA_OUT_OF_RANGE.dnr()),
        (NvmOpcode::WriteZeroes, DiskError::Unsupported, Status::INVALID_OPCODE.dnr()),
        (NvmOpcode::Read, DiskError::Memory(Fault::Gone { iova: 0 }), Status::DATA_TRANSFER_ERROR),
    ];
    for (opcode, error, status) in cases {
        gate.fail(Some(error));
        let command = SubmissionEntry { prp1: page.into(), ..io(opcode, 1, 0, 1) };
        assert_eq!(rig.status(1, command), status, "{opcode:?} {error:?}");
    }
    gate.fail(None);
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 2 | 127 << 16);
    let log = rig.driver.admin_read(log, 512).unwrap();
    // Reads and writes count, also those that failed; media errors are the five of the medium.
    assert_eq!(log[64], 4);
    assert_eq!(log[80], 3);
    assert_eq!(log[160], 5);
    assert_eq!(log[176], cases.len() as u8);
}

#[test]
fn flush_reaches_every_disk_and_writes_are_durable_when_asked() {
    let (one, first) = HeldDisk::make(ram(1 << 20, 512));
    let (two, second) = HeldDisk::make(ram(1 << 20, 4096));
    let mut setup = Setup::new();
    setup.disks = vec![one, two];
    let mut rig = setup.rig();
    first.open();
    rig.driver.submit(1, SubmissionEntry::new(0, NSID_ALL)).unwrap();
    rig.poll(3);
    assert!(rig.reap(1).is_empty(), "the second disk has not flushed");
    second.open();
    rig.poll(2);
    assert!(rig.reap(1)[0].status().is_success());
    assert_eq!((first.flushes.load(Relaxed), second.flushes.load(Relaxed)), (1, 1));
    let page = rig.buffer(4096);
    let write = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Write, 1, 0, 1) };
    rig.run(1, write);
    assert_eq!(first.durable.load(Relaxed), 0);
    rig.run(1, write.with_dword(12, 1 << 30));
    assert_eq!(first.durable.load(Relaxed), 1, "FUA");
    let set = admin(AdminOpcode::SetFeatures).with_dword(10, 6);
    rig.driver.admin(set).unwrap();
    assert_eq!(first.flushes.load(Relaxed), 2, "what the cache held");
    rig.driver.admin(set).unwrap();
    assert_eq!(first.flushes.load(Relaxed), 2, "it was off");
    rig.run(1, write);
    assert_eq!(first.durable.load(Relaxed), 2, "without a volatile write cache");
    rig.run(1, SubmissionEntry { opcode: NvmOpcode::Read.0, ..write });
    assert_eq!(first.durable.load(Relaxed), 2, "a read");
}

#[test]
fn a_discard_has_many_ranges() {
    let mut rig = Setup::new().rig();
    let buffer = rig.buffer(1 << 20);
    rig.fill(buffer, &vec![7; 1 << 20]);
    rig.driver.transfer(1, io(NvmOpcode::Write, 1, 0, 2048), (buffer, 1 << 20)).unwrap();
    let ranges: Vec<u8> = (0..256u64)
        .flat_map(|range| [&[0; 4], &4u32.to_le_bytes(), &(range * 8).to_le_bytes()[..]].concat())
        .collect();
    rig.fill(buffer, &ranges);
    let discard = SubmissionEntry::new(9, 1).with_dword(10, 255).with_dword(11, 4);
    rig.driver.transfer(1, discard, (buffer, 4096)).unwrap();
    rig.driver.transfer(1, io(NvmOpcode::Read, 1, 0, 2048), (buffer, 1 << 20)).unwrap();
    let got = rig.bytes(buffer, 1 << 20);
    assert!(got.chunks(512).enumerate().all(|(block, data)| {
        data.iter().all(|byte| *byte == if block % 8 < 4 { 0 } else { 7 })
    }));
    // One range lies beyond the end, so no range is discarded.
    rig.fill(buffer, &vec![7; 1 << 20]);
    rig.driver.transfer(1, io(NvmOpcode::Write, 1, 0, 2048), (buffer, 1 << 20)).unwrap();
    rig.fill(buffer, &ranges);
    rig.fill(buffer + 4096 - 8, &u64::MAX.to_le_bytes());
    let discard = rig.with_data(discard, buffer, 4096);
    assert_eq!(rig.status(1, discard), Status::LBA_OUT_OF_RANGE.dnr());
    rig.driver.transfer(1, io(NvmOpcode::Read, 1, 0, 2048), (buffer, 1 << 20)).unwrap();
    assert!(rig.bytes(buffer, 1 << 20).iter().all(|byte| *byte == 7));
}

/// Message-only memory: bytes behind a trait.
struct Far(std::sync::Mutex<Vec<u8>>, u64);

impl MessageMemory for Far {
    fn read(&self, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        let at = (iova - self.1) as usize;
        into.copy_from_slice(&self.0.lock().unwrap()[at..at + into.len()]);
        Ok(())
    }

    fn write(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let at = (iova - self.1) as usize;
        self.0.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
}

#[test]
fn message_only_memory_is_served_through_a_bounce_buffer() {
    let mut map = DmaMap::new();
    let half = MEMORY as u64 / 2;
    let far = Far(std::sync::Mutex::new(vec![0; MEMORY / 2]), half);
    map.add(0, Region::heap(MEMORY / 2)).unwrap();
    map.add(half, Region::remote(Arc::new(far), half, Permissions::READ_WRITE)).unwrap();
    let mut rig = Setup::on(map.memory(), ram(16 << 20, 512)).rig();
    let content = Random(4).bytes(256 << 10);
    // Data wholly in message-only memory, and half in it.
    for (lba, address) in [(0, half + 4096), (1000, half - (128 << 10))] {
        rig.fill(address, &content);
        rig.driver.transfer(1, io(NvmOpcode::Write, 1, lba, 512), (address, 256 << 10)).unwrap();
        rig.fill(address, &vec![0; 256 << 10]);
        rig.driver.transfer(1, io(NvmOpcode::Read, 1, lba, 512), (address, 256 << 10)).unwrap();
        assert!(rig.bytes(address, 256 << 10) == content);
    }
}

#[test]
fn all_of_a_driver_may_lie_in_message_only_memory() {
    let far = Far(std::sync::Mutex::new(vec![0; MEMORY]), 0);
    let region = Region::remote(Arc::new(far), MEMORY as u64, Permissions::READ_WRITE);
    let mut map = DmaMap::new();
    map.add(0, region).unwrap();
    let mut rig = Setup::on(map.memory(), ram(16 << 20, 512)).rig();
    against_a_model(&mut rig, 512, 5);
}
