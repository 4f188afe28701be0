//! Drivers that break the rules.

use slipway_virtio_spec::console::{event, queue};
use slipway_virtio_spec::queue::{Descriptor, available, flag};
use zerocopy::IntoBytes;

use super::rig::{AGENT, CONSOLE, MEMORY, Rig};
use crate::driver::{Options, Ring, notification};
use slipway_pci::Function;

/// A descriptor: index, address, length, flags, next.
type Raw = (u16, u64, u32, u16, u16);

fn put(ring: &Ring, entries: &[Raw]) {
    for &(index, address, len, flags, next) in entries {
        let descriptor = Descriptor {
            address: address.into(),
            len: len.into(),
            flags: flags.into(),
            next: next.into(),
        };
        ring.areas()[0].write(16 * usize::from(index), descriptor.as_bytes()).unwrap();
    }
}

/// Lets the host do all it does.
fn pump(rig: &mut Rig) {
    for queue in 0..6 {
        rig.console().write(0, notification(queue), &queue.to_le_bytes());
    }
    rig.settle();
    let mut bytes = [0; 4096];
    for port in [CONSOLE, AGENT] {
        rig.console().port_read(port, &mut bytes);
        rig.console().port_write(port, b"bytes of the host");
    }
    rig.settle();
}

const FAR: u64 = MEMORY as u64;
/// Chains that no queue may have.
const CHAINS: [&[Raw]; 9] = [
    // A circle of one descriptor, and of two.
    &[(0, 0, 1, flag::NEXT, 0)],
    &[(0, 0, 1, flag::NEXT, 1), (1, 0, 1, flag::NEXT, 0)],
    // A next descriptor out of the table.
    &[(0, 0, 1, flag::NEXT, 8)],
    &[(0, 0, 1, flag::NEXT, u16::MAX)],
    // Indirect tables, which are not offered.
    &[(0, 0x8_0000, 16, flag::INDIRECT, 0)],
    // Both directions.
    &[(0, 0, 8, flag::NEXT, 1), (1, 0, 8, flag::WRITE, 0)],
    // Memory that is not there.
    &[(0, FAR - 4, 16, 0, 0)],
    &[(0, u64::MAX - 4, 16, 0, 0)],
    &[(0, u64::MAX, u32::MAX, 0, 0)],
];

#[test]
fn chains_to_the_device_that_cannot_be_need_a_reset() {
    let mut rig = Rig::new(Options::default());
    for chain in CHAINS.iter().chain(&[&[(0, 0, 8, flag::WRITE, 0)][..]]) {
        let transmit = &mut rig.driver.ports[1].transmit.as_mut().unwrap().ring;
        put(transmit, chain);
        transmit.push_head(0).unwrap();
        transmit.publish().unwrap();
        assert!(!rig.needs_reset());
        pump(&mut rig);
        assert!(rig.needs_reset(), "{chain:?}");
        assert_eq!(rig.console().port_read(CONSOLE, &mut [0; 8]), 0);
        assert!(!rig.console().guest_open(AGENT));
        rig.recovers();
    }
}

#[test]
fn buffers_for_the_device_that_cannot_be_need_a_reset() {
    let writable = |raw: &Raw| (raw.0, raw.1, raw.2, raw.3 | flag::WRITE, raw.4);
    let mut rig = Rig::new(Options::default());
    let mut chains: Vec<Vec<Raw>> = CHAINS
        .iter()
        .filter(|chain| chain.len() != 2 || chain[1].3 & flag::WRITE == 0)
        .map(|chain| chain.iter().map(writable).collect())
        .collect();
    chains.extend([vec![(0, 0, 8, 0, 0)], vec![(0, 0, 0, flag::WRITE, 0)]]);
    for chain in chains {
        // The driver's own buffers become this chain.
        let receive = &mut rig.driver.ports[1].receive.as_mut().unwrap().ring;
        for head in 0..8 {
            put(receive, &[(head, chain[0].1, chain[0].2, chain[0].3, chain[0].4)]);
        }
        put(receive, &chain[1..]);
        pump(&mut rig);
        assert!(rig.needs_reset(), "{chain:?}");
        rig.recovers();
    }
}

#[test]
fn indexes_that_cannot_be_need_a_reset() {
    let mut rig = Rig::new(Options::default());
    for port in [CONSOLE, AGENT] {
        for ahead in [9_u16, 1000, 0x8000, u16::MAX] {
            let outbox = rig.driver.ports[usize::from(port)].transmit.as_ref().unwrap();
            let [_, ring, _] = outbox.ring.areas();
            let index = ring.load_u16(available::INDEX).unwrap();
            ring.store_u16(available::INDEX, index.wrapping_add(ahead)).unwrap();
            pump(&mut rig);
            assert!(rig.needs_reset(), "{ahead}");
            rig.recovers();
        }
    }
    let transmit = &mut rig.driver.ports[1].transmit.as_mut().unwrap().ring;
    transmit.push_head(8).unwrap();
    transmit.publish().unwrap();
    pump(&mut rig);
    assert!(rig.needs_reset(), "a head that is no descriptor");
    rig.recovers();
}

#[test]
fn a_queue_in_a_wrong_place_needs_a_reset() {
    use slipway_virtio::driver::Start;
    use slipway_virtio_spec::{RingFeatures, Status, pci::common};
    let mut rig = Rig::new(Options::default());
    for address in [FAR, FAR - 16, u64::MAX - 15] {
        let registers = &mut rig.driver.registers;
        registers.reset().unwrap();
        registers.negotiate(RingFeatures::VERSION_1.bits() | 2).unwrap();
        let select = queue::CONTROL_TRANSMIT.to_le_bytes();
        registers.function.write(0, common::QUEUE_SELECT, &select);
        for at in [common::QUEUE_DESC, common::QUEUE_DRIVER, common::QUEUE_DEVICE] {
            registers.function.write(0, at, &address.to_le_bytes());
        }
        registers.function.write(0, common::QUEUE_ENABLE, &[1, 0]);
        registers.set_status(Status::DRIVER_OK).unwrap();
        rig.settle();
        assert!(rig.needs_reset(), "{address:#x}");
        rig.recovers();
    }
    // Unaligned: refused at once.
    let registers = &mut rig.driver.registers;
    registers.reset().unwrap();
    registers.function.write(0, common::QUEUE_DESC, &8_u64.to_le_bytes());
    registers.function.write(0, common::QUEUE_ENABLE, &[1, 0]);
    assert!(rig.needs_reset());
    rig.recovers();
}

#[test]
fn one_call_does_a_bounded_amount_of_work() {
    let mut rig = Rig::new(Options::default());
    // Chains without bytes, as many as the queue has room for, again and again: the host's call
    // ends although it has got nothing.
    let mut calls = 0;
    for _ in 0..50 {
        let transmit = &mut rig.driver.ports[1].transmit.as_mut().unwrap().ring;
        while transmit.pop().unwrap().is_some() {}
        put(transmit, &[(0, 0, 0, 0, 0)]);
        for _ in 0..8 {
            transmit.push_head(0).unwrap();
        }
        transmit.publish().unwrap();
        assert_eq!(rig.console().port_read(AGENT, &mut [0; 64]), 0);
        calls += rig.settle();
    }
    assert!(calls <= 50 && !rig.needs_reset());
    // A driver that takes no messages: polls do not spin.
    rig.driver.start().unwrap();
    for value in 0..100 {
        rig.driver.say(1, event::PORT_OPEN, value % 2).unwrap();
        rig.console().set_host_open(AGENT, value % 2 == 0);
        rig.settle();
    }
    assert!(!rig.needs_reset());
    rig.console().set_host_open(AGENT, true);
    rig.recovers();
}

#[test]
fn control_buffers_that_are_too_short_need_a_reset() {
    let mut rig = Rig::new(Options::default());
    rig.driver.registers.function.set_host_open(AGENT, false);
    // The message was not told yet: the control queue's buffers are shortened before.
    let state = rig.console().save();
    let text = String::from_utf8(state).unwrap();
    let state: slipway_virtio::registers::QueueRegisters = {
        let at = text.find("\"queues\":[").unwrap() + "\"queues\":[".len();
        let each: Vec<&str> = text[at..].split_inclusive('}').take(3).collect();
        serde_json::from_str(each[2].trim_start_matches(',')).unwrap()
    };
    for head in 0..8_u64 {
        let short =
            Descriptor { address: 0.into(), len: 7.into(), flags: 2.into(), next: 0.into() };
        rig.memory.write(state.descriptors + 16 * head, short.as_bytes()).unwrap();
    }
    rig.settle();
    assert!(rig.needs_reset());
    rig.console().set_host_open(AGENT, true);
    rig.recovers();
}
