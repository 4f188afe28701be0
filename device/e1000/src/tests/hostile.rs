//! Drivers that do what none should.

use std::sync::atomic::{AtomicBool, Ordering};

use slipway_e1000_spec::{
    Context, DESCRIPTOR, Data, Receive, Transmit, command, control, csb, register,
};
use slipway_pci::Function;
use slipway_ram::{DmaMap, Region};
use slipway_switch::{MAX_FRAME, Mac};

use super::rig::{Host, Setup, frame, pair};

fn data(address: u64, length: u32, more: u8) -> Transmit {
    Transmit::Data(Data { address, length, command: command::DEXT | more, ..Data::default() })
}

/// Returns the setup of a host with rings of 1024 descriptors.
fn long_ring(number: u64) -> Setup {
    let mut setup = Setup::new(number).options(|one| one.descriptors = 1024);
    setup.memory = slipway_ram::Memory::heap(crate::driver::memory_len(1024));
    setup
}

/// Checks that frames still move in both directions.
fn works(a: &mut Host, b: &mut Host) {
    a.received();
    b.received();
    a.driver.sending.clean().unwrap();
    a.send(&frame(a.mac, b.mac, 77));
    b.send(&frame(b.mac, a.mac, 78));
    assert_eq!((b.received()[0].len(), a.received()[0].len()), (77, 78));
}

/// Ends the frame that `a` has begun. Checks that it is dropped as one of bad shape, once, and that
/// frames still move.
fn ends_dropped(a: &mut Host, b: &mut Host) {
    assert!(a.driver.sending.push(&data(0, 1, command::EOP | command::RS)).unwrap());
    a.driver.flush().unwrap();
    a.world.settle();
    assert_eq!(a.counters().bad_shape, 1);
    works(a, b);
}

#[test]
fn frames_in_memory_that_is_not_there_are_dropped() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let end = command::EOP | command::RS;
    for (address, length) in [(u64::MAX - 10, 60), (1 << 40, 60), (0, 0xf_ffff), (0, 0)] {
        a.driver.sending.push(&data(address, length, end)).unwrap();
    }
    a.driver.flush().unwrap();
    a.world.settle();
    let counters = a.counters();
    assert_eq!((counters.bad_memory, counters.too_long, counters.too_short), (2, 1, 1));
    works(&mut a, &mut b);
}

#[test]
fn a_frame_without_an_end_does_not_stop_the_ring() {
    let (world, mut a, mut b) = pair(long_ring(1), long_ring(2));
    let before = a.driver.sending.tail();
    for _ in 0..1000 {
        assert!(a.driver.sending.push(&data(0, 1, command::RS)).unwrap());
    }
    a.driver.flush().unwrap();
    world.settle();
    let head = a.driver.get(register::TDH).unwrap();
    assert!(head - before > 700, "{head}: descriptors of a frame that is too long are reported");
    a.driver.sending.clean().unwrap();
    ends_dropped(&mut a, &mut b);
}

/// Contexts may stand among a frame's descriptors. They hold no more memory than those do, whatever
/// the number of times that the driver's tail goes round the ring.
#[test]
fn a_frame_of_contexts_without_an_end_is_dropped() {
    let (world, mut a, mut b) = pair(long_ring(1), long_ring(2));
    let context = Context { command: command::DEXT | command::RS, ..Context::default() };
    assert!(a.driver.sending.push(&data(0, 1, command::RS)).unwrap());
    for _ in 0..3 {
        let before = a.driver.sending.tail();
        for _ in 0..1000 {
            assert!(a.driver.sending.push(&Transmit::Context(context)).unwrap());
        }
        a.driver.flush().unwrap();
        world.settle();
        let head = a.driver.get(register::TDH).unwrap();
        let reported = (head + 1024 - before) % 1024;
        assert!(reported > 700, "{reported}: descriptors of a frame without an end are reported");
        a.driver.sending.clean().unwrap();
    }
    ends_dropped(&mut a, &mut b);
}

#[test]
fn a_tag_makes_no_frame_longer_than_a_switch_takes() {
    let (_, mut a, _b) = pair(Setup::new(1).options(|one| one.vlans = true), Setup::new(2));
    for (tag, too_long) in [(0, 0), (command::VLE, 1)] {
        // As long as a frame can be without its tag.
        let pieces = MAX_FRAME / 4096;
        for _ in 0..pieces {
            assert!(a.driver.sending.push(&data(0, 4096, tag)).unwrap());
        }
        let rest = (MAX_FRAME - pieces * 4096) as u32;
        let end = data(0, rest, command::EOP | command::RS | tag);
        assert!(a.driver.sending.push(&end).unwrap());
        a.driver.flush().unwrap();
        a.world.settle();
        a.driver.sending.clean().unwrap();
        assert_eq!(a.counters().too_long, too_long);
    }
}

#[test]
fn a_frame_has_at_most_256_descriptors() {
    let (_, mut a, mut b) = pair(long_ring(1), Setup::new(2));
    for (len, arrives) in [(1024, true), (1028, false)] {
        let sent = frame(a.mac, b.mac, len);
        let pieces = a.driver.sending.queue_offloaded(&sent, 4, Context::default(), (0, 0, 0));
        assert!(pieces.unwrap());
        a.driver.flush().unwrap();
        a.world.settle();
        a.driver.sending.clean().unwrap();
        assert_eq!(b.received().contains(&sent), arrives, "{len} bytes");
    }
    assert_eq!(a.counters().bad_shape, 1);
    works(&mut a, &mut b);
}

#[test]
fn a_frame_that_is_too_long_is_dropped_to_its_end_when_the_port_has_rested_meanwhile() {
    let (world, mut a, mut b) = pair(long_ring(1), Setup::new(2));
    for _ in 0..300 {
        assert!(a.driver.sending.push(&data(0, 1, command::RS)).unwrap());
    }
    a.driver.flush().unwrap();
    world.settle();
    while !a.device().quiesce() {
        world.settle();
    }
    a.device().poll();
    world.settle();
    // The frame's last descriptor, with the bytes of a whole frame.
    let rest = a.driver.sending.fill(&frame(a.mac, b.mac, 60)).unwrap();
    assert!(a.driver.sending.push(&data(rest, 60, command::EOP | command::RS)).unwrap());
    a.driver.flush().unwrap();
    world.settle();
    assert!(b.received().is_empty(), "the rest of a dropped frame is no frame");
    assert_eq!(a.counters().bad_shape, 1);
    works(&mut a, &mut b);
}

#[test]
fn a_ring_of_contexts_is_read_in_turns() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for _ in 0..50 {
        while a.driver.sending.push(&Transmit::Context(Default::default())).unwrap() {}
        a.driver.flush().unwrap();
        world.settle();
        let (head, tail) = (a.driver.get(register::TDH), a.driver.get(register::TDT));
        assert_eq!(head, tail);
        assert!(a.driver.sending.push(&Transmit::Unknown(command::RS)).is_ok());
        a.driver.sending.restart();
        // The driver and the device begin anew at 0.
        a.driver.set(register::TDH, 0).unwrap();
        a.driver.set(register::TDT, 0).unwrap();
    }
    works(&mut a, &mut b);
}

#[test]
fn rings_that_are_not_in_memory_or_have_no_entries_lose_frames() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for (offset, value) in [
        (register::RDBAH, 1),
        (register::RDBAL, 0xffff_fff0),
        (register::RDLEN, 0),
        (register::RDLEN, 0xf_ff80),
        (register::RDT, 0xffff),
        (register::RDH, 0xffff),
    ] {
        let before = b.driver.get(offset).unwrap();
        b.driver.set(offset, value).unwrap();
        for _ in 0..5 {
            a.send(&frame(a.mac, b.mac, 60));
        }
        a.driver.sending.clean().unwrap();
        b.driver.set(offset, before).unwrap();
    }
    for (offset, value) in [(register::TDBAH, 1), (register::TDLEN, 0), (register::TDT, 0xffff)] {
        let before = b.driver.get(offset).unwrap();
        b.driver.set(offset, value).unwrap();
        b.driver.set(register::TDT, 9).unwrap();
        world.settle();
        b.driver.set(offset, before).unwrap();
    }
    assert!(b.counters().bad_tail > 0);
    b.driver.set(register::CTRL, control::RST).unwrap();
    world.settle();
    b.device().poll();
    let (memory, registers) = (b.memory.clone(), b.driver.registers);
    let options = crate::driver::Options { descriptors: 64, ..Default::default() };
    let len = crate::driver::memory_len(64) as u64;
    b.driver = crate::driver::Driver::new(registers, &memory, (0, len), options).unwrap();
    world.settle();
    works(&mut a, &mut b);
}

#[test]
fn a_transmit_ring_that_is_not_in_memory_lets_the_switch_sleep_until_it_is() {
    let mut map = DmaMap::new();
    map.add(0, Region::heap(crate::driver::memory_len(64))).unwrap();
    let mut setup = Setup::new(1);
    setup.memory = map.memory();
    let (world, mut a, mut b) = pair(setup, Setup::new(2));
    let arms = |port| world.switch.borrow_mut().arm(port);
    let (head, low) = (a.driver.sending.tail(), a.driver.get(register::TDBAL).unwrap());
    a.driver.set(register::TDBAH, 1).unwrap();
    for ahead in [1, 2, 1] {
        a.driver.set(register::TDT, head + ahead).unwrap();
        world.settle();
        assert!(!arms(a.port), "the switch sleeps");
        assert_eq!(a.driver.get(register::TDH), Ok(head));
    }
    map.add(1 << 32, Region::heap(crate::driver::memory_len(64))).unwrap();
    let ring = 1 << 32 | u64::from(low);
    let at = ring + DESCRIPTOR as u64 * u64::from(head);
    a.memory.write(at, &data(0, 60, command::EOP | command::RS).bytes()).unwrap();
    world.settle();
    assert_eq!(a.driver.get(register::TDH), Ok(head + 1), "another map, and no other tail");
    // The driver's own ring again.
    let enabled = a.driver.get(register::TCTL).unwrap();
    for (offset, value) in [
        (register::TCTL, 0),
        (register::TDBAH, 0),
        (register::TDH, head),
        (register::TDT, head),
        (register::TCTL, enabled),
    ] {
        a.driver.set(offset, value).unwrap();
    }
    works(&mut a, &mut b);
}

#[test]
fn receive_buffers_that_are_not_in_memory_lose_their_frames() {
    let (_, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let ring = u64::from(b.driver.get(register::RDBAL).unwrap());
    let head = u64::from(b.driver.get(register::RDH).unwrap());
    let mut good = [0; 16];
    b.memory.read(ring + 16 * head, &mut good).unwrap();
    let bad = Receive { address: u64::MAX - 100, ..Receive::default() };
    b.memory.write(ring + 16 * head, &bad.bits().to_le_bytes()).unwrap();
    // Descriptors that the device has read ahead stay what they were.
    let (low, high) = (b.driver.get(register::RDBAL).unwrap(), b.driver.get(register::RDBAH));
    b.driver.set(register::RDBAL, low).unwrap();
    assert_eq!(high, Ok(0));
    a.send(&frame(a.mac, b.mac, 60));
    assert_eq!((b.counters().bad_memory, b.counters().too_large), (1, 1));
    b.memory.write(ring + 16 * head, &good).unwrap();
    b.driver.set(register::RDBAL, low).unwrap();
    works(&mut a, &mut b);
}

#[test]
fn a_device_without_bus_mastering_touches_no_memory() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    b.device().config_write(4, &[2]);
    world.settle();
    a.send(&frame(a.mac, b.mac, 60));
    b.send(&frame(b.mac, Mac::BROADCAST, 60));
    assert!(a.received().is_empty() && b.received().is_empty());
    b.device().config_write(4, &[6]);
    world.settle();
    assert_eq!(a.received().len(), 1, "the frame waited");
    works(&mut a, &mut b);
}

/// Writes words to the rings and the block of a driver with 64 descriptors until `ends`, as another
/// CPU of its guest.
fn rewrite(memory: &slipway_ram::Memory, places: &[(u32, usize)], ends: &AtomicBool) {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    while !ends.load(Ordering::Relaxed) {
        for (base, len) in places {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let at = u64::from(*base) + (random >> 32) % *len as u64 / 4 * 4;
            // Most words are indices of the ring, lengths, or addresses that are there.
            let word = if random.is_multiple_of(16) { random as u32 } else { random as u32 & 0xff };
            memory.write(at, &word.to_le_bytes()).unwrap();
        }
    }
}

#[test]
fn a_guest_that_rewrites_its_rings_and_its_block_meanwhile_harms_only_itself() {
    let (world, mut b, mut c) = pair(Setup::block(1), Setup::block(2));
    let mut a = Setup::block(3).host(&world);
    let base = |offset| a.driver.get(offset).unwrap();
    let [transmit, receive, block] =
        [register::TDBAL, register::RDBAL, register::CSBAL].map(base).map(|at| at & !0xf);
    let ring = 64 * DESCRIPTOR;
    let places = [(transmit, ring), (receive, ring), (block, csb::LEN)];
    let (memory, ends) = (a.memory.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| rewrite(&memory, &places, &ends));
        for round in 0..50 {
            a.driver.set(register::TDT, round % 64).unwrap();
            a.driver.set(register::RDT, round * 7 % 64).unwrap();
            let [to, back] = [(b.mac, c.mac), (c.mac, b.mac)]
                .map(|(from, to)| frame(from, to, 60 + round as usize));
            b.send(&to);
            c.send(&back);
            b.send(&frame(b.mac, Mac::BROADCAST, 60));
            assert!(c.received().contains(&to) && b.received().contains(&back), "round {round}");
        }
        ends.store(true, Ordering::Relaxed);
    });
    let options = crate::driver::Options { descriptors: 64, csb: true, ..Default::default() };
    let len = crate::driver::memory_len(64) as u64;
    a.driver.set(register::CTRL, control::RST).unwrap();
    world.settle();
    a.device().poll();
    a.driver = crate::driver::Driver::new(a.driver.registers, &memory, (0, len), options).unwrap();
    world.settle();
    works(&mut a, &mut b);
}
