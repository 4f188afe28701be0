//! Deep queues, full queues, doorbells, interrupts.

use std::collections::HashSet;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{head_doorbell, offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_pci::Function;

use super::rig::{HeldDisk, Rig, Setup, ram};
use crate::driver::{DriverError, RegisterAccess, RingDoorbells, admin, io};

fn doorbell(index: usize) -> u64 {
    offset::DOORBELLS + 4 * index as u64
}

/// Returns a read of one block to `page`.
fn read(page: u64, lba: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, lba, 1) }
}

#[test]
fn four_deep_queues_are_in_flight_at_once() {
    let (disk, gate) = HeldDisk::make(ram(16 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).admin();
    let page = rig.buffer(4096);
    for queue in 1..=4 {
        rig.driver.create_pair(queue, 1024, Some(queue)).unwrap();
        for lba in 0..1023 {
            rig.driver.submit(queue, read(page, lba)).unwrap();
        }
    }
    while rig.controller().poll().is_busy() {}
    assert_eq!(gate.waiting(), 4 * 1023);
    assert_eq!(rig.controller().requests_in_flight(), 4 * 1023);
    gate.open();
    rig.poll(2);
    for queue in 1..=4 {
        let ended = rig.reap(queue);
        let ids: HashSet<u16> = ended.iter().map(|entry| entry.id.get()).collect();
        assert_eq!((ended.len(), ids.len()), (1023, 1023));
        assert!(ended.iter().all(|entry| entry.status().is_success()));
        assert!(ended.iter().all(|entry| entry.queue.get() == queue));
    }
}

#[test]
fn bytes_in_flight_are_bounded_and_everything_ends() {
    const TRANSFER: usize = 1 << 20;
    let (disk, gate) = HeldDisk::make(ram(4 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).admin();
    let buffer = rig.buffer(TRANSFER);
    let read = rig.with_data(io(NvmOpcode::Read, 1, 0, 2048), buffer, TRANSFER);
    for queue in 1..=4 {
        rig.driver.create_pair(queue, 256, Some(queue)).unwrap();
        for _ in 0..255 {
            rig.driver.submit(queue, read).unwrap();
        }
    }
    while rig.controller().poll().is_busy() {}
    assert_eq!(gate.waiting(), 96, "96 MiB of reads of 1 MiB");
    assert!(rig.driver.identify_controller().is_ok(), "the admin queue does not wait for data");
    gate.open();
    rig.poll(64);
    for queue in 1..=4 {
        assert_eq!(rig.reap(queue).len(), 255);
    }
}

#[test]
fn sixty_four_pairs_work_at_once_and_fairly() {
    let mut rig = Setup::new().alone().admin();
    assert_eq!(rig.driver.set_queue_count(128).unwrap(), 64);
    let page = rig.buffer(4096);
    for queue in 1..=64 {
        rig.driver.create_pair(queue, 128, Some(queue)).unwrap();
    }
    rig.sink.take();
    for queue in 1..=64 {
        for lba in 0..127 {
            rig.driver.submit(queue, read(page, lba)).unwrap();
        }
    }
    // A turn is 64 commands: four bursts.
    rig.poll(16);
    for queue in 1..=64 {
        assert_eq!(rig.reap(queue).len(), 16, "a burst each, no queue waits for longer");
    }
    let mut vectors = rig.sink.take();
    vectors.sort_unstable();
    assert_eq!(vectors, (1..=64).collect::<Vec<u16>>(), "one interrupt per queue and poll");
    rig.poll(7 * 16);
    for queue in 1..=64 {
        assert_eq!(rig.reap(queue).len(), 111);
    }
}

#[test]
fn in_flight_requests_have_a_limit() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut setup = Setup::new().disk(disk);
    setup.limits.in_flight = 10;
    let mut rig = setup.rig();
    let page = rig.buffer(4096);
    for lba in 0..63 {
        rig.driver.submit(1, read(page, lba)).unwrap();
    }
    rig.poll(10);
    assert_eq!(gate.waiting(), 10);
    gate.open();
    rig.poll(20);
    assert_eq!(rig.reap(1).len(), 63);
}

/// Makes a submission queue of 64 entries on a completion queue of `entries`.
fn small_completion_queue(rig: &mut Rig, entries: u32) -> (u64, u64) {
    let (cq, sq) = (rig.buffer(4096), rig.buffer(4096));
    let mut command = admin(AdminOpcode::CreateCompletionQueue)
        .with_dword(10, (entries - 1) << 16 | 2)
        .with_dword(11, 2 << 16 | 3);
    command.prp1 = cq.into();
    rig.driver.admin(command).unwrap();
    let mut command = admin(AdminOpcode::CreateSubmissionQueue)
        .with_dword(10, 63 << 16 | 2)
        .with_dword(11, 2 << 16 | 1);
    command.prp1 = sq.into();
    rig.driver.admin(command).unwrap();
    (cq, sq)
}

#[test]
fn a_full_completion_queue_makes_commands_wait() {
    let mut rig = Setup::new().rig();
    let (cq, sq) = small_completion_queue(&mut rig, 4);
    let page = rig.buffer(4096);
    for slot in 0..63u64 {
        let mut command = read(page, slot);
        command.id = (slot as u16).into();
        rig.fill(sq + slot * 64, zerocopy::IntoBytes::as_bytes(&command));
    }
    rig.write32(doorbell(tail_doorbell(2)), 63);
    let mut seen = Vec::new();
    let (mut head, mut phase) = (0u64, 1u16);
    while seen.len() < 63 {
        rig.poll(3);
        let mut taken = 0;
        loop {
            let entry = rig.bytes(cq + head * 16, 16);
            let tag = u16::from_le_bytes([entry[14], entry[15]]);
            if tag & 1 != phase {
                break;
            }
            assert_eq!(tag >> 1, 0, "success");
            seen.push(u16::from_le_bytes([entry[12], entry[13]]));
            taken += 1;
            head = (head + 1) % 4;
            phase ^= u16::from(head == 0);
        }
        assert!((1..=3).contains(&taken), "a queue of 4 holds 3: {taken}");
        rig.write32(doorbell(head_doorbell(2)), head as u32);
    }
    assert_eq!(seen, (0..63).collect::<Vec<u16>>());
}

#[test]
fn wrong_doorbell_values_raise_an_event_and_change_nothing() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    rig.poll(2);
    for (index, value) in [
        (tail_doorbell(1), 64),
        (tail_doorbell(1), 0x1_0001),
        (tail_doorbell(1), u32::MAX),
        (head_doorbell(1), 1),
        (head_doorbell(1), 64),
        (head_doorbell(0), 33),
    ] {
        rig.write32(doorbell(index), value);
        rig.poll(2);
        let event = rig.reap(0);
        assert_eq!(event.len(), 1, "{index} {value:#x}");
        assert_eq!(Event::from_dword(event[0].result.get()), Event::INVALID_DOORBELL_VALUE);
        assert_eq!(rig.controller().requests_in_flight(), 0);
        // The log unmasks the event; another request waits for the next.
        let log = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
        rig.driver.admin_read(log, 64).unwrap();
        rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
        rig.poll(2);
    }
    // A valid value right after an invalid one does not hide it.
    rig.write32(doorbell(tail_doorbell(1)), 77);
    rig.write32(doorbell(tail_doorbell(1)), 0);
    rig.poll(2);
    assert_eq!(Event::from_dword(rig.reap(0)[0].result.get()), Event::INVALID_DOORBELL_VALUE);
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
    rig.driver.admin_read(log, 64).unwrap();
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    rig.poll(2);
    // A doorbell register without a queue.
    rig.write32(doorbell(tail_doorbell(9)), 1);
    rig.poll(1);
    let event = rig.reap(0);
    assert_eq!(Event::from_dword(event[0].result.get()), Event::INVALID_DOORBELL_REGISTER);
    // The queues work as before.
    assert_eq!(rig.status(1, read(page, 0)), Status::SUCCESS);
}

#[test]
fn a_tail_cannot_pass_the_head() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut setup = Setup::new().disk(disk);
    setup.limits.in_flight = 1;
    let mut rig = setup.rig();
    let page = rig.buffer(4096);
    for lba in 0..63 {
        rig.driver.submit(1, read(page, lba)).unwrap();
    }
    rig.poll(4);
    // One of 63 commands was fetched: there is room for one more, not for three.
    rig.write32(doorbell(tail_doorbell(1)), 2);
    rig.poll(4);
    gate.open();
    rig.poll(200);
    assert_eq!(rig.reap(1).len(), 63);
}

#[test]
fn interrupts_can_be_off() {
    let mut rig = Setup::new().admin();
    rig.driver.create_pair(1, 16, None).unwrap();
    rig.sink.take();
    let page = rig.buffer(4096);
    assert_eq!(rig.status(1, read(page, 0)), Status::SUCCESS);
    assert!(rig.sink.take().is_empty());
    rig.driver.identify_controller().unwrap();
    assert_eq!(rig.sink.take(), [0], "the admin queue always interrupts");
}

#[test]
fn deleting_a_queue_waits_for_its_commands() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().disk(disk).rig();
    let page = rig.buffer(4096);
    for lba in 0..5 {
        rig.driver.submit(1, read(page, lba)).unwrap();
    }
    rig.poll(2);
    rig.driver.submit(0, admin(AdminOpcode::DeleteSubmissionQueue).with_dword(10, 1)).unwrap();
    // These commands are no longer fetched.
    rig.poll(2);
    rig.driver.submit(1, read(page, 9)).unwrap();
    rig.poll(5);
    assert!(rig.reap(0).is_empty());
    gate.allow(4);
    rig.poll(5);
    assert!(rig.reap(0).is_empty());
    gate.open();
    rig.poll(5);
    assert_eq!(rig.reap(1).len(), 5);
    assert!(rig.reap(0)[0].status().is_success());
}

#[test]
fn queues_can_be_made_again_and_again() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    for round in 0..200 {
        assert_eq!(rig.status(1, read(page, round)), Status::SUCCESS);
        rig.driver.delete_pair(1).unwrap();
        rig.driver.create_pair(1, 2 + round as u16, Some(1)).unwrap();
        assert_eq!(rig.status(1, read(page, round)), Status::SUCCESS);
    }
}

#[test]
fn doorbells_may_lie_in_memory_that_nobody_traps() {
    let mut rig = Setup::new().rig();
    let cells = rig.controller().home.engine.doorbells.clone();
    let page = rig.buffer(4096);
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    rig.poll(2);
    let memory = rig.driver.arena.memory().clone();
    let pair = rig.driver.pair(1).unwrap();
    pair.push(&memory, read(page, 0)).unwrap();
    cells.store(tail_doorbell(1), 1);
    rig.poll(1);
    let pair = rig.driver.pair(1).unwrap();
    assert!(pair.pop(&memory).unwrap().unwrap().status().is_success());
    cells.store(head_doorbell(1), 1);
    rig.poll(1);
    assert!(rig.reap(0).is_empty());
    for (index, good) in [(tail_doorbell(1), 1), (head_doorbell(1), 1)] {
        cells.store(index, 0x8000_0000);
        rig.poll(3);
        let event = rig.reap(0);
        assert_eq!(event.len(), 1, "once, however often it is polled");
        assert_eq!(Event::from_dword(event[0].result.get()), Event::INVALID_DOORBELL_VALUE);
        cells.store(index, good);
        let log = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
        rig.driver.admin_read(log, 64).unwrap();
        rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
        rig.poll(2);
    }
    assert_eq!(rig.status(1, read(page, 0)), Status::SUCCESS);
}

#[test]
fn a_pinned_pair_goes_round_its_queues() {
    let mut rig = Setup::new().admin();
    rig.driver.create_pair(3, 4, None).unwrap();
    let mut pair = rig.driver.pin_pair(3).unwrap();
    assert!(matches!(rig.driver.pin_pair(3), Err(DriverError::Queue(3))));
    assert_eq!((pair.id(), pair.room()), (3, 3));
    let buffer = rig.driver.arena.allocate(4096).unwrap();
    for round in 0..10_u16 {
        for id in 0..3 {
            let lba = if id == 2 { u64::MAX } else { 0 };
            let mut command = io(NvmOpcode::Read, 1, lba, 8);
            command.id.set(round * 3 + id);
            command.prp1.set(buffer);
            pair.push(&command).unwrap();
        }
        let ring = |(doorbell, value), rig: &mut Rig| {
            rig.driver.registers.ring(doorbell, value).unwrap();
        };
        ring(pair.tail(), &mut rig);
        let mut ended = Vec::new();
        while ended.len() < 3 {
            rig.driver.registers.idle().unwrap();
            ended.extend(pair.pop().unwrap());
        }
        ring(pair.head(), &mut rig);
        assert_eq!(pair.pop().unwrap(), None);
        ended.sort_by_key(|ended| ended.id);
        let seen: Vec<_> = ended.iter().map(|e| (e.id, e.status.is_success())).collect();
        assert_eq!(seen, [(round * 3, true), (round * 3 + 1, true), (round * 3 + 2, false)]);
    }
    rig.driver.delete_pinned(pair).unwrap();
    rig.driver.create_pair(3, 4, None).unwrap();
}

#[test]
fn a_queue_starts_no_more_than_the_arbitration_burst() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut rig = Setup::new().alone().disk(disk).rig();
    for (log2, burst) in [(0, 1), (2, 4), (4, 16), (5, 16), (7, 16)] {
        let set = admin(AdminOpcode::SetFeatures).with_dword(10, 1).with_dword(11, log2);
        rig.driver.admin(set).unwrap();
        rig.driver.submit_all(1, &[SubmissionEntry::new(0, 1); 60]).unwrap();
        rig.poll(1);
        assert_eq!(gate.waiting(), burst, "a burst of 2^{log2}");
        gate.open();
        rig.poll(200);
        assert_eq!(rig.reap(1).len(), 60);
        gate.close();
        // A batch ends at the end of the ring, so each round begins with a new pair.
        rig.driver.delete_pair(1).unwrap();
        rig.driver.create_pair(1, 64, Some(1)).unwrap();
    }
}
