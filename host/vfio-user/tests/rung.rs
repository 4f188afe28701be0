//! An NVMe driver over rung doorbells: commands write no register by a message.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::time::Duration;

use slipway_block::RamDisk;
use slipway_nvme::driver::{Arena, Driver, Shadowed, io};
use slipway_nvme::{Controller, Identity, Limits, Namespace, Parts, doorbell_count};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::Interrupt;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::{Config, Control, DoorbellMode, Endpoint, EndpointParts, LaneHome};
use slipway_vfio_user_client::TestGuest;

const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 4 << 20;
const QUEUES: u16 = 4;
const COMMANDS: u32 = 100;

/// A controller with a RAM disk, and with one lane beside its home if `spread`.
fn serve(config: Config, spread: bool) -> (Control, Vec<Reactor>) {
    let reactors = [(); 2].map(|()| Reactor::spawn(Settings::default()).unwrap());
    let mut parts = EndpointParts::new(&config);
    let sink = parts.interrupts();
    // The home and the lane each have a disk.
    let disk = || Box::new(RamDisk::new(1 << 20, 512).unwrap());
    let mut namespace = Namespace::new(1, disk(), [1; 16]);
    if spread {
        namespace.lanes.push(disk());
    }
    let controller = Controller::new(Parts {
        memory: parts.memory(),
        interrupts: (0..=QUEUES).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        doorbells: parts.doorbells(doorbell_count(QUEUES)).unwrap(),
        namespaces: vec![namespace],
        clock: parts.clock(),
        identity: Identity::new("RUNG"),
        limits: Limits { queue_pairs: QUEUES, lanes: 1 + u16::from(spread), ..Limits::default() },
        journal: None,
    });
    let home = reactors[0].handle();
    let function = Box::new(controller.unwrap());
    let mut endpoint = Endpoint::new(config, parts, function, Vec::new(), &home).unwrap();
    if spread {
        let lane = LaneHome { reactor: reactors[1].handle(), wakes: Vec::new() };
        endpoint.spread(vec![lane]).unwrap();
    }
    let control = endpoint.control();
    home.add(Box::new(endpoint)).unwrap();
    (control, reactors.into())
}

/// Writes and reads back through queue pairs on the home and, if there is one, on the lane. Returns
/// the number of register writes by messages that the commands took.
fn move_data(spread: bool) -> u64 {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let config = Config { doorbells: DoorbellMode::Rung, ..Config::at(&path) };
    let (control, _reactors) = serve(config, spread);
    let guest = TestGuest::new(0, MEMORY).unwrap();
    let arena = Arena::new(guest.memory.clone(), 0, MEMORY);
    let registers = guest.connect_shared(&path, PATIENCE).unwrap();
    let registers = Shadowed::new(registers, guest.memory.clone());
    let mut driver = Driver::new(registers, arena, 16).unwrap();
    for pair in 1..=2 {
        driver.create_pair(pair, 16, None).unwrap();
    }
    let buffer = driver.arena.allocate(512).unwrap();
    // While it waits, the driver looks at the status register now and then: those are reads.
    let writes = control.stats().region_writes;
    for number in 0..COMMANDS {
        let (pair, block) = ((number % 2 + 1) as u16, u64::from(number));
        let pattern = [number as u8 ^ 0x5a; 512];
        driver.arena.memory().write(buffer, &pattern).unwrap();
        driver.transfer(pair, io(NvmOpcode::Write, 1, block, 1), (buffer, 512)).unwrap();
        driver.arena.memory().write(buffer, &[0; 512]).unwrap();
        driver.transfer(pair, io(NvmOpcode::Read, 1, block, 1), (buffer, 512)).unwrap();
        let mut read = [0; 512];
        driver.arena.memory().read(buffer, &mut read).unwrap();
        assert!(read == pattern, "command {number}");
        if number % 10 == 0 {
            // Long enough for every thread to go to sleep: the eventfd alone wakes them.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let taken = control.stats().region_writes - writes;
    // Unlike a controller whose doorbells are mapped, this one offers shadow doorbells.
    driver.shadow_doorbells(false).unwrap();
    let transfer = driver.transfer(1, io(NvmOpcode::Read, 1, 0, 1), (buffer, 512));
    transfer.unwrap();
    taken
}

#[test]
fn commands_write_no_register_by_message() {
    assert_eq!(move_data(false), 0);
}

#[test]
fn commands_of_a_lane_write_no_register_by_message() {
    assert_eq!(move_data(true), 0);
}
