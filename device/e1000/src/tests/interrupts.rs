//! Interrupts and register accesses, with exact times.

use std::time::Duration;

use slipway_e1000_spec::{cause, command, register};
use slipway_pci::{Function, Progress};

use super::rig::{Host, Setup, World, frame, pair};
use crate::COUNTED;

/// Returns how often a register was read and written.
fn accesses(host: &mut Host, register: u32) -> (u64, u64) {
    let place = COUNTED.iter().position(|(offset, _)| *offset == register).unwrap();
    let one = host.counters().registers[place];
    (one.reads, one.writes)
}

/// Returns the device's deadline in nanoseconds from now on.
fn deadline(host: &mut Host) -> Option<u64> {
    let now = slipway_telemetry::Clock::nanos(&host.world.clock);
    match host.device().poll() {
        Progress::Idle(deadline) => deadline.map(|at| at.as_nanos() as u64 - now),
        _ => panic!("the function does not move frames itself"),
    }
}

#[test]
fn the_driver_makes_exactly_the_accesses_of_linux() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let registers = [
        register::ICR,
        register::IMC,
        register::IMS,
        register::STATUS,
        register::TDT,
        register::RDT,
    ];
    let before = registers.map(|one| accesses(&mut b, one));
    let (tdt, other) = (accesses(&mut a, register::TDT), b.counters().other_registers);
    for _ in 0..10 {
        a.send(&frame(a.mac, b.mac, 60));
        assert!(b.sink.pin());
        assert_eq!(b.driver.interrupt(|_| ()).unwrap(), cause::RXT0);
        assert!(!b.sink.pin());
    }
    assert_eq!(accesses(&mut a, register::TDT).1 - tdt.1, 10, "one for each frame");
    let after = registers.map(|one| accesses(&mut b, one));
    let each: Vec<(u64, u64)> =
        before.iter().zip(after).map(|(old, new)| (new.0 - old.0, new.1 - old.1)).collect();
    assert_eq!(each, [(10, 0), (0, 10), (0, 10), (20, 0), (0, 0), (0, 10)]);
    assert_eq!(b.counters().other_registers, other, "no other register");
    assert_eq!(b.driver.interrupt(|_| ()).unwrap(), 0, "not this device's");
}

#[test]
fn receive_buffers_are_given_back_in_sixteens() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let before = accesses(&mut b, register::RDT).1;
    (0..40).for_each(|_| a.queue(&frame(a.mac, b.mac, 60)));
    a.driver.flush().unwrap();
    a.world.settle();
    assert_eq!(b.received().len(), 40);
    assert_eq!(accesses(&mut b, register::RDT).1 - before, 3);
}

#[test]
fn a_throttle_holds_interrupts_for_exactly_its_interval() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2).options(|o| o.throttle = 250));
    let before = b.counters().interrupts;
    a.send(&frame(a.mac, b.mac, 60));
    assert!(b.sink.pin(), "the first is not held");
    b.driver.interrupt(|_| ()).unwrap();
    for _ in 0..12 {
        a.send(&frame(a.mac, b.mac, 60));
        assert!(!b.sink.pin());
        world.pass(4_000);
    }
    assert_eq!(deadline(&mut b), Some(250 * 256 - 48_000));
    world.pass(250 * 256 - 48_000 - 1);
    b.device().poll();
    assert!(!b.sink.pin());
    world.pass(1);
    b.device().poll();
    assert!(b.sink.pin());
    let mut count = 0;
    b.driver.interrupt(|_| count += 1).unwrap();
    assert_eq!((count, b.counters().interrupts - before), (12, 2));
}

#[test]
fn the_port_keeps_the_deadlines_when_the_function_is_not_polled() {
    let (world, mut a, mut b) =
        pair(Setup::new(1), Setup::new(2).options(|o| o.delays = [100, 0, 0, 0]));
    a.send(&frame(a.mac, b.mac, 60));
    assert!(!b.sink.pin());
    world.pass(100 * 1024 - 1);
    world.settle();
    assert!(!b.sink.pin());
    world.pass(1);
    // A turn of the port passes the time.
    world.settle();
    assert!(b.sink.pin());
    assert_eq!(deadline(&mut b), None);
}

#[test]
fn delayed_reports_of_sent_frames_come_together() {
    let setup = Setup::new(1).options(|one| one.delays = [0, 0, 8, 32]);
    let (world, mut a, b) = pair(setup, Setup::new(2));
    for _ in 0..4 {
        assert!(a.driver.sending.queue(&frame(a.mac, b.mac, 60), command::IDE).unwrap());
        a.driver.flush().unwrap();
        world.settle();
        assert!(!a.sink.pin());
        world.pass(7 * 1024);
    }
    assert_eq!(deadline(&mut a), Some(1024));
    world.pass(1024);
    a.device().poll();
    assert!(a.sink.pin());
    let causes = a.driver.get(register::ICR).unwrap();
    assert_eq!(causes, cause::TXDW | cause::TXQE);
    assert_eq!(a.driver.sending.clean().unwrap(), 4);
}

#[test]
fn the_host_enforces_an_interval_on_a_driver_that_asks_for_none() {
    let interval = Duration::from_micros(100);
    let (world, mut a, mut b) =
        pair(Setup::new(1), Setup::new(2).settings(|s| s.interval = interval));
    let before = b.counters().interrupts;
    // 1 ms of a frame each 2 us.
    for _ in 0..500 {
        a.send(&frame(a.mac, b.mac, 60));
        if b.sink.pin() {
            b.driver.interrupt(|_| ()).unwrap();
        }
        world.pass(2_000);
    }
    let interrupts = b.counters().interrupts - before;
    assert_eq!(interrupts, 10);
    b.device().control().set_interval(Duration::ZERO).unwrap();
    assert!(b.device().control().set_interval(Duration::from_millis(17)).is_err());
}

#[test]
fn interrupt_disable_holds_the_pin_and_not_the_causes() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.device().config_write(5, &[4]);
    a.send(&frame(a.mac, b.mac, 60));
    assert!(!b.sink.pin());
    let mut status = [0; 2];
    b.device().config_read(6, &mut status);
    assert_ne!(status[0] & 8, 0, "Interrupt Status is set");
    b.device().config_write(5, &[0]);
    assert!(b.sink.pin());
    b.driver.interrupt(|_| ()).unwrap();
    b.device().config_read(6, &mut status);
    assert_eq!(status[0] & 8, 0);
}

#[test]
fn causes_can_be_set_masked_and_cleared_by_the_driver() {
    let world = World::new();
    let mut host = Setup::new(1).host(&world);
    host.driver.set(register::IMC, u32::MAX).unwrap();
    for bit in 0..10 {
        let one = 1 << bit;
        host.driver.set(register::ICS, one).unwrap();
        assert!(!host.sink.pin());
        host.driver.set(register::IMS, one).unwrap();
        assert!(host.sink.pin());
        host.driver.set(register::ICR, one).unwrap();
        assert!(!host.sink.pin(), "cleared by a write");
        host.driver.set(register::ICS, one).unwrap();
        assert_eq!(host.driver.get(register::ICR).unwrap(), one);
        assert_eq!(host.driver.get(register::ICR).unwrap(), 0);
        host.driver.set(register::IMC, one).unwrap();
    }
}
