//! The interrupt pin: a level that follows the entries that wait for the host.

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::{head_doorbell, offset};
use slipway_pci::Function;
use slipway_ram::Memory;

use super::rig::{MEMORY, Random, Rig, Setup, Shared, ram};
use crate::Controller;
use crate::driver::{Arena, Direct, Driver, RingDoorbells, Shadowed};

const COMMAND: u16 = 0x04;
const INTERRUPT_DISABLE: u16 = 1 << 10;

/// Makes a rig with a pair of queues, number 1, with `vector`.
fn rig(vector: Option<u16>) -> Rig {
    let mut rig = Setup::new().admin();
    rig.driver.create_pair(1, 64, vector).unwrap();
    assert!(!rig.sink.pin(), "the driver took what there was");
    rig
}

fn submit(rig: &mut Rig, count: usize) {
    for _ in 0..count {
        rig.driver.submit(1, SubmissionEntry::new(NvmOpcode::Flush.0, 1)).unwrap();
    }
    rig.poll(3);
}

fn head(rig: &mut Rig, value: u32) {
    rig.write32(offset::DOORBELLS + 4 * head_doorbell(1) as u64, value);
}

/// Reads Status, Interrupt Status.
fn status(controller: &mut Controller) -> bool {
    let mut status = [0; 2];
    controller.config_read(0x06, &mut status);
    status[0] >> 3 & 1 == 1
}

#[test]
fn it_is_asserted_until_everything_is_taken() {
    let mut rig = rig(Some(0));
    let mut pin = [0; 1];
    rig.controller().config_read(0x3d, &mut pin);
    assert_eq!(pin, [1], "INTA#");
    submit(&mut rig, 3);
    assert!(rig.sink.pin() && status(rig.controller()));
    head(&mut rig, 2);
    assert!(rig.sink.pin(), "one is left");
    head(&mut rig, 3);
    assert!(!rig.sink.pin(), "at once, without a poll");
    assert!(!status(rig.controller()));
    submit(&mut rig, 1);
    assert!(rig.sink.pin());
}

#[test]
fn the_admin_queue_asserts_it_and_queues_without_interrupts_or_of_other_vectors_do_not() {
    for vector in [None, Some(1)] {
        let mut rig = rig(vector);
        submit(&mut rig, 1);
        assert!(!rig.sink.pin() && !status(rig.controller()), "{vector:?}");
        let identify = crate::driver::admin(slipway_nvme_spec::opcode::AdminOpcode::KeepAlive);
        rig.driver.submit(0, identify).unwrap();
        rig.poll(1);
        assert!(rig.sink.pin());
        assert_eq!(rig.reap(0).len(), 1);
        assert!(!rig.sink.pin());
    }
}

#[test]
fn the_mask_register_holds_it_back() {
    let mut rig = rig(Some(0));
    rig.write32(offset::INTMS, 1);
    submit(&mut rig, 1);
    assert!(!rig.sink.pin() && !status(rig.controller()));
    rig.write32(offset::INTMC, 1);
    assert!(rig.sink.pin());
    rig.write32(offset::INTMS, !1);
    assert!(rig.sink.pin(), "other vectors' bits");
    rig.write32(offset::INTMS, 1);
    assert!(!rig.sink.pin());
}

#[test]
fn interrupt_disable_and_msix_take_it_away() {
    let mut rig = rig(Some(0));
    submit(&mut rig, 1);
    rig.controller().config_write(COMMAND, &INTERRUPT_DISABLE.to_le_bytes());
    assert!(!rig.sink.pin());
    assert!(status(rig.controller()), "pending all the same");
    rig.controller().config_write(COMMAND, &[0; 2]);
    assert!(rig.sink.pin());
    let msix = capability(rig.controller(), 0x11) + 2;
    rig.controller().config_write(msix, &0x8000_u16.to_le_bytes());
    assert!(!rig.sink.pin() && !status(rig.controller()));
    rig.controller().config_write(msix, &[0; 2]);
    assert!(rig.sink.pin());
}

fn capability(controller: &mut Controller, id: u8) -> u16 {
    let mut at = [0x34, 0x34];
    controller.config_read(0x34, &mut at[1..]);
    loop {
        let here = u16::from(at[1]);
        controller.config_read(here, &mut at);
        if at[0] == id {
            return here;
        }
    }
}

#[test]
fn resets_take_it_away() {
    let resets: [fn(&mut Rig); 2] =
        [|rig| rig.write32(offset::CC, 0), |rig| rig.controller().reset()];
    for reset in resets {
        let mut rig = rig(Some(0));
        submit(&mut rig, 1);
        assert!(rig.sink.pin());
        reset(&mut rig);
        assert!(!rig.sink.pin());
        rig.poll(3);
        assert!(!rig.sink.pin());
    }
}

#[test]
fn a_successor_asserts_it() {
    let memory = Memory::heap(MEMORY);
    let disk = Shared::new(ram(1 << 20, 512));
    let setup = || Setup::on(memory.clone(), Box::new(disk.clone()));
    let mut rig = setup().admin();
    rig.driver.create_pair(1, 64, Some(0)).unwrap();
    submit(&mut rig, 1);
    assert!(rig.controller().quiesce());
    let state = rig.controller().save();
    let setup = setup();
    let sink = setup.sink.clone();
    let mut successor = setup.controller();
    successor.restore(&state).unwrap();
    assert!(sink.pin());
    let place = offset::DOORBELLS + 4 * head_doorbell(1) as u64;
    let _ = successor.write(0, place, &1_u32.to_le_bytes());
    assert!(!sink.pin());
}

/// Makes a guest with shadow doorbells, with `vector` for its queue pair.
fn shadowed(vector: u16) -> (Driver<Shadowed<Direct<Controller>>>, Setup) {
    let setup = Setup::new();
    let (memory, sink) = (setup.memory.clone(), setup.sink.clone());
    let registers = Shadowed::new(Direct::new(setup.controller()), memory.clone());
    let arena = Arena::new(memory, 0, MEMORY as u64);
    let mut guest = Driver::new(registers, arena, 32).unwrap();
    guest.shadow_doorbells(false).unwrap();
    guest.create_pair(1, 64, Some(vector)).unwrap();
    (guest, Setup { sink, ..Setup::new() })
}

#[test]
fn a_host_with_shadow_doorbells_is_asked_to_say_that_it_took_entries() {
    for vector in [0, 1] {
        let (mut guest, Setup { sink, .. }) = shadowed(vector);
        let mut random = Random(u64::from(vector));
        let mut taken = 0;
        let before = guest.registers.written;
        for _ in 0..2000 {
            let mut left = 1 + random.below(40) as u32;
            for _ in 0..left {
                guest.submit(1, SubmissionEntry::new(NvmOpcode::Flush.0, 1)).unwrap();
            }
            for _ in 0..4 {
                guest.registers.inner.function.poll();
            }
            assert_eq!(sink.pin(), vector == 0);
            // A handler takes some entries and rings; the controller may look in between, or not.
            while left > 0 {
                let some = 1 + random.below(left.into()) as u32;
                (taken, left) = ((taken + some) % 64, left - some);
                guest.registers.ring(head_doorbell(1), taken).unwrap();
                if random.below(3) == 0 {
                    guest.registers.inner.function.poll();
                }
                assert_eq!(sink.pin(), vector == 0 && left > 0, "as soon as it is said");
            }
            let mut entries = Vec::new();
            guest.reap(1, &mut entries).unwrap();
        }
        let written = guest.registers.written - before;
        assert_eq!(written > 2000, vector == 0, "{written} register writes");
    }
}
