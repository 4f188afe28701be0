//! A real NVMe function behind a socket, driven as a guest drives it. Its namespaces are left
//! alone.
//!
//! Runs as root, on a host with an IOMMU and the driver vfio-pci, with the PCI address of a
//! function that nothing uses in `SLIPWAY_NVME_FUNCTION`. A VF is to be online.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_nvme::driver::{Arena, Driver as NvmeDriver};
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_reactor::{Reactor, Settings};
use slipway_vfio::{Device, Driver, HardwareFunction, Host, PciAddress};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts};
use slipway_vfio_user_client::{Client, Registers};
use slipway_vfio_user_spec::{irq, region};

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
    let earlier = host.sysfs().driver(address);
    host.sysfs().check(address).unwrap();
    let binding = host.sysfs().bind(address).unwrap();
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
    assert_eq!(host.sysfs().driver(address), earlier);
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
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("guest", flags).unwrap();
    rustix::fs::ftruncate(&file, MEMORY).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    let mut client = Client::connect(socket, PATIENCE).unwrap();
    client.map(BASE, MEMORY, file.as_fd(), 0, true).unwrap();
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    client.route_irqs(irq::MSIX, 0, 1, &[event.as_fd()]).unwrap();
    client.write(region::CONFIG, COMMAND, &ENABLED).unwrap();
    let mut configuration = [0xff; 4];
    client.read(region::BAR0, CONFIGURATION, &mut configuration).unwrap();
    assert_eq!(configuration[0] & 1, 0, "the controller of the last client goes on");
    let mut map = DmaMap::new();
    let memory = Region::mapped(file.as_fd(), 0, MEMORY, Permissions::READ_WRITE).unwrap();
    map.add(BASE, memory).unwrap();
    let arena = Arena::new(map.memory(), BASE, MEMORY);
    let registers = Registers::new(client, PATIENCE);
    let mut driver = NvmeDriver::new(registers, arena, 32).unwrap();
    assert_ne!(driver.identify_controller().unwrap().vendor.get(), 0, "nothing was written");
    let (until, mut count) = (Instant::now() + PATIENCE, [0; 8]);
    while rustix::io::read(&event, &mut count).is_err() {
        assert!(Instant::now() < until, "no interrupt came");
        std::thread::sleep(Duration::from_millis(1));
    }
}
