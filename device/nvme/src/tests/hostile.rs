//! A hostile or broken guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::{head_doorbell, offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_pci::Function;
use slipway_ram::{DmaMap, Memory, Region};
use zerocopy::IntoBytes;

use super::rig::{MEMORY, Random, Setup, ram};
use crate::driver::{DriverError, io};
use crate::fuzz::{self, fuzz};

/// Random entries; their numbers are mostly small and their addresses mostly in memory, so that
/// many get far.
fn garbage(random: &mut Random, admin: bool) -> SubmissionEntry {
    let mut entry = SubmissionEntry::default();
    entry.as_mut_bytes().copy_from_slice(&random.bytes(64));
    entry.opcode = if admin { random.below(0x20) as u8 } else { random.below(10) as u8 };
    entry.flags = if random.below(8) == 0 { entry.flags } else { 0 };
    entry.nsid = (random.below(3) as u32).into();
    if random.below(8) > 0 {
        entry.prp1 = (random.below(MEMORY as u64) & !3).into();
        entry.prp2 = (random.below(MEMORY as u64) & !7).into();
    }
    for dword in 10..16 {
        if random.below(4) > 0 {
            entry = entry.with_dword(dword, random.below(64) as u32);
        }
    }
    entry
}

#[test]
fn garbage_commands_always_end() {
    for admin in [false, true] {
        let mut random = Random(11);
        let mut rig = Setup::new().rig();
        let queue = u16::from(!admin);
        for _ in 0..5000 {
            let entry = garbage(&mut random, admin);
            // Event requests wait, and a queue's deletion or the driver's memory overwritten would
            // be this test's own doing: those go to the fuzzer.
            let destroys = admin && matches!(entry.opcode, 0x00 | 0x04 | 0x0c | 0x02 | 0x06 | 0x0a);
            let own = entry.opcode == 2 || entry.opcode == 0x0a;
            if destroys || own {
                continue;
            }
            rig.driver.run(queue, entry).unwrap();
        }
        assert!(!rig.csts().fatal());
    }
}

#[test]
fn random_inputs_of_the_fuzz_target() {
    let mut random = Random(12);
    for round in 0..400 {
        let len = random.below(2000) as usize;
        let mut input = random.bytes(len);
        if let Some(first) = input.first_mut() {
            *first = round as u8;
        }
        fuzz(&input);
        fuzz::admin(&input);
        fuzz::io(&input);
        fuzz::pointers(&input);
    }
}

#[test]
fn every_doorbell_takes_every_value() {
    let mut rig = Setup::new().rig();
    let mut random = Random(13);
    for _ in 0..20_000 {
        let cell = random.below(1024);
        let value =
            if random.below(2) == 0 { random.below(70) as u32 } else { random.next() as u32 };
        // The queues hold zeros: Flush of namespace 0, or Delete SQ 0; both fail.
        rig.write32(offset::DOORBELLS + 4 * cell, value);
        rig.poll(1);
    }
    rig.driver.enable(16).unwrap();
    rig.driver.identify_controller().unwrap();
}

/// Returns a rig whose memory has a removable piece at the end, and the piece's address.
fn with_removable() -> (super::rig::Rig, DmaMap, u64) {
    let mut map = DmaMap::new();
    let end = MEMORY as u64;
    map.add(0, Region::heap(MEMORY)).unwrap();
    map.add(end, Region::heap(1 << 20)).unwrap();
    (Setup::on(map.memory(), ram(16 << 20, 512)).rig(), map, end)
}

#[test]
fn queue_memory_taken_away_is_fatal_and_a_reset_mends_it() {
    for completion in [false, true] {
        let (mut rig, mut map, end) = with_removable();
        let good = rig.buffer(4096);
        let (cq, sq) = if completion { (end, good) } else { (good, end) };
        let mut make =
            crate::driver::admin(slipway_nvme_spec::opcode::AdminOpcode::CreateCompletionQueue)
                .with_dword(10, 15 << 16 | 2)
                .with_dword(11, 1);
        make.prp1 = cq.into();
        rig.driver.admin(make).unwrap();
        make.opcode = 1;
        make.prp1 = sq.into();
        rig.driver.admin(make.with_dword(11, 2 << 16 | 1)).unwrap();
        map.remove(end, 1 << 20).unwrap();
        rig.write32(offset::DOORBELLS + 4 * tail_doorbell(2) as u64, 3);
        rig.poll(3);
        assert!(rig.csts().fatal());
        assert!(matches!(rig.driver.identify_controller(), Err(DriverError::Fatal)));
        rig.driver.enable(16).unwrap();
        rig.driver.identify_controller().unwrap();
    }
}

#[test]
fn data_memory_taken_away_is_a_transfer_error() {
    let (mut rig, mut map, end) = with_removable();
    let read = SubmissionEntry { prp1: end.into(), ..io(NvmOpcode::Read, 1, 0, 1) };
    assert_eq!(rig.status(1, read), Status::SUCCESS);
    map.remove(end, 1 << 20).unwrap();
    assert_eq!(rig.status(1, read), Status::DATA_TRANSFER_ERROR);
    let write = SubmissionEntry { opcode: NvmOpcode::Write.0, ..read };
    assert_eq!(rig.status(1, write), Status::DATA_TRANSFER_ERROR);
    // Half of the data lies in memory.
    let half = SubmissionEntry { prp1: (end - 4096).into(), prp2: end.into(), ..read };
    assert_eq!(rig.status(1, half.with_dword(12, 15)), Status::DATA_TRANSFER_ERROR);
}

/// Another processor of the guest overwrites commands and lists while they are served.
#[test]
fn memory_may_change_under_the_controller() {
    let memory = Memory::heap(1 << 20);
    let mut controller = Setup::on(memory.clone(), ram(16 << 20, 512)).controller();
    let write32 = |controller: &mut crate::Controller, at: u64, value: u32| {
        controller.write(0, at, &value.to_le_bytes());
    };
    write32(&mut controller, offset::AQA, 0x003f_003f);
    write32(&mut controller, offset::ACQ, 0x1000);
    write32(&mut controller, offset::CC, 0x0046_0001);
    controller.poll();
    // Queue pair 1 at pages 2 and 3.
    let mut create = SubmissionEntry::new(5, 0).with_dword(10, 63 << 16 | 1).with_dword(11, 1);
    create.prp1 = 0x3000.into();
    memory.write(0, create.as_bytes()).unwrap();
    create.opcode = 1;
    create.prp1 = 0x2000.into();
    memory.write(64, create.with_dword(11, 1 << 16 | 1).as_bytes()).unwrap();
    write32(&mut controller, offset::DOORBELLS, 2);
    controller.poll();
    let stop = Arc::new(AtomicBool::new(false));
    let racer = std::thread::spawn({
        let (memory, stop) = (memory.clone(), stop.clone());
        move || {
            let mut random = Random(14);
            while !stop.load(Ordering::Relaxed) {
                let mut entry = garbage(&mut random, false);
                // Data and lists lie past the queues.
                entry.prp1 = (0x4000 + random.below(0xf0000)).into();
                entry.prp2 = (0x4000 + (random.below(0xf0000) & !7)).into();
                let slot = random.below(64) * 64;
                let _ = memory.write(0x2000 + slot, entry.as_bytes());
                let list = (0x4000 + (random.below(0xf0000) & !0xfff)).to_le_bytes();
                let _ = memory.write(0x4000 + (random.below(0xf0000) & !7), &list);
            }
        }
    });
    let mut head = 0;
    for tail in 1..40_000u32 {
        write32(&mut controller, offset::DOORBELLS + 4 * tail_doorbell(1) as u64, tail % 64);
        controller.poll();
        head = (head + 1) % 64;
        write32(&mut controller, offset::DOORBELLS + 4 * head_doorbell(1) as u64, head);
    }
    stop.store(true, Ordering::Relaxed);
    racer.join().unwrap();
    let mut status = [0; 4];
    controller.read(0, offset::CSTS, &mut status);
    assert_eq!(status, [1, 0, 0, 0]);
    assert_eq!(controller.requests_in_flight(), 0);
}
