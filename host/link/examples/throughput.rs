//! Measures two engines in one process with a program at each, and the cost of each part of an
//! engine alone.
//!
//!     cargo run --release -p slipway-link --example throughput [MiB [record bytes [streams]]]
//!
//! Prints GB/s, and for each engine the CPU time per GiB beside the sum of copy, crypto and
//! transport measured alone, each in the same pieces. Needs two cores that are otherwise idle.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{DESTINATION, Memory, Program, SOURCE, certificates, left, right};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::time::{ClockId, clock_gettime};
use slipway_family::Family;
use slipway_link::{Carrier, Command, End, Event, Links, News, Settings, StreamId, start_carrier};
use slipway_ram::Lasting;
use slipway_ring::cross::Signals;
use slipway_ring::sleep::{ANY, SleepWord};
use slipway_sgiov_spec::table;
use slipway_warp::record::{self, HEADER, TAG};
use slipway_warp::{Cipher, Opener, Sealer, Secret};

const MESSAGE: usize = 128 << 10;

/// An engine, and the family of the programs at it.
struct Node {
    carrier: Carrier,
    memory: Memory,
    table: Lasting,
    bell: Arc<std::os::fd::OwnedFd>,
}

/// The way programs signal the engine, the same as in the library.
struct Teller {
    table: Lasting,
    signals: Signals,
    bell: Arc<std::os::fd::OwnedFd>,
}

impl Teller {
    fn tell(&mut self, entry: u64) {
        let _ = self.signals.raise(entry);
        let asleep = SleepWord::new(&self.table.words()[table::ASLEEP / 8]);
        if asleep.barrier_and_take(ANY) {
            assert!(slipway_peer::eventfd::raise(self.bell.as_fd()));
        }
    }
}

impl Node {
    fn new(settings: Settings) -> (Self, String) {
        let links = Links::new(settings).unwrap();
        let at = links.local().unwrap().to_string();
        let table = Lasting::new("table", table::bytes(1024, 1)).unwrap();
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let family = Family::new(&table, 1024, 1, bell.clone()).unwrap();
        let carrier = start_carrier(links).unwrap();
        carrier.join(0, family);
        (Self { carrier, memory: Memory::new(1024), table, bell }, at)
    }

    fn teller(&self) -> Teller {
        let (_, rest) = self.table.split(table::signals(1024, 1)).unwrap();
        let signals = Signals::new(rest, table::SIGNALS).unwrap();
        Teller { table: self.table.clone(), signals, bell: self.bell.clone() }
    }

    fn news(&self) -> Vec<News> {
        loop {
            let news: Vec<_> = self.carrier.news().collect();
            if !news.is_empty() {
                return news;
            }
            wait(self.carrier.descriptor());
        }
    }

    fn attach(&mut self, stream: StreamId) -> Program {
        let (program, end): (Program, End) = self.memory.socket();
        let entry = (0, program.number);
        self.carrier.command(Command::Attach { stream, end, entry });
        program
    }
}

fn wait(file: std::os::fd::BorrowedFd<'_>) {
    let _ = poll(&mut [PollFd::new(&file, PollFlags::IN)], None);
}

fn open(here: &mut Node, there: &mut Node) -> (Program, Program) {
    let (tenant, source, destination) = ("blue".into(), SOURCE, DESTINATION);
    here.carrier.command(Command::Open { ticket: 1, tenant, source, destination });
    let asked = there.news().into_iter().find_map(|news| match news {
        News::Event(Event::Asked { stream, .. }) => Some(stream),
        _ => None,
    });
    let theirs = there.attach(asked.unwrap());
    loop {
        for news in here.news() {
            if let News::Event(Event::Opened(stream)) = news {
                return (here.attach(stream), theirs);
            }
        }
    }
}

/// Returns the CPU time of the threads called `name`, the oldest first.
fn threads(name: &str) -> Vec<Duration> {
    let mut tasks: Vec<u32> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .map(|task| task.unwrap().file_name().into_string().unwrap().parse().unwrap())
        .collect();
    tasks.sort_unstable();
    let text = |task: &u32, file| {
        std::fs::read_to_string(format!("/proc/self/task/{task}/{file}")).unwrap_or_default()
    };
    tasks.retain(|task| text(task, "comm").trim() == name);
    let nanos = |task| {
        let text: String = text(task, "schedstat");
        text.split(' ').next().and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
    };
    tasks.iter().map(|task| Duration::from_nanos(nanos(task))).collect()
}

fn own_cpu() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

/// Writes `total` bytes over all streams, sleeping when none takes any.
fn write(programs: &[Program], mut teller: Teller, total: u64) {
    let message = vec![7; MESSAGE];
    let mut left: Vec<u64> = programs.iter().map(|_| total / programs.len() as u64).collect();
    while left.iter().any(|left| *left > 0) {
        let mut some = false;
        for (program, left) in programs.iter().zip(&mut left) {
            let count = MESSAGE.min(*left as usize);
            let entry = program.number.into();
            let done = program.write(&message[..count], || teller.tell(entry)).unwrap();
            *left -= done as u64;
            some |= done > 0;
        }
        if !some && let [program] = programs {
            if !program.stream().arm_space().unwrap() {
                wait(program.bell.as_fd());
                slipway_peer::eventfd::drain(program.bell.as_fd());
            }
        } else if !some {
            std::thread::yield_now();
        }
    }
}

fn read(programs: &[Program], mut teller: Teller, total: u64) {
    let mut buffer = vec![0; MESSAGE];
    let mut left = total / programs.len() as u64 * programs.len() as u64;
    while left > 0 {
        let mut some = false;
        for program in programs {
            let entry = program.number.into();
            let done = program.read(&mut buffer, || teller.tell(entry)).unwrap();
            left -= done as u64;
            some |= done > 0;
        }
        if !some && let [program] = programs {
            if !program.stream().arm_data(1).unwrap() {
                wait(program.bell.as_fd());
                slipway_peer::eventfd::drain(program.bell.as_fd());
            }
        } else if !some {
            std::thread::yield_now();
        }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

/// Returns seconds for a GiB.
fn per_gib(time: Duration, bytes: u64) -> f64 {
    time.as_secs_f64() * GIB / bytes as f64
}

/// Copies from a ring into pieces of a record, as an engine does. Returns seconds for a GiB.
fn copy_alone(record: usize) -> f64 {
    let (ring, mut out) = (vec![1u8; 512 << 10], vec![0u8; 4 * record]);
    let (mut from, mut to, rounds) = (0, 0, (512 << 20) / record);
    let begin = own_cpu();
    for _ in 0..rounds {
        from = if from + record > ring.len() { 0 } else { from };
        to = (to + record) % out.len();
        out[to..to + record].copy_from_slice(black_box(&ring[from..from + record]));
        black_box(&mut out);
        from += record;
    }
    per_gib(own_cpu() - begin, (rounds * record) as u64)
}

/// Returns seconds for sealing a GiB, and for opening it.
fn crypto_alone(record: usize) -> (f64, f64) {
    let secret = Secret::derive(&[1; 32], &[]);
    let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
    let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
    let mut buffer = vec![0; HEADER + record + TAG];
    let (mut seal, mut open) = (Duration::ZERO, Duration::ZERO);
    let rounds = (512 << 20) / record;
    for _ in 0..rounds {
        let begin = own_cpu();
        record::seal(&mut sealer, &mut buffer).unwrap();
        let middle = own_cpu();
        black_box(record::open(&mut opener, &mut buffer).unwrap());
        (seal, open) = (seal + (middle - begin), open + (own_cpu() - middle));
    }
    let bytes = (rounds * record) as u64;
    (per_gib(seal, bytes), per_gib(open, bytes))
}

/// Returns seconds for sending a GiB over loopback TCP, and for receiving it.
fn transport_alone(record: usize, total: u64) -> (f64, f64) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let sender = std::thread::spawn(move || {
        let mut socket = std::net::TcpStream::connect(at).unwrap();
        socket.set_nodelay(true).unwrap();
        let piece = vec![1; HEADER + record + TAG];
        let begin = own_cpu();
        for _ in 0..total / record as u64 {
            socket.write_all(&piece).unwrap();
        }
        per_gib(own_cpu() - begin, total)
    });
    let (mut socket, _) = listener.accept().unwrap();
    let mut buffer = vec![0; 4 * (128 << 10)];
    let begin = own_cpu();
    while socket.read(&mut buffer).unwrap() > 0 {}
    let received = per_gib(own_cpu() - begin, total);
    (sender.join().unwrap(), received)
}

fn main() {
    let mut words = std::env::args().skip(1).map(|word| word.parse::<u64>().unwrap());
    let total = words.next().unwrap_or(4096) << 20;
    let record = words.next().unwrap_or(64 << 10) as usize;
    let streams = words.next().unwrap_or(1);

    let dir = tempfile::tempdir().unwrap();
    certificates(dir.path());
    let with = |settings| Settings { record, ..settings };
    let (mut there, at) = Node::new(with(right(dir.path(), "127.0.0.1:1")));
    let (mut here, _) = Node::new(with(left(dir.path(), &at)));
    let pairs = (0..streams).map(|_| open(&mut here, &mut there));
    let (senders, receivers): (Vec<_>, Vec<_>) = pairs.unzip();

    let before = threads("slipway-link");
    let begin = Instant::now();
    let (tell_here, tell_there) = (here.teller(), there.teller());
    let writer = std::thread::spawn(move || {
        write(&senders, tell_here, total);
        (own_cpu(), senders)
    });
    read(&receivers, tell_there, total);
    let time = begin.elapsed();
    let after = threads("slipway-link");
    let (writer, _senders) = writer.join().unwrap();
    let cpu: Vec<_> = after.iter().zip(&before).map(|(after, before)| *after - *before).collect();
    let [received, sent] = [per_gib(cpu[0], total), per_gib(cpu[1], total)];

    let copy = copy_alone(record);
    let (seal, open) = crypto_alone(record);
    let (send, receive) = transport_alone(record, 2 << 30);
    println!(
        "{} MiB, records of {record} bytes, {streams} stream(s): {:.2} GB/s",
        total >> 20,
        total as f64 / time.as_secs_f64() / 1e9
    );
    println!("CPU per GiB in ms         copy   crypto  transport     sum   engine   ratio");
    let line = |name, crypto: f64, transport: f64, engine: f64| {
        let sum = copy + crypto + transport;
        let [copy, crypto, transport, sum_ms, engine_ms] =
            [copy, crypto, transport, sum, engine].map(|seconds| seconds * 1e3);
        println!(
            "{name:22} {copy:7.1} {crypto:8.1} {transport:10.1} {sum_ms:7.1} {engine_ms:8.1} \
             {:7.2}",
            engine / sum
        );
    };
    line("engine 1 (seals)", seal, send, sent);
    line("engine 2 (opens)", open, receive, received);
    line("both", seal + open + copy, send + receive, sent + received);
    println!("writing program: {:.1} ms per GiB", per_gib(writer, total) * 1e3);
}
