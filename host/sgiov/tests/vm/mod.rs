//! A fake guest: a client of the function's socket that acts as the engine in a guest does.
#![allow(dead_code)] // not every test needs all of it

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use slipway_ram::Lasting;
use slipway_ring::cross::{Arena, Error, Own, Regions, Shape, Side, Stream};
use slipway_sgiov::{Function, Memory, serve_function};
use slipway_sgiov_function::driver::{Driver, RegisterAccess, start};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::Request;
use slipway_sgiov_spec::function::{Line, Message, PIECE, RUNNING, register};
use slipway_vfio_user_client::{Client as Vmm, Registers};

use crate::client::{self, Client, Connected, PATIENCE, readable};

/// Bytes of an exchange, each way.
pub const BYTES: u64 = 4 << 20;

/// The byte at a position of a stream.
pub fn byte(position: u64) -> u8 {
    (position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// A stream of the guest.
pub struct Open {
    pub connection: u32,
    pub line: Line,
    own: [AtomicU64; 4],
}

pub struct Guest {
    registers: Registers,
    ram: Lasting,
    driver: Driver,
    arena: Arena,
    regions: Vec<AtomicU64>,
    pub address: Address,
    next: u32,
    interrupt: OwnedFd,
    _asked: OwnedFd,
}

const CONTROL: u64 = PIECE as u64;
const ARENA: u64 = 2 * PIECE as u64;

fn make(ram: &Lasting) -> (Driver, Arena) {
    ram.words()
        .iter()
        .skip(PIECE / 8)
        .for_each(|word| word.store(0, std::sync::atomic::Ordering::Relaxed));
    let (_, rest) = ram.split(PIECE).unwrap();
    let (control, arena) = rest.split(PIECE).unwrap();
    let shape = Shape::filling(32, PIECE).unwrap();
    (Driver::new(control).unwrap(), Arena::within(arena, shape).unwrap())
}

/// Opens a file for no access (access mode 3 of open(2)).
fn token(file: BorrowedFd<'_>) -> OwnedFd {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let neither = rustix::fs::OFlags::from_bits_retain(3) | rustix::fs::OFlags::CLOEXEC;
    rustix::fs::open(path, neither, rustix::fs::Mode::empty()).unwrap()
}

impl Guest {
    /// Starts a guest whose channel runs, with one arena.
    pub fn start(dir: &Path, engine: &Path, name: &str, tenant: &str, ip: [u8; 4]) -> Self {
        Self::start_with(dir, engine, (name, tenant, ip), false)
    }

    /// Starts a guest whose VMM has a descriptor of its memory that only names it.
    pub fn start_named(dir: &Path, engine: &Path, name: &str, tenant: &str, ip: [u8; 4]) -> Self {
        Self::start_with(dir, engine, (name, tenant, ip), true)
    }

    fn start_with(
        dir: &Path,
        engine: &Path,
        (name, tenant, ip): (&str, &str, [u8; 4]),
        names: bool,
    ) -> Self {
        let path = dir.join(format!("{name}.sock"));
        let listener = UnixListener::bind(&path).unwrap();
        let ram = Lasting::new("guest", 3 * PIECE).unwrap();
        let file = ram.file().unwrap();
        let status = rustix::fs::fstat(file).unwrap();
        let (device, inode) = (status.st_dev, status.st_ino);
        let function = Function {
            name: name.into(),
            tenant: tenant.into(),
            addresses: vec![ip.into()],
            memory: names.then_some(Memory { bytes: 3 * PIECE as u64, device, inode }),
        };
        let passed = names.then_some(file);
        let _asked = serve_function(engine, listener.as_fd(), &function, passed).unwrap();
        let mut vmm = Vmm::connect(&path, PATIENCE).unwrap();
        let token = names.then(|| token(file));
        let own = token.as_ref().map_or(file, |token| token.as_fd());
        vmm.map(0, 3 * PIECE as u64, own, 0, true).unwrap();
        let interrupt = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        vmm.route_irqs(0, 0, 1, &[interrupt.as_fd()]).unwrap();
        let (driver, arena) = make(&ram);
        let regions = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        let address = Address::v4(ip, 0);
        let (registers, next) = (Registers::new(vmm, PATIENCE), 0);
        let mut guest =
            Self { registers, ram, driver, arena, regions, address, next, interrupt, _asked };
        guest.greet();
        guest
    }

    fn greet(&mut self) {
        assert_eq!(start(&mut self.registers, CONTROL), Ok(RUNNING));
        self.say(Message::Hello { version: 1 });
        let Message::Welcome(given) = self.next() else { panic!("no welcome") };
        assert_eq!((given.count, given.ips[0]), (1, self.address.ip));
        self.say(Message::Arena { arena: 5, at: ARENA });
    }

    /// Starts the channel again after it was broken.
    pub fn restart(&mut self) {
        self.registers.write32(register::CONTROL, 0).unwrap();
        let begun = Instant::now();
        while self.status() != Some(0) {
            assert!(begun.elapsed() < PATIENCE, "the reset does not end");
        }
        (self.driver, self.arena) = make(&self.ram);
        self.regions.iter_mut().for_each(|word| *word.get_mut() = 0);
        self.next = 0;
        self.greet();
    }

    /// Returns the function's status, or `None` if the function is gone.
    pub fn status(&mut self) -> Option<u32> {
        self.registers.read32(register::STATUS).ok()
    }

    fn ring(&mut self) {
        if self.driver.is_to_ring() {
            let _ = self.registers.write32(register::BELL, 0);
        }
    }

    pub fn say(&mut self, message: Message) {
        assert!(self.driver.say(&message));
        self.ring();
    }

    /// Waits for the next message.
    pub fn next(&mut self) -> Message {
        let begun = Instant::now();
        loop {
            if let Some(message) = self.driver.hear() {
                return message;
            }
            assert!(begun.elapsed() < PATIENCE, "no message");
            std::thread::yield_now();
        }
    }

    fn open(&mut self) -> Open {
        let number = self.next;
        self.next += 1;
        self.arena.clear(number);
        Open {
            connection: 100 + number,
            line: Line { arena: 5, stream: number, side: 1 },
            own: Default::default(),
        }
    }

    pub fn connect(&mut self, to: Address) -> Open {
        self.connect_from(Address { port: 40_000, ..self.address }, to)
    }

    pub fn connect_from(&mut self, from: Address, to: Address) -> Open {
        let open = self.open();
        let (connection, line) = (open.connection, open.line);
        self.say(Message::Connect { connection, line, from, to });
        open
    }

    /// Returns whether a connection to `to` succeeds.
    pub fn is_connected(&mut self, to: Address) -> bool {
        let open = self.connect(to);
        match self.next() {
            Message::Connected { .. } => true,
            Message::Refused { connection, .. } if connection == open.connection => false,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for a request to connect from `whom`, with any port, to `at`. Returns its number.
    pub fn incoming(&mut self, whom: Address, at: Address) -> u32 {
        let Message::Incoming { incoming, from, to } = self.next() else {
            panic!("nobody connects")
        };
        assert_eq!((from.ip, to), (whom.ip, at));
        incoming
    }

    pub fn accept(&mut self, incoming: u32) -> Open {
        let open = self.open();
        let (connection, line) = (open.connection, open.line);
        self.say(Message::Accepted { incoming, connection, line });
        open
    }

    pub fn stream<'a>(&'a self, open: &'a Open) -> Stream<'a> {
        let [tail, head_seen, head, tail_seen] = &open.own;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(&self.arena, open.line.stream, Side::Zero, out, into)
    }

    fn signal(&mut self, open: &Open, told: bool) {
        if told {
            assert!(self.driver.raise(open.line.arena, open.line.stream));
        }
        self.ring();
    }

    /// Writes some of a stream's bytes from `position` on, up to `most` in all. Returns their
    /// number.
    pub fn write(&mut self, open: &Open, position: u64, most: u64) -> u64 {
        let piece: Vec<u8> = (position..most.min(position + 50_000)).map(byte).collect();
        let mut told = false;
        let regions = Regions::new(&self.regions, self.arena.shape());
        let stream = self.stream(open);
        let count = stream.write(&piece, 1 << 20, regions, || told = true).unwrap();
        self.signal(open, told);
        count as u64
    }

    /// Reads the bytes that have arrived. Returns them, and whether the stream has ended.
    pub fn read(&mut self, open: &mut Open) -> Result<(Vec<u8>, bool), Error> {
        let mut told = false;
        let mut bytes = vec![0; 100_000];
        let stream = self.stream(open);
        let count = stream.read(&mut bytes, || told = true)?;
        let (left, ended) = stream.available()?;
        self.signal(open, told);
        bytes.truncate(count);
        Ok((bytes, left == 0 && ended))
    }

    /// Checks the bytes that have arrived, which begin at `position`. Returns their number.
    pub fn check(&mut self, open: &Open, position: u64) -> u64 {
        let mut told = false;
        let mut bytes = vec![0; 100_000];
        let count = self.stream(open).read(&mut bytes, || told = true).unwrap();
        self.signal(open, told);
        for (at, value) in (position..).zip(&bytes[..count]) {
            assert_eq!(*value, byte(at), "at {at}");
        }
        count as u64
    }

    /// Closes the stream for the program.
    pub fn close(&mut self, open: Open) {
        let stream = self.stream(&open);
        let told = [stream.out.finish(), stream.into.shut()].contains(&true);
        self.signal(&open, told);
        self.say(Message::Closed { connection: open.connection });
    }

    /// Writes invalid counters of a stream.
    pub fn spoil(&mut self, open: &Open) {
        let inbox = self.arena.inbox(open.line.stream, Side::One);
        inbox.tail.store(1 << 30, std::sync::atomic::Ordering::Relaxed);
        self.signal(open, true);
    }

    /// Sleeps until the interrupt that `other` causes.
    pub fn wakes_up(&mut self, open: &Open, other: &mut Self, others: &Open) {
        assert!(!self.stream(open).arm_data(1).unwrap());
        while self.driver.signal().is_some() {}
        self.driver.sleep();
        // By then the engine sleeps, too.
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(other.write(others, 0, 1), 1);
        assert!(readable(self.interrupt.as_fd(), PATIENCE), "no interrupt");
        assert_eq!(self.registers.read32(register::CAUSE), Ok(1));
        assert_eq!(self.driver.signal(), Some((open.line.arena, open.line.stream)));
        assert_eq!(self.check(open, 0), 1);
    }
}

/// Connects a program, whose address is `from`, to a guest that listens at `at`.
pub fn host_to_guest(
    host: &mut Client,
    from: Address,
    guest: &mut Guest,
    at: Address,
) -> (Connected, Open) {
    let request = Request::Connect { to: at, from: Address::ANY };
    client::send(&host.socket, &request.encode(), &[]).unwrap();
    let incoming = guest.incoming(from, at);
    let open = guest.accept(incoming);
    let connected = host.take_connected().unwrap();
    assert!(connected.endpoint.place.engine);
    (connected, open)
}

/// Connects a guest to a program that listens at `at`.
pub fn guest_to_host(
    host: &mut Client,
    listener: u64,
    guest: &mut Guest,
    at: Address,
) -> (Connected, Open) {
    let open = guest.connect(at);
    assert_eq!(guest.next(), Message::Connected { connection: open.connection });
    (host.accept(listener).unwrap(), open)
}

/// Sends bytes both ways at once between a program and a guest, and checks each of them.
pub fn exchange(host: (&Client, &Connected), guest: (&mut Guest, &mut Open)) {
    let ((host, connected), (guest, open)) = (host, guest);
    let (mut sent, mut received) = ([0_u64; 2], [0_u64; 2]);
    let begun = Instant::now();
    while received != [BYTES; 2] {
        let piece: Vec<u8> = (sent[0]..BYTES.min(sent[0] + 60_000)).map(byte).collect();
        sent[0] += host.write(connected, &piece).unwrap() as u64;
        sent[1] += guest.write(open, sent[1], BYTES);
        received[1] += guest.check(open, received[1]);
        if host.stream(connected).available().unwrap().0 > 0 {
            for value in host.read(connected, 100_000).unwrap() {
                assert_eq!(value, byte(received[0]));
                received[0] += 1;
            }
        } else if !host.stream(connected).arm_data(1).unwrap() {
            std::thread::yield_now();
        }
        assert!(begun.elapsed() < PATIENCE, "{sent:?} {received:?}");
    }
}
