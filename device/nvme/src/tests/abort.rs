//! Abort (section 5.1): cancels what can still be cancelled, and leaves everything else.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slipway_block::{FileDisk, FileOptions, NullDisk, create_sparse};
use slipway_nvme_spec::command::{CopyRange, SubmissionEntry};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;
use zerocopy::IntoBytes;

use super::rig::{Gate, HeldDisk, Rig, Setup, ram};
use crate::driver::{admin, io};

fn held() -> (Rig, Arc<Gate>) {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    (Setup::new().disk(disk).rig(), gate)
}

fn read(rig: &mut Rig, lba: u64) -> SubmissionEntry {
    let page = rig.buffer(4096);
    rig.with_data(io(NvmOpcode::Read, 1, lba, 8), page, 4096)
}

/// Aborts command `id` of queue 1. Returns whether the Abort reports the command as aborted.
fn abort(rig: &mut Rig, id: u16) -> bool {
    let abort = admin(AdminOpcode::Abort).with_dword(10, u32::from(id) << 16 | 1);
    match rig.driver.admin(abort).unwrap() {
        0 => true,
        1 => false,
        other => panic!("dword 0 is {other:#x}"),
    }
}

#[test]
fn what_waits_at_the_disk_is_given_up() {
    let (mut rig, gate) = held();
    let commands = [0, 8, 16].map(|lba| read(&mut rig, lba));
    let ids = commands.map(|command| rig.driver.submit(1, command).unwrap());
    rig.poll(2);
    assert_eq!(gate.waiting(), 3);
    assert!(abort(&mut rig, ids[1]));
    let ended = rig.reap(1);
    assert_eq!((ended.len(), ended[0].id.get()), (1, ids[1]));
    assert_eq!(ended[0].status(), Status::ABORT_REQUESTED, "an end that the host asked for");
    assert!(!abort(&mut rig, ids[1]), "it has ended");
    assert!(!abort(&mut rig, 0x7777), "there is none");
    gate.open();
    rig.poll(3);
    let ended = rig.reap(1);
    assert!(ended.len() == 2 && ended.iter().all(|entry| entry.status().is_success()));
}

#[test]
fn what_the_disk_keeps_ends_by_itself() {
    let (mut rig, gate) = held();
    gate.keeps.store(true, Relaxed);
    let command = read(&mut rig, 0);
    let id = rig.driver.submit(1, command).unwrap();
    rig.poll(2);
    assert!(!abort(&mut rig, id));
    assert!(rig.reap(1).is_empty());
    gate.open();
    rig.poll(3);
    assert!(rig.reap(1)[0].status().is_success());
}

#[test]
fn commands_of_several_steps_stop_between_them() {
    let shape = slipway_block::Geometry { block_size: 512, blocks: 1 << 20, read_only: false };
    let (disk, gate) = HeldDisk::make(Box::new(NullDisk::new(shape)));
    let mut rig = Setup::new().disk(disk).rig();
    gate.keeps.store(true, Relaxed);
    let list = rig.buffer(4096);
    rig.fill(list, CopyRange::new(0, 60_000).as_bytes());
    let copy = SubmissionEntry::new(NvmOpcode::Copy.0, 1).with_dword(10, 1 << 19);
    let copy = SubmissionEntry { prp1: list.into(), ..copy };
    let compare = io(NvmOpcode::Compare, 1, 0, 8);
    let compare = SubmissionEntry { prp1: list.into(), ..compare };
    for command in [io(NvmOpcode::Verify, 1, 0, 65_536), copy, compare] {
        let id = rig.driver.submit(1, command).unwrap();
        rig.poll(2);
        assert!(abort(&mut rig, id));
        assert!(rig.reap(1).is_empty(), "the step is under way");
        gate.allow(1);
        rig.poll(3);
        let ended = rig.reap(1);
        assert_eq!(ended.len(), 1);
        assert_eq!((ended[0].id.get(), ended[0].status()), (id, Status::ABORT_REQUESTED));
        assert_eq!(gate.waiting(), 0);
    }
}

#[test]
fn a_pair_is_aborted_as_far_as_it_has_not_written() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).rig();
    let page = rig.buffer(4096);
    let half = |opcode, flags| SubmissionEntry { flags, prp1: page.into(), ..io(opcode, 1, 0, 1) };
    let pair = [half(NvmOpcode::Compare, 1), half(NvmOpcode::Write, 2)];
    let ids = rig.driver.submit_all(1, &pair).unwrap();
    rig.poll(2);
    assert!(!abort(&mut rig, ids[1]), "the write waits for the compare");
    assert!(abort(&mut rig, ids[0]));
    let ended: Vec<_> = rig.reap(1).iter().map(|entry| entry.status().code()).collect();
    assert_eq!(ended, [Status::ABORT_REQUESTED.code(), Status::FUSED_FAILED.code()]);
    let ids = rig.driver.submit_all(1, &pair).unwrap();
    rig.poll(2);
    gate.allow(1);
    rig.poll(2);
    gate.keeps.store(true, Relaxed);
    assert!(!abort(&mut rig, ids[1]), "it may have been written");
    gate.open();
    rig.poll(3);
    assert!(rig.reap(1).iter().all(|entry| entry.status().is_success()));
    let command = read(&mut rig, 0);
    assert_eq!(rig.status(1, command), Status::SUCCESS, "the disk is everybody's again");
}

#[test]
fn requests_of_a_file_that_the_kernel_has_no_place_for_are_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    create_sparse(&path, 1 << 20).unwrap();
    let disk = FileDisk::open(&path, &FileOptions::default()).unwrap();
    let mut rig = Setup::new().disk(Box::new(disk)).admin();
    rig.driver.create_pair(1, 1024, Some(1)).unwrap();
    let command = read(&mut rig, 0);
    let ids = rig.driver.submit_all(1, &[command; 600]).unwrap();
    let (mut aborted, mut ended) = (0, Vec::new());
    for id in ids.iter().rev().step_by(3) {
        aborted += usize::from(abort(&mut rig, *id));
        ended.extend(rig.reap(1));
    }
    while ended.len() < 600 {
        rig.poll(1);
        ended.extend(rig.reap(1));
    }
    let status = Status::ABORT_REQUESTED;
    assert_eq!(ended.iter().filter(|entry| entry.status() == status).count(), aborted);
    assert!(ended.iter().all(|one| one.status().is_success() || one.status() == status));
    assert_eq!(
        ended.iter().map(|one| one.id.get()).collect::<std::collections::BTreeSet<_>>().len(),
        600
    );
}
