//! A machine: the function's device, memory that both sides see, and an engine that echoes.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use slipway_pci::{Function, Interrupt, InterruptSink};
use slipway_ram::{DmaMap, Lasting, Permissions, Region};
use slipway_ring::cross::{Own, Regions, Side, Stream};
use slipway_sgiov::guest::{Device, Piece};
use slipway_sgiov_function::{Attended, Broken, Channel, Device as Pci, Parts, Peer};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::{Addresses, Line, Message, PIECE};

use crate::client::PATIENCE;

/// The port whose connections are echoed.
pub const ECHO: u16 = 7;
/// The port whose connections are refused. Those to all other ports are left to the kernel.
pub const REFUSED: u16 = 9;

/// Counts of what the machine has received.
#[derive(Clone, Default, Debug)]
pub struct Seen {
    pub hello: bool,
    pub listens: HashSet<Address>,
    pub answers: Vec<(u32, Result<(), u32>)>,
    pub closed: usize,
    /// Streams that the guest's side has finished or reset.
    pub ended_by_guest: usize,
    pub streams: usize,
    pub arenas: usize,
}

#[derive(Default)]
struct Orders {
    say: Vec<Message>,
    break_off: Option<Broken>,
    stop: bool,
    rung: bool,
}

#[derive(Default)]
struct Bell {
    orders: Mutex<Orders>,
    ring: Condvar,
    seen: Mutex<Seen>,
    told: Condvar,
}

impl Bell {
    fn order(&self, what: impl FnOnce(&mut Orders)) {
        let mut orders = self.orders.lock().unwrap();
        what(&mut orders);
        orders.rung = true;
        self.ring.notify_all();
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.order(|_| ());
    }
}

/// The pin as an eventfd, which is raised while the pin is asserted and not yet seen.
struct Pin(OwnedFd, Mutex<bool>);

impl InterruptSink for Pin {
    fn signal(&self, _: u16) {}

    fn set_pin(&self, asserted: bool) {
        *self.1.lock().unwrap() = asserted;
        if asserted {
            assert!(slipway_peer::eventfd::raise(self.0.as_fd()));
        }
    }
}

struct Bus {
    pci: Pci,
    gone: bool,
    map: DmaMap,
    next: u64,
}

pub struct Machine {
    bus: Arc<Mutex<Bus>>,
    pin: Arc<Pin>,
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Machine {
    pub fn new() -> Self {
        let bell = Arc::<Bell>::default();
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        let pin = Arc::new(Pin(eventfd(0, flags).unwrap(), Mutex::new(false)));
        let map = DmaMap::new();
        let sink: Arc<dyn InterruptSink> = pin.clone();
        let interrupt = Interrupt::new(sink, 0);
        let parts = Parts { memory: map.memory(), interrupt, peer: Waker::from(bell.clone()) };
        let (mut pci, peer) = Pci::new(parts);
        pci.config_write(4, &[6, 0]);
        let bus = Arc::new(Mutex::new(Bus { pci, gone: false, map, next: PIECE as u64 }));
        let engine = bell.clone();
        let thread = Some(std::thread::spawn(move || serve(&peer, &engine)));
        Self { bus, pin, bell, thread }
    }

    pub fn device(&self, interrupts: bool) -> Taken {
        let (bus, pin) = (self.bus.clone(), self.pin.clone());
        Taken { bus, pin, interrupts, lie: None, unmapped: false }
    }

    /// Stops answering from now on.
    pub fn vanish(&self) {
        self.bus.lock().unwrap().gone = true;
    }

    pub fn say(&self, message: Message) {
        self.bell.order(|orders| orders.say.push(message));
    }

    pub fn break_off(&self, why: Broken) {
        self.bell.order(|orders| orders.break_off = Some(why));
    }

    /// Waits until `wanted` holds for what the machine has received.
    pub fn wait(&self, wanted: impl Fn(&Seen) -> bool) -> Seen {
        let begun = Instant::now();
        let mut seen = self.bell.seen.lock().unwrap();
        while !wanted(&seen) {
            assert!(begun.elapsed() < PATIENCE, "{seen:?}");
            seen = self.bell.told.wait_timeout(seen, PATIENCE).unwrap().0;
        }
        seen.clone()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.bell.order(|orders| orders.stop = true);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

/// The function as a guest's driver sees it.
pub struct Taken {
    bus: Arc<Mutex<Bus>>,
    pin: Arc<Pin>,
    interrupts: bool,
    /// A register, by its offset, and the value that it reads as instead of its own.
    pub lie: Option<(u64, u32)>,
    /// Set if the machine cannot access the guest's memory.
    pub unmapped: bool,
}

impl Device for Taken {
    fn read(&mut self, offset: u64) -> u32 {
        if let Some((at, value)) = self.lie
            && at == offset
        {
            return value;
        }
        let mut bytes = [0; 4];
        let bus = &mut self.bus.lock().unwrap();
        if bus.gone {
            return u32::MAX;
        }
        bus.pci.read(0, offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        let bus = &mut self.bus.lock().unwrap();
        bus.pci.write(0, offset, &value.to_le_bytes());
        bus.pci.poll();
    }

    fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        self.interrupts.then(|| self.pin.0.as_fd())
    }

    fn take_interrupt(&mut self) {
        slipway_peer::eventfd::drain(self.pin.0.as_fd());
    }

    fn unmask(&mut self) {
        if *self.pin.1.lock().unwrap() {
            assert!(slipway_peer::eventfd::raise(self.pin.0.as_fd()));
        }
    }

    fn piece(&mut self) -> std::io::Result<Piece> {
        let memory = Lasting::new("guest", PIECE)?;
        let file = memory.file().unwrap();
        let region = Region::mapped(file, 0, PIECE as u64, Permissions::READ_WRITE)?;
        let bus = &mut self.bus.lock().unwrap();
        let at = bus.next;
        bus.next += PIECE as u64;
        if !self.unmapped {
            bus.map.add(at, region).unwrap();
        }
        Ok(Piece { memory, at })
    }
}

/// A stream of the guest that the machine serves.
struct Served {
    line: Line,
    words: [AtomicU64; 4],
    ended: bool,
}

struct Serving {
    channel: Channel,
    streams: HashMap<u32, Served>,
    arenas: HashSet<u32>,
    gone: HashSet<u32>,
    seen: Seen,
}

fn serve(peer: &Peer, bell: &Arc<Bell>) {
    let mut serving: Option<Serving> = None;
    loop {
        let mut orders = bell.orders.lock().unwrap();
        let is_idle = serving.as_mut().is_none_or(|serving| serving.channel.sleep(true));
        while is_idle && !orders.rung {
            orders = bell.ring.wait(orders).unwrap();
        }
        let Orders { say, break_off, stop, .. } = std::mem::take(&mut *orders);
        drop(orders);
        if stop {
            return;
        }
        if serving.is_none() {
            serving = peer.take().map(Serving::new);
        }
        let Some(there) = &mut serving else { continue };
        there.channel.awake();
        let mut is_over = there.channel.attend() != Ok(Attended::On);
        if let Some(why) = break_off {
            there.channel.break_off(why);
            is_over = true;
        }
        if !is_over {
            say.iter().for_each(|message| there.say(message));
            while there.turn() {}
            there.channel.tell();
        }
        let mut told = bell.seen.lock().unwrap();
        *told = there.seen.clone();
        bell.told.notify_all();
        if is_over {
            serving = None;
        }
    }
}

impl Serving {
    fn new(channel: Channel) -> Self {
        let (streams, arenas, gone, seen) = Default::default();
        Self { channel, streams, arenas, gone, seen }
    }

    fn say(&mut self, message: &Message) {
        self.channel.say(message).unwrap();
    }

    /// Does the waiting work. Returns whether there was any.
    fn turn(&mut self) -> bool {
        let mut some = self.channel.flush().unwrap();
        while let Some(message) = self.channel.hear().unwrap() {
            some = true;
            self.message(message);
        }
        let mut stirred = self.channel.overflowed();
        while self.channel.signal().unwrap().is_some() {
            stirred = true;
        }
        let all: Vec<u32> = self.streams.keys().copied().collect();
        for connection in all {
            some |= self.carry(connection);
        }
        self.seen.streams = self.streams.len();
        self.seen.arenas = self.arenas.len();
        some || stirred
    }

    fn take(&mut self, connection: u32, line: Line) {
        assert!(self.arenas.contains(&line.arena));
        let served = Served { line, words: Default::default(), ended: false };
        assert!(self.streams.insert(connection, served).is_none());
    }

    fn message(&mut self, message: Message) {
        match message {
            Message::Hello { version } => {
                assert_eq!(version, 1);
                self.seen.hello = true;
                self.say(&Message::Welcome(Addresses {
                    count: 1,
                    ips: [[1; 16], [0; 16], [0; 16], [0; 16]],
                }));
            }
            Message::Arena { arena, at } => {
                self.channel.add_arena(arena, at).unwrap();
                assert!(self.arenas.insert(arena));
            }
            Message::ArenaGone { arena } => {
                self.gone.insert(arena);
                self.free_arenas();
            }
            Message::Listen { at } => assert!(self.seen.listens.insert(at)),
            Message::Unlisten { at } => assert!(self.seen.listens.remove(&at)),
            Message::Connect { connection, line, to, .. } => match to.port {
                ECHO => {
                    self.take(connection, line);
                    self.say(&Message::Connected { connection });
                }
                REFUSED => self.say(&Message::Refused { connection, errno: 111 }),
                _ => self.say(&Message::Refused { connection, errno: 93 }),
            },
            Message::Accepted { incoming, connection, line } => {
                self.take(connection, line);
                self.seen.answers.push((incoming, Ok(())));
            }
            Message::Rejected { incoming, errno } => self.seen.answers.push((incoming, Err(errno))),
            Message::Closed { connection } => {
                self.carry(connection);
                assert!(self.streams.remove(&connection).is_some());
                self.seen.closed += 1;
                self.say(&Message::Ended { connection });
                self.free_arenas();
            }
            other => panic!("{other:?}"),
        }
    }

    fn free_arenas(&mut self) {
        let used: HashSet<u32> = self.streams.values().map(|served| served.line.arena).collect();
        for arena in self.gone.clone() {
            if !used.contains(&arena) {
                self.gone.remove(&arena);
                assert!(self.arenas.remove(&arena) && self.channel.remove_arena(arena));
                self.say(&Message::ArenaFree { arena });
            }
        }
    }

    /// Echoes the bytes that are there, and asks for a signal for more. Returns whether there were
    /// any.
    fn carry(&mut self, connection: u32) -> bool {
        let served = self.streams.get_mut(&connection).unwrap();
        let Line { arena: number, stream, side } = served.line;
        let (arena, bits) = self.channel.arena(number).unwrap();
        let (arena, bits) = (arena.clone(), bits.clone());
        let [tail, head_seen, head, tail_seen] = &served.words;
        let side = if side == 0 { Side::Zero } else { Side::One };
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        let fifo = Stream::new(&arena, stream, side, out, into);
        let regions = Regions::new(&bits, arena.shape());
        let (mut some, mut tells) = (false, 0);
        loop {
            let mut bytes = [0; 4096];
            let count = fifo.space().unwrap_or(0).min(bytes.len());
            let count = fifo.read(&mut bytes[..count], || tells += 1).unwrap_or(0);
            if count == 0 {
                break;
            }
            some = true;
            let written = fifo.write(&bytes[..count], 1 << 20, regions, || tells += 1);
            assert_eq!(written, Ok(count));
        }
        if !served.ended && matches!(fifo.available(), Ok((0, true)) | Err(_)) {
            served.ended = true;
            self.seen.ended_by_guest += 1;
        }
        if !served.ended {
            some |= fifo.arm_data(1).unwrap() && fifo.space() != Ok(0);
            some |= fifo.space() == Ok(0) && fifo.arm_space().unwrap();
        }
        for _ in 0..tells.min(1) {
            self.channel.raise(number, stream).unwrap();
        }
        some
    }
}

/// Returns an address of this network namespace other than loopback's.
pub fn own_address() -> Option<Address> {
    let all = slipway_netlink::Netlink::open().ok()?.addresses().ok()?;
    let own = all.into_iter().map(|own| own.address).find(|address| !address.is_loopback())?;
    let std::net::IpAddr::V4(own) = own else { return None };
    Some(Address::v4(own.octets(), 0))
}
