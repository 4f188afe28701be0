//! States that another controller takes over: after a migration, or many from one snapshot.

use slipway_doorbells::Doorbells;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::identify::Cns;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::tail_doorbell;
use slipway_nvme_spec::status::Status;
use slipway_pci::Function;
use slipway_ram::{Lasting, Memory};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::lanes;
use super::rig::{self, MEMORY, Rig, Setup, Shared, ram};
use super::saved::{mid_life, saved};
use crate::driver::{admin, io};
use crate::{Limits, doorbell_count, journal_len};

/// Returns a setup without disks, on `memory`.
fn diskless(memory: &Memory) -> Setup {
    Setup { disks: Vec::new(), ..Setup::on(memory.clone(), ram(1 << 20, 512)) }
}

/// Makes a driver with an I/O queue pair that listens to events.
fn listening(setup: Setup) -> Rig {
    let mut rig = setup.rig();
    let set = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
        .with_dword(11, 1 << 8);
    rig.driver.admin(set).unwrap();
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    rig.poll(1);
    rig
}

/// Returns the events that have come.
fn events(rig: &mut Rig) -> Vec<Event> {
    rig.poll(2);
    rig.reap(0).iter().map(|entry| Event::from_dword(entry.result.get())).collect()
}

/// Returns the Changed Namespace List.
fn changed(rig: &mut Rig) -> Vec<u32> {
    let command = admin(AdminOpcode::GetLogPage).with_dword(10, 4 | 1023 << 16);
    numbers(&rig.driver.admin_read(command, 4096).unwrap())
}

fn active(rig: &mut Rig) -> Vec<u32> {
    numbers(&rig.driver.identify(Cns::ActiveNamespaces, 0).unwrap())
}

/// Returns the namespace IDs of a list that zeros end.
fn numbers(page: &[u8]) -> Vec<u32> {
    let words = page.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    words.take_while(|nsid| *nsid != 0).collect()
}

/// Writes a block of namespace `nsid`, and reads it back.
fn uses(rig: &mut Rig, nsid: u32) {
    let page = rig.buffer(4096);
    rig.fill(page, &[0x77; 512]);
    let write = rig.with_data(io(NvmOpcode::Write, nsid, 3, 1), page, 512);
    assert_eq!(rig.status(1, write), Status::SUCCESS);
    rig.fill(page, &[0; 512]);
    let read = rig.with_data(io(NvmOpcode::Read, nsid, 3, 1), page, 512);
    assert_eq!(rig.status(1, read), Status::SUCCESS);
    assert_eq!(rig.bytes(page, 512), [0x77; 512]);
}

/// The template of many: its guest has enabled a controller without a disk. Each controller that
/// takes its state over gets a disk of its own afterwards.
#[test]
fn disks_come_after_a_state_without_any() {
    let memory = Memory::heap(MEMORY);
    let mut rig = listening(diskless(&memory));
    assert!(active(&mut rig).is_empty());
    let state = saved(&mut rig);
    let mut fork = Setup { serial: "FORK0001", ..diskless(&memory) }.controller();
    fork.restore(&state).unwrap();
    rig.driver.registers.function = fork;
    assert!(events(&mut rig).is_empty());
    let identity = rig.driver.identify_controller().unwrap();
    assert!(identity.serial.starts_with(b"FORK0001"));
    let disk = rig::namespace(4, ram(1 << 20, 512), lanes::wanted());
    rig.controller().attach(disk).unwrap();
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!(changed(&mut rig), [4]);
    assert_eq!(active(&mut rig), [4]);
    uses(&mut rig, 4);
}

#[test]
fn the_guest_is_told_of_disks_that_are_others_than_in_the_state() {
    let memory = Memory::heap(MEMORY);
    let mut rig = listening(diskless(&memory));
    let state = saved(&mut rig);
    // A disk was there first.
    let disk = Setup::on(memory.clone(), ram(1 << 20, 512));
    let mut other = disk.controller();
    other.restore(&state).unwrap();
    rig.driver.registers.function = other;
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!((changed(&mut rig), active(&mut rig)), (vec![1], vec![1]));
    uses(&mut rig, 1);
    // And then it is gone.
    let with_disk = saved(&mut rig);
    let mut none = diskless(&memory).controller();
    none.restore(&with_disk).unwrap();
    rig.driver.registers.function = none;
    rig.driver.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    assert_eq!(events(&mut rig), [Event::NAMESPACE_CHANGED]);
    assert_eq!((changed(&mut rig), active(&mut rig)), (vec![1], vec![]));
}

#[test]
fn doorbells_in_memory_that_were_rung_and_not_seen_are_in_the_state() {
    let memory = Memory::heap(MEMORY);
    let disk = Shared::new(ram(1 << 20, 512));
    let page = || {
        let cells = 0..doorbell_count(Limits::default().queue_pairs);
        let cells: Box<[AtomicU32]> = cells.map(|_| AtomicU32::new(0)).collect();
        Doorbells::shared(Arc::new(cells))
    };
    let setup = || Setup::on(memory.clone(), Box::new(disk.clone()));
    let (old, new) = (page(), page());
    let mut rig = setup().rig();
    let mut first = setup().with_doorbells(old.clone());
    first.restore(&saved(&mut rig)).unwrap();
    rig.driver.registers.function = first;
    uses(&mut rig, 1);
    // The guest's entry is in the ring, and its doorbell in the page.
    let address = rig.buffer(4096);
    let read = rig.with_data(io(NvmOpcode::Read, 1, 3, 1), address, 512);
    assert!(rig.controller().quiesce());
    rig.driver.pair(1).unwrap().push(&memory, read).unwrap();
    let tail = old.load(tail_doorbell(1)) + 1;
    old.store(tail_doorbell(1), tail);
    assert!(rig.controller().quiesce());
    let state = rig.controller().save();
    let mut second = setup().with_doorbells(new.clone());
    second.restore(&state).unwrap();
    assert_eq!(new.load(tail_doorbell(1)), tail);
    rig.driver.registers.function = second;
    rig.poll(2);
    assert_eq!(rig.reap(1).len(), 1);
    assert_eq!(rig.bytes(address, 512), [0x77; 512]);
}

/// Nothing happens before the first poll, neither at home nor in lanes, which are polled.
#[test]
fn a_state_that_is_taken_over_waits_for_a_poll() {
    let (mut rig, again) = mid_life();
    let state = saved(&mut rig);
    let mut successor = again().controller();
    successor.restore(&state).unwrap();
    while !successor.quiesce() {}
    assert!(rig.reap(5).is_empty());
    // As often as one likes.
    assert!(successor.save() == state);
    let mut third = again().controller();
    third.restore(&successor.save()).unwrap();
    while !third.quiesce() {}
    assert!(third.save() == state);
    rig.driver.registers.function = third;
    rig.poll(2);
    assert_eq!(rig.reap(5).len(), 10);
}

/// As a host does with a function that runs already.
#[test]
fn a_controller_in_use_takes_a_state_over_after_a_reset() {
    let (mut rig, again) = mid_life();
    let state = saved(&mut rig);
    let memory = rig.bytes(0, MEMORY);
    let mut used = again().rig();
    uses(&mut used, 1);
    let controller = used.controller();
    assert!(controller.restore(&state[..10]).is_err());
    while !controller.quiesce() {}
    // The guest's memory comes with its state: the other driver had its queues in it.
    rig.fill(0, &memory);
    controller.restore(&state).unwrap();
    std::mem::swap(&mut used.driver.registers.function, &mut rig.driver.registers.function);
    rig.poll(2);
    assert_eq!(rig.reap(5).len(), 10);
}

/// The journal of a controller that has taken a state over belongs to that state.
#[test]
fn a_controller_that_took_a_state_over_recovers_from_its_journal() {
    let (mut rig, again) = mid_life();
    let state = saved(&mut rig);
    let journal = Lasting::heap(journal_len(&Limits::default()));
    let doorbells = Doorbells::trapped(doorbell_count(Limits::default().queue_pairs));
    let make = || Setup { journal: Some(journal.clone()), ..again() };
    let mut first = make().with_doorbells(doorbells.clone());
    first.restore(&state).unwrap();
    for round in 0..40_u64 {
        // Killed before and after the commands of a round.
        let mut next = make().with_doorbells(doorbells.clone());
        assert!(next.recover().unwrap(), "round {round}");
        rig.driver.registers.function = next;
        if round == 0 {
            rig.poll(2);
            assert_eq!(rig.reap(5).len(), 10);
        }
        let page = rig.buffer(4096);
        let stamp = [round as u8 + 1; 512];
        rig.fill(page, &stamp);
        let write = rig.with_data(io(NvmOpcode::Write, 1, round, 1), page, 512);
        assert_eq!(rig.status(5, write), Status::SUCCESS);
        rig.fill(page, &[0; 512]);
        let read = rig.with_data(io(NvmOpcode::Read, 1, round, 1), page, 512);
        assert_eq!(rig.status(1, read), Status::SUCCESS);
        assert_eq!(rig.bytes(page, 512), stamp);
    }
}
