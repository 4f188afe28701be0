//! A driver on a device, on heap memory.
//!
//! Over 500 lines: a test for each rule of the requests, each short.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use slipway_pci::{FifoSink, Function, Progress, StateError};
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::RingFeatures;
use slipway_virtio_spec::mem::{Config, Features, Request, Response, request, response, state};
use slipway_virtio_spec::pci::common;
use zerocopy::IntoBytes;

use crate::driver::{
    Arena, Buffer, Direct, DriverError, FEATURES, SingleQueue, ask, request as request_of, submit,
    unplug_all,
};
use crate::{
    Geometry, MIN_BLOCK, Mem, MemoryHost, PIECE, Parts, PartsError, Refused, RequestError, VECTORS,
};

const MEMORY: usize = 1 << 20;
const BLOCK: u64 = 2 * MIN_BLOCK;
const BLOCKS: u64 = 100;
/// A region of which all is usable when one block was asked for.
const GEOMETRY: Geometry = Geometry {
    address: 5 << 30,
    bytes: BLOCKS * BLOCK,
    block: BLOCK,
    unit: BLOCKS * BLOCK,
    node: 2,
};
/// A region that grows by eight blocks.
const GROWING: Geometry = Geometry { unit: 8 * BLOCK, ..GEOMETRY };

/// The calls of the host, in pieces, and its answer to the next ones.
#[derive(Default)]
struct Host {
    plugged: Vec<(u64, u64)>,
    unplugged: Vec<u64>,
    /// The ends of the usable part, in blocks.
    revealed: Vec<u64>,
    refuses_to_reveal: bool,
    refuses_to_plug: bool,
    refuses_to_unplug: bool,
    /// The guest has access to these pieces.
    accessible: BTreeSet<u64>,
}

#[derive(Clone, Default)]
struct Handle(Arc<Mutex<Host>>);

impl Handle {
    fn refuses(&self, to_plug: bool, to_unplug: bool) {
        let mut host = self.0.lock().unwrap();
        (host.refuses_to_plug, host.refuses_to_unplug) = (to_plug, to_unplug);
    }

    /// Returns the ranges that were plugged since the last call, in pieces.
    fn plugged(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.0.lock().unwrap().plugged)
    }

    /// Returns the ends that the usable part got since the last call, in blocks.
    fn revealed(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap().revealed)
    }

    /// Returns the number of pieces to which the guest has access.
    fn accessible(&self) -> usize {
        self.0.lock().unwrap().accessible.len()
    }

    /// Returns the pieces that were given back since the last call.
    fn unplugged(&self) -> Vec<u64> {
        std::mem::take(&mut self.0.lock().unwrap().unplugged)
    }
}

impl MemoryHost for Handle {
    fn reveal(&mut self, end: u64) -> Result<(), Refused> {
        let mut host = self.0.lock().unwrap();
        if host.refuses_to_reveal {
            return Err(Refused);
        }
        host.revealed.push(end / BLOCK);
        Ok(())
    }

    fn plug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        let mut host = self.0.lock().unwrap();
        if host.refuses_to_plug {
            return Err(Refused);
        }
        host.plugged.push((range.start / PIECE, range.end / PIECE));
        for piece in range.start / PIECE..range.end / PIECE {
            assert!(host.accessible.insert(piece), "{piece} is plugged twice");
        }
        Ok(())
    }

    fn unplug(&mut self, range: Range<u64>) -> Result<(), Refused> {
        let mut host = self.0.lock().unwrap();
        if host.refuses_to_unplug {
            return Err(Refused);
        }
        host.accessible.retain(|piece| !range.contains(&(piece * PIECE)));
        Ok(())
    }

    fn discard(&mut self, piece: Range<u64>) -> Result<(), Refused> {
        assert_eq!(piece.end - piece.start, PIECE);
        let mut host = self.0.lock().unwrap();
        assert!(!host.accessible.contains(&(piece.start / PIECE)));
        if host.refuses_to_unplug {
            return Err(Refused);
        }
        host.unplugged.push(piece.start / PIECE);
        Ok(())
    }
}

type Driver = SingleQueue<Direct<Mem>>;

fn device(memory: &Memory, geometry: Geometry) -> (Mem, Handle, Arc<FifoSink>) {
    let (sink, handle) = (FifoSink::new(), Handle::default());
    let parts = Parts {
        memory: memory.clone(),
        interrupts: sink.interrupts(VECTORS),
        geometry,
        host: Box::new(handle.clone()),
    };
    (Mem::new(parts).unwrap(), handle, sink)
}

fn driver() -> (Driver, Handle, Memory, Arc<FifoSink>) {
    driver_of(GEOMETRY)
}

fn driver_of(geometry: Geometry) -> (Driver, Handle, Memory, Arc<FifoSink>) {
    let memory = Memory::heap(MEMORY);
    let (mem, handle, sink) = device(&memory, geometry);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let driver = SingleQueue::with_features(Direct::new(mem), arena, 16, FEATURES).unwrap();
    (driver, handle, memory, sink)
}

/// Returns a request for `blocks` blocks from block `first` on.
fn range(kind: u16, first: u64, blocks: u16) -> Request {
    request_of(kind, GEOMETRY.address + first * BLOCK, blocks)
}

fn config(driver: &mut Driver) -> Config {
    let mut config = Config::default();
    driver.registers.read_config(config.as_mut_bytes()).unwrap();
    config
}

/// Sends a request without a state in its response, and returns the response's type.
fn kind(driver: &mut Driver, request: &Request) -> u16 {
    ask(driver, request).unwrap().0
}

fn state_of(driver: &mut Driver, first: u64, blocks: u16) -> u16 {
    let (kind, state) = ask(driver, &range(request::STATE, first, blocks)).unwrap();
    assert_eq!(kind, response::ACK);
    state
}

#[test]
fn the_configuration_says_where_the_region_is_and_how_much_is_plugged() {
    let (mut driver, ..) = driver();
    driver.registers.function.request(3 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 7, 2)), response::ACK);
    let found = config(&mut driver);
    assert_eq!((found.block_size.get(), found.node_id.get()), (BLOCK, 2));
    assert_eq!((found.addr.get(), found.region_size.get()), (5 << 30, BLOCKS * BLOCK));
    assert_eq!(found.usable_region_size, found.region_size);
    assert_eq!((found.plugged_size.get(), found.requested_size.get()), (2 * BLOCK, 3 * BLOCK));
    driver.registers.function.write(0, slipway_virtio::layout::DEVICE.start, &[0xff; 8]);
    assert_eq!(config(&mut driver), found, "read-only");
}

#[test]
fn a_driver_that_would_touch_unplugged_memory_is_refused() {
    let memory = Memory::heap(MEMORY);
    for features in [0, Features::ACPI_PXM.bits()] {
        let (mem, ..) = device(&memory, GEOMETRY);
        let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
        let made = SingleQueue::with_features(Direct::new(mem), arena, 16, features);
        assert!(matches!(made, Err(DriverError::Features(_))));
    }
    let (mem, ..) = device(&memory, GEOMETRY);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let features = Features::UNPLUGGED_INACCESSIBLE.bits();
    let mut driver = SingleQueue::with_features(Direct::new(mem), arena, 16, features).unwrap();
    let rings = RingFeatures::VERSION_1 | RingFeatures::EVENT_IDX;
    assert_eq!(driver.registers.offered().unwrap(), FEATURES | rings.bits());
}

#[test]
fn a_new_size_is_told_at_once_and_only_if_it_is_new() {
    let (mut driver, _, _, sink) = driver();
    let mem = &mut driver.registers.function;
    mem.write(0, common::CONFIG_VECTOR, &0u16.to_le_bytes());
    sink.take();
    mem.request(2 * BLOCK).unwrap();
    assert_eq!(sink.take(), [0]);
    mem.request(2 * BLOCK).unwrap();
    assert_eq!(mem.request(BLOCK + 1), Err(RequestError::PartOfABlock(BLOCK)));
    let most = BLOCKS * BLOCK;
    assert_eq!(mem.request(most + BLOCK), Err(RequestError::TooLarge(most)));
    assert_eq!((mem.requested(), sink.take()), (2 * BLOCK, vec![]));
    mem.request(0).unwrap();
    assert_eq!(sink.take(), [0]);
}

#[test]
fn blocks_are_plugged_and_unplugged() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(64 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 10, 60)), response::ACK);
    assert_eq!(kind(&mut driver, &range(request::UNPLUG, 20, 3)), response::ACK);
    assert_eq!(host.plugged(), [(20, 140)]);
    assert_eq!(host.unplugged(), [40, 41, 42, 43, 44, 45], "all of it, piece by piece");
    assert_eq!(driver.registers.function.plugged(), 57 * BLOCK);
    assert_eq!(state_of(&mut driver, 0, 10), state::UNPLUGGED);
    assert_eq!(state_of(&mut driver, 10, 10), state::PLUGGED);
    assert_eq!(state_of(&mut driver, 19, 2), state::MIXED);
    assert_eq!(state_of(&mut driver, 20, 3), state::UNPLUGGED);
    assert_eq!(kind(&mut driver, &unplug_all()), response::ACK);
    assert!(host.unplugged().into_iter().eq(0..2 * BLOCKS), "what is not plugged, too");
    assert_eq!(driver.registers.function.plugged(), 0);
    assert_eq!(kind(&mut driver, &unplug_all()), response::ACK);
    assert_eq!(state_of(&mut driver, 0, BLOCKS as u16), state::UNPLUGGED);
}

/// Returns the blocks of the usable part.
fn usable(driver: &mut Driver) -> u64 {
    config(driver).usable_region_size.get() / BLOCK
}

#[test]
fn blocks_are_plugged_where_so_many_were_asked_for() {
    let (mut driver, host, ..) = driver_of(GROWING);
    assert_eq!(usable(&mut driver), 0);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 1)), response::ERROR);
    driver.registers.function.request(3 * BLOCK).unwrap();
    assert_eq!(usable(&mut driver), 8, "a whole unit");
    for (first, blocks) in [(8, 1), (7, 2), (99, 1)] {
        let plug = range(request::PLUG, first, blocks);
        assert_eq!(kind(&mut driver, &plug), response::ERROR, "{first}");
    }
    assert_eq!(kind(&mut driver, &range(request::PLUG, 6, 2)), response::ACK);
    driver.registers.function.request(0).unwrap();
    assert_eq!((usable(&mut driver), state_of(&mut driver, 6, 2)), (8, state::PLUGGED));
    host.0.lock().unwrap().refuses_to_reveal = true;
    let refused = driver.registers.function.request(9 * BLOCK);
    assert_eq!(refused, Err(RequestError::Unreachable));
    assert_eq!((driver.registers.function.requested(), usable(&mut driver)), (0, 8));
    driver.registers.function.request(8 * BLOCK).unwrap();
    host.0.lock().unwrap().refuses_to_reveal = false;
    driver.registers.function.request(98 * BLOCK).unwrap();
    assert_eq!((usable(&mut driver), host.revealed()), (BLOCKS, vec![8, BLOCKS]));
    assert_eq!(kind(&mut driver, &range(request::PLUG, 99, 1)), response::ACK);
}

#[test]
fn a_successor_has_the_usable_part() {
    let (mut driver, _, memory, _) = driver_of(GROWING);
    driver.registers.function.request(20 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 22, 2)), response::ACK);
    driver.registers.function.request(2 * BLOCK).unwrap();
    assert!(driver.registers.function.quiesce());
    let state = String::from_utf8(driver.registers.function.save()).unwrap();
    let restore = |state: &str| {
        let (mut mem, host, _) = device(&memory, GROWING);
        mem.restore(state.as_bytes()).map(|()| host.revealed())
    };
    assert_eq!(restore(&state), Ok(vec![24]));
    let usable = format!("\"usable\":{}", 24 * BLOCK);
    assert!(state.contains(&usable), "{state}");
    let without = state.replace(&format!("{usable},"), "");
    assert_eq!(restore(&without), Ok(vec![BLOCKS]), "of a device that did not grow");
    for bad in [23 * BLOCK, 101 * BLOCK, 24 * BLOCK + 1] {
        let state = state.replace(&usable, &format!("\"usable\":{bad}"));
        assert!(matches!(restore(&state), Err(StateError::Inconsistent(_))), "{bad}");
    }
}

#[test]
fn no_more_is_plugged_than_was_asked_for() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(BLOCK).unwrap();
    driver.registers.function.request(0).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 1)), response::NACK);
    driver.registers.function.request(2 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 3)), response::NACK);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 2)), response::ACK);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 2, 1)), response::NACK);
    assert_eq!(host.plugged(), [(0, 4)]);
    // A size below what is plugged takes nothing away by itself.
    driver.registers.function.request(BLOCK).unwrap();
    assert_eq!(driver.registers.function.plugged(), 2 * BLOCK);
    assert_eq!(kind(&mut driver, &range(request::UNPLUG, 0, 1)), response::ACK);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 1)), response::NACK);
}

#[test]
fn requests_that_cannot_be_are_errors_and_change_nothing() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(50 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 4, 2)), response::ACK);
    host.plugged();
    let address = GEOMETRY.address;
    let bad = [
        range(request::PLUG, 5, 1),
        range(request::PLUG, 3, 2),
        range(request::UNPLUG, 3, 2),
        range(request::UNPLUG, 5, 2),
        range(request::UNPLUG, 0, 1),
        range(request::PLUG, 0, 0),
        range(request::PLUG, BLOCKS, 1),
        range(request::PLUG, BLOCKS - 1, 2),
        range(request::STATE, BLOCKS - 1, u16::MAX),
        range(request::STATE, 0, 0),
        request_of(request::PLUG, address - BLOCK, 1),
        request_of(request::PLUG, address + MIN_BLOCK, 1),
        request_of(request::PLUG, 0, 1),
        request_of(request::STATE, u64::MAX - BLOCK + 1, u16::MAX),
        range(4, 0, 1),
        range(u16::MAX, 0, 1),
    ];
    for request in &bad {
        assert_eq!(kind(&mut driver, request), response::ERROR, "{request:?}");
    }
    assert_eq!((host.plugged(), host.unplugged()), (vec![], vec![]));
    assert_eq!(driver.registers.function.plugged(), 2 * BLOCK);
}

#[test]
fn a_host_that_refuses_keeps_the_driver_waiting_and_nothing_changes() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(8 * BLOCK).unwrap();
    host.refuses(true, false);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 4)), response::BUSY);
    assert_eq!(driver.registers.function.plugged(), 0);
    host.refuses(false, true);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 4)), response::ACK);
    assert_eq!(kind(&mut driver, &range(request::UNPLUG, 0, 4)), response::BUSY);
    assert_eq!(kind(&mut driver, &unplug_all()), response::BUSY);
    assert_eq!(driver.registers.function.plugged(), 4 * BLOCK);
    host.refuses(false, false);
    assert_eq!(kind(&mut driver, &range(request::UNPLUG, 0, 4)), response::ACK);
}

/// Has the device give back the first half of block 1 of four, and then refuse.
fn refused_on_the_way(request: &Request) -> (Driver, Handle) {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(4 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 4)), response::ACK);
    host.plugged();
    submit(&mut driver, request).unwrap();
    driver.ring.publish().unwrap();
    let polls = [(); 4].map(|()| driver.registers.function.poll());
    assert_eq!(polls, [Progress::Busy; 4]);
    assert_eq!(host.unplugged(), [0, 1, 2]);
    (driver, host)
}

/// The blocks that count as plugged are those to which the guest has access.
fn is_consistent(driver: &Driver, host: &Handle) -> bool {
    driver.registers.function.plugged() == host.accessible() as u64 * PIECE
}

#[test]
fn a_range_that_is_refused_on_the_way_stays_plugged_whole() {
    let request = range(request::UNPLUG, 0, 3);
    let (mut driver, host) = refused_on_the_way(&request);
    assert_eq!(host.accessible(), 2, "nothing of the range, from the start");
    host.refuses(false, true);
    driver.registers.function.poll();
    assert_eq!(host.plugged(), [(0, 6)], "the range");
    assert_eq!(driver.registers.function.plugged(), 4 * BLOCK);
    assert!(is_consistent(&driver, &host));
    let (mut driver, host) = refused_on_the_way(&request);
    host.refuses(true, true);
    driver.registers.function.poll();
    assert_eq!(driver.registers.function.plugged(), BLOCK, "nothing helps");
    assert!(is_consistent(&driver, &host));
    host.refuses(false, false);
    assert_eq!(kind(&mut driver, &request), response::ERROR);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 3)), response::ACK);
}

#[test]
fn a_refusal_on_the_way_leaves_whole_blocks() {
    for (refuses_to_plug, left) in [(false, 3), (true, 0)] {
        let (mut driver, host) = refused_on_the_way(&unplug_all());
        host.refuses(refuses_to_plug, true);
        driver.registers.function.poll();
        assert_eq!(driver.registers.function.plugged(), left * BLOCK);
        assert!(is_consistent(&driver, &host));
        host.refuses(false, false);
        assert_eq!(driver.ring.pop().unwrap().unwrap().len, 10);
        assert_eq!(kind(&mut driver, &unplug_all()), response::ACK);
        assert_eq!((driver.registers.function.plugged(), host.accessible()), (0, 0));
    }
}

#[test]
fn a_poll_gives_back_one_piece_and_the_answer_comes_after_the_last() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(4 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 0, 4)), response::ACK);
    submit(&mut driver, &range(request::UNPLUG, 0, 4)).unwrap();
    submit(&mut driver, &range(request::STATE, 0, 4)).unwrap();
    driver.ring.publish().unwrap();
    let pieces = 4 * BLOCK / PIECE;
    // The poll that takes the request gives nothing back.
    for piece in 0..=pieces {
        assert_eq!(driver.ring.pop().unwrap(), None, "before piece {piece}");
        assert_eq!(driver.registers.function.poll(), Progress::Busy);
        assert_eq!(host.unplugged(), if piece == 0 { vec![] } else { vec![piece - 1] });
        let left = 4 - piece / (BLOCK / PIECE);
        assert_eq!(driver.registers.function.plugged(), left * BLOCK);
    }
    assert_eq!(driver.ring.pop().unwrap().unwrap().len, 10);
    assert_eq!(driver.ring.pop().unwrap(), None, "answers are in order");
    assert_eq!(driver.registers.function.poll(), Progress::Busy);
    assert_eq!(driver.ring.pop().unwrap().unwrap().len, 10);
    assert_eq!(driver.registers.function.poll(), Progress::Idle(None));
}

#[test]
fn a_poll_answers_a_bounded_number_of_requests() {
    let memory = Memory::heap(MEMORY);
    let (mem, ..) = device(&memory, GEOMETRY);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let mut driver = SingleQueue::with_features(Direct::new(mem), arena, 16, FEATURES).unwrap();
    let mut answers = 0;
    for _ in 0..2 {
        for _ in 0..8 {
            submit(&mut driver, &range(request::STATE, 0, 1)).unwrap();
        }
        driver.ring.publish().unwrap();
        assert_eq!(driver.registers.function.poll(), Progress::Busy);
        answers += std::iter::from_fn(|| driver.ring.pop().unwrap()).count();
    }
    assert_eq!((answers, driver.registers.function.poll()), (16, Progress::Idle(None)));
}

#[test]
fn a_reset_forgets_the_request_and_its_blocks_are_given_back() {
    let by_status = |mem: &mut Mem| {
        mem.write(0, common::DEVICE_STATUS, &[0]);
    };
    for reset in [by_status, Mem::reset] {
        let (mut driver, host) = refused_on_the_way(&range(request::UNPLUG, 0, 3));
        reset(&mut driver.registers.function);
        assert_eq!(host.unplugged(), [0; 0], "a register access gives back nothing");
        assert_eq!(driver.registers.function.poll(), Progress::Busy);
        assert_eq!(host.unplugged(), [3], "there is no driver");
        driver.start().unwrap();
        assert_eq!(state_of(&mut driver, 0, 3), state::UNPLUGGED);
        assert_eq!(host.unplugged(), [4, 5], "before the next driver's request");
        assert_eq!(state_of(&mut driver, 3, 1), state::PLUGGED);
        assert!(is_consistent(&driver, &host));
    }
}

#[test]
fn drivers_that_break_the_rules_need_a_reset() {
    let (mut driver, host, ..) = driver();
    driver.registers.function.request(BLOCK).unwrap();
    let (at, far) = (MEMORY as u64 / 2, MEMORY as u64);
    let (request, response) = (size_of::<Request>() as u32, size_of::<Response>() as u32);
    let chains: [&[Buffer]; 6] = [
        &[Buffer::readable(at, request)],
        &[Buffer::writable(at, response)],
        &[Buffer::readable(at, request - 1), Buffer::writable(at, response)],
        &[Buffer::readable(at, request), Buffer::writable(at, response - 1)],
        &[Buffer::readable(far - 2, request), Buffer::writable(at, response)],
        &[Buffer::readable(at, request), Buffer::writable(u64::MAX - 1, response)],
    ];
    for (number, chain) in chains.into_iter().enumerate() {
        let bytes = range(request::STATE, 0, 1);
        driver.arena.memory().write(at, bytes.as_bytes()).unwrap();
        driver.ring.push(chain).unwrap();
        driver.ring.publish().unwrap();
        driver.registers.function.poll();
        let needs = driver.registers.needs_no_reset();
        assert!(matches!(needs, Err(DriverError::NeedsReset)), "chain {number}");
        driver.start().unwrap();
        assert_eq!(state_of(&mut driver, 0, 1), state::UNPLUGGED);
    }
    assert_eq!((host.plugged(), host.unplugged()), (vec![], vec![]));
}

#[test]
fn a_successor_goes_on() {
    let (mut driver, _, memory, _) = driver();
    driver.registers.function.request(9 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 2, 5)), response::ACK);
    assert_eq!(kind(&mut driver, &range(request::PLUG, 97, 3)), response::ACK);
    // A request that the predecessor has begun, and one that it has not seen.
    submit(&mut driver, &range(request::UNPLUG, 4, 1)).unwrap();
    let last = submit(&mut driver, &range(request::STATE, 4, 1)).unwrap();
    driver.ring.publish().unwrap();
    driver.registers.function.poll();
    driver.registers.function.poll();
    assert!(driver.registers.function.quiesce());
    assert_eq!(driver.registers.function.plugged(), 8 * BLOCK, "the driver has to ask again");
    let state = driver.registers.function.save();
    let (mut successor, host, sink) = device(&memory, GEOMETRY);
    successor.restore(&state).unwrap();
    assert_eq!(host.plugged(), [(4, 14), (194, 200)]);
    assert_eq!((successor.requested(), successor.plugged()), (9 * BLOCK, 8 * BLOCK));
    assert!(successor.save() == state);
    driver.registers.function = successor;
    driver.registers.function.poll();
    assert!(sink.take().contains(&1), "the predecessor may not have interrupted");
    assert_eq!(driver.ring.pop().unwrap().unwrap().len, 10);
    assert_eq!(driver.ring.pop().unwrap().unwrap().len, 10);
    let found = crate::driver::response(&driver, last).unwrap();
    assert_eq!(found, (response::ACK, state::PLUGGED));
    assert_eq!(kind(&mut driver, &range(request::UNPLUG, 97, 3)), response::ACK);
}

#[test]
fn states_of_other_devices_are_refused() {
    let (mut driver, _, memory, _) = driver();
    driver.registers.function.request(9 * BLOCK).unwrap();
    assert_eq!(kind(&mut driver, &range(request::PLUG, 2, 5)), response::ACK);
    assert!(driver.registers.function.quiesce());
    let state = String::from_utf8(driver.registers.function.save()).unwrap();
    let restore = |state: &str, geometry| {
        let (mut mem, ..) = device(&memory, geometry);
        let outcome = mem.restore(state.as_bytes());
        let mut status = [1];
        mem.read(0, common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(restore(&state, GEOMETRY), Ok(()));
    for other in [
        Geometry { node: 3, ..GEOMETRY },
        Geometry { address: 0, ..GEOMETRY },
        Geometry { bytes: BLOCK, ..GEOMETRY },
    ] {
        assert!(matches!(restore(&state, other), Err(StateError::Inconsistent(_))));
    }
    assert!(state.contains("[[2,7]]"), "{state}");
    for runs in
        ["[[2,2]]", "[[7,2]]", "[[99,101]]", "[[2,7],[6,8]]", "[[2,7],[7,8]]", "[[5,7],[1,2]]"]
    {
        let state = state.replace("[[2,7]]", runs);
        assert!(matches!(restore(&state, GEOMETRY), Err(StateError::Inconsistent(_))), "{runs}");
    }
    let requested = format!("\"requested\":{}", 9 * BLOCK);
    for bad in [BLOCKS * BLOCK + BLOCK, 1] {
        let state = state.replace(&requested, &format!("\"requested\":{bad}"));
        assert!(matches!(restore(&state, GEOMETRY), Err(StateError::Inconsistent(_))));
    }
    for bad in [
        "{}",
        &state.replace("mem\",\"version\":1", "mem\",\"version\":2"),
        &state.replace("virtio-mem", "virtio-pmem"),
        &state.replace("[[2,7]]", "[[-1,7]]"),
    ] {
        assert!(matches!(restore(bad, GEOMETRY), Err(StateError::Unknown(_))), "{bad}");
    }
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let made = |interrupts: u16, geometry| {
        let interrupts = FifoSink::new().interrupts(interrupts);
        let (memory, host) = (Memory::heap(4096), Box::new(Handle::default()));
        Mem::new(Parts { memory, interrupts, geometry, host }).err()
    };
    assert_eq!(made(2, GEOMETRY), None);
    assert_eq!(made(0, GEOMETRY), Some(PartsError::Interrupts(InterruptCount)));
    for geometry in [
        Geometry { block: MIN_BLOCK / 2, ..GEOMETRY },
        Geometry { block: 3 * MIN_BLOCK, bytes: 3 * MIN_BLOCK, ..GEOMETRY },
        Geometry { bytes: 0, ..GEOMETRY },
        Geometry { bytes: BLOCK + MIN_BLOCK, ..GEOMETRY },
        Geometry { address: MIN_BLOCK, ..GEOMETRY },
        Geometry { address: u64::MAX - BLOCK + 1, ..GEOMETRY },
        Geometry { bytes: ((1 << 16) + 1) * BLOCK, ..GEOMETRY },
        Geometry { unit: 0, ..GEOMETRY },
        Geometry { unit: BLOCK + MIN_BLOCK, ..GEOMETRY },
    ] {
        assert_eq!(made(2, geometry), Some(PartsError::Geometry), "{geometry:?}");
    }
}
