//! A driver on a device, on heap memory.

use std::sync::Arc;

use slipway_pci::{FifoSink, Function, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::pci::common;
use slipway_virtio_spec::pmem::{DONE, FAILED, FLUSH};

use crate::driver::{Arena, Buffer, Direct, DriverError, SingleQueue, ask, submit};
use crate::{Parts, Pmem, VECTORS};

const MEMORY: usize = 1 << 20;
const RANGE: (u64, u64) = (5 << 30, 6 << 20);

fn device(memory: &Memory, (start, bytes): (u64, u64)) -> (Pmem, Arc<FifoSink>) {
    let sink = FifoSink::new();
    let interrupts = sink.interrupts(VECTORS);
    let parts = Parts { memory: memory.clone(), interrupts, start, bytes };
    (Pmem::new(parts).unwrap(), sink)
}

fn driver() -> (SingleQueue<Direct<Pmem>>, Memory, Arc<FifoSink>) {
    let memory = Memory::heap(MEMORY);
    let (pmem, sink) = device(&memory, RANGE);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    (SingleQueue::new(Direct::new(pmem), arena, 16).unwrap(), memory, sink)
}

#[test]
fn the_configuration_is_the_range() {
    let (mut pmem, _) = device(&Memory::heap(4096), RANGE);
    let mut bytes = [0; 16];
    pmem.read(0, slipway_virtio::layout::DEVICE.start, &mut bytes);
    assert_eq!(bytes[..8], RANGE.0.to_le_bytes());
    assert_eq!(bytes[8..], RANGE.1.to_le_bytes());
    pmem.write(0, slipway_virtio::layout::DEVICE.start, &[0xff; 8]);
    let mut again = [0; 16];
    pmem.read(0, slipway_virtio::layout::DEVICE.start, &mut again);
    assert_eq!(again, bytes, "read-only");
}

#[test]
fn a_flush_is_done_and_nothing_else_is() {
    let (mut driver, _, sink) = driver();
    assert_eq!(ask(&mut driver, FLUSH).unwrap(), DONE);
    for kind in [1, 2, u32::MAX] {
        assert_eq!(ask(&mut driver, kind).unwrap(), FAILED);
    }
    sink.take();
    assert!(!driver.ring.want_interrupt().unwrap());
    ask(&mut driver, FLUSH).unwrap();
    assert_eq!(sink.take(), [1]);
}

#[test]
fn a_poll_answers_a_bounded_number_of_requests() {
    let memory = Memory::heap(MEMORY);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let (pmem, _) = device(&memory, RANGE);
    let mut driver = SingleQueue::new(Direct::new(pmem), arena, 64).unwrap();
    for _ in 0..32 {
        submit(&mut driver, FLUSH).unwrap();
    }
    assert!(driver.ring.publish().unwrap());
    let pmem = &mut driver.registers.function;
    let polls = [pmem.poll(), pmem.poll(), pmem.poll()];
    assert_eq!(polls, [Progress::Busy, Progress::Busy, Progress::Idle(None)]);
    let answers = std::iter::from_fn(|| driver.ring.pop().unwrap());
    assert_eq!(answers.map(|used| used.len).collect::<Vec<_>>(), [4; 32]);
}

#[test]
fn drivers_that_break_the_rules_need_a_reset() {
    let (mut driver, ..) = driver();
    let at = MEMORY as u64 / 2;
    let far = MEMORY as u64;
    let chains: [&[Buffer]; 6] = [
        &[Buffer::readable(at, 4)],
        &[Buffer::writable(at, 4)],
        &[Buffer::readable(at, 3), Buffer::writable(at, 4)],
        &[Buffer::readable(at, 4), Buffer::writable(at, 3)],
        &[Buffer::readable(far - 2, 4), Buffer::writable(at, 4)],
        &[Buffer::readable(at, 4), Buffer::writable(u64::MAX - 1, 4)],
    ];
    for (number, chain) in chains.into_iter().enumerate() {
        driver.ring.push(chain).unwrap();
        driver.ring.publish().unwrap();
        driver.registers.function.poll();
        let needs = driver.registers.needs_no_reset();
        assert!(matches!(needs, Err(DriverError::NeedsReset)), "chain {number}");
        driver.start().unwrap();
        assert_eq!(ask(&mut driver, FLUSH).unwrap(), DONE);
    }
}

#[test]
fn a_successor_goes_on() {
    let (mut driver, memory, _) = driver();
    for round in 0..20 {
        // A request that the predecessor has not seen.
        let waits = round % 2 == 0;
        if waits {
            submit(&mut driver, FLUSH).unwrap();
            driver.ring.publish().unwrap();
        }
        assert!(driver.registers.function.quiesce());
        let state = driver.registers.function.save();
        let (mut successor, sink) = device(&memory, RANGE);
        successor.restore(&state).unwrap();
        driver.registers.function = successor;
        driver.registers.function.poll();
        assert!(sink.take().contains(&1), "the predecessor may not have interrupted");
        if waits {
            assert_eq!(driver.ring.pop().unwrap().unwrap().len, 4);
        }
        assert_eq!(ask(&mut driver, FLUSH).unwrap(), DONE);
    }
}

#[test]
fn states_of_other_devices_are_refused() {
    let (mut driver, memory, _) = driver();
    assert!(driver.registers.function.quiesce());
    let state = String::from_utf8(driver.registers.function.save()).unwrap();
    let restore = |state: &str, range| {
        let (mut pmem, _) = device(&memory, range);
        let outcome = pmem.restore(state.as_bytes());
        let mut status = [1];
        pmem.read(0, common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(restore(&state, RANGE), Ok(()));
    for range in [(RANGE.0, RANGE.1 + 1), (0, RANGE.1)] {
        assert!(matches!(restore(&state, range), Err(StateError::Inconsistent(_))));
    }
    for bad in [
        "{}",
        &state.replace("pmem\",\"version\":1", "pmem\",\"version\":2"),
        &state.replace("virtio-pmem", "virtio-rng"),
    ] {
        assert!(matches!(restore(bad, RANGE), Err(StateError::Unknown(_))), "{bad}");
    }
}

#[test]
fn a_device_without_interrupts_is_refused() {
    let parts = Parts { memory: Memory::heap(4096), interrupts: Vec::new(), start: 0, bytes: 0 };
    assert_eq!(Pmem::new(parts).err(), Some(InterruptCount));
}
