//! A VMM gives a device up if one reply takes too long (QEMU: 5 s), whatever its guest has the
//! device do. Every request is answered within `Config::reply_deadline`, both while 128 commands of
//! 128 KiB run and while 128 commands wait for a disk that does not respond.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use slipway_block::{DelayDisk, Disk, RamDisk};
use slipway_nvme::driver::{Arena, Driver, RegisterAccess, io};
use slipway_nvme::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::Interrupt;
use slipway_reactor::{Reactor, Settings};
use slipway_telemetry::ManualClock;
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts};
use slipway_vfio_user_client::{Client, ClientError, Registers, TestGuest};

/// Long enough for a machine with other work.
const PATIENCE: Duration = Duration::from_secs(120);
const MEMORY: u64 = 32 << 20;
/// Memory that no command uses; in a guest, that of another device.
const BESIDE: (u64, u64) = (1 << 30, 1 << 20);
const DEPTH: usize = 128;
const TRANSFER: usize = 128 << 10;
const CSTS: u64 = 0x1c;
const CC: u64 = 0x14;

fn serve(config: Config, disk: impl Disk + 'static, reactor: &Reactor) -> Control {
    let mut parts = EndpointParts::new(&config);
    let wakes = disk.wake_descriptor().map(|wake| wake.try_clone_to_owned().unwrap());
    let sink = parts.interrupts();
    let controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: (0..=1).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        doorbells: parts.doorbells(doorbell_count(1)).unwrap(),
        namespaces: vec![Namespace::new(1, Box::new(disk), [1; 16])],
        clock: parts.clock(),
        identity: Identity::new("REPLIES"),
        limits: Limits { queue_pairs: 1, ..Limits::default() },
        journal: None,
    });
    let (function, wakes) = (Box::new(controller.unwrap()), wakes.into_iter().collect());
    let endpoint = Endpoint::new(config, parts, function, wakes, &reactor.handle()).unwrap();
    let control = endpoint.control();
    reactor.handle().add(Box::new(endpoint)).unwrap();
    control
}

/// A guest: its memory, its driver, and the commands that it repeats.
struct Guest {
    file: OwnedFd,
    driver: Driver<Registers>,
    commands: Vec<SubmissionEntry>,
    /// The longest time until a reply, and the request.
    longest: (Duration, &'static str),
}

impl Guest {
    fn boot(path: &Path) -> Self {
        let guest = TestGuest::new(0, MEMORY).unwrap();
        let mut registers = guest.connect(path, PATIENCE).unwrap();
        registers.client.map(BESIDE.0, BESIDE.1, guest.file.as_fd(), 0, true).unwrap();
        let TestGuest { file, memory, .. } = guest;
        let mut driver = Driver::new(registers, Arena::new(memory, 0, MEMORY), 16).unwrap();
        driver.create_pair(1, 256, None).unwrap();
        let command = |_| {
            let buffer = driver.arena.allocate(TRANSFER).unwrap();
            let mut read = io(NvmOpcode::Read, 1, 0, (TRANSFER / 512) as u32);
            (read.prp1, read.prp2) = driver.point(buffer, TRANSFER).unwrap();
            read
        };
        let commands = (0..DEPTH).map(command).collect();
        Self { file, driver, commands, longest: (Duration::ZERO, "nothing") }
    }

    fn timed<T>(
        &mut self,
        what: &'static str,
        request: impl FnOnce(&mut Client) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let from = Instant::now();
        let answered = request(&mut self.driver.registers.client);
        self.longest = self.longest.max((from.elapsed(), what));
        answered
    }

    /// Sends the requests that a VMM sends while a guest runs. Fails if memory could not be
    /// unmapped.
    fn ask(&mut self) -> Result<(), ClientError> {
        self.timed("a register", |client| client.read_u32(0, CSTS)).unwrap();
        self.timed("interrupts", |client| client.irq(2)).unwrap();
        self.timed("device info", |client| client.device_info().map(drop)).unwrap();
        let unmapped = self.timed("an unmap", |client| client.unmap(BESIDE.0, BESIDE.1));
        if unmapped.is_ok() {
            let file = self.file.try_clone().unwrap();
            let map = |client: &mut Client| client.map(BESIDE.0, BESIDE.1, file.as_fd(), 0, true);
            self.timed("a map", map).unwrap();
        }
        unmapped.map(drop)
    }
}

#[test]
fn every_request_is_answered_while_large_commands_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = serve(Config::at(&path), RamDisk::new(1 << 20, 512).unwrap(), &reactor);
    let mut guest = Guest::boot(&path);
    let mut ended = Vec::new();
    for _ in 0..20 {
        guest.driver.submit_all(1, &guest.commands.clone()).unwrap();
        guest.ask().unwrap();
        while guest.driver.pair(1).unwrap().in_flight() > 0 {
            guest.driver.reap(1, &mut ended).unwrap();
            guest.driver.registers.idle().unwrap();
        }
    }
    assert!(ended.len() == 20 * DEPTH && ended.iter().all(|entry| entry.status().is_success()));
    println!("longest reply beside 128 reads of 128 KiB: {:?}", guest.longest);
    drop(guest);
    control.close();
    assert!(control.wait_closed(PATIENCE));
}

#[test]
fn every_request_is_answered_while_the_disk_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let default = Config::at(&path).reply_deadline;
    assert!(default <= Duration::from_secs(4), "QEMU waits for 5 s: {default:?}");
    let deadline = Duration::from_millis(200);
    let clock = ManualClock::new();
    let hour = Duration::from_secs(3600);
    let disk = RamDisk::new(1 << 20, 512).unwrap();
    let disk = DelayDisk::new(disk, std::sync::Arc::new(clock.clone()), hour).unwrap();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let config = Config { reply_deadline: deadline, ..Config::at(&path) };
    let control = serve(config, disk, &reactor);
    let mut guest = Guest::boot(&path);
    guest.driver.submit_all(1, &guest.commands.clone()).unwrap();
    // Memory cannot be unmapped while commands are in flight; the second unmap does not wait for
    // the whole deadline again.
    for _ in 0..2 {
        assert!(matches!(guest.ask(), Err(ClientError::Refused(_))));
    }
    let reset = guest.timed("a reset", Client::reset);
    assert!(matches!(reset, Err(ClientError::Refused(_))), "{reset:?}");
    assert_eq!(guest.driver.pair(1).unwrap().in_flight(), DEPTH, "nothing has come to an end");
    println!("longest reply beside a disk that stands still: {:?} of {deadline:?}", guest.longest);
    // The deadline counts from the beginning of the step in which the request is read.
    assert!(guest.longest.0 >= deadline / 2, "nothing had to wait: {:?}", guest.longest);
    // The guest's own reset, as its driver does it: the write is answered at once.
    guest.timed("the reset's register", |client| client.write(0, CC, &[0; 4])).unwrap();
    clock.advance(2 * hour);
    let from = Instant::now();
    while guest.driver.registers.read32(CSTS).unwrap() & 1 != 0 {
        assert!(from.elapsed() < PATIENCE, "it does not get ready for the next start");
    }
    guest.ask().unwrap();
    drop(guest);
    control.close();
    assert!(control.wait_closed(PATIENCE));
}
