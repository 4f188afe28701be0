//! The cost of idle sockets: opens many connections between two families, each of which moved a few
//! bytes once, and prints the memory of one socket and the processor time of the engine.
//!
//! Run as root, for the descriptors:
//! `cargo run --release -p slipway-sgiov --example idle_sockets -- [SOCKETS] [SECONDS]`.
#![allow(clippy::unwrap_used)]

#[path = "../tests/client/mod.rs"]
mod client;

use std::time::{Duration, Instant};

use client::Client;
use slipway_sgiov::{Engine, Settings, raise_descriptor_limit};
use slipway_sgiov_spec::Address;

/// Connections to one address have ports of their own, of which there are 28,232.
const PER_LISTENER: usize = 20_000;

fn main() {
    let argument = |at: usize| std::env::args().nth(at).and_then(|text| text.parse::<u64>().ok());
    let sockets = argument(1).unwrap_or(100_000) as usize;
    let seconds = argument(2).unwrap_or(10);
    // One descriptor of the engine, and on each side its own one and the other side's.
    let wanted = sockets as u64 * 3 + 1000;
    let limit = raise_descriptor_limit(wanted);
    if limit < wanted {
        eprintln!(
            "the descriptor limit is {limit}, {wanted} are needed: ulimit -n, or fewer sockets"
        );
        std::process::exit(1);
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let mut engine =
        Engine::bind(Settings { socket: socket.clone(), ..Settings::default() }).unwrap();
    let stop = engine.stop();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        engine.run().unwrap();
    });
    let engine = told.recv().unwrap();
    let (mut server, mut client) = (Client::attach(&socket), Client::attach(&socket));
    let ports: Vec<u16> =
        (0..sockets.div_ceil(2 * PER_LISTENER)).map(|at| 7400 + at as u16).collect();
    let listeners: Vec<u64> =
        ports.iter().map(|port| server.listen(Address::v4([127, 0, 0, 1], *port), 64).0).collect();
    let before = Memory::now();
    let begun = Instant::now();
    let mut open = Vec::with_capacity(sockets);
    for number in 0..sockets / 2 {
        let at = number / PER_LISTENER;
        let there = client.connect(Address::v4([127, 0, 0, 1], ports[at])).unwrap();
        let here = server.accept(listeners[at]).unwrap();
        client.write(&there, b"hello").unwrap();
        assert_eq!(server.read(&here, 100).unwrap(), b"hello");
        open.push((there, here));
    }
    let took = begun.elapsed();
    let used = Memory::now().since(&before);
    println!(
        "{sockets} sockets opened in {:.1} s, each connection moved 5 bytes",
        took.as_secs_f64()
    );
    used.print("right afterwards", sockets);
    // The sweeper needs two rounds to see that nothing moves, and one that finds nothing to do.
    std::thread::sleep(Duration::from_secs(5));
    let used = Memory::now().since(&before);
    used.print("swept", sockets);
    let (from, begun) = (cpu(engine), Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let share = (cpu(engine) - from).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!("engine: {:.3} % of a core over {seconds} s", share * 100.0);
    // The connections still work.
    let (there, here) = &open[open.len() / 2];
    client.write(there, b"awake").unwrap();
    assert_eq!(server.read(here, 100).unwrap(), b"awake");
    drop(open);
    stop.stop();
    thread.join().unwrap();
}

/// Processor time of a thread of this process.
fn cpu(thread: i32) -> Duration {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Memory in bytes, as the kernel counts it.
struct Memory {
    slab: i64,
    shmem: i64,
    /// Anonymous memory of this process: engine and clients.
    own: i64,
}

impl Memory {
    fn now() -> Self {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap();
        let own = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        Self {
            slab: field(&info, "Slab:"),
            shmem: field(&info, "Shmem:"),
            own: field(&own, "Pss_Anon:"),
        }
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            slab: self.slab - before.slab,
            shmem: self.shmem - before.shmem,
            own: self.own - before.own,
        }
    }

    fn print(&self, when: &str, sockets: usize) {
        let each = |bytes: i64| bytes / sockets as i64;
        let sum = each(self.slab + self.shmem + self.own);
        println!(
            "{when}: {sum} bytes a socket (kernel's objects {}, shared memory {}, engine and \
             clients {})",
            each(self.slab),
            each(self.shmem),
            each(self.own)
        );
    }
}

fn field(text: &str, name: &str) -> i64 {
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    let kib: i64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}
