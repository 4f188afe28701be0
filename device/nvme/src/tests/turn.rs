//! The amount of work of a poll, in commands and bytes.

use std::sync::atomic::Ordering::Relaxed;

use slipway_block::{Disk, DiskError, Operation, OverlayDisk, RamDisk, Request};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::sgl::{DescriptorType, SglDescriptor};
use slipway_nvme_spec::status::Status;
use slipway_pci::{Function, Progress, TurnLength};
use slipway_ram::Span;
use zerocopy::IntoBytes;

use super::rig::{HeldDisk, Random, Rig, Setup, namespace, ram};
use crate::driver::{admin, io};
use crate::namespace::Namespaces;
use crate::turn::Quota;

/// Returns a rig whose controller shares its thread.
fn shared() -> Rig {
    let mut rig = Setup::new().alone().rig();
    rig.controller().set_turn(TurnLength::Short);
    rig
}

fn quota(turn: TurnLength) -> (usize, usize) {
    let quota = Quota::from(turn);
    (quota.commands as usize, quota.bytes as usize)
}

fn transfer(rig: &mut Rig, opcode: NvmOpcode, lba: u64, len: usize) -> (SubmissionEntry, u64) {
    let buffer = rig.buffer(len);
    let command = io(opcode, 1, lba, (len / 512) as u32);
    (rig.with_data(command, buffer, len), buffer)
}

/// Polls until nothing is left to do. Returns how many commands of queue 1 ended in each poll.
fn polls(rig: &mut Rig) -> Vec<usize> {
    let mut ended = Vec::new();
    while rig.controller().poll().is_busy() {
        ended.push(rig.reap(1).len());
    }
    ended
}

#[test]
fn a_turn_ends_after_so_many_commands() {
    for turn in [TurnLength::Short, TurnLength::Long] {
        let mut rig = Setup::new().rig();
        rig.controller().set_turn(turn);
        let (read, _) = transfer(&mut rig, NvmOpcode::Read, 0, 512);
        for _ in 0..60 {
            rig.driver.submit(1, read).unwrap();
        }
        // One queue's share is never more than its own burst.
        let most = quota(turn).0.min(16);
        let ended = polls(&mut rig);
        assert!(ended.iter().all(|count| *count <= most), "{turn:?}: {ended:?}");
        assert_eq!(ended.iter().filter(|count| **count > 0).count(), 60_usize.div_ceil(most));
        assert_eq!(ended.iter().sum::<usize>(), 60);
    }
}

#[test]
fn queues_take_turns() {
    let mut rig = shared();
    for queue in 2..=5 {
        rig.driver.create_pair(queue, 64, None).unwrap();
    }
    let (read, _) = transfer(&mut rig, NvmOpcode::Read, 0, 512);
    for queue in 1..=5 {
        for _ in 0..40 {
            rig.driver.submit(queue, read).unwrap();
        }
    }
    let mut ended = [0; 5];
    // The admin queue has its turn as well, with nothing in it.
    for poll in 1..=12 {
        rig.poll(1);
        let mut sum = 0;
        for (queue, count) in (1..).zip(&mut ended) {
            *count += rig.reap(queue).len();
            sum += *count;
        }
        assert!(sum <= poll * quota(TurnLength::Short).0, "poll {poll}: {ended:?}");
    }
    let (least, most) = (ended.iter().min().unwrap(), ended.iter().max().unwrap());
    assert!(*least > 0 && most - least <= quota(TurnLength::Short).0, "{ended:?}");
}

#[test]
fn a_turn_ends_after_so_many_bytes_within_a_command() {
    let len = 128 << 10;
    for turn in [TurnLength::Short, TurnLength::Long] {
        let mut rig = Setup::new().alone().rig();
        rig.controller().set_turn(turn);
        let data = Random(7).bytes(len);
        let (write, from) = transfer(&mut rig, NvmOpcode::Write, 3, len);
        let (read, to) = transfer(&mut rig, NvmOpcode::Read, 3, len);
        rig.fill(from, &data);
        for command in [write, read] {
            rig.driver.submit(1, command).unwrap();
            let ended = polls(&mut rig);
            // One poll more finds nothing left, and is idle.
            assert_eq!(ended.len(), len.div_ceil(quota(turn).1), "{turn:?}: {ended:?}");
            assert_eq!((ended.last(), ended.iter().sum()), (Some(&1), 1));
        }
        assert!(rig.bytes(to, len) == data);
    }
}

#[test]
fn bytes_are_shared_by_all_commands_of_a_turn_and_none_overtakes() {
    let mut rig = shared();
    let (large, from) = transfer(&mut rig, NvmOpcode::Write, 0, 40 << 10);
    let (small, to) = transfer(&mut rig, NvmOpcode::Read, 78, 1024);
    rig.fill(from, &[9; 40 << 10]);
    let order = [large, small, large, small].map(|one| rig.driver.submit(1, one).unwrap());
    let mut ended = Vec::new();
    let mut polls = 0;
    while rig.controller().poll().is_busy() {
        polls += 1;
        ended.extend(rig.reap(1).iter().map(|entry| entry.id.get()));
    }
    assert_eq!(ended, order);
    // The last command is fetched when all before it has gone: it is one too many for their turn.
    assert_eq!(polls, (81_usize << 10).div_ceil(quota(TurnLength::Short).1) + 1);
    assert_eq!(rig.bytes(to, 1024), [9; 1024], "the read came after the write");
}

#[test]
fn the_admin_queue_waits_for_no_data() {
    let mut rig = shared();
    let (write, _) = transfer(&mut rig, NvmOpcode::Write, 0, 1 << 20);
    rig.driver.submit(1, write).unwrap();
    rig.poll(2);
    rig.driver.identify_controller().unwrap();
    assert_eq!(rig.reap(1).len(), 0, "it ended long before");
    assert_eq!(polls(&mut rig).iter().sum::<usize>(), 1);
}

#[test]
fn a_namespace_waits_for_no_long_command_of_another() {
    let mut setup = Setup::new().alone();
    setup.disks = vec![ram(8 << 20, 512), ram(1 << 20, 512)];
    let mut rig = setup.rig();
    rig.controller().set_turn(TurnLength::Short);
    let verify = rig.driver.submit(1, io(NvmOpcode::Verify, 1, 0, 8192)).unwrap();
    let buffer = rig.buffer(8192);
    // Too large to go at once.
    let read = rig.with_data(io(NvmOpcode::Read, 2, 0, 16), buffer, 8192);
    let read = rig.driver.submit(1, read).unwrap();
    let mut ended = Vec::new();
    while rig.controller().poll().is_busy() {
        ended.extend(rig.reap(1).iter().map(|entry| entry.id.get()));
    }
    assert_eq!(ended, [read, verify]);
}

#[test]
fn turns_begin_after_the_namespace_with_which_the_last_one_ended() {
    let three = [1, 2, 3].map(|nsid| namespace(nsid, ram(1 << 16, 512), 1));
    let mut all = Namespaces::new(three.into());
    let order = |all: &mut Namespaces| all.driven().map(|one| one.nsid).collect::<Vec<_>>();
    assert_eq!(order(&mut all), [1, 2, 3]);
    all.begin_after(0);
    assert_eq!(order(&mut all), [2, 3, 1]);
    all.begin_after(1);
    assert_eq!(order(&mut all), [1, 2, 3]);
    let two = all.detach(2).unwrap();
    all.leave(two, Box::new(|_| {}), 0);
    all.begin_after(1);
    assert_eq!(order(&mut all), [2, 1, 3], "one that leaves has its turn, too");
    all.begin_after(0);
    assert_eq!(order(&mut all), [1, 3, 2]);
    all.begin_after(1);
    assert!(all.complete_changes().is_empty());
    assert_eq!(order(&mut all), [1, 3]);
}

#[test]
fn what_is_zeroed_goes_in_pieces_too() {
    let mut rig = Setup::new().disk(ram(1 << 30, 4096)).rig();
    rig.controller().set_turn(TurnLength::Short);
    let zero = io(NvmOpcode::WriteZeroes, 1, 5, 1 << 16);
    rig.driver.submit(1, zero).unwrap();
    // 256 MiB that begin within 2 MiB: a piece for each 2 MiB that it touches.
    assert_eq!(polls(&mut rig).len(), 129);
}

#[test]
fn one_piece_that_fails_is_the_end_of_its_command() {
    let (disk, gate) = HeldDisk::copying(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    rig.controller().set_turn(TurnLength::Short);
    let (read, _) = transfer(&mut rig, NvmOpcode::Read, 0, 64 << 10);
    rig.driver.submit(1, read).unwrap();
    gate.allow(2);
    rig.poll(4);
    assert_eq!((rig.reap(1).len(), gate.waiting()), (0, 1), "two of four pieces are through");
    gate.fail(Some(DiskError::Io(5)));
    gate.open();
    rig.poll(2);
    let ended = rig.reap(1);
    assert_eq!(ended.len(), 1);
    assert_eq!(ended[0].status().code(), Status::UNRECOVERED_READ_ERROR.code());
    gate.fail(None);
    rig.driver.submit(1, read).unwrap();
    let ended = polls(&mut rig);
    assert_eq!(ended.iter().sum::<usize>(), 1, "the next one is whole");
}

#[test]
fn a_command_is_aborted_between_two_pieces_or_within_one() {
    for within in [false, true] {
        let (disk, gate) = HeldDisk::copying(ram(4 << 20, 512));
        let mut rig = Setup::new().disk(disk).rig();
        rig.controller().set_turn(TurnLength::Short);
        let (write, _) = transfer(&mut rig, NvmOpcode::Write, 0, 1 << 20);
        let id = rig.driver.submit(1, write).unwrap();
        if !within {
            gate.open();
        }
        rig.poll(2);
        assert_eq!(gate.waiting.load(Relaxed), usize::from(within));
        let abort = admin(AdminOpcode::Abort).with_dword(10, u32::from(id) << 16 | 1);
        assert_eq!(rig.driver.admin(abort).unwrap(), 0, "it was aborted");
        let ended = rig.reap(1);
        assert_eq!((ended.len(), ended[0].status()), (1, Status::ABORT_REQUESTED));
        gate.open();
        assert_eq!(polls(&mut rig).iter().sum::<usize>(), 0);
        assert!(rig.controller().quiesce(), "nothing is left of it");
    }
}

#[test]
fn quiescing_waits_for_no_turn() {
    let mut rig = shared();
    let (write, _) = transfer(&mut rig, NvmOpcode::Write, 0, 1 << 20);
    rig.driver.submit(1, write).unwrap();
    rig.poll(1);
    assert!(rig.controller().quiesce());
    assert_eq!(rig.reap(1).len(), 1);
}

#[test]
fn a_poll_says_whether_more_waits_than_its_turn_had_room_for() {
    let mut rig = shared();
    let (read, _) = transfer(&mut rig, NvmOpcode::Read, 0, 4096);
    let most = quota(TurnLength::Short).0;
    for _ in 0..2 * most + 1 {
        rig.driver.submit(1, read).unwrap();
    }
    let found: Vec<_> = (0..4).map(|_| rig.controller().poll()).collect();
    let expected = [Progress::Behind, Progress::Behind, Progress::Busy, Progress::Idle(None)];
    assert_eq!(found, expected);
    rig.reap(1);
    let (large, _) = transfer(&mut rig, NvmOpcode::Write, 0, 4 * quota(TurnLength::Short).1);
    rig.driver.submit(1, large).unwrap();
    for left in (1..4).rev() {
        assert_eq!(rig.controller().poll(), Progress::Behind, "{left} quarters of it are left");
    }
    assert_eq!(rig.controller().poll(), Progress::Busy);
}

/// Returns an overlay of 4 MiB over zeros, with every second block written, from the first on.
fn striped() -> Box<dyn Disk> {
    let mut overlay = OverlayDisk::new(RamDisk::new(4 << 20, 512).unwrap(), None).unwrap();
    let mut ended = Vec::new();
    for lba in (0..8192).step_by(2) {
        let span = Span::heap(512);
        span.write(0, &[1; 512]).unwrap();
        let (operation, spans) = (Operation::Write, vec![span]);
        let write = Request { tag: 0, operation, lba, blocks: 1, spans, durable: false };
        overlay.submit(&mut vec![write], &mut ended);
    }
    assert!(ended.iter().all(|one| one.result.is_ok()));
    Box::new(overlay)
}

#[test]
fn a_turn_ends_after_so_many_runs_of_an_overlay() {
    let len = 1 << 20;
    // Each of the 2,048 runs costs some 2.3 KiB or 2.8 KiB, and a call does 32 KiB at least.
    for (turn, least) in [(TurnLength::Short, 100), (TurnLength::Long, 16)] {
        let mut rig = Setup::new().alone().disk(striped()).rig();
        rig.controller().set_turn(turn);
        let (read, to) = transfer(&mut rig, NvmOpcode::Read, 0, len);
        rig.driver.submit(1, read).unwrap();
        let ended = polls(&mut rig);
        assert!(ended.len() >= least, "{turn:?}: {} polls", ended.len());
        assert_eq!((ended.last(), ended.iter().sum()), (Some(&1), 1));
        let expected = [[1_u8; 512], [0; 512]].concat().repeat(len / 1024);
        assert!(rig.bytes(to, len) == expected);
    }
}

#[test]
fn commands_of_many_pieces_count_as_several() {
    let mut rig = Setup::new().alone().rig();
    rig.controller().set_turn(TurnLength::Long);
    for queue in 2..=4 {
        rig.driver.create_pair(queue, 64, None).unwrap();
    }
    let (buffer, list) = (rig.buffer(4096), rig.buffer(16 << 10));
    let dword = |at: u64| SglDescriptor::new(DescriptorType::DataBlock, buffer + 4 * at, 4);
    let all: Vec<SglDescriptor> = (0..1024).map(dword).collect();
    rig.fill(list, all.as_bytes());
    let segment = SglDescriptor::new(DescriptorType::LastSegment, list, 16 << 10);
    let read = io(NvmOpcode::Read, 1, 0, 8).with_sgl(segment);
    for queue in 1..=4 {
        for _ in 0..16 {
            rig.driver.submit(queue, read).unwrap();
        }
    }
    // Four queues' bursts are 64 commands, which a turn has room for if their data is contiguous.
    let mut ended = Vec::new();
    while rig.controller().poll().is_busy() {
        ended.push((1..=4).map(|queue| rig.reap(queue).len()).sum::<usize>());
    }
    assert!(ended.iter().all(|count| *count <= 16), "{ended:?}");
    assert_eq!(ended.iter().sum::<usize>(), 64);
}

#[test]
fn the_pieces_of_commands_in_flight_are_bounded() {
    for opcode in [NvmOpcode::Read, NvmOpcode::Compare] {
        pieces_are_bounded(opcode);
    }
}

fn pieces_are_bounded(opcode: NvmOpcode) {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).rig();
    rig.driver.create_pair(2, 64, None).unwrap();
    let (buffer, list) = (rig.buffer(32 << 10), rig.buffer(64 << 10));
    // No two are neighbours.
    let dword = |at: u64| SglDescriptor::new(DescriptorType::DataBlock, buffer + 8 * at, 4);
    let all: Vec<SglDescriptor> = (0..4096).map(dword).collect();
    rig.fill(list, all.as_bytes());
    let segment = SglDescriptor::new(DescriptorType::LastSegment, list, 64 << 10);
    let command = io(opcode, 1, 0, 32).with_sgl(segment);
    for queue in 1..=2 {
        for _ in 0..60 {
            rig.driver.submit(queue, command).unwrap();
        }
    }
    rig.poll(20);
    assert_eq!(gate.waiting(), 96, "{opcode:?}");
    gate.open();
    let mut ended = 0;
    while rig.controller().poll().is_busy() {
        ended += rig.reap(1).len() + rig.reap(2).len();
    }
    assert_eq!(ended, 120, "{opcode:?}");
}
