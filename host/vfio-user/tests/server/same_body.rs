//! Runs the same test body by direct calls and over the socket.

use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_pci::driver::{Direct, RegisterAccess};
use slipway_pci::{FifoSink, InterruptSink};
use slipway_ram::Memory;
use slipway_vfio_user::testing::{DONE, DOORBELLS, FAULT, ID, Scratch};
use slipway_vfio_user_client::TestGuest;

use crate::common::*;

fn body(registers: &mut dyn RegisterAccess, interrupts: impl Fn() -> u64) {
    assert_eq!(registers.read32(0), Ok(ID));
    registers.write32(0x48, 0x1000).unwrap();
    registers.write32(0x50, 16).unwrap();
    registers.write32(0x1000, 1).unwrap();
    assert_eq!(registers.read32(0x54), Ok(DONE));
    assert_eq!(interrupts(), 1);
    registers.write32(0x48, 0x2000).unwrap();
    registers.write32(0x1000, 2).unwrap();
    assert_eq!(registers.read32(0x54), Ok(FAULT));
    assert_eq!(interrupts(), 1);
    registers.write32(0x1000, 2).unwrap();
    assert_eq!(interrupts(), 0, "no new value, no work");
}

#[test]
fn by_direct_calls() {
    let fifo = FifoSink::new();
    let sink: Arc<dyn InterruptSink> = fifo.clone();
    let function =
        Scratch::new(Memory::heap(0x2000), &sink, Doorbells::trapped(DOORBELLS), Arc::default());
    // The function is polled after each write.
    body(&mut Direct::beside(function, || ()), || fifo.take().len() as u64);
}

#[test]
fn over_the_socket() {
    let (served, guest) = (serve(), TestGuest::new(0, 0x2000).unwrap());
    let guest = guest.with_interrupts(1).unwrap();
    body(&mut guest.connect(&served.path, PATIENCE).unwrap(), || guest.count(0));
}

#[test]
fn over_a_socket_of_several_threads() {
    let (served, guest) = (serve(), TestGuest::new(0, 0x2000).unwrap());
    let guest = guest.with_interrupts(1).unwrap();
    body(&mut guest.connect_shared(&served.path, PATIENCE).unwrap(), || guest.count(0));
}
