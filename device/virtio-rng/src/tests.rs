//! A driver on a device, on heap memory.

use std::sync::Arc;

use slipway_pci::{FifoSink, Function, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::pci::{common, config_type};
use slipway_virtio_spec::queue::{Descriptor, available, flag};
use zerocopy::IntoBytes;

use crate::driver::{Arena, Buffer, Direct, DriverError, SingleQueue, ask};
use crate::{LONGEST, Parts, Rng, VECTORS};

const MEMORY: usize = 1 << 20;

/// A device whose bytes count from `first` on, so that each is told from the next.
fn device(memory: &Memory, first: u8) -> (Rng, Arc<FifoSink>) {
    let sink = FifoSink::new();
    let mut next = first;
    let source = move |into: &mut [u8]| {
        assert!((1..=LONGEST).contains(&into.len()));
        for byte in into {
            *byte = next;
            next = next.wrapping_add(1);
        }
    };
    let parts = Parts {
        memory: memory.clone(),
        interrupts: sink.interrupts(VECTORS),
        source: Box::new(source),
    };
    (Rng::new(parts).unwrap(), sink)
}

fn driver() -> (SingleQueue<Direct<Rng>>, Memory, Arc<FifoSink>) {
    let memory = Memory::heap(MEMORY);
    let (rng, sink) = device(&memory, 0);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    (SingleQueue::new(Direct::new(rng), arena, 8).unwrap(), memory, sink)
}

fn needs_reset(driver: &mut SingleQueue<Direct<Rng>>) -> bool {
    matches!(driver.registers.needs_no_reset(), Err(DriverError::NeedsReset))
}

fn recovers(driver: &mut SingleQueue<Direct<Rng>>) {
    driver.start().unwrap();
    assert_eq!(ask(driver, &[32]).unwrap().len(), 32);
}

#[test]
fn buffers_are_filled_from_the_source() {
    let (mut driver, _, sink) = driver();
    assert_eq!(ask(&mut driver, &[4]).unwrap(), [0, 1, 2, 3]);
    assert_eq!(ask(&mut driver, &[1, 0, 3]).unwrap(), [4, 5, 6, 7]);
    let most: Vec<u8> = (0..LONGEST).map(|at| at as u8).map(|at| at.wrapping_add(8)).collect();
    assert!(
        ask(&mut driver, &[700, 700]).unwrap() == most,
        "no more than the device gives at a time"
    );
    sink.take();
    assert!(!driver.ring.want_interrupt().unwrap());
    ask(&mut driver, &[1]).unwrap();
    assert_eq!(sink.take(), [1]);
}

#[test]
fn a_poll_fills_a_bounded_number_of_buffers() {
    let (mut driver, ..) = driver();
    let mut filled = 0;
    for round in 0..10 {
        while driver.ring.room() > 0 {
            driver.ring.push(&[Buffer::writable(0x8_0000, u32::MAX >> 16)]).unwrap();
            filled += 1;
        }
        assert!(driver.ring.publish().unwrap(), "round {round}");
        let rng = &mut driver.registers.function;
        assert_eq!((rng.poll(), rng.poll()), (Progress::Busy, Progress::Idle(None)));
        while driver.ring.pop().unwrap().is_some() {
            filled -= 1;
        }
        assert_eq!(filled, 0);
    }
}

#[test]
fn drivers_that_break_the_rules_need_a_reset() {
    let (mut driver, ..) = driver();
    let far = MEMORY as u64;
    for (address, len, flags, next) in [
        (0, 8, 0, 0),
        (0, 0, flag::WRITE, 0),
        (0, 8, flag::WRITE | flag::NEXT, 0),
        (0, 8, flag::WRITE | flag::NEXT, 8),
        (0, 16, flag::INDIRECT, 0),
        (far - 4, 8, flag::WRITE, 0),
        (u64::MAX - 4, 8, flag::WRITE, 0),
    ] {
        let descriptor = Descriptor {
            address: u64::into(address),
            len: u32::into(len),
            flags: flags.into(),
            next: u16::into(next),
        };
        driver.ring.areas()[0].write(0, descriptor.as_bytes()).unwrap();
        driver.ring.push_head(0).unwrap();
        driver.ring.publish().unwrap();
        driver.registers.function.poll();
        assert!(needs_reset(&mut driver), "{address:#x} {len} {flags} {next}");
        recovers(&mut driver);
    }
    for ahead in [9_u16, 0x8000, u16::MAX] {
        let [_, ring, _] = driver.ring.areas();
        let index = ring.load_u16(available::INDEX).unwrap();
        ring.store_u16(available::INDEX, index.wrapping_add(ahead)).unwrap();
        driver.registers.function.poll();
        assert!(needs_reset(&mut driver), "{ahead}");
        recovers(&mut driver);
    }
}

#[test]
fn there_is_no_device_configuration() {
    let (rng, _) = device(&Memory::heap(4096), 0);
    let (mut rng, mut found, mut at) = (rng, Vec::new(), [0x34]);
    rng.config_read(0x34, &mut at);
    while at != [0] {
        let mut head = [0; 4];
        rng.config_read(at[0].into(), &mut head);
        if head[0] == 9 {
            found.push(head[3]);
        }
        at = [head[1]];
    }
    let expected = [config_type::COMMON, config_type::NOTIFY, config_type::ISR, config_type::PCI];
    assert_eq!(found, expected);
    let mut bytes = [1; 4];
    rng.read(0, slipway_virtio::layout::DEVICE.start, &mut bytes);
    assert_eq!(bytes, [0; 4]);
}

#[test]
fn a_successor_goes_on() {
    let (mut driver, memory, _) = driver();
    for round in 0..20 {
        // One buffer that the predecessor has not seen.
        let waits = round % 2 == 0;
        if waits {
            driver.ring.push(&[Buffer::writable(0x8_0000, 4)]).unwrap();
            driver.ring.publish().unwrap();
        }
        assert!(driver.registers.function.quiesce());
        let state = driver.registers.function.save();
        let (mut successor, sink) = device(&memory, 100);
        successor.restore(&state).unwrap();
        driver.registers.function = successor;
        driver.registers.function.poll();
        assert!(sink.take().contains(&1), "the predecessor may not have interrupted");
        if waits {
            assert_eq!(driver.ring.pop().unwrap().unwrap().len, 4);
        }
        assert_eq!(ask(&mut driver, &[4]).unwrap().len(), 4);
    }
}

#[test]
fn states_that_cannot_be_are_refused() {
    let (mut driver, memory, _) = driver();
    assert!(driver.registers.function.quiesce());
    let state = String::from_utf8(driver.registers.function.save()).unwrap();
    let restore = |state: &str| {
        let (mut rng, _) = device(&memory, 0);
        let outcome = rng.restore(state.as_bytes());
        let mut status = [1];
        rng.read(0, common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(restore(&state), Ok(()));
    for bad in [
        "{}",
        &state.replace("rng\",\"version\":1", "rng\",\"version\":2"),
        &state.replace("virtio-rng", "virtio-net"),
        &state.replace("\"own\":{}", "\"own\":{\"more\":1}"),
    ] {
        assert!(matches!(restore(bad), Err(StateError::Unknown(_))), "{bad}");
    }
    for (good, bad) in [
        ("\"size\":8", "\"size\":16"),
        ("\"size\":8", "\"size\":0"),
        ("\"status\":15", "\"status\":7"),
        ("\"resetting\":false", "\"resetting\":true"),
        ("\"queues\":[", "\"queues\":[], \"queues\":["),
    ] {
        let changed = state.replace(good, bad);
        assert_ne!(changed, state);
        assert!(restore(&changed).is_err(), "{bad}");
    }
}

#[test]
fn a_device_without_interrupts_is_refused() {
    let memory = Memory::heap(4096);
    let parts = Parts { memory, interrupts: Vec::new(), source: Box::new(|_| {}) };
    assert_eq!(Rng::new(parts).err(), Some(InterruptCount));
}
