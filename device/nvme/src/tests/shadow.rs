//! Shadow doorbells: no doorbell is lost, and register writes are saved.

use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::identify::IdentifyController;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{ControllerStatus, head_doorbell, offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_pci::{Access, Function, Progress};
use slipway_ram::{DmaMap, Memory, Region};

use super::rig::{HeldDisk, MEMORY, Random, Setup, Shared, ram};
use crate::Controller;
use crate::driver::{
    AccessError, Arena, Driver, DriverError, RegisterAccess, RingDoorbells, Shadowed, admin,
    doorbell_buffer_config, io, passes,
};

/// A host that sleeps when it may: it polls as long as there is work, calls `rest` some polls
/// later, and is then woken only by register writes.
struct Sleeper {
    function: Controller,
    asleep: bool,
    /// The number of polls without work before the host rests.
    patience: u32,
    idle: u32,
    /// The number of times that the host fell asleep.
    naps: u32,
}

impl Sleeper {
    fn new(function: Controller, patience: u32) -> Self {
        Self { function, asleep: false, patience, idle: 0, naps: 0 }
    }

    fn step(&mut self) {
        if self.asleep {
            return;
        }
        let found = match self.function.poll() {
            Progress::Watching(_) if self.idle >= self.patience => self.function.rest(),
            found => found,
        };
        self.idle = if found.is_busy() { 0 } else { self.idle + 1 };
        self.asleep = matches!(found, Progress::Idle(_));
        self.naps += u32::from(self.asleep);
    }

    fn sleep(&mut self) {
        for _ in 0..1000 {
            self.step();
        }
        assert!(self.asleep);
    }
}

impl RegisterAccess for Sleeper {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        assert_eq!(self.function.read(0, offset, into), Access::Done);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.asleep = false;
        self.idle = 0;
        assert_eq!(self.function.write(0, offset, from), Access::Done);
        Ok(())
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        if self.asleep {
            return Err(AccessError("it sleeps, and the driver waits".into()));
        }
        self.step();
        Ok(())
    }
}

type Guest = Driver<Shadowed<Sleeper>>;

fn guest(setup: Setup, patience: u32) -> Guest {
    let memory = setup.memory.clone();
    let sleeper = Sleeper::new(setup.controller(), patience);
    let registers = Shadowed::new(sleeper, memory.clone());
    Driver::new(registers, Arena::new(memory, 0, MEMORY as u64), 32).unwrap()
}

/// Makes a guest with shadow doorbells and a queue pair of `entries` that is made after them.
fn shadowed(patience: u32, entries: u16, admin_too: bool) -> Guest {
    let mut guest = guest(Setup::new(), patience);
    guest.shadow_doorbells(admin_too).unwrap();
    guest.create_pair(1, entries, Some(1)).unwrap();
    guest
}

fn read(page: u64, lba: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, lba, 1) }
}

/// Takes the completions of the commands in flight in queue 1, and fails if the controller sleeps
/// meanwhile.
fn drain(guest: &mut Guest, mut in_flight: usize) {
    let mut entries = Vec::new();
    while in_flight > 0 {
        let ended = guest.reap(1, &mut entries).unwrap();
        in_flight -= ended;
        if ended == 0 {
            guest.registers.idle().unwrap();
        }
    }
    assert!(entries.iter().all(|entry| entry.status().is_success()));
}

#[test]
fn no_command_is_slept_over() {
    for admin_too in [false, true] {
        for (entries, patience) in [(2, 0), (3, 1), (4, 0), (16, 3), (64, 0), (64, 9), (1000, 2)] {
            let mut guest = shadowed(patience, entries, admin_too);
            let page = guest.arena.allocate(4096).unwrap();
            let mut random = Random(u64::from(entries) << 8 | u64::from(patience));
            for round in 0..300 {
                let count = 1 + random.below(u64::from(entries) - 1) as usize;
                for lba in 0..count {
                    guest.submit(1, read(page, lba as u64)).unwrap();
                    if random.below(4) == 0 {
                        guest.registers.inner.step();
                    }
                }
                drain(&mut guest, count);
                if random.below(3) == 0 {
                    guest.registers.inner.sleep();
                }
                if round % 50 == 0 {
                    guest.identify_controller().unwrap();
                }
            }
            assert!(guest.registers.inner.naps > 50);
        }
    }
}

#[test]
fn a_loaded_queue_is_not_rung_and_a_sleeping_one_once() {
    let mut guest = shadowed(u32::MAX, 64, false);
    let page = guest.arena.allocate(4096).unwrap();
    let before = guest.registers.written;
    for round in 0..10_000 {
        guest.submit(1, read(page, round % 100)).unwrap();
        guest.submit(1, read(page, round % 100)).unwrap();
        drain(&mut guest, 2);
    }
    assert_eq!(guest.registers.written, before, "20,000 commands, no register write");
    guest.registers.inner.patience = 0;
    for round in 1..100 {
        guest.registers.inner.sleep();
        for lba in 0..20 {
            guest.submit(1, read(page, lba)).unwrap();
        }
        drain(&mut guest, 20);
        assert_eq!(guest.registers.written, before + round, "one write wakes it");
    }
}

#[test]
fn room_in_a_full_completion_queue_is_heard_of() {
    let mut guest = shadowed(0, 64, false);
    // Completion queue 2 has 4 entries, its submission queue 64.
    let cq = guest.arena.allocate(4096).unwrap();
    let sq = guest.arena.allocate(4096).unwrap();
    for (opcode, size, flags, base) in [
        (AdminOpcode::CreateCompletionQueue, 3, 1, cq),
        (AdminOpcode::CreateSubmissionQueue, 63, 2 << 16 | 1, sq),
    ] {
        let command = admin(opcode).with_dword(10, size << 16 | 2).with_dword(11, flags);
        guest.admin(SubmissionEntry { prp1: base.into(), ..command }).unwrap();
    }
    let page = guest.arena.allocate(4096).unwrap();
    for slot in 0..40u64 {
        let command = read(page, slot);
        let bytes = zerocopy::IntoBytes::as_bytes(&command);
        guest.arena.memory().write(sq + slot * 64, bytes).unwrap();
    }
    guest.registers.ring(tail_doorbell(2), 40).unwrap();
    let submission = |guest: &mut Guest| {
        let queue = guest.registers.inner.function.home.engine.queues.submission(2).unwrap();
        (queue.head, queue.waiting())
    };
    guest.registers.inner.sleep();
    assert_eq!(submission(&mut guest), (3, 37), "a queue of 4 holds 3");
    let mut head = 0;
    while submission(&mut guest).1 > 0 {
        head = (head + 1) % 4;
        guest.registers.ring(head_doorbell(2), head).unwrap();
        guest.registers.inner.sleep();
    }
    assert_eq!(submission(&mut guest), (40, 0));
    // No command waits for room any more, so no register write is wanted.
    let written = guest.registers.written;
    guest.registers.ring(head_doorbell(2), (head + 1) % 4).unwrap();
    assert_eq!(guest.registers.written, written);
}

#[test]
fn a_late_register_write_does_not_turn_the_queue_back() {
    let mut guest = shadowed(0, 64, false);
    let page = guest.arena.allocate(4096).unwrap();
    for lba in 0..5 {
        guest.submit(1, read(page, lba)).unwrap();
    }
    drain(&mut guest, 5);
    for late in [3, 5, 0, 4] {
        guest.registers.inner.ring(tail_doorbell(1), late).unwrap();
        guest.registers.inner.ring(head_doorbell(1), late).unwrap();
    }
    assert!(guest.registers.inner.function.home.events.waiting.is_empty());
    guest.submit(1, read(page, 9)).unwrap();
    drain(&mut guest, 1);
}

#[test]
fn wrong_values_raise_an_event_and_change_nothing() {
    let mut guest = guest(Setup::new(), u32::MAX);
    guest.create_pair(1, 64, Some(1)).unwrap();
    let (doorbells, _) = guest.shadow_doorbells(true).unwrap();
    let memory = guest.arena.memory().clone();
    let page = guest.arena.allocate(4096).unwrap();
    guest.submit(1, read(page, 0)).unwrap();
    drain(&mut guest, 1);
    for (index, value, good) in [
        (tail_doorbell(1), 64, 1),
        (tail_doorbell(1), u32::MAX, 1),
        (head_doorbell(1), 7, 1),
        (head_doorbell(1), 0x1_0001, 1),
    ] {
        memory.store_u32(doorbells + 4 * index as u64, value).unwrap();
        for _ in 0..3 {
            guest.registers.inner.step();
        }
        let waiting = &mut guest.registers.inner.function.home.events.waiting;
        assert_eq!(waiting.drain(..).collect::<Vec<_>>(), [Event::INVALID_DOORBELL_VALUE]);
        memory.store_u32(doorbells + 4 * index as u64, good).unwrap();
        guest.registers.inner.step();
    }
    guest.submit(1, read(page, 0)).unwrap();
    drain(&mut guest, 1);
}

#[test]
fn pages_are_checked() {
    let mut guest = guest(Setup::new(), 0);
    let page = guest.arena.allocate(4096).unwrap();
    let other = guest.arena.allocate(4096).unwrap();
    let refused = |guest: &mut Guest, doorbells, events| match guest
        .admin(doorbell_buffer_config(doorbells, events))
    {
        Err(DriverError::Command(status)) => {
            assert_eq!(status.code(), Status::INVALID_FIELD.code())
        }
        other => panic!("{doorbells:#x} {events:#x}: {other:?}"),
    };
    for (doorbells, events) in [
        (page + 8, other),
        (page, other + 2048),
        (page, page),
        (MEMORY as u64, other),
        (page, MEMORY as u64),
        (u64::MAX - 4095, other),
    ] {
        refused(&mut guest, doorbells, events);
        assert_eq!(guest.registers.inner.function.home.engine.shadow, None);
    }
    assert_eq!(guest.identify_controller().unwrap().admin_commands.get(), 1 << 8);
    guest.admin(doorbell_buffer_config(page, other)).unwrap();
    // Other pages replace the first ones, and a refused command changes nothing.
    guest.admin(doorbell_buffer_config(other, page)).unwrap();
    refused(&mut guest, page, page);
    let pages = guest.registers.inner.function.home.engine.shadow.unwrap();
    assert_eq!((pages.doorbells, pages.events), (other, page));
    // A controller reset forgets the pages.
    guest.enable(32).unwrap();
    assert_eq!(guest.registers.inner.function.home.engine.shadow, None);
}

#[test]
fn doorbells_that_can_be_mapped_need_no_shadow() {
    let cells: Box<[std::sync::atomic::AtomicU32]> =
        (0..crate::doorbell_count(64)).map(|_| 0.into()).collect();
    let setup = Setup::new();
    let memory = setup.memory.clone();
    let controller = setup.with_doorbells(Doorbells::shared(Arc::new(cells)));
    let registers = Shadowed::new(Sleeper::new(controller, 0), memory.clone());
    let mut guest = Driver::new(registers, Arena::new(memory, 0, MEMORY as u64), 32).unwrap();
    let identity = guest.identify_controller().unwrap();
    assert_eq!(identity.admin_commands.get() & IdentifyController::DOORBELL_BUFFER, 0);
    let refused = guest.shadow_doorbells(true);
    let Err(DriverError::Command(status)) = refused else { panic!("{refused:?}") };
    assert_eq!(status.code(), Status::INVALID_OPCODE.code());
}

#[test]
fn pages_that_are_taken_away_are_fatal_for_their_controller() {
    let mut map = DmaMap::new();
    map.add(0, Region::heap(MEMORY)).unwrap();
    map.add(1 << 32, Region::heap(8192)).unwrap();
    let setup = Setup::on(map.memory(), ram(1 << 20, 512));
    let mut guest = guest(setup, u32::MAX);
    guest.create_pair(1, 64, Some(1)).unwrap();
    guest.admin(doorbell_buffer_config(1 << 32, (1 << 32) + 4096)).unwrap();
    guest.registers.idle().unwrap();
    map.remove(1 << 32, 8192).unwrap();
    guest.registers.idle().unwrap();
    let status = ControllerStatus(guest.registers.read32(offset::CSTS).unwrap());
    assert!(status.fatal());
    guest.enable(32).unwrap();
    guest.identify_controller().unwrap();
}

#[test]
fn a_successor_finds_what_was_rung_in_between() {
    for asleep in [false, true] {
        let disk = Shared::new(ram(1 << 20, 512));
        let setup = Setup::on(Memory::heap(MEMORY), Box::new(disk.clone()));
        let memory = setup.memory.clone();
        let mut guest = guest(setup, 0);
        guest.create_pair(1, 16, Some(1)).unwrap();
        guest.shadow_doorbells(false).unwrap();
        let page = guest.arena.allocate(4096).unwrap();
        for lba in 0..40 {
            guest.submit(1, read(page, lba)).unwrap();
            drain(&mut guest, 1);
        }
        if asleep {
            guest.registers.inner.sleep();
        }
        let before = &mut guest.registers.inner.function;
        assert!(before.quiesce());
        let state = before.save();
        for lba in 0..7 {
            guest.submit(1, read(page, lba)).unwrap();
        }
        let mut successor = Setup::on(memory, Box::new(disk)).controller();
        successor.restore(&state).unwrap();
        assert!(successor.quiesce());
        assert!(successor.save() == state);
        guest.registers.inner = Sleeper::new(successor, 0);
        drain(&mut guest, 7);
        guest.identify_controller().unwrap();
        guest.registers.inner.sleep();
        guest.submit(1, read(page, 0)).unwrap();
        drain(&mut guest, 1);
    }
}

#[test]
fn a_wait_for_a_disk_ends_by_the_disk() {
    let (disk, gate) = HeldDisk::make(ram(1 << 20, 512));
    let mut guest = guest(Setup::new().disk(disk), 0);
    guest.create_pair(1, 16, Some(1)).unwrap();
    guest.shadow_doorbells(false).unwrap();
    let page = guest.arena.allocate(4096).unwrap();
    guest.submit(1, read(page, 0)).unwrap();
    guest.registers.inner.sleep();
    gate.open();
    // The disk's descriptor wakes the host, which polls.
    assert_eq!(guest.registers.inner.function.poll(), Progress::Busy);
    assert_eq!(guest.registers.inner.function.poll(), Progress::Watching(None));
    drain(&mut guest, 1);
}

/// Returns whether walking a ring of `size` from `old` to `new` leaves `event` behind.
fn walks_past(event: u32, old: u32, new: u32, size: u32) -> bool {
    let mut at = old;
    while at != new {
        if at == event {
            return true;
        }
        at = (at + 1) % size;
    }
    false
}

#[test]
fn the_drivers_comparison_is_the_rings_for_every_size() {
    for size in 2..=40 {
        for (event, old, new) in
            (0..size * size * size).map(|n| (n % size, n / size % size, n / size / size))
        {
            let (fast, slow) = (passes(event, old, new), walks_past(event, old, new, size));
            assert_eq!(fast, slow, "event {event}, {old} to {new} of {size}");
        }
    }
}
