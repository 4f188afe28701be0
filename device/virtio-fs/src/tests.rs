//! A driver on a device, on heap memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_pci::{FifoSink, Function, StateError};
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;
use slipway_virtio::driver::Start;
use slipway_virtio_spec::fs::{FIRST_REQUEST_QUEUE, HIGH_PRIORITY_QUEUE, RequestHeader};
use slipway_virtio_spec::queue::{Descriptor, available, flag};
use zerocopy::IntoBytes;

use crate::driver::{Arena, Direct, Driver, DriverError};
use crate::{
    FileServer, Fs, LONGEST_REQUEST, MOST_BYTES, MOST_REQUESTS, Parts, PartsError, Reply, Request,
    VECTORS,
};

const MEMORY: usize = 16 << 20;
const REQUESTS: u16 = FIRST_REQUEST_QUEUE;

/// The test's side of the file server.
#[derive(Default)]
struct ServerState {
    begun: Vec<Request>,
    replies: VecDeque<Reply>,
    sessions_ended: usize,
    /// Answer each request at once with its own bytes.
    echoes: bool,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<ServerState>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.0.lock().unwrap()
    }

    /// Answers the request that was begun as number `index` of those that wait.
    fn answer(&self, index: usize, bytes: &[u8]) {
        let mut state = self.lock();
        let ticket = state.begun.remove(index).ticket;
        state.replies.push_back(Reply { ticket, bytes: bytes.to_vec() });
    }
}

impl FileServer for Shared {
    fn begin(&mut self, request: Request) {
        let mut state = self.lock();
        if !state.echoes {
            state.begun.push(request);
            return;
        }
        let Request { ticket, message: bytes, .. } = request;
        state.replies.push_back(Reply { ticket, bytes });
    }

    fn take_reply(&mut self) -> Option<Reply> {
        self.lock().replies.pop_front()
    }

    fn end_session(&mut self) {
        self.lock().sessions_ended += 1;
    }
}

fn parts(memory: &Memory, server: &Shared) -> (Parts, Arc<FifoSink>) {
    let sink = FifoSink::new();
    let parts = Parts {
        memory: memory.clone(),
        interrupts: sink.interrupts(VECTORS),
        tag: "share-0".into(),
        server: Box::new(server.clone()),
        session: 5,
    };
    (parts, sink)
}

struct Rig {
    driver: Driver<Direct<Fs>>,
    server: Shared,
    sink: Arc<FifoSink>,
    memory: Memory,
}

fn rig(entries: u16) -> Rig {
    let (memory, server) = (Memory::heap(MEMORY), Shared::default());
    let (parts, sink) = parts(&memory, &server);
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let driver = Driver::new(Direct::new(Fs::new(parts).unwrap()), arena, entries).unwrap();
    Rig { driver, server, sink, memory }
}

/// Returns a request with these bytes behind a header.
fn request(tail: &[u8]) -> Vec<u8> {
    let len = size_of::<RequestHeader>() + tail.len();
    let header = RequestHeader { len: (len as u32).into(), ..RequestHeader::default() };
    [header.as_bytes(), tail].concat()
}

fn needs_reset(driver: &mut Driver<Direct<Fs>>) -> bool {
    driver.registers.function.poll();
    matches!(driver.registers.needs_no_reset(), Err(DriverError::NeedsReset))
}

#[test]
fn the_configuration_has_the_tag() {
    let mut rig = rig(8);
    let mut bytes = [0; 44];
    rig.driver.registers.read_config(&mut bytes).unwrap();
    assert_eq!(&bytes[..8], b"share-0\0");
    assert_eq!(bytes[8..36], [0; 28]);
    assert_eq!(bytes[36..], [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_request_is_copied_and_its_reply_is_spread_over_the_buffers() {
    let mut rig = rig(8);
    rig.server.lock().echoes = true;
    let message = request(b"hello");
    for queue in [HIGH_PRIORITY_QUEUE, REQUESTS] {
        assert_eq!(rig.driver.call(queue, &message, &[16, 0, 40]).unwrap(), message);
    }
    assert!(rig.driver.call(REQUESTS, &message, &[]).unwrap().is_empty(), "no room, no reply");
    assert_eq!(rig.driver.call(REQUESTS, &message, &[3]).unwrap(), message[..3]);
    assert!(!rig.sink.take().contains(&0));
}

#[test]
fn replies_come_in_any_order() {
    let mut rig = rig(16);
    let asked: Vec<_> =
        (0..4).map(|n| rig.driver.ask(REQUESTS, &request(&[n]), &[16]).unwrap()).collect();
    assert_eq!(rig.driver.pop(REQUESTS).unwrap(), None);
    assert_eq!(rig.server.lock().begun.len(), 4);
    for (index, expected) in [(2, 2), (0, 0), (1, 3), (0, 1)] {
        rig.server.answer(index, &[expected as u8; 4]);
        let used = rig.driver.pop(REQUESTS).unwrap().unwrap();
        assert_eq!(used.id, asked[expected].id);
        assert_eq!(rig.driver.reply(asked[expected], used).unwrap(), [expected as u8; 4]);
    }
    rig.sink.take();
    assert!(!rig.driver.rings[1].want_interrupt().unwrap());
    rig.driver.ask(REQUESTS, &request(&[]), &[16]).unwrap();
    rig.driver.pop(REQUESTS).unwrap();
    rig.server.answer(0, &[]);
    rig.driver.registers.function.poll();
    assert_eq!(rig.sink.take(), [REQUESTS + 1], "the vector of the queue");
}

#[test]
fn the_requests_under_way_are_bounded() {
    let mut rig = rig(256);
    for _ in 0..MOST_REQUESTS + 10 {
        rig.driver.ask(REQUESTS, &request(&[]), &[16]).unwrap();
    }
    let poll = |rig: &mut Rig| while rig.driver.registers.function.poll().is_busy() {};
    poll(&mut rig);
    assert_eq!(rig.server.lock().begun.len(), MOST_REQUESTS);
    rig.server.answer(0, &[]);
    poll(&mut rig);
    assert_eq!(rig.server.lock().begun.len(), MOST_REQUESTS);
    // A reset makes no room: the file server still works on them.
    for round in 1..4 {
        rig.driver.start().unwrap();
        assert_eq!(rig.server.lock().sessions_ended, round);
        rig.driver.ask(REQUESTS, &request(&[]), &[16]).unwrap();
        poll(&mut rig);
        assert_eq!(rig.server.lock().begun.len(), MOST_REQUESTS);
    }
    for _ in 0..MOST_REQUESTS {
        rig.server.answer(0, &[9; 16]);
    }
    poll(&mut rig);
    assert_eq!(rig.driver.pop(REQUESTS).unwrap(), None, "no reply to earlier requests");
    rig.server.answer(0, &[1; 16]);
    assert_eq!(rig.driver.pop(REQUESTS).unwrap().unwrap().len, 16);
}

#[test]
fn the_bytes_under_way_are_bounded() {
    let mut rig = rig(64);
    let room = 1 << 20;
    for _ in 0..12 {
        rig.driver.ask(REQUESTS, &request(&[]), &[room]).unwrap();
    }
    while rig.driver.registers.function.poll().is_busy() {}
    assert_eq!(rig.server.lock().begun.len(), MOST_BYTES / (1 << 20));
}

#[test]
fn drivers_that_break_the_rules_need_a_reset() {
    let mut rig = rig(8);
    rig.server.lock().echoes = true;
    let driver = &mut rig.driver;
    let far = MEMORY as u64;
    for (address, len, flags, next) in [
        (0, 39, 0, 0),
        (0, 0, 0, 0),
        (0, LONGEST_REQUEST as u32 + 1, 0, 0),
        (0, u32::MAX, 0, 0),
        (0, 64, flag::WRITE, 0),
        (0, 64, flag::NEXT, 0),
        (0, 64, flag::NEXT, 8),
        (0, 15, flag::INDIRECT, 0),
        (far - 4, 64, 0, 0),
        (u64::MAX - 4, 64, 0, 0),
    ] {
        for queue in [HIGH_PRIORITY_QUEUE, REQUESTS] {
            let descriptor = Descriptor {
                address: u64::into(address),
                len: u32::into(len),
                flags: flags.into(),
                next: u16::into(next),
            };
            let ring = &mut driver.rings[usize::from(queue)];
            ring.areas()[0].write(0, descriptor.as_bytes()).unwrap();
            ring.push_head(0).unwrap();
            ring.publish().unwrap();
            assert!(needs_reset(driver), "{address:#x} {len} {flags} {next}");
            driver.start().unwrap();
            assert_eq!(driver.call(queue, &request(b"a"), &[64]).unwrap(), request(b"a"));
        }
    }
    for ahead in [9_u16, 0x8000, u16::MAX] {
        let [_, ring, _] = driver.rings[1].areas();
        let index = ring.load_u16(available::INDEX).unwrap();
        ring.store_u16(available::INDEX, index.wrapping_add(ahead)).unwrap();
        assert!(needs_reset(driver), "{ahead}");
        driver.start().unwrap();
    }
}

#[test]
fn a_reply_to_memory_that_is_gone_needs_a_reset() {
    let mut rig = rig(8);
    let asked = rig.driver.ask(REQUESTS, &request(&[]), &[16]).unwrap();
    assert_eq!(rig.driver.pop(REQUESTS).unwrap(), None);
    // The device has read the descriptor: a change is too late.
    let elsewhere = Descriptor {
        address: (MEMORY as u64).into(),
        len: 16.into(),
        flags: flag::WRITE.into(),
        next: 0.into(),
    };
    let at = 16 * (usize::from(asked.id) ^ 1);
    rig.driver.rings[1].areas()[0].write(at, elsewhere.as_bytes()).unwrap();
    rig.server.answer(0, &[3; 16]);
    let used = rig.driver.pop(REQUESTS).unwrap().unwrap();
    assert_eq!(rig.driver.reply(asked, used).unwrap(), [3; 16]);
}

#[test]
fn a_successor_with_the_same_session_goes_on() {
    let mut rig = rig(8);
    rig.driver.ask(REQUESTS, &request(&[]), &[16]).unwrap();
    rig.driver.pop(REQUESTS).unwrap();
    let function = &mut rig.driver.registers.function;
    assert!(function.quiesce());
    let under_way = function.save();
    let restore = |state: &[u8], session| {
        let (parts, _) = parts(&rig.memory, &rig.server);
        let mut fs = Fs::new(Parts { session, ..parts }).unwrap();
        fs.restore(state).map(|()| fs)
    };
    assert!(matches!(restore(&under_way, 5).err(), Some(StateError::Inconsistent(_))));
    rig.server.answer(0, &[1; 16]);
    function.poll();
    assert!(function.quiesce());
    let state = function.save();
    assert!(matches!(restore(&state, 6).err(), Some(StateError::Inconsistent(_))));
    let text = String::from_utf8(state.clone()).unwrap();
    for (good, bad) in [("\"version\":1", "\"version\":2"), ("\"session\":5", "\"session\":-5")] {
        let changed = text.replacen(good, bad, 1);
        assert_ne!(changed, text);
        assert!(matches!(restore(changed.as_bytes(), 5).err(), Some(StateError::Unknown(_))));
    }
    rig.driver.registers.function = restore(&state, 5).unwrap();
    rig.server.lock().echoes = true;
    assert_eq!(rig.driver.pop(REQUESTS).unwrap().unwrap().len, 16);
    let message = request(b"more");
    assert_eq!(rig.driver.call(REQUESTS, &message, &[64]).unwrap(), message);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let (memory, server) = (Memory::heap(4096), Shared::default());
    let with = |change: fn(&mut Parts)| {
        let (mut parts, _) = parts(&memory, &server);
        change(&mut parts);
        Fs::new(parts).err()
    };
    assert_eq!(
        with(|parts| parts.interrupts.clear()),
        Some(PartsError::Interrupts(InterruptCount))
    );
    for tag in ["", "a\0b", &"a".repeat(37)] {
        let (parts, _) = parts(&memory, &server);
        assert_eq!(Fs::new(Parts { tag: tag.into(), ..parts }).err(), Some(PartsError::Tag));
    }
    assert_eq!(with(|parts| parts.tag = "a".repeat(36)), None);
}
