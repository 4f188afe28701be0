//! Two engines in two network namespaces, with a program at each: needs root and the programs `ip` and
//! `openssl`. The test runs itself in the namespaces, as one node each.
#![cfg(feature = "links")]
#![allow(clippy::unwrap_used)]

mod client;
#[path = "../../link/tests/common/mod.rs"]
mod common;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE, readable};
use slipway_ring::cross::Error;
use slipway_sgiov::{Carrier, Engine, Policy, Settings};
use slipway_sgiov_spec::Address;

const RIGHT: [u8; 4] = [10, 77, 0, 2];
const PORT: u16 = 8080;
const NAME: &str = "streams_run_between_two_namespaces";

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split_whitespace()).output().unwrap();
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Two network namespaces with a cable between them.
struct Nodes([String; 2]);

impl Nodes {
    fn new() -> Self {
        let id = std::process::id();
        let nodes = Self(["l", "r"].map(|side| format!("slipway-test-{id}-{side}")));
        let [left, right] = &nodes.0;
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

    /// This test again, as a node.
    fn start(&self, side: usize, role: &str, dir: &Path) -> Node {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[side]]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", NAME, "--nocapture"]);
        command.env("SLIPWAY_TEST_ROLE", role).env("SLIPWAY_TEST_DIR", dir);
        command.env("SLIPWAY_TEST_NETNS", &self.0[side]);
        Node(command.spawn().unwrap())
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &self.0 {
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

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn streams_run_between_two_namespaces() {
    if let Ok(role) = std::env::var("SLIPWAY_TEST_ROLE") {
        let dir = PathBuf::from(std::env::var("SLIPWAY_TEST_DIR").unwrap());
        return if role == "left" { left(&dir) } else { right(&dir) };
    }
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: {NAME}: needs root");
    }
    let (dir, nodes) = (tempfile::tempdir().unwrap(), Nodes::new());
    common::certificates(dir.path());
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

/// An engine with links, and a program of its own that is attached.
fn node(dir: &Path, settings: slipway_link::Settings) -> Client {
    let netns = std::env::var("SLIPWAY_TEST_NETNS").unwrap();
    let file = dir.join(format!("{}.toml", settings.name));
    std::fs::write(&file, format!("[[tenant]]\nname = 'web'\nnetns = '{netns}'\n")).unwrap();
    let socket = dir.join(format!("{}.sock", settings.name));
    let remote = Some(Box::new(Carrier::start(settings).unwrap()) as Box<_>);
    let policy = Policy::read(&file).unwrap();
    let settings = Settings { socket: socket.clone(), policy, remote, ..Settings::default() };
    let mut engine = Engine::bind(settings).unwrap();
    std::thread::spawn(move || engine.run().unwrap());
    Client::attach(&socket)
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
    let mut program = node(dir, settings);
    let (listener, waits) = program.listen(Address::v4([0; 4], PORT), 5);
    std::fs::write(dir.join("ready"), "").unwrap();
    // Until it is killed, or the test is over.
    loop {
        readable(waits.as_fd(), Duration::from_secs(1));
        slipway_eventfd::drain(waits.as_fd());
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

fn talk_over(program: &Client, there: &Connected) {
    assert!(there.endpoint.place.engine);
    send(program, there, 1);
    expect(program, there, 2);
}

fn left(dir: &Path) {
    let mut settings = common::left(dir, "10.77.0.2:4790");
    settings.engine[0].addresses = vec!["10.77.0.2/32".parse().unwrap()];
    let mut program = node(dir, settings);
    // Nobody listens at that port.
    assert_eq!(program.connect(Address::v4(RIGHT, PORT + 1)).err(), Some(111));
    let first = talk(&mut program);
    program.stream(&first).out.finish();
    program.tell(&first);
    assert_eq!(program.read(&first, 1), Ok(vec![]), "the end, and not more");
    program.close(first);

    let open = talk(&mut program);
    std::fs::write(dir.join("kill"), "").unwrap();
    until("the other node is dead", || !dir.join("ready").exists());
    let begun = Instant::now();
    while program.stream(&open).available() != Err(Error::Reset) {
        assert!(begun.elapsed() < Duration::from_secs(1), "a second");
        std::thread::yield_now();
    }
    program.close(open);
    // An engine that is not there: what a program is told whose server is not.
    assert_eq!(program.connect(Address::v4(RIGHT, PORT)).err(), Some(111));
    std::fs::write(dir.join("lost"), "").unwrap();
    until("the other node is back", || dir.join("ready").exists());
    let begun = Instant::now();
    let last = loop {
        match program.connect(Address::v4(RIGHT, PORT)) {
            Ok(there) => break there,
            Err(_) => assert!(begun.elapsed() < Duration::from_secs(2), "at once"),
        }
    };
    talk_over(&program, &last);
    program.close(last);
}
