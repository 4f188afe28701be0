//! The guest's engine on the function's device, with a small stand-in for the machine's engine.
#![allow(clippy::unwrap_used)]

mod client;
mod machine;

use std::os::fd::AsFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE, readable};
use machine::{Machine, Seen};
use slipway_ring::cross::Error;
use slipway_sgiov::guest::FunctionRemote;
use slipway_sgiov::{Engine, Settings, Stop};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::NOT_OURS;
use slipway_sgiov_spec::function::{Broken, Message};

/// Returns whether the kernel has a source address for connections to the machine's programs, as in
/// a guest with an interface.
fn has_route(test: &str) -> bool {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let found = socket.connect("10.9.0.2:9").is_ok();
    if !found {
        println!("SKIPPED: {test}: needs a route to 10.9.0.2");
    }
    found
}

fn there(port: u16) -> Address {
    Address::v4([10, 9, 0, 2], port)
}

struct Guest {
    dir: tempfile::TempDir,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    fn new(machine: &Machine, interrupts: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let remote = FunctionRemote::start(Box::new(machine.device(interrupts))).unwrap();
        let remote = Some(Box::new(remote) as _);
        let mut engine = Engine::bind(Settings { socket, remote, ..Settings::default() }).unwrap();
        let stop = engine.stop();
        let thread = Some(std::thread::spawn(move || engine.run().unwrap()));
        machine.wait(|seen| seen.hello);
        Self { dir, stop, thread }
    }

    fn attach(&self) -> Client {
        Client::attach(&self.dir.path().join("s"))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// Connects, with retries: the engine may not have received the machine's welcome yet.
fn connect(client: &mut Client, to: Address) -> Connected {
    let begun = Instant::now();
    loop {
        match client.connect_from(Address::ANY, to) {
            Err(NOT_OURS) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other.unwrap(),
        }
    }
}

/// Sends `bytes` to a program that sends them back, and compares.
fn echo(client: &Client, connected: &Connected, bytes: &[u8]) {
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < bytes.len() {
        sent += client.write(connected, &bytes[sent..]).unwrap();
        got.extend(client.read(connected, 1 << 20).unwrap());
    }
    assert!(got == bytes, "other bytes came back");
}

#[test]
fn streams_go_to_the_machine_and_back() {
    if !has_route("streams_go_to_the_machine_and_back") {
        return;
    }
    for interrupts in [true, false] {
        let machine = Machine::new();
        let guest = Guest::new(&machine, interrupts);
        let mut client = guest.attach();
        let c = connect(&mut client, there(machine::ECHO));
        assert!(c.endpoint.place.engine && !c.endpoint.place.same_tenant);
        echo(&client, &c, b"ping");
        let long: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 251) as u8).collect();
        echo(&client, &c, &long);
        client.close(c);
        machine.wait(|seen| seen.closed == 1 && seen.streams == 0);
        assert_eq!(client.connect_from(Address::ANY, there(machine::REFUSED)).err(), Some(111));
        assert_eq!(client.connect_from(Address::ANY, there(1)).err(), Some(NOT_OURS));
    }
}

#[test]
fn more_streams_than_an_arena_has_lie_in_another_one() {
    if !has_route("more_streams_than_an_arena_has_lie_in_another_one") {
        return;
    }
    let machine = Machine::new();
    let guest = Guest::new(&machine, true);
    let mut client = guest.attach();
    let all: Vec<_> = (0..70).map(|_| connect(&mut client, there(machine::ECHO))).collect();
    for (number, connected) in all.iter().enumerate() {
        echo(&client, connected, &[number as u8; 5000]);
    }
    assert_eq!((client.arenas.len(), machine.wait(|_| true).arenas), (3, 3));
    for connected in all {
        client.close(connected);
    }
    machine.wait(|seen| seen.closed == 70 && seen.streams == 0);
    let c = connect(&mut client, there(machine::ECHO));
    echo(&client, &c, b"in a stream that was another's");
    // The client ends with its memory: the machine keeps nothing of it.
    drop(client);
    machine.wait(|seen| seen.streams == 0 && seen.arenas == 0);
}

#[test]
fn a_program_that_is_killed_is_an_end_to_the_machine() {
    if !has_route("a_program_that_is_killed_is_an_end_to_the_machine") {
        return;
    }
    let machine = Machine::new();
    let guest = Guest::new(&machine, true);
    let mut client = guest.attach();
    let c = connect(&mut client, there(machine::ECHO));
    echo(&client, &c, b"x");
    drop(client);
    machine.wait(|seen| seen.closed == 1 && seen.ended_by_guest == 1);
}

#[test]
fn the_machine_reaches_who_listens() {
    if !has_route("the_machine_reaches_who_listens") {
        return;
    }
    let Some(own) = machine::own_address() else {
        println!(
            "SKIPPED: the_machine_reaches_who_listens: needs an address other than loopback's"
        );
        return;
    };
    let machine = Machine::new();
    let guest = Guest::new(&machine, true);
    let mut server = guest.attach();
    let at = Address { port: 7100, ..own };
    machine.say(Message::Incoming { incoming: 4, from: there(5), to: at });
    let rejected = |seen: &Seen| seen.answers.contains(&(4, Err(111)));
    machine.wait(rejected);
    let (listener, waits) = server.listen(Address::v4([0; 4], 7100), 5);
    machine.wait(|seen| seen.listens.contains(&Address::v4([0; 4], 7100)));
    machine.say(Message::Incoming { incoming: 5, from: there(5), to: at });
    machine.wait(|seen| seen.answers.contains(&(5, Ok(()))));
    assert!(readable(waits.as_fd(), PATIENCE));
    let s = server.accept(listener).unwrap();
    assert_eq!((s.endpoint.local, s.endpoint.peer), (at, there(5)));
    echo(&server, &s, &[9; 100_000]);
    server.close(s);
    machine.wait(|seen| seen.streams == 0);
    drop(server);
    machine.wait(|seen| seen.listens.is_empty());
}

#[test]
fn a_machine_that_serves_no_more_resets_all_and_the_kernel_goes_on() {
    if !has_route("a_machine_that_serves_no_more_resets_all_and_the_kernel_goes_on") {
        return;
    }
    for how in 0..3 {
        let machine = Machine::new();
        let guest = Guest::new(&machine, true);
        let mut client = guest.attach();
        let c = connect(&mut client, there(machine::ECHO));
        echo(&client, &c, b"x");
        match how {
            // A reply to a request that was never made.
            0 => machine.say(Message::Connected { connection: 99 }),
            1 => machine.break_off(Broken::Unserved),
            _ => machine.vanish(),
        }
        assert_eq!(client.read(&c, 1), Err(Error::Reset));
        let begun = Instant::now();
        while client.connect_from(Address::ANY, there(machine::ECHO)).err() != Some(NOT_OURS) {
            assert!(begun.elapsed() < PATIENCE);
        }
        // Programs of the same guest still reach each other.
        let mut server = guest.attach();
        let (listener, _) = server.listen(Address::v4([127, 0, 0, 1], 7000), 5);
        let here = client.connect(Address::v4([127, 0, 0, 1], 7000)).unwrap();
        let s = server.accept(listener).unwrap();
        client.write(&here, b"here").unwrap();
        assert_eq!(server.read(&s, 10).unwrap(), b"here");
    }
}

#[test]
fn what_is_no_function_is_refused() {
    if !has_route("what_is_no_function_is_refused") {
        return;
    }
    let machine = Machine::new();
    let mut device = machine.device(true);
    device.lie = Some((0, 0));
    let error = FunctionRemote::start(Box::new(device)).err().unwrap().to_string();
    assert!(error.contains("no socket function"), "{error}");
    let mut device = machine.device(true);
    device.lie = Some((8, 7));
    let error = FunctionRemote::start(Box::new(device)).err().unwrap().to_string();
    assert!(error.contains("version 7"), "{error}");
    let mut device = machine.device(true);
    device.unmapped = true;
    let error = FunctionRemote::start(Box::new(device)).err().unwrap().to_string();
    assert!(error.contains("cannot rely on the guest's memory"), "{error}");
}
