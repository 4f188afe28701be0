//! Compare, Verify, Copy, and fused pairs.

use std::sync::Arc;

use slipway_block::{DiskError, NullDisk};
use slipway_nvme_spec::command::{CompletionEntry, CopyRange, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::status::Status;
use zerocopy::IntoBytes;

use super::rig::{Gate, HeldDisk, Random, Rig, Setup, ram};
use crate::driver::io;

const READ: NvmOpcode = NvmOpcode::Read;
const WRITE: NvmOpcode = NvmOpcode::Write;
const COMPARE: NvmOpcode = NvmOpcode::Compare;

fn with(rig: &mut Rig, opcode: NvmOpcode, lba: u64, at: u64, len: usize) -> SubmissionEntry {
    rig.with_data(io(opcode, 1, lba, (len / 512) as u32), at, len)
}

fn write(rig: &mut Rig, lba: u64, at: u64, data: &[u8]) {
    rig.fill(at, data);
    let command = with(rig, WRITE, lba, at, data.len());
    assert_eq!(rig.status(1, command), Status::SUCCESS);
}

fn read(rig: &mut Rig, lba: u64, at: u64, len: usize) -> Vec<u8> {
    let command = with(rig, READ, lba, at, len);
    assert_eq!(rig.status(1, command), Status::SUCCESS);
    rig.bytes(at, len)
}

#[test]
fn compare_finds_every_byte() {
    let mut rig = Setup::new().rig();
    let mut random = Random(11);
    let buffer = rig.buffer(1 << 20);
    let data = random.bytes(300 * 512);
    write(&mut rig, 7, buffer, &data);
    // At another alignment than the write's.
    let at = buffer + (512 << 10) + 20;
    rig.fill(at, &data);
    let compare = with(&mut rig, COMPARE, 7, at, data.len());
    assert_eq!(rig.status(1, compare), Status::SUCCESS);
    let spots = [0, 4095, 4096, data.len() - 1].into_iter();
    for wrong in spots.chain((0..50).map(|_| random.below(data.len() as u64) as usize)) {
        rig.fill(at + wrong as u64, &[!data[wrong]]);
        assert_eq!(rig.status(1, compare), Status::COMPARE_FAILURE.dnr(), "byte {wrong}");
        rig.fill(at + wrong as u64, &[data[wrong]]);
    }
    assert_eq!(rig.status(1, compare), Status::SUCCESS);
}

#[test]
fn a_disk_that_fails_fails_the_step() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    gate.open();
    let page = rig.buffer(4096);
    gate.fail(Some(DiskError::Io(5)));
    let compare = with(&mut rig, COMPARE, 0, page, 512);
    assert_eq!(rig.status(1, compare), Status::UNRECOVERED_READ_ERROR);
    assert_eq!(rig.status(1, io(NvmOpcode::Verify, 1, 0, 2048)), Status::UNRECOVERED_READ_ERROR);
    rig.fill(page, CopyRange::new(0, 4).as_bytes());
    let copy = SubmissionEntry { prp1: page.into(), ..SubmissionEntry::new(NvmOpcode::Copy.0, 1) };
    assert_eq!(rig.status(1, copy), Status::UNRECOVERED_READ_ERROR);
}

#[test]
fn verify_reads_everything_in_steps() {
    let (disk, gate) = HeldDisk::make(Box::new(NullDisk::new(slipway_block::Geometry {
        block_size: 4096,
        blocks: 1 << 17,
        read_only: false,
    })));
    let mut rig = Setup::new().disk(disk).rig();
    // 256 MiB are 256 steps of the MDTS.
    let id = rig.driver.submit(1, io(NvmOpcode::Verify, 1, 5, 65_536)).unwrap();
    for step in 0..256 {
        rig.poll(2);
        assert_eq!(gate.waiting(), 1, "step {step}");
        assert!(rig.reap(1).is_empty());
        gate.allow(1);
    }
    rig.poll(2);
    let ended = rig.reap(1);
    assert_eq!((ended.len(), ended[0].id.get(), ended[0].status()), (1, id, Status::SUCCESS));
}

/// Runs a Copy of `ranges` to `to`, and returns its completion.
fn copy(rig: &mut Rig, list: u64, ranges: &[(u64, u32)], to: u64) -> CompletionEntry {
    let ranges: Vec<_> = ranges.iter().map(|(lba, n)| CopyRange::new(*lba, *n)).collect();
    rig.fill(list, ranges.as_slice().as_bytes());
    let command = SubmissionEntry::new(NvmOpcode::Copy.0, 1)
        .with_dword(10, to as u32)
        .with_dword(11, (to >> 32) as u32)
        .with_dword(12, ranges.len() as u32 - 1);
    let command = rig.with_data(command, list, 32 * ranges.len());
    rig.run(1, command)
}

#[test]
fn copy_moves_ranges_like_a_model() {
    for block in [512, 4096u64] {
        let mut rig = Setup::new().disk(ram(16 << 20, block as u32)).rig();
        let (list, buffer) = (rig.buffer(4096), rig.buffer(1 << 20));
        let blocks = (16 << 20) / block;
        let mut random = Random(block);
        let mut model = vec![0; 16 << 20];
        let whole = (1 << 20) / block;
        for part in 0..16 {
            let data = random.bytes(1 << 20);
            rig.fill(buffer, &data);
            let command = io(WRITE, 1, part * whole, whole as u32);
            rig.driver.transfer(1, command, (buffer, 1 << 20)).unwrap();
            model[(part as usize) << 20..][..1 << 20].copy_from_slice(&data);
        }
        for _ in 0..40 {
            // Sources in the first half, destination in the second.
            let most = random.below(3 * whole).max(1);
            let count = random.below(5) + 1;
            let range = |random: &mut Random| {
                let n = random.below(most / 5 + 1) + 1;
                (random.below(blocks / 2 - n), n as u32)
            };
            let ranges: Vec<_> = (0..count).map(|_| range(&mut random)).collect();
            let sum: u64 = ranges.iter().map(|(_, n)| u64::from(*n)).sum();
            let to = blocks / 2 + random.below(blocks / 2 - sum + 1);
            let ended = copy(&mut rig, list, &ranges, to);
            assert_eq!((ended.status(), ended.result.get()), (Status::SUCCESS, 0));
            let mut at = (to * block) as usize;
            for (lba, n) in ranges {
                let (from, len) = ((lba * block) as usize, (u64::from(n) * block) as usize);
                model.copy_within(from..from + len, at);
                at += len;
            }
        }
        for part in 0..16 {
            let command = io(READ, 1, part * whole, whole as u32);
            rig.driver.transfer(1, command, (buffer, 1 << 20)).unwrap();
            assert!(rig.bytes(buffer, 1 << 20) == model[(part as usize) << 20..][..1 << 20]);
        }
    }
}

#[test]
fn copy_keeps_to_its_limits() {
    let null = |blocks| {
        NullDisk::new(slipway_block::Geometry { block_size: 512, blocks, read_only: false })
    };
    let mut rig = Setup::new().disk(Box::new(null(1 << 30))).rig();
    let page = rig.driver.identify_namespace(1).unwrap();
    let limits = (page.copy_range_blocks.get(), page.copy_blocks.get(), page.copy_ranges);
    assert_eq!(limits, (65_535, 1 << 17, 127));
    let list = rig.buffer(4096);
    let too_long = Status::COPY_SIZE_EXCEEDED.dnr().more();
    assert_eq!(copy(&mut rig, list, &[(0, 65_536)], 1 << 20).status(), too_long);
    assert_eq!(
        copy(&mut rig, list, &[(0, 65_535), (0, 65_535), (0, 3)], 1 << 20).status(),
        too_long
    );
    let most = [(0, 65_535), (0, 65_535), (0, 2)];
    assert_eq!(copy(&mut rig, list, &most, 1 << 20).status(), Status::SUCCESS);
    assert_eq!(copy(&mut rig, list, &[(5, 1); 128], 1 << 20).status(), Status::SUCCESS);
    let out = Status::LBA_OUT_OF_RANGE.dnr().more();
    assert_eq!(copy(&mut rig, list, &[(0, 2), (1 << 30, 1)], 8).status(), out);
    assert_eq!(copy(&mut rig, list, &[(0, 2)], (1 << 30) - 1).status(), out);
    assert_eq!(copy(&mut rig, list, &[(u64::MAX, 2)], 8).status(), out);
}

#[test]
fn a_failed_copy_says_which_range() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    let list = rig.buffer(4096);
    let ranges = [(0, 1), (8, 1), (16, 1)].map(|(lba, n)| CopyRange::new(lba, n));
    rig.fill(list, ranges.as_slice().as_bytes());
    let copy = SubmissionEntry::new(NvmOpcode::Copy.0, 1);
    let command = copy.with_dword(10, 100).with_dword(12, 2);
    let command = SubmissionEntry { prp1: list.into(), ..command };
    rig.driver.submit(1, command).unwrap();
    // The first range is read and written, the second only read.
    for _ in 0..3 {
        rig.poll(2);
        gate.allow(1);
    }
    rig.poll(2);
    gate.fail(Some(DiskError::Io(5)));
    gate.allow(1);
    rig.poll(2);
    let ended = rig.reap(1);
    assert_eq!(ended[0].status(), Status::WRITE_FAULT.more());
    assert_eq!(ended[0].result.get(), 1);
}

/// Returns a fused Compare and Write of `len` bytes at `lba`.
fn pair(rig: &mut Rig, lba: u64, expected: u64, new: u64, len: usize) -> [SubmissionEntry; 2] {
    let (mut first, mut second) =
        (with(rig, COMPARE, lba, expected, len), with(rig, WRITE, lba, new, len));
    (first.flags, second.flags) = (1, 2);
    [first, second]
}

/// Submits all of `commands` with one doorbell. Returns their statuses, in their order.
fn at_once(rig: &mut Rig, commands: &[SubmissionEntry]) -> Vec<Status> {
    let ids = rig.driver.submit_all(1, commands).unwrap();
    rig.poll(8);
    let ended = rig.reap(1);
    let status = |id: &u16| {
        let entry = ended.iter().find(|entry| entry.id.get() == *id).expect("every command ends");
        Status(entry.status().0 & !(1 << 13))
    };
    assert_eq!(ended.len(), commands.len());
    ids.iter().map(status).collect()
}

const FAILED: Status = Status::FUSED_FAILED.dnr();
const MISSING: Status = Status::FUSED_MISSING.dnr();
const SUCCESS: Status = Status::SUCCESS;

#[test]
fn a_fused_pair_writes_if_it_finds_what_it_expects() {
    let mut rig = Setup::new().alone().rig();
    let (old, new, page) = (rig.buffer(4096), rig.buffer(4096), rig.buffer(4096));
    write(&mut rig, 5, old, &[1; 4096]);
    rig.fill(new, &[2; 4096]);
    let exchange = pair(&mut rig, 5, old, new, 4096);
    assert_eq!(at_once(&mut rig, &exchange), [SUCCESS, SUCCESS]);
    assert_eq!(read(&mut rig, 5, page, 4096), [2; 4096]);
    rig.fill(new, &[3; 4096]);
    assert_eq!(at_once(&mut rig, &exchange), [Status::COMPARE_FAILURE.dnr(), FAILED]);
    assert_eq!(read(&mut rig, 5, page, 4096), [2; 4096]);
}

#[test]
fn halves_of_pairs_that_do_not_fit_are_refused() {
    let mut rig = Setup::new().alone().rig();
    let (old, new) = (rig.buffer(4096), rig.buffer(4096));
    let [first, second] = pair(&mut rig, 0, old, new, 4096);
    let plain = with(&mut rig, READ, 0, old, 512);
    let invalid = Status::INVALID_FIELD.dnr();
    let out = Status::LBA_OUT_OF_RANGE.dnr();
    let nowhere = SubmissionEntry { prp1: (super::rig::MEMORY as u64).into(), ..second };
    let cases: [(&str, &[SubmissionEntry], &[Status]); 10] = [
        ("the first alone", &[first], &[MISSING]),
        ("the second alone", &[second], &[MISSING]),
        ("one between", &[first, plain, second], &[MISSING, SUCCESS, MISSING]),
        ("twice the first", &[first, first, second], &[MISSING, SUCCESS, SUCCESS]),
        ("the wrong way round", &[second, first], &[MISSING, MISSING]),
        ("another range", &[first, second.with_dword(10, 8)], &[invalid, FAILED]),
        ("another length", &[first, second.with_dword(12, 3)], &[invalid, FAILED]),
        ("two writes", &[SubmissionEntry { opcode: 1, ..first }, second], &[invalid, FAILED]),
        (
            "past the end",
            &[first.with_dword(10, 32768), second.with_dword(10, 32768)],
            &[out, FAILED],
        ),
        ("no data", &[first, nowhere], &[FAILED, Status::DATA_TRANSFER_ERROR]),
    ];
    // Both buffers and the disk are zeros: a good pair that follows a bad command, as in "twice the
    // first", leaves the disk as the pairs of later cases expect it.
    rig.fill(new, &[0; 4096]);
    for (name, commands, ends) in cases {
        assert_eq!(at_once(&mut rig, commands), ends, "{name}");
    }
}

#[test]
fn pairs_are_never_torn_apart() {
    // Pairs work anywhere in the ring, and in any burst.
    let mut rig = Setup::new().alone().rig();
    let (zeros, page) = (rig.buffer(4096), rig.buffer(4096));
    let [first, second] = pair(&mut rig, 0, zeros, zeros, 512);
    let plain = with(&mut rig, READ, 0, page, 512);
    for before in 0..64 {
        let mut commands = vec![plain; before % 7];
        commands.extend([first, second, plain, first, second]);
        assert!(at_once(&mut rig, &commands).iter().all(|status| status.is_success()));
    }
    // A completion queue with one free slot never has room for two commands.
    rig.driver.create_pair(2, 2, None).unwrap();
    let id = rig.driver.submit(2, first).unwrap();
    rig.poll(4);
    let ended = rig.reap(2);
    assert_eq!((ended[0].id.get(), ended[0].status().code()), (id, MISSING.code()));
}

fn held() -> (Rig, Arc<Gate>) {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    (Setup::new().alone().disk(disk).rig(), gate)
}

#[test]
fn a_pair_has_the_disk_for_itself() {
    let (mut rig, gate) = held();
    let (zeros, ones) = (rig.buffer(4096), rig.buffer(4096));
    rig.fill(ones, &[1; 4096]);
    let [first, second] = pair(&mut rig, 0, zeros, ones, 512);
    let write = with(&mut rig, WRITE, 0, ones, 512);
    rig.driver.submit_all(1, &[write, first, second, first, second, write]).unwrap();
    // The compare and the write of a pair are each alone on the disk; between the pairs the two
    // other writes have their turn, so that the second pair does not find what it expects.
    let mut seen = Vec::new();
    for _ in 0..8 {
        rig.poll(2);
        seen.push(gate.waiting());
        gate.allow(1);
    }
    rig.poll(3);
    let failures = rig.reap(1).iter().filter(|entry| !entry.status().is_success()).count();
    assert_eq!((seen, failures), (vec![1, 1, 2, 1, 1, 0, 0, 0], 2));
}

#[test]
fn a_shared_namespace_takes_no_pairs() {
    let mut setup = Setup::new().alone();
    setup.shared = true;
    let mut rig = setup.rig();
    assert_eq!(rig.driver.identify_controller().unwrap().fused.get(), 0);
    let page = rig.buffer(4096);
    let exchange = pair(&mut rig, 0, page, page, 512);
    assert_eq!(at_once(&mut rig, &exchange), [Status::INVALID_FIELD.dnr(), FAILED]);
    let compare = with(&mut rig, COMPARE, 0, page, 512);
    assert_eq!(rig.status(1, compare), SUCCESS);
}

#[test]
fn a_reset_in_a_pair_lets_go_of_the_disk() {
    let (mut rig, gate) = held();
    let page = rig.buffer(4096);
    let exchange = pair(&mut rig, 0, page, page, 512);
    rig.driver.submit_all(1, &exchange).unwrap();
    rig.poll(2);
    assert_eq!(gate.waiting(), 1);
    gate.open();
    rig.driver.enable(32).unwrap();
    rig.driver.create_pair(1, 64, Some(1)).unwrap();
    let command = with(&mut rig, READ, 0, page, 512);
    assert_eq!(rig.status(1, command), SUCCESS);
}
