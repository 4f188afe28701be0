//! Runs the same test body by direct calls and over the socket.

use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_pci::{Access, FifoSink, Function, InterruptSink};
use slipway_ram::Memory;
use slipway_vfio_user::testing::{DONE, DOORBELLS, FAULT, ID, Scratch};

use crate::common::*;

/// The accesses to a device that the body needs, independent of the transport.
trait Driver {
    fn read(&mut self, offset: u64) -> u32;
    fn write(&mut self, offset: u64, value: u32);
    fn interrupts(&mut self) -> u64;
}

struct Direct(Scratch, Arc<FifoSink>);

impl Driver for Direct {
    fn read(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        assert_eq!(self.0.read(0, offset, &mut bytes), Access::Done);
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        assert_eq!(self.0.write(0, offset, &value.to_le_bytes()), Access::Done);
        self.0.poll();
    }

    fn interrupts(&mut self) -> u64 {
        self.1.take().len() as u64
    }
}

struct Remote(Client, std::os::fd::OwnedFd);

impl Driver for Remote {
    fn read(&mut self, offset: u64) -> u32 {
        self.0.read_u32(0, offset).unwrap()
    }

    fn write(&mut self, offset: u64, value: u32) {
        self.0.write(0, offset, &value.to_le_bytes()).unwrap();
    }

    fn interrupts(&mut self) -> u64 {
        count(&self.1)
    }
}

fn body(device: &mut dyn Driver) {
    assert_eq!(device.read(0), ID);
    device.write(0x48, 0x1000);
    device.write(0x50, 16);
    device.write(0x1000, 1);
    assert_eq!(device.read(0x54), DONE);
    assert_eq!(device.interrupts(), 1);
    device.write(0x48, 0x2000);
    device.write(0x1000, 2);
    assert_eq!(device.read(0x54), FAULT);
    assert_eq!(device.interrupts(), 1);
    device.write(0x1000, 2);
    assert_eq!(device.interrupts(), 0, "no new value, no work");
}

#[test]
fn by_direct_calls() {
    let fifo = FifoSink::new();
    let sink: Arc<dyn InterruptSink> = fifo.clone();
    let function =
        Scratch::new(Memory::heap(0x2000), &sink, Doorbells::trapped(DOORBELLS), Arc::default());
    body(&mut Direct(function, fifo));
}

#[test]
fn over_the_socket() {
    use std::os::fd::AsFd;
    let served = serve();
    let mut client = Client::connect(&served.path, PATIENCE).unwrap();
    let (guest, interrupt) = (memory(0x2000), event());
    client.map(0, 0x2000, guest.as_fd(), 0, true).unwrap();
    client.route_irqs(spec::irq::MSIX, 0, 1, &[interrupt.as_fd()]).unwrap();
    body(&mut Remote(client, interrupt));
}
