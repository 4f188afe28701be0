//! Two engines in two network namespaces, with a program at each. Needs root and the programs `ip`
//! and `openssl`. A test runs itself in the two namespaces, as one node in each.
#![cfg(all(feature = "guests", feature = "links"))]
#![allow(clippy::unwrap_used)]

mod client;
#[path = "../../link/tests/common/mod.rs"]
mod common;
mod vm;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE, readable, until};
use slipway_ring::cross::Error;
use slipway_sgiov::{Engine, NodeCarrier, Policy, Settings, report};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::NOT_OURS;
use slipway_sgiov_spec::function::Message;
use vm::{Guest, Open};

const LEFT: [u8; 4] = [10, 77, 0, 1];
const RIGHT: [u8; 4] = [10, 77, 0, 2];
const PORT: u16 = 8080;

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split_whitespace()).output().unwrap();
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Two network namespaces with a cable between them, for a test.
struct Nodes {
    names: [String; 2],
    test: &'static str,
}

impl Nodes {
    fn new(test: &'static str) -> Self {
        let id = std::process::id();
        let names = ["l", "r"].map(|side| format!("slipway-{id}-{test}-{side}"));
        let nodes = Self { names, test };
        let [left, right] = &nodes.names;
        ip(&format!("netns add {left}"));
        ip(&format!("netns add {right}"));
        ip(&format!("link add v0 netns {left} type veth peer name v0 netns {right}"));
        for (node, last) in [(left, 1), (right, 2)] {
            ip(&format!("-n {node} addr add 10.77.0.{last}/24 dev v0"));
            ip(&format!("-n {node} link set v0 up"));
            ip(&format!("-n {node} link set lo up"));
        }
        nodes
    }

    /// Runs this test again as a node.
    fn start(&self, side: usize, role: &str, dir: &Path) -> Node {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[side]]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", self.test, "--nocapture"]);
        command.env("SLIPWAY_TEST_ROLE", role).env("SLIPWAY_TEST_DIR", dir);
        command.env("SLIPWAY_TEST_NETNS", &self.names[side]);
        Node(command.spawn().unwrap())
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &self.names {
            let _ = Command::new("ip").args(["netns", "del", node]).status();
        }
    }
}

struct Node(Child);

impl Node {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Plays a node's role if this process is one of the nodes. Returns whether it is.
fn is_node() -> bool {
    let Ok(role) = std::env::var("SLIPWAY_TEST_ROLE") else { return false };
    let dir = PathBuf::from(std::env::var("SLIPWAY_TEST_DIR").unwrap());
    match role.as_str() {
        "left" => left(&dir),
        "left with a guest" => left_with_a_guest(&dir),
        _ => right(&dir),
    }
    true
}

/// Makes two nodes. Returns `None` after printing why the test is skipped.
fn nodes(test: &'static str) -> Option<(tempfile::TempDir, Nodes)> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: {test}: needs root");
        return None;
    }
    let (dir, nodes) = (tempfile::tempdir().unwrap(), Nodes::new(test));
    common::certificates(dir.path());
    Some((dir, nodes))
}

#[test]
fn streams_run_between_two_namespaces() {
    if is_node() {
        return;
    }
    let Some((dir, nodes)) = nodes("streams_run_between_two_namespaces") else { return };
    let there = |name: &str| dir.path().join(name).exists();
    let mut right = nodes.start(1, "right", dir.path());
    until("the right node serves", || there("ready"));
    let mut left = nodes.start(0, "left", dir.path());
    until("bytes went", || there("kill") || left.0.try_wait().unwrap().is_some());
    right.kill();
    std::fs::remove_file(dir.path().join("ready")).unwrap();
    until("the loss was seen", || there("lost") || left.0.try_wait().unwrap().is_some());
    let _right = nodes.start(1, "right", dir.path());
    assert!(left.0.wait().unwrap().success());
}

#[test]
fn one_engine_has_links_and_guests() {
    if is_node() {
        return;
    }
    let Some((dir, nodes)) = nodes("one_engine_has_links_and_guests") else { return };
    let _right = nodes.start(1, "right", dir.path());
    until("the right node serves", || dir.path().join("ready").exists());
    let mut left = nodes.start(0, "left with a guest", dir.path());
    assert!(left.0.wait().unwrap().success());
}

const POLICY: &str = "
[[tenant]]
name = 'web'
netns = 'NETNS'
[[allow]]
from = 'web'
to = 'network:one'
[[allow]]
from = 'network:one'
to = 'web'
";

/// Starts an engine with links that also serves guests, and attaches a program to it.
fn node(dir: &Path, settings: slipway_link::Settings) -> Client {
    let netns = std::env::var("SLIPWAY_TEST_NETNS").unwrap();
    let file = dir.join(format!("{}.toml", settings.name));
    std::fs::write(&file, POLICY.replace("NETNS", &netns)).unwrap();
    let socket = socket_of(dir, &settings.name);
    let remote = Some(Box::new(NodeCarrier::start(settings).unwrap()) as Box<_>);
    let policy = Policy::read(&file).unwrap();
    let settings =
        Settings { socket: socket.clone(), policy, remote, guests: true, ..Settings::default() };
    let mut engine = Engine::bind(settings).unwrap();
    std::thread::spawn(move || engine.run().unwrap());
    Client::attach(&socket)
}

fn socket_of(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.sock"))
}

const BYTES: u64 = 2 << 20;

fn send(program: &Client, to: &Connected, seed: u64) {
    let all = common::bytes(seed, 0, BYTES as usize);
    let (mut sent, begun) = (0, Instant::now());
    while sent < all.len() {
        sent += program.write(to, &all[sent..]).unwrap();
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

fn expect(program: &Client, from: &Connected, seed: u64) {
    let mut got = 0;
    while got < BYTES {
        let bytes = program.read(from, 100_000).unwrap();
        assert!(!bytes.is_empty() && bytes == common::bytes(seed, got, bytes.len()));
        got += bytes.len() as u64;
    }
}

fn right(dir: &Path) {
    let mut settings = common::right(dir, "10.77.0.1:4790");
    settings.listen = Some("10.77.0.2:4790".parse().unwrap());
    settings.engine[0].addresses = vec!["10.77.0.1/32".parse().unwrap()];
    let mut program = node(dir, settings);
    let (listener, waits) = program.listen(Address::v4([0; 4], PORT), 5);
    std::fs::write(dir.join("ready"), "").unwrap();
    // Serves until this process is killed, or the test is over.
    loop {
        readable(waits.as_fd(), Duration::from_secs(1));
        slipway_peer::eventfd::drain(waits.as_fd());
        let Ok(accepted) = program.accept(listener) else { continue };
        assert_eq!(accepted.endpoint.peer.as_v4(), Some([10, 77, 0, 1]));
        expect(&program, &accepted, 1);
        send(&program, &accepted, 2);
        if program.read(&accepted, 1) == Ok(vec![]) {
            program.close(accepted);
        }
    }
}

fn talk(program: &mut Client) -> Connected {
    let there = program.connect(Address::v4(RIGHT, PORT)).unwrap();
    talk_over(program, &there);
    there
}

fn ends(program: &Client, open: Connected) {
    program.stream(&open).out.finish();
    program.tell(&open);
    assert_eq!(program.read(&open, 1), Ok(vec![]), "the end, and not more");
    program.close(open);
}

fn talk_over(program: &Client, there: &Connected) {
    assert!(there.endpoint.place.engine);
    send(program, there, 1);
    expect(program, there, 2);
}

/// The left node's engine and program.
fn left_node(dir: &Path) -> Client {
    let mut settings = common::left(dir, "10.77.0.2:4790");
    settings.engine[0].addresses = vec!["10.77.0.2/32".parse().unwrap()];
    node(dir, settings)
}

fn left(dir: &Path) {
    let mut program = left_node(dir);
    // No program listens at that port.
    assert_eq!(program.connect(Address::v4(RIGHT, PORT + 1)).err(), Some(111));
    let first = talk(&mut program);
    ends(&program, first);

    let open = talk(&mut program);
    std::fs::write(dir.join("kill"), "").unwrap();
    until("the other node is dead", || !dir.join("ready").exists());
    let begun = Instant::now();
    until("the stream is reset", || program.stream(&open).available() == Err(Error::Reset));
    println!("the loss of the other node was seen after {:?}", begun.elapsed());
    program.close(open);
    // An engine that is gone gives the same error as a server that is gone.
    assert_eq!(program.connect(Address::v4(RIGHT, PORT)).err(), Some(111));
    std::fs::write(dir.join("lost"), "").unwrap();
    until("the other node is back", || dir.join("ready").exists());
    let begun = Instant::now();
    let last = loop {
        match program.connect(Address::v4(RIGHT, PORT)) {
            Ok(there) => break there,
            Err(_) => assert!(begun.elapsed() < PATIENCE, "no link"),
        }
    };
    talk_over(&program, &last);
    program.close(last);
}

/// Sends bytes of one program through the link and to a guest, and back, side by side.
fn left_with_a_guest(dir: &Path) {
    const GUEST: [u8; 4] = [10, 9, 0, 1];
    let mut program = left_node(dir);
    let socket = socket_of(dir, "left");
    let mut guest = Guest::start(dir, &socket, "a", "network:one", GUEST);
    let (own, at) = (Address::v4(LEFT, PORT), Address::v4(GUEST, 80));
    guest.say(Message::Listen { at });
    until("the guest listens", || {
        report(&socket).unwrap().guests.iter().any(|guest| !guest.listeners.is_empty())
    });
    let (listener, _waits) = program.listen(Address::v4([0; 4], PORT), 5);
    let far = talk(&mut program);
    let (out, mut into) = vm::host_to_guest(&mut program, own, &mut guest, at);
    vm::exchange((&program, &out), (&mut guest, &mut into));
    let (here, mut there) = vm::guest_to_host(&mut program, listener, &mut guest, own);
    vm::exchange((&program, &here), (&mut guest, &mut there));
    assert_eq!(program.connect(Address::v4(GUEST, 81)).err(), Some(NOT_OURS));
    rests();
    wakes(&program, &out, &mut guest, &into);
    vm::exchange((&program, &here), (&mut guest, &mut there));
    ends(&program, far);
    // The link outlives the guest.
    drop(guest);
    for open in [&out, &here] {
        until("the program sees the guest's end", || program.read(open, 1) == Err(Error::Reset));
    }
    let far = talk(&mut program);
    ends(&program, far);
}

/// Checks that a program's bytes reach a guest each time the engine's threads sleep.
fn wakes(program: &Client, out: &Connected, guest: &mut Guest, into: &Open) {
    for round in 0..100 {
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(program.write(out, &[vm::byte(round)]), Ok(1));
        until("the engine wakes", || guest.check(into, round) == 1);
    }
}

/// Checks that no thread wakes up while streams of all kinds are open and idle.
fn rests() {
    // Counted by thread: the threads that release memory end when there is none to release.
    let switches = || -> HashMap<OsString, u64> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let of_one = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("status")).ok()?;
            let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            Some((task.file_name(), line?.trim().parse().ok()?))
        };
        tasks.filter_map(of_one).collect()
    };
    // Memory of empty FIFOs is released after a second.
    std::thread::sleep(Duration::from_secs(2));
    let (before, begun) = (switches(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (after, seconds) = (switches(), begun.elapsed().as_secs_f64());
    let woke: u64 = after.iter().map(|(id, count)| count - before.get(id).unwrap_or(&0)).sum();
    println!("threads woke {woke} times in {seconds:.1} s");
    assert!((woke as f64) < 100.0 * seconds, "{woke} in {seconds:.1} s");
}
