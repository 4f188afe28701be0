//! Resets, quiescing, queues that come and go.

use slipway_pci::{Function, Progress};
use slipway_switch::Mac;
use slipway_virtio_spec::Status;
use slipway_virtio_spec::net::Header;

use super::rig::{Setup, World, frame, pair};
use crate::driver::Receiving;

#[test]
fn a_reset_waits_for_the_port() {
    let (world, mut a, b) = pair(Setup::new(1), Setup::new(2));
    let status = slipway_virtio_spec::pci::common::DEVICE_STATUS;
    a.device().write(0, status, &[0]);
    let mut byte = [0];
    a.device().read(0, status, &mut byte);
    assert_ne!(byte, [0], "the port has the queues");
    assert!(matches!(a.device().poll(), Progress::Idle(Some(_))), "it is looked for soon");
    world.settle();
    a.device().read(0, status, &mut byte);
    assert_eq!(byte, [0]);
    for _ in 0..20 {
        a.driver.start().unwrap();
        world.settle();
        a.send(&frame(a.mac, b.mac, 60));
        world.settle();
        assert_eq!(a.driver.transmit[0].reap().unwrap(), 0);
    }
}

#[test]
fn an_address_of_the_hosts_is_the_drivers_from_its_next_reset_on() {
    let (world, mut a, _b) = pair(Setup::new(1), Setup::new(2));
    let (first, other) = (a.mac, Mac::local(77));
    let control = a.device().control();
    control.set_mac(other);
    assert_eq!((control.mac(), a.driver.mac().unwrap()), (other, first.0));
    control.set_mac(Mac::BROADCAST);
    a.driver.start().unwrap();
    world.settle();
    assert_eq!((control.mac(), a.driver.mac().unwrap()), (other, other.0));
    // A successor that is made with the address takes it for the host's, as its predecessor did.
    while !a.device().quiesce() {
        world.settle();
    }
    let state = a.device().save();
    let (mut next, _port, _) = Setup::new(1).settings(|settings| settings.mac = other).device();
    next.restore(&state).unwrap();
    assert_eq!(next.driven.filter.mac, other.0);
    let (mut moved, _port, _) = Setup::new(3).device();
    moved.restore(&state).unwrap();
    assert_eq!(moved.driven.filter.mac, Mac::local(3).0);
}

#[test]
fn a_function_level_reset_is_over_when_the_status_is_zero() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    a.device().reset();
    b.send(&frame(b.mac, a.mac, 60));
    while !a.driver.status().unwrap().is_empty() {
        world.settle();
    }
    assert!(a.received().is_empty());
    a.driver.start().unwrap();
    world.settle();
    b.send(&frame(b.mac, a.mac, 60));
    world.settle();
    assert_eq!(a.received().len(), 1);
}

#[test]
fn quiesced_it_touches_nothing_and_goes_on_afterwards() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    assert!(!b.device().quiesce(), "the port has the queues");
    world.settle();
    assert!(b.device().quiesce());
    // The driver is down for a moment only: frames wait where they are, or are dropped.
    a.send(&frame(a.mac, b.mac, 60));
    world.settle();
    assert!(b.received().is_empty());
    assert!(b.device().quiesce(), "still");
    b.device().poll();
    world.settle();
    for len in [60, 1514] {
        a.send(&frame(a.mac, b.mac, len));
        world.settle();
    }
    let lengths: Vec<usize> = b.received().iter().map(|one| one.frame.len()).collect();
    assert_eq!(lengths, [60, 1514]);
}

#[test]
fn quiesced_it_lets_go_of_all_memory() {
    use slipway_ram::{DmaMap, Region};
    let mut map = DmaMap::new();
    map.add(0, Region::heap(super::rig::MEMORY)).unwrap();
    let mut setup = Setup::new(1);
    setup.memory = map.memory();
    let (world, mut a, mut b) = pair(setup, Setup::new(2));
    a.send(&frame(a.mac, b.mac, 1514));
    world.settle();
    assert_eq!(b.received().len(), 1);
    while !a.device().quiesce() {
        world.settle();
    }
    let removed = map.remove(0, super::rig::MEMORY as u64).unwrap();
    // The driver's own spans, which belong to another process outside of tests.
    let held = !removed.is_idle();
    a.driver.receive.clear();
    a.driver.transmit.clear();
    drop(a.driver);
    assert!(held && removed.is_idle(), "neither the device nor a burst of the switch holds it");
}

#[test]
fn memory_goes_with_the_function_wherever_the_queues_are() {
    use slipway_ram::{DmaMap, Region};
    let mut map = DmaMap::new();
    map.add(0, Region::heap(super::rig::MEMORY)).unwrap();
    let mut setup = Setup::new(1);
    setup.memory = map.memory();
    let (world, mut a, b) = pair(setup, Setup::new(2));
    a.send(&frame(a.mac, b.mac, 1514));
    world.settle();
    let removed = map.remove(0, super::rig::MEMORY as u64).unwrap();
    a.driver.receive.clear();
    a.driver.transmit.clear();
    // The port has the queues, and nobody asked for them back: the device can be dropped all the
    // same.
    drop(a.driver);
    world.settle();
    world.0.borrow_mut().release();
    assert!(removed.is_idle(), "a path that nobody has keeps the guest's memory");
}

#[test]
fn one_queue_is_reset_while_the_others_run() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.driver.reset_queue(0).unwrap();
    a.send(&frame(a.mac, b.mac, 60));
    world.settle();
    assert!(b.received().is_empty());
    b.send(&frame(b.mac, a.mac, 60));
    world.settle();
    assert_eq!(a.received().len(), 1, "the transmit queue goes on");
    let ring = b.driver.make_queue(0, 32).unwrap();
    b.driver.receive[0] = Receiving::new(ring, &mut b.driver.arena, 2048, true).unwrap();
    // The port gives the queues back, and gets them with the new one among them.
    for _ in 0..2 {
        world.settle();
        b.device().poll();
    }
    world.settle();
    a.send(&frame(a.mac, b.mac, 61));
    world.settle();
    assert_eq!(b.received()[0].frame.len(), 61);
    assert_eq!(b.driver.status().unwrap() & Status::DEVICE_NEEDS_RESET, Status::empty());
}

#[test]
fn a_port_that_goes_gives_the_queues_back() {
    let world = World::new();
    let mut a = Setup::new(1).host(&world);
    drop(world.0.borrow_mut().detach(a.port).unwrap());
    assert!(a.device().quiesce());
    // Nobody moves frames, and nothing waits for ever.
    a.driver.start().unwrap();
    a.driver.reset().unwrap();
}

#[test]
fn indirect_chains_are_frames_too() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let sent = frame(a.mac, b.mac, 1000);
    let at = a.driver.arena.allocate(2048).unwrap();
    let table = a.driver.arena.allocate(48).unwrap();
    let memory = a.driver.arena.memory().clone();
    let header = zerocopy::IntoBytes::as_bytes(&Header::default()).to_vec();
    memory.write(at, &[header, sent.clone()].concat()).unwrap();
    // Header, addresses and the rest lie in a table, out of order.
    let entry = |at: u64, len: u32, flags: u16, next: u16| {
        let (at, len) = (at.to_le_bytes(), len.to_le_bytes());
        [&at[..], &len, &flags.to_le_bytes(), &next.to_le_bytes()].concat()
    };
    let entries = [entry(at, 12, 1, 2), entry(at + 26, 986, 0, 0), entry(at + 12, 14, 1, 1)];
    memory.write(table, &entries.concat()).unwrap();
    a.driver.transmit[0].ring.push_indirect(table, 48).unwrap();
    a.driver.flush(0).unwrap();
    world.settle();
    assert!(b.received()[0].frame == sent);
}
