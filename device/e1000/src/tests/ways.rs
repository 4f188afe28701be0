//! Ways to drive the device with fewer register accesses.

use std::time::Duration;

use slipway_e1000_spec::{csb, register};
use slipway_pci::Function;

use super::rig::{Host, Setup, World, frame, pair};
use crate::COUNTED;

/// Returns how often the transmit tail was written.
fn tails(host: &mut Host) -> u64 {
    let place = COUNTED.iter().position(|(offset, _)| *offset == register::TDT).unwrap();
    host.counters().registers[place].writes
}

#[test]
fn sends_are_combined_until_the_interrupt_of_those_before() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let before = tails(&mut a);
    for len in 60..80 {
        a.queue(&frame(a.mac, b.mac, len));
        a.driver.combine().unwrap();
    }
    assert_eq!(tails(&mut a) - before, 1, "the device has not done the first frame yet");
    world.settle();
    assert_eq!(b.received().len(), 1);
    assert!(a.sink.pin());
    a.driver.interrupt(|_| ()).unwrap();
    a.driver.combine().unwrap();
    assert_eq!(tails(&mut a) - before, 2, "all others go with one write");
    a.driver.combine().unwrap();
    world.settle();
    assert_eq!(b.received().len(), 19);
    a.driver.interrupt(|_| ()).unwrap();
    a.driver.combine().unwrap();
    assert_eq!(tails(&mut a) - before, 2, "nothing was queued");
    a.queue(&frame(a.mac, b.mac, 60));
    a.driver.combine().unwrap();
    assert_eq!(tails(&mut a) - before, 3, "a frame after a pause goes at once");
}

/// Makes two hosts whose drivers take heads from the block.
fn heads(world: &World) -> (Host, Host) {
    let host = |number| Setup::block(number).options(|one| one.heads = true).host(world);
    (host(1), host(2))
}

#[test]
fn heads_in_the_block_replace_reports_and_status() {
    let world = World::new();
    let (mut a, mut b) = heads(&world);
    let mut number = 0_u64;
    for round in 0..300_usize {
        let count = 1 + round % 60;
        a.driver.clean().unwrap();
        for _ in 0..count {
            let mut one = frame(a.mac, b.mac, 60 + round);
            one[14..22].copy_from_slice(&number.to_le_bytes());
            assert!(a.driver.sending.queue(&one, 0).unwrap(), "the ring is full");
            number += 1;
        }
        a.driver.flush().unwrap();
        world.settle();
        let mut due = number - count as u64;
        let got = b.driver.receive_unread(usize::MAX, |one| {
            let mut bytes = [0; 22];
            one.read(&mut bytes)?;
            assert_eq!(usize::from(one.descriptor.length), 60 + round + 4);
            assert_eq!(bytes[14..], due.to_le_bytes());
            due += 1;
            Ok(())
        });
        assert_eq!(got.unwrap(), count, "round {round}");
    }
    assert_eq!(a.driver.block(csb::TDH).unwrap(), Some(a.driver.sending.tail()));
    assert_eq!((a.counters().bad_tail, b.counters().no_buffer), (0, 0));
    assert!(b.driver.receive(1, |_| ()).is_err(), "a status says nothing then");
}

#[test]
fn a_driver_notices_heads_that_cannot_be() {
    let world = World::new();
    let (mut a, mut b) = heads(&world);
    for host in [&mut a, &mut b] {
        let base = u64::from(host.driver.get(register::CSBAL).unwrap() & csb::ADDRESS);
        for (word, value) in [(csb::TDH, 40_u32), (csb::RDH, 64)] {
            host.memory.write(base + word as u64, &value.to_le_bytes()).unwrap();
        }
        assert!(host.driver.clean().is_err());
        assert!(host.driver.receive_unread(1, |_| Ok(())).is_err());
    }
}

#[test]
fn moderation_delays_the_interrupt_of_combined_sends() {
    let throttled = || Setup::new(1).options(|one| one.throttle = 250);
    let (world, mut a, b) = pair(throttled(), Setup::new(2));
    let before = tails(&mut a);
    let interval = Duration::from_nanos(250 * 256);
    for _ in 0..10 {
        for _ in 0..30 {
            // Only an interrupt makes the driver look at what was sent.
            assert!(a.driver.sending.queue(&frame(a.mac, b.mac, 60), 0).unwrap());
            a.driver.combine().unwrap();
            world.settle();
        }
        world.pass(interval.as_nanos() as u64);
        a.device().poll();
        assert!(a.sink.pin());
        a.driver.interrupt(|_| ()).unwrap();
        a.driver.combine().unwrap();
    }
    let writes = tails(&mut a) - before;
    assert!(writes <= 11, "{writes} writes for 300 frames");
}
