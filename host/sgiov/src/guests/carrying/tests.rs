//! Turns of the thread with hostile guests, on heap memory.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate};
use slipway_family::NewsReceiver;
use slipway_pci::{FifoSink, Function as _, Interrupt};
use slipway_ram::{Access, DmaMap, Lasting, Memory, Permissions, Region};
use slipway_reactor::Reactor;
use slipway_ring::cross::{Arena, Own, Regions, Shape, Side, Stream};
use slipway_sgiov_function::driver::{Direct, Driver, start};
use slipway_sgiov_function::{Broken, Device, Parts};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{self, Message, PIECE, RUNNING, TO_GUEST, VERSION};

use super::super::pair::{Answerer, PairEnd};
use super::super::programs::tests::line;
use super::super::serve::serve;
use super::super::{GUESTS, SIGNALS};
use super::*;
use crate::Function;

const PROTONOSUPPORT: u32 = 93;
/// The words of signals before the events, with the reader's position.
const HEAD: usize = 64;

/// The thread's state, whose turns the test takes.
struct Rig {
    carrying: Carrying,
    news: NewsReceiver<News>,
    reactor: Reactor,
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let (sender, news) = slipway_family::news().unwrap();
        let (book, policy) = Default::default();
        let carrying = Carrying::new(sender, book, policy);
        let reactor = Reactor::spawn(slipway_reactor::Settings::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        Self { carrying, news, reactor, dir }
    }

    /// Returns a guest that has started its function and sent its hello. Its address is
    /// 10.9.0.`number`.
    fn guest(&mut self, number: u32) -> Hostile {
        self.guest_with(number, Memory::heap(3 * PIECE))
    }

    /// Returns such a guest with this memory.
    fn guest_with(&mut self, number: u32, memory: Memory) -> Hostile {
        let listener = UnixListener::bind(self.dir.path().join(number.to_string())).unwrap();
        let handle = self.reactor.handle();
        let waker = Waker::noop().clone();
        let (served, _) = serve(0, listener.into(), (None, None), waker, &handle).unwrap();
        let interrupt = Interrupt::new(FifoSink::new(), 0);
        let parts = Parts { memory: memory.clone(), interrupt, peer: Waker::noop().clone() };
        let (device, peer) = Device::new(parts);
        let function = Function {
            name: number.to_string(),
            tenant: "web".into(),
            addresses: vec![Ipv4Addr::from(ip(number)).into()],
            memory: None,
        };
        self.carrying.book.add(number, function);
        let counts = self.carrying.book.counts(number);
        let there = Guest::new(peer, served.control(), "web".into(), counts);
        self.carrying.guests.insert(number, there);
        let driver = Driver::new(piece(&memory, 0)).unwrap();
        let mut registers = Direct::new(device);
        assert_eq!(start(&mut registers, 0), Ok(RUNNING));
        let guest = Hostile { registers, driver, memory };
        guest.driver.say(&Message::Hello { version: VERSION });
        self.turn();
        assert!(matches!(guest.driver.hear(), Some(Message::Welcome(_))));
        guest
    }

    fn turn(&mut self) {
        self.carrying.serve(Instant::now());
        self.carrying.news.announce();
    }

    /// Joins streams of two programs of a tenant, each of which has an arena to itself.
    fn join(&mut self, tenant: &str, arenas: [&Arena; 2]) {
        let end = |arena: &Arena| {
            let line = Line {
                arena: arena.clone(),
                stream: 0,
                side: Side::One,
                eventfd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
                tenant: tenant.into(),
                family: 0,
                entry: 0,
                regions: (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect(),
            };
            PairEnd::new(EndOwner::Program { connection: 0, line })
        };
        let [one, other] = arenas.map(end);
        let pair = Pair::new(one, Answerer::Engine(0), Instant::now());
        let pair = self.carrying.pairs.insert(pair);
        self.carrying.open_pair(pair, other);
    }

    fn asked(&self) -> Vec<u64> {
        let asked = self.news.take().filter_map(|news| match news {
            News::Event(Event::FromGuest { incoming, .. }) => Some(incoming),
            _ => None,
        });
        asked.collect()
    }
}

struct Hostile {
    registers: Direct<Device>,
    driver: Driver,
    memory: Memory,
}

impl Hostile {
    /// Gives the machine an arena of 16 streams.
    fn arena(&self, rig: &mut Rig) -> Arena {
        let words = piece(&self.memory, PIECE as u64);
        let arena = Arena::within(words, Shape::filling(16, PIECE).unwrap()).unwrap();
        assert!(self.driver.say(&Message::Arena { arena: 0, at: PIECE as u64 }));
        rig.turn();
        arena
    }

    fn connect(&self, connection: u32, from: u32, to: Address) {
        let line = function::Line { arena: 0, stream: 0, side: 1 };
        let from = Address::v4(ip(from), 5);
        assert!(self.driver.say(&Message::Connect { connection, line, from, to }));
    }
}

fn ip(number: u32) -> [u8; 4] {
    [10, 9, 0, number as u8]
}

fn piece(memory: &Memory, at: u64) -> Lasting {
    let mut spans = Vec::new();
    memory.pin(at, PIECE, Access::Write, &mut spans).unwrap();
    Lasting::over(spans.pop().unwrap()).unwrap()
}

/// A guest signals entries without streams as fast as they are taken. The others still have their
/// turns.
#[test]
fn a_guests_signals_are_bounded_by_a_turn() {
    let mut rig = Rig::new();
    let mut guest = rig.guest(1);
    while guest.driver.raise(9, 9) {}
    rig.turn();
    assert_eq!(std::iter::from_fn(|| guest.driver.raise(9, 9).then_some(())).count(), SIGNALS);
}

/// A guest connects and closes again and again in one stream. The engine gets a bounded number of
/// its requests at a time.
#[test]
fn a_guests_questions_are_bounded() {
    let mut rig = Rig::new();
    let guest = rig.guest(1);
    let _arena = guest.arena(&mut rig);
    let nobody = Address::v4([10, 9, 1, 1], 80);
    let (mut asked, mut last) = (Vec::new(), None);
    for connection in 0..1500 {
        guest.connect(connection, 1, nobody);
        rig.turn();
        asked.extend(rig.asked());
        last = guest.driver.hear();
        if last.is_none() {
            assert!(guest.driver.say(&Message::Closed { connection }));
            rig.turn();
            assert!(matches!(guest.driver.hear(), Some(Message::Refused { .. })));
        }
    }
    assert_eq!(asked.len(), 1024);
    assert_eq!(last, Some(Message::Refused { connection: 1499, errno: PROTONOSUPPORT }));
    // The guest starts anew, and its requests to the engine still count.
    rig.carrying.break_off(1, Broken::Message);
    assert_eq!(rig.carrying.guests[&1].asking.0, 1024);
    for incoming in asked {
        rig.carrying.engine_answers((incoming & !GUESTS) as u32, Err(111));
    }
    assert_eq!((rig.carrying.guests[&1].asking.0, rig.carrying.pairs.iter().count()), (0, 0));
}

/// A guest is lost in the middle of its own answer. Nothing is left of the stream that it named,
/// whose number may be too large for the next arena.
#[test]
fn a_guest_that_breaks_by_what_it_is_told_leaves_no_stream() {
    let mut rig = Rig::new();
    let (one, two) = (rig.guest(1), rig.guest(2));
    let (_arena, arena) = (one.arena(&mut rig), two.arena(&mut rig));
    let at = Address::v4(ip(2), 80);
    assert!(two.driver.say(&Message::Listen { at }));
    rig.turn();
    one.connect(1, 1, at);
    rig.turn();
    let Some(Message::Incoming { incoming, .. }) = two.driver.hear() else { panic!() };
    assert!(one.driver.say(&Message::Closed { connection: 1 }));
    rig.turn();
    // The guest asks to be woken for everything, there is no room for a signal, and a counter is
    // invalid.
    for side in [Side::Zero, Side::One] {
        let inbox = arena.inbox(15, side);
        inbox.data_wanted.store(u64::MAX, Ordering::Relaxed);
        inbox.space_wanted.store(u64::MAX, Ordering::Relaxed);
    }
    let machines = rig.carrying.guests.get_mut(&2).unwrap().channel.as_mut().unwrap();
    (0..function::SIGNALS).for_each(|_| machines.raise(0, 1).unwrap());
    two.driver.word(TO_GUEST + HEAD).store(u64::MAX / 2, Ordering::Relaxed);
    let line = function::Line { arena: 0, stream: 15, side: 1 };
    assert!(two.driver.say(&Message::Accepted { incoming, connection: 7, line }));
    rig.turn();
    let lost = &rig.carrying.guests[&2];
    assert!(lost.channel.is_none(), "it is not broken");
    assert!(lost.streams.is_empty() && lost.connections.is_empty());
    assert_eq!(rig.carrying.pairs.iter().count(), 0);
}

/// An arena is given back when it has no stream, and not before, whatever streams other arenas
/// have.
#[test]
fn an_arena_is_free_when_it_has_no_stream_whatever_others_have() {
    let mut rig = Rig::new();
    let guest = rig.guest(1);
    let _arena = guest.arena(&mut rig);
    let there = rig.carrying.guests.get_mut(&1).unwrap();
    let line = |arena, stream| function::Line { arena, stream, side: 1 };
    (0..16_000).for_each(|stream| there.enter(stream, line(1, stream), stream, 0));
    there.enter(u32::MAX, line(0, 3), 0, 0);
    assert!(!there.take_free(0), "nobody wants it back");
    there.leave_arena(0).unwrap();
    assert!(!there.take_free(0), "it has a stream");
    there.forget(u32::MAX, line(0, 3));
    assert!(there.take_free(0));
}

/// Returns a program's side of the stream of [`Rig::join`].
fn program<'a>(arena: &'a Arena, words: &'a [AtomicU64; 4]) -> Stream<'a> {
    let [tail, head_seen, head, tail_seen] = words;
    let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
    Stream::new(arena, 0, Side::Zero, out, into)
}

/// A program takes its arena's pages away while the carrier touches them.
#[test]
fn a_tenant_whose_memory_made_the_carrier_sleep_stands_still_and_others_do_not() {
    let mut rig = Rig::new();
    let [slow, other, from, to] = [(); 4].map(|()| Arena::new(Regions::shape(1)).unwrap());
    let pause = Duration::from_millis(100);
    let Ok(sleeps) = slipway_peer::testing::slow(slow.words(), pause) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    let take_away = || {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(slow.file().unwrap(), mode, 0, slow.shape().bytes() as u64).unwrap();
    };
    rig.join("slow", [&slow, &other]);
    rig.join("quick", [&from, &to]);
    // The first sleep is nobody's.
    take_away();
    rig.turn();
    assert!(sleeps() > 0 && rig.carrying.stalls.due().is_none());
    take_away();
    rig.turn();
    let until = rig.carrying.stalls.due().unwrap();
    take_away();
    let before = sleeps();
    let ([sender, receiver], bits): ([[AtomicU64; 4]; 2], Vec<AtomicU64>) =
        (Default::default(), (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect());
    let regions = Regions::new(&bits, from.shape());
    assert_eq!(program(&from, &sender).write(b"x", 4096, regions, || ()), Ok(1));
    rig.carrying.serve(until - Duration::from_nanos(1));
    assert_eq!(program(&to, &receiver).available(), Ok((1, false)));
    assert_eq!(sleeps(), before, "it is served");
    rig.carrying.serve(until);
    assert!(sleeps() > before);
}

/// A program sees that the carrier asks it for a signal, and takes its arena's pages away then.
#[test]
fn a_tenant_pays_for_sleeps_while_the_carrier_falls_asleep() {
    let mut rig = Rig::new();
    let [slow, other] = [(); 2].map(|()| Arena::new(Regions::shape(1)).unwrap());
    let pause = Duration::from_millis(100);
    let Ok(sleeps) = slipway_peer::testing::slow(slow.words(), pause) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    let take_away = || {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(slow.file().unwrap(), mode, 0, slow.shape().bytes() as u64).unwrap();
    };
    rig.join("slow", [&slow, &other]);
    // The first sleep is nobody's.
    take_away();
    rig.turn();
    assert!(sleeps() > 0 && rig.carrying.stalls.due().is_none());
    take_away();
    let before = sleeps();
    assert!(matches!(rig.carrying.rest(Instant::now()), Rest::Asleep(_)));
    assert!(sleeps() > before && rig.carrying.stalls.due().is_some());
}

/// A tenant is left out while its stream has turns. The carrier falls asleep.
#[test]
fn a_stream_that_is_left_out_is_not_touched_when_the_carrier_falls_asleep() {
    let mut rig = Rig::new();
    let [slow, other] = [(); 2].map(|()| Arena::new(Regions::shape(1)).unwrap());
    let pause = Duration::from_millis(100);
    let Ok(sleeps) = slipway_peer::testing::slow(slow.words(), pause) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    rig.join("slow", [&slow, &other]);
    let tenants: Tenants = ["slow".into(), "slow".into()];
    assert!(rig.carrying.stalls.charge(&tenants, Duration::from_secs(2)));
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(slow.file().unwrap(), mode, 0, slow.shape().bytes() as u64).unwrap();
    let before = sleeps();
    assert!(matches!(rig.carrying.rest(Instant::now()), Rest::Asleep(Some(_))));
    assert_eq!(sleeps(), before);
    let until = rig.carrying.stalls.due().unwrap();
    rig.carrying.serve(until);
    assert!(sleeps() > before, "it is served again");
}

/// A guest's memory is taken away while the carrier sleeps, which withdraws its request then.
#[test]
fn a_tenant_pays_for_sleeps_when_the_carrier_wakes() {
    let mut rig = Rig::new();
    let file = Lasting::new("slipway-test", 3 * PIECE).unwrap();
    let len = 3 * PIECE as u64;
    let region = Region::mapped(file.file().unwrap(), 0, len, Permissions::READ_WRITE).unwrap();
    let mut map = DmaMap::new();
    map.add(0, region).unwrap();
    let guest = rig.guest_with(1, map.memory());
    let control = piece(&guest.memory, 0);
    let pause = Duration::from_millis(100);
    let words = &control.words()[function::HOST_ASLEEP / 8..];
    let Ok(sleeps) = slipway_peer::testing::slow(words, pause) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    // The first sleep is nobody's.
    for is_charged in [false, true] {
        assert!(matches!(rig.carrying.rest(Instant::now()), Rest::Asleep(_)));
        let before = sleeps.load(Ordering::Relaxed);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file.file().unwrap(), mode, function::HOST_ASLEEP as u64, 4096).unwrap();
        rig.carrying.woken(Some(Instant::now()));
        assert_eq!(sleeps.load(Ordering::Relaxed), before + 1);
        assert_eq!(rig.carrying.stalls.due().is_some(), is_charged);
    }
}

/// A program makes its signals invalid and ends. The links' carrier finds that when the number of
/// its family is another tenant's already.
#[test]
fn invalid_signals_of_an_ended_family_are_not_those_of_the_next_one() {
    let mut rig = Rig::new();
    let (ended, next) = (Arc::<Claims>::default(), Arc::<Claims>::default());
    rig.carrying.programs.join_claimed(1, ended.clone());
    rig.carrying.programs.part(1);
    rig.carrying.programs.join_claimed(1, next.clone());
    rig.carrying.claimed_family_spoiled(1, &ended);
    rig.carrying.programs.enter(70, &line(5), 7);
    assert!(next.pass_on(5), "its signals are lost");
    rig.carrying.claimed_family_spoiled(1, &next);
    rig.carrying.programs.enter(80, &line(6), 8);
    assert!(!next.pass_on(6));
}

/// A tenant is left out. The VMM of its guest pauses the guest, which takes the memory away.
#[test]
fn a_guest_that_is_left_out_can_be_paused_and_its_memory_is_not_touched() {
    let mut rig = Rig::new();
    let mut guest = rig.guest(1);
    let tenants = rig.carrying.guests[&1].tenants.clone();
    assert!(rig.carrying.stalls.charge(&tenants, Duration::from_secs(2)));
    let control = piece(&guest.memory, 0);
    let asleep = &control.words()[function::HOST_ASLEEP / 8];
    asleep.store(7, Ordering::Relaxed);
    assert!(matches!(rig.carrying.rest(Instant::now()), Rest::Asleep(Some(_))));
    rig.carrying.woken(Some(Instant::now()));
    assert_eq!(asleep.load(Ordering::Relaxed), 7);
    assert!(!guest.registers.function.quiesce());
    rig.turn();
    assert!(guest.registers.function.quiesce(), "its VMM waits");
}

/// A guest sleeps and takes away the memory that says so. Its tenant is left out.
#[test]
fn a_guest_that_is_left_out_is_interrupted_once_it_is_served_again() {
    let mut rig = Rig::new();
    let guest = rig.guest(1);
    let tenants = rig.carrying.guests[&1].tenants.clone();
    let control = piece(&guest.memory, 0);
    let asleep = &control.words()[function::GUEST_ASLEEP / 8];
    asleep.store(u64::MAX, Ordering::Relaxed);
    rig.carrying.guests.get_mut(&1).unwrap().signal(0, 0).unwrap();
    assert!(rig.carrying.stalls.charge(&tenants, Duration::from_secs(2)));
    rig.turn();
    assert!(matches!(rig.carrying.rest(Instant::now()), Rest::Asleep(Some(_))));
    assert_eq!(asleep.load(Ordering::Relaxed), u64::MAX, "its memory is touched");
    let until = rig.carrying.stalls.due().unwrap();
    rig.carrying.serve(until);
    assert_eq!(asleep.load(Ordering::Relaxed), 0);
}

/// The bell of a program's family cannot be watched.
#[test]
fn a_program_whose_signals_do_not_come_has_no_stream_with_a_guest() {
    let mut rig = Rig::new();
    let _guest = rig.guest(1);
    let (mut families, now) = (Families::default(), Instant::now());
    let connect = |connection| {
        let (from, to) = (Address::ANY, Address::v4(ip(1), 80));
        Command::Connect { connection, guest: Some(1), from, to, line: line(5) }
    };
    rig.carrying.obey(connect(70), &mut families, now);
    let refused = |news: &News| matches!(news, News::Event(Event::Refused { connection: 70, .. }));
    assert!(rig.news.take().any(|news| refused(&news)));
    assert_eq!(rig.carrying.programs.pair(70), None);
    rig.carrying.programs.join_claimed(1, Arc::default());
    rig.carrying.obey(connect(80), &mut families, now);
    assert!(rig.carrying.programs.pair(80).is_some());
}
