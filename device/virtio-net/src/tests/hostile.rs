//! Drivers that break the rules.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slipway_switch::MAX_FRAME;
use slipway_virtio_spec::net::{HEADER, Header, gso, header_flag};
use slipway_virtio_spec::queue::{Descriptor, available, flag};
use zerocopy::IntoBytes;

use super::rig::{Host, Setup, World, frame, pair};
use crate::driver::{Buffer, DriverError};

fn needs_reset(host: &mut Host) -> bool {
    matches!(host.driver.needs_no_reset(), Err(DriverError::NeedsReset))
}

/// Checks that after a reset this driver and its neighbour work again.
fn recovers(world: &World, bad: &mut Host, good: &mut Host) {
    bad.driver.start().unwrap();
    world.settle();
    bad.send(&frame(bad.mac, good.mac, 100));
    world.settle();
    assert_eq!(good.received().last().unwrap().frame.len(), 100);
}

/// A descriptor: index, address, length, flags, next.
type Raw = (u16, u64, u32, u16, u16);

/// Puts a descriptor into the transmit queue's table and makes it available.
fn push_raw(host: &mut Host, index: u16, entries: &[Raw]) {
    let ring = &mut host.driver.transmit[0].ring;
    for &(index, address, len, flags, next) in entries {
        let descriptor = Descriptor {
            address: address.into(),
            len: len.into(),
            flags: flags.into(),
            next: next.into(),
        };
        ring.areas()[0].write(16 * usize::from(index), descriptor.as_bytes()).unwrap();
    }
    ring.push_head(index).unwrap();
    host.driver.flush(0).unwrap();
}

#[test]
fn chains_that_cannot_be_need_a_reset_and_harm_nobody_else() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let table = 0x10_0000;
    let chains: [&[Raw]; 9] = [
        // A circle of one descriptor, and of two.
        &[(0, 0, 100, flag::NEXT, 0)],
        &[(0, 0, 100, flag::NEXT, 1), (1, 0, 100, flag::NEXT, 0)],
        // A next descriptor out of the table.
        &[(0, 0, 100, flag::NEXT, 64)],
        &[(0, 0, 100, flag::NEXT, u16::MAX)],
        // Indirect tables: empty, no multiple of a descriptor, too long, with a successor,
        // unmapped.
        &[(0, table, 0, flag::INDIRECT, 0)],
        &[(0, table, 17, flag::INDIRECT, 0)],
        &[(0, table, 16 * 65, flag::INDIRECT, 0)],
        &[(0, table, 16, flag::INDIRECT | flag::NEXT, 1)],
        &[(0, u64::MAX - 15, 16, flag::INDIRECT, 0)],
    ];
    for chain in chains {
        push_raw(&mut a, 0, chain);
        world.settle();
        assert!(needs_reset(&mut a), "{chain:?}");
        assert!(!needs_reset(&mut b));
        recovers(&world, &mut a, &mut b);
    }
    // A table in a table, a circle in a table, and an entry that does not exist.
    for (flags, next) in [(flag::INDIRECT, 0), (flag::NEXT, 0), (flag::NEXT, 1)] {
        let inner = Descriptor { flags: flags.into(), next: next.into(), ..Descriptor::default() };
        a.driver.arena.memory().write(table, inner.as_bytes()).unwrap();
        push_raw(&mut a, 0, &[(0, table, 16, flag::INDIRECT, 0)]);
        world.settle();
        assert!(needs_reset(&mut a), "{flags} {next}");
        recovers(&world, &mut a, &mut b);
    }
}

#[test]
fn indexes_that_cannot_be_need_a_reset() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    for ahead in [65_u16, 1000, 0x8000, u16::MAX] {
        let ring = &a.driver.transmit[0].ring;
        let [_, ring, _] = ring.areas();
        let index = ring.load_u16(available::INDEX).unwrap();
        ring.store_u16(available::INDEX, index.wrapping_add(ahead)).unwrap();
        world.settle();
        assert!(needs_reset(&mut a), "{ahead}");
        recovers(&world, &mut a, &mut b);
    }
    let head = a.driver.transmit[0].ring.entries();
    a.driver.transmit[0].ring.push_head(head).unwrap();
    a.driver.flush(0).unwrap();
    world.settle();
    assert!(needs_reset(&mut a));
    recovers(&world, &mut a, &mut b);
}

#[test]
fn frames_that_are_none_are_dropped_and_counted_by_cause() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let before = a.device().control().counters();
    let memory = super::rig::MEMORY as u64;
    let header = Header { flags: header_flag::NEEDS_CSUM, gso_type: gso::UDP, ..Header::default() };
    let sent = frame(a.mac, b.mac, 100);
    a.send_with(&header, &sent, &[]);
    a.send(&sent[..13]);
    let too_long = (HEADER + MAX_FRAME + 1) as u32;
    let ring = &mut a.driver.transmit[0].ring;
    for buffers in [
        &[Buffer::readable(0, too_long)][..],
        &[Buffer::readable(0, u32::MAX), Buffer::readable(0, u32::MAX)],
        &[Buffer::readable(memory - 50, 100)],
        &[Buffer::readable(memory * 2, 100)],
        &[Buffer::writable(0, 100)],
        &[Buffer::readable(0, 100), Buffer::writable(0, 100)],
        &[Buffer::readable(0, 0)],
    ] {
        ring.push(buffers).unwrap();
    }
    a.driver.flush(0).unwrap();
    world.settle();
    assert!(b.received().is_empty());
    let after = a.device().control().counters();
    assert_eq!(after.bad_header - before.bad_header, 1);
    assert_eq!(after.too_short - before.too_short, 2);
    assert_eq!(after.too_long - before.too_long, 2);
    assert_eq!(after.bad_memory - before.bad_memory, 2);
    assert_eq!(after.bad_shape - before.bad_shape, 2);
    let malformed = world.0.borrow_mut().port_mut(a.port).unwrap().malformed();
    assert_eq!(malformed, 9);
    // All buffers were used, and the device goes on.
    let mut used = 0;
    while a.driver.transmit[0].ring.pop().unwrap().is_some() {
        used += 1;
    }
    assert_eq!(used, 9);
    a.send(&sent);
    world.settle();
    assert_eq!(b.received().len(), 1);
}

#[test]
fn receive_buffers_that_are_none_need_a_reset() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let far = super::rig::MEMORY as u64;
    for (at, len, flags) in [(far, 2048, flag::WRITE), (0, 0, flag::WRITE), (0, 2048, 0)] {
        let ring = &b.driver.receive[0].ring;
        let descriptor = Descriptor {
            address: u64::into(at),
            len: u32::into(len),
            flags: flags.into(),
            ..Descriptor::default()
        };
        for index in 0..64 {
            ring.areas()[0].write(16 * index, descriptor.as_bytes()).unwrap();
        }
        a.send(&frame(a.mac, b.mac, 60));
        world.settle();
        assert!(needs_reset(&mut b), "{at:#x} {len} {flags}");
        recovers(&world, &mut b, &mut a);
        a.received();
        b.received();
    }
}

#[test]
fn commands_without_an_acknowledgement_need_a_reset() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    // The driver's own control queue is not used: this queue takes its place.
    a.driver.reset_queue(2).unwrap();
    let mut ring = a.driver.make_queue(2, 16).unwrap();
    ring.push(&[Buffer::readable(0, 3)]).unwrap();
    ring.publish().unwrap();
    for _ in 0..3 {
        world.settle();
        a.driver.notify(2).unwrap();
    }
    assert!(needs_reset(&mut a));
    recovers(&world, &mut a, &mut b);
}

#[test]
fn rings_that_are_rewritten_while_they_are_read_harm_nobody_else() {
    let (world, mut a, mut b) = pair(Setup::new(1), Setup::new(2));
    let stop = Arc::new(AtomicBool::new(false));
    let mut seed = 1_u64;
    let mut random = move || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (seed >> 33) as u32
    };
    for _ in 0..6 {
        stop.store(false, Ordering::Relaxed);
        let areas: Vec<_> = [&a.driver.transmit[0].ring, &a.driver.receive[0].ring]
            .iter()
            .flat_map(|ring| ring.areas().map(Clone::clone))
            .collect();
        let (ended, mut next) = (stop.clone(), random());
        let writer = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                for span in &areas {
                    next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let words = span.len() / 4;
                    let at = (next >> 8) as usize % words * 4;
                    // Small numbers, so that some of them are valid.
                    let _ = span.store_u32(at, next >> 16 & 0x0003_007f);
                }
            }
        });
        for _ in 0..300 {
            a.driver.notify(1).unwrap();
            b.send(&frame(b.mac, a.mac, 200));
            world.settle();
            for received in b.received() {
                assert!(received.frame.len() >= 14);
            }
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        assert!(!needs_reset(&mut b));
        recovers(&world, &mut a, &mut b);
        b.driver.start().unwrap();
        world.settle();
    }
}
