//! The example that serves a RAM disk, driven over its socket by a driver: both ends of the library
//! without the rest of Slipway.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

#[path = "../examples/ramdisk.rs"]
mod example;

use std::time::Duration;

use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user_client::TestGuest;

const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 4 << 20;

#[test]
fn a_driver_uses_the_examples_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = example::serve(path.to_str().unwrap(), &reactor).unwrap();

    let guest = TestGuest::new(0, MEMORY).unwrap();
    let registers = guest.connect(&path, PATIENCE).unwrap();
    assert_eq!(registers.client.server_pid(), Some(std::process::id()));
    let mut driver = Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), 16).unwrap();
    assert_eq!(driver.identify_namespace(1).unwrap().size.get(), (64 << 20) / 512);

    driver.create_pair(1, 16, None).unwrap();
    let buffer = driver.arena.allocate(8192).unwrap();
    let pattern: Vec<u8> = (0..8192_u32).map(|at| (at * 7 / 8) as u8).collect();
    driver.arena.memory().write(buffer, &pattern).unwrap();
    driver.transfer(1, io(NvmOpcode::Write, 1, 99, 16), (buffer, 8192)).unwrap();
    driver.arena.memory().write(buffer, &[0; 8192]).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, 1, 99, 16), (buffer, 8192)).unwrap();
    let mut read = vec![0; 8192];
    driver.arena.memory().read(buffer, &mut read).unwrap();
    assert!(read == pattern);
    drop(driver);
    control.close();
    assert!(control.wait_closed(PATIENCE));
    assert!(!path.exists());
}
