//! A hostile client harms itself only: it unmaps its memory under running commands, truncates it,
//! rings doorbells at random, makes a PRP list that points to itself, disconnects in the middle. It
//! gets the errors that the specifications define, and they are counted. Meanwhile a neighbour on
//! the same reactor verifies its data.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use slipway_nvme::driver::{Arena, Driver, DriverError, RegisterAccess, admin, io, succeeded};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_vfio_user_client::{Client, ClientError};

use crate::common::*;

const TRANSFER: usize = 128 << 10;
const DEPTH: usize = 128;
const CSTS: u64 = 0x1c;
/// CSTS.CFS, Controller Fatal Status (section 3.1.6).
const FATAL: u32 = 1 << 1;
/// The tail doorbell of submission queue 1 and the head doorbell of completion queue 1.
const DOORBELLS: [u64; 2] = [0x1008, 0x100c];

/// A hostile client, which may truncate its memory.
struct Evil {
    driver: Driver<Registers>,
    file: OwnedFd,
    read: SubmissionEntry,
}

impl Evil {
    fn connect(socket: &Path) -> Self {
        let file = rustix::fs::memfd_create("evil", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY).unwrap();
        let mut client = Client::connect(socket, PATIENCE).unwrap();
        client.map(BASE, MEMORY, file.as_fd(), 0, true).unwrap();
        let mut map = DmaMap::new();
        let region = Region::mapped(file.as_fd(), 0, MEMORY, Permissions::READ_WRITE).unwrap();
        map.add(BASE, region).unwrap();
        let arena = Arena::new(map.memory(), BASE, MEMORY);
        let registers = Registers::new(client, PATIENCE);
        let mut driver = Driver::new(registers, arena, 32).unwrap();
        driver.create_pair(1, 256, None).unwrap();
        let buffer = driver.arena.allocate(TRANSFER).unwrap();
        let mut read = io(NvmOpcode::Read, 1, 0, (TRANSFER / 512) as u32);
        (read.prp1, read.prp2) = driver.point(buffer, TRANSFER).unwrap();
        Self { driver, file, read }
    }

    /// Starts 128 commands of 128 KiB.
    fn begin(&mut self) {
        self.driver.submit_all(1, &[self.read; DEPTH]).unwrap();
    }

    /// Rings the doorbell for commands that it did not submit, and waits for Controller Fatal
    /// Status.
    fn wait_for_the_end(&mut self) {
        let registers = &mut self.driver.registers;
        let mut tail = 0;
        while registers.read32(CSTS).unwrap() & FATAL == 0 {
            tail = (tail + 1) % 256;
            registers.write32(DOORBELLS[0], tail).unwrap();
            registers.idle().unwrap();
        }
    }

    fn event(&mut self) -> Event {
        let mut ended = Vec::new();
        while self.driver.reap(0, &mut ended).unwrap() == 0 {
            self.driver.registers.idle().unwrap();
        }
        Event::from_dword(ended[0].result.get())
    }

    /// Returns the Number of Error Information Log Entries of the SMART log (section 5.14.1.2).
    fn errors(&mut self) -> u64 {
        let log = admin(AdminOpcode::GetLogPage).with_dword(10, 2 | 127 << 16);
        let page = self.driver.admin_read(log, 512).unwrap();
        u64::from_le_bytes(page[176..184].try_into().unwrap())
    }
}

/// A plane with a neighbour, which verifies its data as long as the plane exists.
struct House {
    rig: Rig,
    evil: PathBuf,
    rounds: AtomicU64,
    stop: AtomicBool,
}

impl House {
    fn clients(&self) -> u64 {
        self.rig.plane.get("evil").unwrap().counters.unwrap().clients
    }

    fn errors(&self) -> u64 {
        self.rig.plane.get("evil").unwrap().counters.unwrap().errors
    }

    /// Waits until the neighbour has made progress.
    fn neighbour_goes_on(&self) {
        let (seen, from) = (self.rounds.load(Ordering::Relaxed), Instant::now());
        while self.rounds.load(Ordering::Relaxed) < seen + 3 {
            assert!(from.elapsed() < PATIENCE, "the neighbour stands still");
            std::thread::yield_now();
        }
    }

    fn neighbour(&self, mut driver: Driver<Registers>) {
        driver.create_pair(1, 8, None).unwrap();
        while !self.stop.load(Ordering::Relaxed) {
            round_trip(&mut driver, 1, self.rounds.fetch_add(1, Ordering::Relaxed) % 1000, 8);
        }
        assert_eq!(driver.registers.read32(CSTS).unwrap(), 1, "ready, and nothing else");
    }
}

fn beside_a_neighbour(misdeed: impl FnOnce(&House)) {
    let mut rig = Rig::new();
    rig.plane.create(&rig.request("good", vec![ram(1 << 20)])).unwrap();
    let good = rig.drive();
    let evil = rig.dir.path().join("evil");
    rig.socket = evil.clone();
    rig.plane.create(&rig.request("evil", vec![ram(1 << 20)])).unwrap();
    let house = House { rig, evil, rounds: AtomicU64::new(0), stop: AtomicBool::new(false) };
    std::thread::scope(|threads| {
        let neighbour = threads.spawn(|| house.neighbour(good));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            house.neighbour_goes_on();
            misdeed(&house);
            house.neighbour_goes_on();
        }));
        house.stop.store(true, Ordering::Relaxed);
        neighbour.join().unwrap();
        done.unwrap();
    });
    let counters = house.rig.plane.get("good").unwrap().counters.unwrap();
    assert_eq!((counters.errors, counters.clients), (0, 1), "the neighbour's counters");
    // The next client finds the controller in its initial state.
    let mut next = Evil::connect(&house.evil);
    succeeded(next.driver.run(1, next.read).unwrap()).unwrap();
}

#[test]
fn memory_unmapped_under_running_commands_is_fatal_to_that_controller() {
    beside_a_neighbour(|house| {
        let mut evil = Evil::connect(&house.evil);
        evil.begin();
        evil.driver.registers.client.unmap(BASE, MEMORY).unwrap();
        assert!(house.rig.plane.get("evil").unwrap().dma_regions.is_empty());
        evil.wait_for_the_end();
        let again = evil.driver.registers.client.unmap(BASE, MEMORY);
        assert!(matches!(again, Err(ClientError::Refused(_))), "{again:?}");
        assert!(house.errors() > 0, "a refusal is counted");
    });
}

#[test]
fn truncated_memory_is_fatal_to_that_controller() {
    beside_a_neighbour(|house| {
        let mut evil = Evil::connect(&house.evil);
        assert!(house.rig.plane.get("evil").unwrap().dma_regions.iter().all(|one| one.guarded));
        evil.begin();
        rustix::fs::ftruncate(&evil.file, 0).unwrap();
        evil.wait_for_the_end();
    });
}

#[test]
fn wild_doorbells_are_an_event_and_ring_nothing() {
    beside_a_neighbour(|house| {
        let mut evil = Evil::connect(&house.evil);
        for (doorbell, value) in [(0, 256), (0, u32::MAX), (0, 0x1_0001), (1, 256), (1, 9)] {
            let request = admin(AdminOpcode::AsynchronousEventRequest);
            evil.driver.submit(0, request).unwrap();
            evil.driver.registers.write32(DOORBELLS[doorbell], value).unwrap();
            assert_eq!(evil.event(), Event::INVALID_DOORBELL_VALUE, "{doorbell} {value:#x}");
            // The next event is reported only after the log is read.
            let log = admin(AdminOpcode::GetLogPage).with_dword(10, 1 | 15 << 16);
            evil.driver.admin_read(log, 64).unwrap();
        }
        succeeded(evil.driver.run(1, evil.read).unwrap()).unwrap();
    });
}

#[test]
fn a_list_of_prps_that_points_at_itself_ends() {
    beside_a_neighbour(|house| {
        let mut evil = Evil::connect(&house.evil);
        let list = evil.driver.arena.allocate(4096).unwrap();
        let itself: Vec<u8> = (0..512).flat_map(|_| list.to_le_bytes()).collect();
        evil.driver.arena.memory().write(list, &itself).unwrap();
        let mut read = io(NvmOpcode::Read, 1, 0, 2048);
        (read.prp1, read.prp2) = (list.into(), list.into());
        // Data are read into the list itself. Whatever the outcome, the command ends, and only its
        // owner's bytes change.
        evil.driver.run(1, read).unwrap();
        let before = evil.errors();
        evil.driver.arena.memory().write(list, &itself).unwrap();
        let mut aslant = io(NvmOpcode::Write, 1, 0, 2048);
        (aslant.prp1, aslant.prp2) = (list.into(), (list + 2).into());
        let refused = succeeded(evil.driver.run(1, aslant).unwrap());
        let Err(DriverError::Command(status)) = refused else { panic!("{refused:?}") };
        assert_eq!(status.code(), Status::PRP_OFFSET_INVALID.code());
        assert!(status.do_not_retry() && status.has_more());
        assert_eq!(evil.errors(), before + 1, "it is in the error log");
        assert_eq!(evil.driver.registers.read32(CSTS).unwrap() & FATAL, 0);
    });
}

#[test]
fn a_client_that_goes_in_the_middle_makes_room_for_the_next() {
    beside_a_neighbour(|house| {
        for gone in 1..=5 {
            let mut evil = Evil::connect(&house.evil);
            evil.begin();
            drop(evil);
            assert_eq!(house.clients(), gone);
        }
    });
}
