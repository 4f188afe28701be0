//! Initialisation and the first I/O, as a driver does them.

use slipway_nvme_spec::opcode::NvmOpcode;

use super::rig::Setup;
use crate::driver::io;

#[test]
fn a_driver_initialises_and_does_io() {
    let mut rig = Setup::new().rig();
    let controller = rig.driver.identify_controller().unwrap();
    assert_eq!(&controller.model[..23], b"Slipway NVMe controller");
    let namespace = rig.driver.identify_namespace(1).unwrap();
    assert_eq!((namespace.block_size(), namespace.size.get()), (512, 32768));
    let buffer = rig.driver.arena.allocate(1 << 20).unwrap();
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at % 251) as u8).collect();
    rig.driver.arena.memory().write(buffer, &data).unwrap();
    let write = io(NvmOpcode::Write, 1, 7, 2048);
    rig.driver.transfer(1, write, (buffer, 1 << 20)).unwrap();
    let back = rig.driver.arena.allocate(1 << 20).unwrap();
    let read = io(NvmOpcode::Read, 1, 7, 2048);
    rig.driver.transfer(1, read, (back, 1 << 20)).unwrap();
    let mut got = vec![0; 1 << 20];
    rig.driver.arena.memory().read(back, &mut got).unwrap();
    assert!(got == data);
    rig.driver.shutdown().unwrap();
    rig.driver.disable().unwrap();
}
