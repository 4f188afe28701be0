//! A driver on a device, on heap memory.

use std::sync::{Arc, Mutex};

use slipway_pci::{FifoSink, Function, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::balloon::{Features, queue};
use slipway_virtio_spec::pci::common;

use crate::driver::{Arena, Buffer, Direct, DriverError, Reporter};
use crate::{Balloon, PIECE, PIECES, Parts, VECTORS};

/// Bytes of the guest's memory that can be given back.
const END: u64 = 64 << 20;
/// Bytes of the memory with the queues.
const MEMORY: usize = 1 << 20;

/// The addresses of the pieces that were given back.
type Given = Arc<Mutex<Vec<u64>>>;

fn device(memory: &Memory) -> (Balloon, Given, Arc<FifoSink>) {
    let (sink, given) = (FifoSink::new(), Given::default());
    let its = Arc::clone(&given);
    let discard = Box::new(move |at: u64| {
        assert!(at.is_multiple_of(PIECE));
        let exists = at < END;
        if exists {
            its.lock().unwrap().push(at);
        }
        exists
    });
    let interrupts = sink.interrupts(VECTORS);
    let parts = Parts { memory: memory.clone(), interrupts, discard };
    (Balloon::new(parts).unwrap(), given, sink)
}

type Driver = Reporter<Direct<Balloon>>;

fn driver(number: u16) -> (Driver, Given, Memory) {
    let memory = Memory::heap(MEMORY);
    let (balloon, given, _) = device(&memory);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    (Reporter::new(Direct::new(balloon), arena, number).unwrap(), given, memory)
}

fn taken(given: &Given) -> Vec<u64> {
    std::mem::take(&mut given.lock().unwrap())
}

const LINUX: u16 = queue::REPORTING_WITHOUT_OTHERS;

#[test]
fn reported_ranges_are_given_back_in_whole_pieces() {
    for number in [LINUX, queue::REPORTING] {
        let (mut driver, given, _) = driver(number);
        let piece = PIECE as u32;
        driver.report(&[(4 * PIECE, piece), (8 * PIECE, 2 * piece)]).unwrap();
        assert_eq!(taken(&given), [4 * PIECE, 8 * PIECE, 9 * PIECE]);
        // The first and the last piece are not whole.
        driver.report(&[(4 * PIECE - 4096, 2 * piece + 8192)]).unwrap();
        assert_eq!(taken(&given), [4 * PIECE, 5 * PIECE]);
        driver.report(&[(PIECE + 4096, piece), (0, 4096)]).unwrap();
        assert!(taken(&given).is_empty());
    }
}

#[test]
fn ranges_that_overlap_are_given_back_twice() {
    let (mut driver, given, _) = driver(LINUX);
    driver.report(&[(0, 2 * PIECE as u32), (PIECE, PIECE as u32), (0, PIECE as u32)]).unwrap();
    assert_eq!(taken(&given), [0, PIECE, PIECE, 0]);
}

#[test]
fn a_poll_serves_one_report_and_gives_back_a_bounded_number_of_pieces() {
    let (mut driver, given, _) = driver(LINUX);
    let all = Buffer::writable(0, END as u32);
    driver.submit(&[all; 3]).unwrap();
    driver.submit(&[Buffer::writable(0, PIECE as u32)]).unwrap();
    assert_eq!(driver.registers.function.poll(), Progress::Busy);
    assert_eq!(taken(&given).len(), PIECES, "of 96");
    assert_eq!(driver.ring.pop().unwrap().unwrap().len, 0);
    assert!(driver.ring.pop().unwrap().is_none());
    assert_eq!(driver.registers.function.poll(), Progress::Busy);
    assert_eq!(taken(&given), [0]);
    assert_eq!(driver.registers.function.poll(), Progress::Idle(None));
}

#[test]
fn drivers_that_break_the_rules_need_a_reset() {
    let (mut driver, given, _) = driver(LINUX);
    let piece = PIECE as u32;
    let chains: [&[Buffer]; 6] = [
        &[Buffer::readable(0, piece)],
        &[Buffer::readable(0, 4), Buffer::writable(0, piece)],
        &[Buffer::writable(0, 0)],
        &[Buffer::writable(END, piece)],
        &[Buffer::writable(END - PIECE, 2 * piece)],
        &[Buffer::writable(u64::MAX - 2 * PIECE, u32::MAX)],
    ];
    for (number, chain) in chains.into_iter().enumerate() {
        driver.submit(chain).unwrap();
        while driver.registers.function.poll().is_busy() {}
        let needs = driver.registers.needs_no_reset();
        assert!(matches!(needs, Err(DriverError::NeedsReset)), "chain {number}");
        assert!(driver.ring.pop().unwrap().is_none());
        taken(&given);
        assert_eq!(driver.registers.function.poll(), Progress::Idle(None));
        driver.start().unwrap();
        driver.report(&[(PIECE, piece)]).unwrap();
        assert_eq!(taken(&given), [PIECE]);
    }
}

#[test]
fn what_is_put_into_an_inflated_balloon_stays_the_guests() {
    for number in [queue::INFLATE, queue::DEFLATE] {
        let (mut driver, given, _) = driver(number);
        driver.submit(&[Buffer::readable(0, 4096)]).unwrap();
        assert_eq!(driver.registers.function.poll(), Progress::Idle(None));
        assert!(taken(&given).is_empty());
    }
}

#[test]
fn a_driver_is_asked_for_no_page_and_offered_no_poison() {
    let (mut driver, ..) = driver(LINUX);
    let mut config = [1; 16];
    driver.registers.read_config(&mut config).unwrap();
    assert_eq!(config, [0; 16]);
    let offered = Features::from_bits_truncate(driver.registers.offered().unwrap());
    assert_eq!(offered, Features::PAGE_REPORTING);
}

#[test]
fn a_successor_serves_what_its_predecessor_has_not_seen() {
    let (mut driver, before, memory) = driver(LINUX);
    driver.submit(&[Buffer::writable(0, 2 * PIECE as u32)]).unwrap();
    assert!(driver.registers.function.quiesce());
    let state = driver.registers.function.save();
    let (mut successor, given, sink) = device(&memory);
    successor.restore(&state).unwrap();
    assert_eq!(successor.save(), state);
    driver.registers.function = successor;
    while driver.registers.function.poll().is_busy() {}
    assert!(driver.ring.pop().unwrap().is_some());
    assert_eq!((taken(&before), taken(&given)), (vec![], vec![0, PIECE]));
    assert!(sink.take().contains(&LINUX), "the predecessor may not have interrupted");
    driver.report(&[(0, PIECE as u32)]).unwrap();
}

#[test]
fn states_of_other_devices_are_refused() {
    let (mut driver, _, memory) = driver(LINUX);
    assert!(driver.registers.function.quiesce());
    let state = String::from_utf8(driver.registers.function.save()).unwrap();
    let restore = |state: &str| {
        let (mut balloon, ..) = device(&memory);
        let outcome = balloon.restore(state.as_bytes());
        let mut status = [1];
        balloon.read(0, common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(restore(&state), Ok(()));
    for bad in [
        "{}",
        &state.replace("balloon\",\"version\":1", "balloon\",\"version\":2"),
        &state.replace("virtio-balloon", "virtio-rng"),
        &state.replace("\"own\":null", "\"own\":{}"),
    ] {
        assert!(matches!(restore(bad), Err(StateError::Unknown(_))), "{bad}");
    }
}

#[test]
fn a_device_without_interrupts_is_refused() {
    let (memory, discard) = (Memory::heap(4096), Box::new(|_: u64| true));
    let parts = Parts { memory, interrupts: Vec::new(), discard };
    assert_eq!(Balloon::new(parts).err(), Some(InterruptCount));
}
