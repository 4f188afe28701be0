//! The communication status block.

use slipway_e1000_spec::{csb, register};
use slipway_pci::Function;

use super::rig::{Setup, World, frame, pair};
use crate::COUNTED;

fn csbk() -> usize {
    COUNTED.iter().position(|(offset, _)| *offset == register::CSBK).unwrap()
}

#[test]
fn a_busy_pair_exchanges_frames_without_registers_and_interrupts() {
    let (world, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    let (before, other) = (a.counters(), b.counters());
    let mut total = 0;
    for round in 0..200 {
        for step in 0..20 {
            a.queue(&frame(a.mac, b.mac, 60 + step));
            a.driver.flush().unwrap();
        }
        // The switch goes on without falling asleep.
        let mut switch = world.switch.borrow_mut();
        for _ in 0..3 {
            switch.turn(a.port, 256, std::time::Duration::ZERO);
        }
        drop(switch);
        let got = b.received();
        total += got.len();
        assert_eq!(got.len(), 20, "round {round}");
    }
    assert_eq!(total, 4000);
    let kicks = a.counters().registers[csbk()].writes - before.registers[csbk()].writes;
    assert_eq!(kicks, 1, "after idleness only");
    assert_eq!(b.counters().registers, other.registers);
    assert_eq!(
        (a.counters().interrupts, b.counters().interrupts),
        (before.interrupts, other.interrupts)
    );
    assert_eq!(a.driver.block(csb::TDH).unwrap(), Some(a.driver.sending.tail()));
}

#[test]
fn a_device_that_sleeps_asks_for_a_kick_and_finds_what_came_meanwhile() {
    let (world, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    world.settle();
    assert_eq!(a.driver.block(csb::NEED_TX_KICK).unwrap(), Some(1));
    let before = a.counters();
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!(b.received().len(), 1);
    let after = a.counters();
    assert_eq!(after.registers[csbk()].writes - before.registers[csbk()].writes, 1);
    assert_eq!(after.kicks - before.kicks, 1);
    // A frame that comes after the last look and before the sleep.
    world.switch.borrow_mut().turn(a.port, 256, std::time::Duration::ZERO);
    a.queue(&frame(a.mac, b.mac, 60));
    a.driver.flush().unwrap();
    assert!(world.switch.borrow_mut().arm(a.port), "found before the sleep");
}

#[test]
fn one_kick_is_enough_for_the_frames_that_follow_it() {
    let (world, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    world.settle();
    let base = u64::from(a.driver.get(register::CSBAL).unwrap() & csb::ADDRESS);
    a.queue(&frame(a.mac, b.mac, 60));
    a.driver.flush().unwrap();
    assert_ne!(a.driver.block(csb::TDH).unwrap(), Some(a.driver.sending.tail()));
    // The device has not woken: the block still asks for a kick, and the driver knows better.
    assert_eq!(a.driver.block(csb::NEED_TX_KICK).unwrap(), Some(1));
    a.queue(&frame(a.mac, b.mac, 60));
    let tail = a.driver.sending.tail();
    a.memory.write(base + csb::TDT as u64, &tail.to_le_bytes()).unwrap();
    world.settle();
    assert_eq!(b.received().len(), 2);
    assert_eq!(a.driver.block(csb::TDH).unwrap(), Some(tail));
    assert_eq!(a.driver.block(csb::NEED_TX_KICK).unwrap(), Some(1));
}

#[test]
fn a_driver_that_sleeps_is_interrupted() {
    let (_, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    a.send(&frame(a.mac, b.mac, 60));
    assert!(!b.sink.pin() && !a.sink.pin());
    b.received();
    b.driver.want(false, true).unwrap();
    a.driver.want(true, false).unwrap();
    a.send(&frame(a.mac, b.mac, 60));
    assert!(b.sink.pin() && a.sink.pin());
    let mut count = 0;
    b.driver.interrupt(|_| count += 1).unwrap();
    assert_eq!(count, 1);
}

#[test]
fn the_block_is_off_until_the_driver_turns_it_on_and_after_a_reset() {
    let world = World::new();
    let mut plain = Setup::new(1).settings(|one| one.csb = true).host(&world);
    let mut config = [0; 2];
    plain.device().config_read(0x2e, &mut config);
    assert_eq!(u16::from_le_bytes(config), csb::SUBSYSTEM);
    assert_eq!(plain.driver.get(register::CSBAL).unwrap(), csb::KICKS);
    let mut with = Setup::block(2).host(&world);
    assert_ne!(with.driver.get(register::CSBAL).unwrap() & csb::ENABLE, 0);
    with.driver.set(register::CTRL, slipway_e1000_spec::control::RST).unwrap();
    assert_eq!(with.driver.get(register::CSBAL).unwrap(), csb::KICKS);
    let mut without = Setup::new(3).host(&world);
    without.driver.set(register::CSBAL, csb::ENABLE).unwrap();
    assert_eq!(without.driver.get(register::CSBAL).unwrap(), 0, "the device has none");
    without.device().config_read(0x2e, &mut config);
    assert_eq!(u16::from_le_bytes(config), csb::PLAIN_SUBSYSTEM);
}

#[test]
fn tails_beyond_the_ring_and_blocks_that_are_not_there_do_nothing() {
    let (world, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    let base = u64::from(a.driver.get(register::CSBAL).unwrap() & csb::ADDRESS);
    let tail = a.driver.sending.tail();
    a.memory.write(base, &u32::MAX.to_le_bytes()).unwrap();
    a.driver.set(register::TDT, 0).unwrap();
    world.settle();
    assert!(b.received().is_empty());
    a.memory.write(base, &tail.to_le_bytes()).unwrap();
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!(b.received().len(), 1);
    a.driver.set(register::CSBAL, 0xffff_ff80 | csb::ENABLE).unwrap();
    a.driver.set(register::TDT, 5).unwrap();
    world.settle();
    assert!(b.received().is_empty());
    assert!(!a.device().quiesce());
    world.settle();
    assert!(a.device().quiesce());
}

/// As under a VMM that takes the write of CSBK for an event.
#[test]
fn an_announced_kick_wakes_the_device() {
    let (world, mut a, mut b) = pair(Setup::block(1), Setup::block(2));
    world.settle();
    let (before, base) = (a.counters(), a.driver.get(register::CSBAL).unwrap() & csb::ADDRESS);
    a.queue(&frame(a.mac, b.mac, 60));
    let tail = a.driver.sending.tail();
    a.memory.write(u64::from(base) + csb::TDT as u64, &tail.to_le_bytes()).unwrap();
    a.device().notified(1);
    world.settle();
    assert_eq!(b.received().len(), 1);
    let after = a.counters();
    assert_eq!((after.kicks - before.kicks, after.announced), (1, 1));
    assert_eq!(after.registers[csbk()].writes, before.registers[csbk()].writes);
}
