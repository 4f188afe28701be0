//! A real NVMe function behind a socket, driven as a guest drives it. Its namespaces are left
//! alone.
//!
//! Runs as root, on a host with an IOMMU and the driver vfio-pci, with the PCI address of a
//! function that nothing uses in `SLIPWAY_NVME_FUNCTION`. A VF is to be online.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Arena, Driver as NvmeDriver, RegisterAccess};
use slipway_reactor::{Reactor, Settings};
use slipway_vfio::{Device, Driver, HardwareFunction, Host, PciAddress};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts};
use slipway_vfio_user_client::TestGuest;
use slipway_vfio_user_spec::region;

const VARIABLE: &str = "SLIPWAY_NVME_FUNCTION";
const PATIENCE: Duration = Duration::from_secs(60);
/// The address of the test's memory in the controller's address space.
const BASE: u64 = 1 << 32;
const MEMORY: u64 = 8 << 20;
/// Command, and its bits for memory and bus mastering.
const COMMAND: u64 = 4;
const ENABLED: [u8; 2] = [0b110, 0];
/// CC, controller configuration, whose lowest bit is EN.
const CONFIGURATION: u64 = 0x14;

#[test]
fn a_real_controller_serves_one_client_after_the_other() {
    let Ok(address) = std::env::var(VARIABLE) else {
        return println!("SKIPPED: a_real_controller_…: needs {VARIABLE}");
    };
    let address: PciAddress = address.parse().unwrap();
    let host = Host::default();
    let prior = host.sysfs().driver_state(address).unwrap();
    host.sysfs().check(address).unwrap();
    let binding = host.sysfs().bind(address, prior.clone()).unwrap();
    let device = Arc::new(host.open(address).unwrap());
    device.reset().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("cntrl");
    let home = Reactor::spawn(Settings::default()).unwrap();
    let control = serve(&device, &socket, &home);
    for _ in 0..2 {
        drive(&socket);
    }
    control.close();
    assert!(control.wait_closed(PATIENCE));
    assert_eq!(Arc::strong_count(&device), 1, "something of the endpoint is left");
    device.reset().unwrap();
    drop(device);
    host.sysfs().give_back(binding).unwrap();
    assert_eq!(host.sysfs().driver_state(address).unwrap(), prior);
}

fn serve(device: &Arc<Device>, socket: &Path, home: &Reactor) -> Control {
    let config = Config::at(socket);
    let mut parts = EndpointParts::new(&config);
    parts.set_hardware(Box::new(Driver::new(device.clone())));
    let function = Box::new(HardwareFunction::new(device.clone()).unwrap());
    let endpoint = Endpoint::new(config, parts, function, Vec::new(), &home.handle()).unwrap();
    let control = endpoint.control();
    endpoint.serve_alone("hardware").unwrap();
    control
}

/// Enables the controller, has it write to memory and raise an interrupt, and goes without a word.
fn drive(socket: &Path) {
    let guest = TestGuest::new(BASE, MEMORY).unwrap().with_interrupts(1).unwrap();
    let mut registers = guest.connect(socket, PATIENCE).unwrap();
    registers.client.write(region::CONFIG, COMMAND, &ENABLED).unwrap();
    let configuration = registers.read32(CONFIGURATION).unwrap();
    assert_eq!(configuration & 1, 0, "the controller of the last client goes on");
    let arena = Arena::new(guest.memory.clone(), BASE, MEMORY);
    let mut driver = NvmeDriver::new(registers, arena, 32).unwrap();
    assert_ne!(driver.identify_controller().unwrap().vendor.get(), 0, "nothing was written");
    let until = Instant::now() + PATIENCE;
    while guest.count(0) == 0 {
        assert!(Instant::now() < until, "no interrupt came");
        std::thread::sleep(Duration::from_millis(1));
    }
}
