//! A program under the library beside one of another user's, whose eventfds are full and blocking.
#![allow(clippy::unwrap_used, unsafe_code)] // unshare(2)

mod client;
mod node;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::channel;

use client::{PATIENCE, readable, until};
use node::{Node, Process, at};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slipway_sgiov_spec::Address;
use slipway_socket::{Family, Half};

const MALLORY: u32 = 61_021;

/// The body of a test's child processes, chosen by the environment. Does nothing in a run of the
/// tests.
#[test]
fn in_a_child_process() {
    match node::role() {
        None => {}
        Some((role, files, socket)) if role == "engine" => node::serve(&files, socket),
        Some((role, how, socket)) if role == "deaf" => deaf(&how, &socket),
        Some((role, how, socket)) if role == "send" => send(&how, &socket),
        Some(other) => panic!("{other:?}"),
    }
}

/// Accepts a connection and waits for its bytes. With "full", its eventfd is full and blocking, so
/// that write(2) cannot raise it.
fn deaf(how: &str, socket: &Path) {
    let family = Family::attach(socket).unwrap();
    let listening = family.listen(at(7400), 5, false, false, None).unwrap();
    say("listens");
    assert!(readable(listening.eventfd.as_fd(), PATIENCE));
    let opened = family.accept(listening.listener).unwrap();
    assert!(!opened.endpoint.arm(Half::Receiving, 1));
    if how == "full" {
        rustix::io::ioctl_fionbio(&opened.eventfd, false).unwrap();
        rustix::io::write(&opened.eventfd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    }
    say("waits");
    if how != "full" {
        assert!(readable(opened.eventfd.as_fd(), PATIENCE), "nobody told it");
        assert_eq!(opened.endpoint.recv(&mut [0; 10]), Ok(1));
        say("told");
    }
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// Sends a byte. With "bare", no descriptors are left, so that this thread cannot make a context
/// for raising an eventfd.
fn send(how: &str, socket: &Path) {
    let family = Family::attach(socket).unwrap();
    let opened = family.connect(at(7400), Address::ANY).unwrap();
    say("connected");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let maximum = getrlimit(Resource::Nofile).maximum;
    if how == "bare" {
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum }).unwrap();
    }
    let can = std::thread::spawn(slipway_peer::eventfd::can_raise).join().unwrap();
    assert_eq!(can, how != "bare");
    let sent = std::thread::spawn(move || opened.endpoint.send(b"!")).join().unwrap();
    assert_eq!(sent, Ok(1));
    say("sent");
}

fn say(word: &str) {
    println!("said: {word}");
    std::io::stdout().flush().unwrap();
}

/// The program at the other side of the library's connection, perhaps with another user's id.
struct Program(Process, std::sync::mpsc::Receiver<String>);

impl Program {
    fn new(role: &str, uid: Option<u32>, node: &Node) -> Self {
        let mut command = Process::command(role, &node.socket());
        if let Some(uid) = uid {
            command.uid(uid).gid(uid);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (lines, said) = channel();
        let stdout = child.stdout.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some((_, word)) = line.split_once("said: ") {
                    let _ = lines.send(word.to_owned());
                }
            }
        });
        Self(Process(child), said)
    }

    fn says(&self, word: &str) {
        assert_eq!(self.1.recv_timeout(PATIENCE).as_deref(), Ok(word));
    }

    fn go_on(&mut self) {
        self.0.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }
}

/// A program that cannot raise another user's eventfd without waiting asks the engine to raise it,
/// and does not wait.
#[test]
fn a_program_never_waits_for_anothers_eventfd_as_root() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: a_program_never_waits_for_anothers_eventfd_as_root: needs root");
    }
    for (peer, sender) in [("full", "rich"), ("full", "bare"), ("empty", "bare")] {
        let node = Node::new();
        std::fs::set_permissions(node.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        until("an engine", || slipway_sgiov::is_served(&node.socket()));
        let mallory = Program::new(&format!("deaf {peer}"), Some(MALLORY), &node);
        mallory.says("listens");
        let mut program = Program::new(&format!("send {sender}"), None, &node);
        program.says("connected");
        mallory.says("waits");
        program.go_on();
        program.says("sent");
        if peer == "empty" {
            mallory.says("told");
        }
    }
}
