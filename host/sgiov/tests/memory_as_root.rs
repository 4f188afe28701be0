//! Programs in a control group that has no memory left: a FIFO's pages are charged to the group of
//! the sender. Needs root, and a memory controller.
#![allow(clippy::unwrap_used, unsafe_code)]

mod client;
mod node;

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE, readable};
use node::{Node, Process, at};
use slipway_ring::cross::Error;

/// The group's limit in bytes: some dozens of FIFOs of half a MiB, and then some of a page.
const LIMIT: u64 = 32 << 20;
/// Connections of the program that fills FIFOs, beside the one by which it reports. Their FIFOs
/// need more than the group's memory.
const CONNECTIONS: usize = 240;
/// The most shared memory in bytes of a program without FIFOs: its table and inboxes.
const RESIDUE: u64 = 64 << 10;
/// The number of bytes sent at once: no multiple of a page or of a FIFO's size.
const PIECE: usize = 396_000;
const SIGKILL: i32 = 9;
/// The byte by which the program reports that it is ready.
const READY: u8 = 200;
const GO_ON: u8 = 201;

/// The body of a test's child processes, chosen by the environment. Does nothing in a run of the
/// tests.
#[test]
fn in_a_child_process() {
    match node::role() {
        None => {}
        Some((role, files, socket)) if role == "engine" => node::serve(&files, socket),
        Some((role, port, socket)) if role == "fill" => fill(&socket, port.parse().unwrap()),
        Some(other) => panic!("{other:?}"),
    }
}

/// A memory control group with a limit. Its processes are killed when this is dropped.
struct Group {
    folder: PathBuf,
    is_first_version: bool,
}

impl Group {
    /// Makes the group. Returns `None` after printing why the test is skipped.
    fn new(test: &str) -> Option<Self> {
        let name = format!("slipway-test-{}-{test}", std::process::id());
        let _ = std::fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
        for (root, limit) in [("memory", "memory.limit_in_bytes"), ("", "memory.max")] {
            let folder = Path::new("/sys/fs/cgroup").join(root).join(&name);
            if std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let group = Self { folder, is_first_version: root == "memory" };
            if group.set(limit, LIMIT) {
                // If pages may be swapped out, the limit does not bind. Without the file there is
                // no swap accounting.
                group.set("memory.memsw.limit_in_bytes", LIMIT);
                group.set("memory.swap.max", 0);
                return Some(group);
            }
        }
        println!("SKIPPED: {test}: needs root and a control group with a limit of memory");
        None
    }

    /// Writes a file of the group. Returns `false` if there is no such file or it is not writable.
    fn set(&self, file: &str, value: u64) -> bool {
        let opened = OpenOptions::new().write(true).open(self.folder.join(file));
        opened.is_ok_and(|file| rustix::io::write(file, value.to_string().as_bytes()).is_ok())
    }

    /// Returns a number in a file of the group, given the word before it.
    fn number(&self, file: &str, word: &str) -> u64 {
        let text = std::fs::read_to_string(self.folder.join(file)).unwrap();
        let mut lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.find(|(key, _)| *key == word).unwrap().1.parse().unwrap()
    }

    /// Returns the number of the group's processes that the kernel killed for want of memory.
    fn killed(&self) -> u64 {
        let file = if self.is_first_version { "memory.oom_control" } else { "memory.events" };
        self.number(file, "oom_kill")
    }

    fn start(&self, role: &str, socket: &Path) -> Process {
        let mut command = Process::command(role, socket);
        let members: File =
            OpenOptions::new().write(true).open(self.folder.join("cgroup.procs")).unwrap();
        // SAFETY: write(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(move || Ok(rustix::io::write(&members, b"0").map(drop)?));
        }
        Process(command.spawn().unwrap())
    }

    /// Waits until no page of FIFOs is charged to the group.
    fn is_empty(&self) {
        let begun = Instant::now();
        while self.number("memory.stat", "shmem") > RESIDUE {
            assert!(begun.elapsed() < PATIENCE, "{}", self.number("memory.stat", "shmem"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The group empties a moment after its last process was reaped.
        let begun = Instant::now();
        while std::fs::remove_dir(&self.folder).is_err() && begun.elapsed().as_secs() < 5 {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Returns the bytes that are sent from `position` on.
fn text(position: usize) -> Vec<u8> {
    (position..position + PIECE).map(|at| (at % 251) as u8).collect()
}

/// Fills the FIFOs of all its connections. When there is no memory for one, it reports which one,
/// closes those before it when it is told to, and goes on sending.
fn fill(socket: &Path, port: u16) {
    let mut client = Client::attach(socket);
    let words = client.connect(at(port)).unwrap();
    let mut open: Vec<_> = (0..CONNECTIONS).map(|_| client.connect(at(port)).unwrap()).collect();
    let piece = text(0);
    assert_eq!(client.send(&words, &[READY]), Ok(1));
    let lacking = open.iter().position(|there| lacks_memory(&client, there, &piece));
    let lacking = lacking.expect("there was memory for all of them");
    assert_eq!(client.send(&words, &[lacking as u8]), Ok(1));
    assert_eq!(client.read(&words, 1).unwrap(), [GO_ON]);
    open.drain(..lacking).for_each(|there| client.close(there));
    let begun = Instant::now();
    while client.send(&open[0], &piece) != Ok(PIECE) {
        assert!(begun.elapsed() < PATIENCE, "there is memory, and it gets none");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.read(&words, 1).unwrap(), [GO_ON]);
}

/// Sends until the FIFO is full. Returns whether there was no memory for the FIFO.
fn lacks_memory(client: &Client, there: &Connected, piece: &[u8]) -> bool {
    let mut sent = 0;
    loop {
        match client.send(there, &piece[sent % 251..]) {
            Ok(0) => return false,
            Ok(count) => sent += count,
            Err(Error::NoMemory) => return true,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Reads to the end or the reset of a stream, and checks that all bytes are the stream's own.
/// Returns their number.
fn read_all(server: &Client, here: &Connected) -> usize {
    let mut got = 0;
    while let Ok(bytes) = server.read(here, PIECE)
        && !bytes.is_empty()
    {
        assert!(bytes == text(got)[..bytes.len()], "something else came at {got}");
        got += bytes.len();
    }
    got
}

/// A node, a program in the group, and a program that receives from it, with the streams between
/// them.
struct Scene {
    node: Node,
    server: Client,
    sender: Process,
    words: Connected,
    streams: Vec<Connected>,
}

impl Scene {
    fn new(group: &Group) -> Self {
        let node = Node::new();
        let mut server = node.attach();
        let (listener, waits) = server.listen(at(7100), 4096);
        let sender = group.start("fill 7100", &node.socket());
        let mut all = Vec::new();
        while all.len() <= CONNECTIONS {
            assert!(readable(waits.as_fd(), PATIENCE));
            slipway_peer::eventfd::drain(waits.as_fd());
            while let Ok(here) = server.accept(listener) {
                all.push(here);
            }
        }
        let words = all.remove(0);
        assert_eq!(server.read(&words, 1).unwrap(), [READY]);
        Self { node, server, sender, words, streams: all }
    }

    /// Checks that two programs outside the group still have memory and reach each other.
    fn others_go_on(&self) {
        let (mut one, mut other) = (self.node.attach(), self.node.attach());
        let (listener, _waits) = one.listen(at(7101), 1);
        let there = other.connect(at(7101)).unwrap();
        let here = one.accept(listener).unwrap();
        assert!(other.send(&there, &text(0)).unwrap() > 0);
        other.close(there);
        assert!(read_all(&one, &here) > 0);
        one.close(here);
    }

    fn nothing_is_held(self, group: &Group) {
        self.server.close(self.words);
        self.streams.into_iter().for_each(|here| self.server.close(here));
        self.node.all_is_given_back(&self.server);
        group.is_empty();
    }
}

#[test]
fn a_program_at_the_limit_of_its_group_is_killed_as_the_kernel_does_and_harms_nobody() {
    let Some(group) = Group::new("limit") else { return };
    let mut scene = Scene::new(&group);
    let status = scene.sender.0.wait().unwrap();
    // The kernel killed it for memory: it did not end by SIGBUS in the middle of a copy.
    assert_eq!((status.signal(), group.killed()), (Some(SIGKILL), 1));
    scene.others_go_on();
    let got = scene.streams.iter().map(|here| read_all(&scene.server, here)).sum::<usize>();
    assert!(got as u64 > LIMIT / 4, "{got}");
    scene.nothing_is_held(&group);
}

/// The kernel kills nothing, as with `memory.oom_control` of the first version of control groups:
/// the program gets an error.
#[test]
fn a_program_whom_nobody_kills_is_told_and_goes_on_when_there_is_memory() {
    let Some(group) = Group::new("told") else { return };
    if !group.set("memory.oom_control", 1) {
        return println!("SKIPPED: told: needs the first version's memory.oom_control");
    }
    let mut scene = Scene::new(&group);
    let lacking = usize::from(scene.server.read(&scene.words, 1).unwrap()[0]);
    println!("no memory for FIFO {lacking} of {CONNECTIONS}, each of {PIECE} bytes and more");
    assert!(lacking > 0);
    scene.others_go_on();
    assert_eq!(scene.server.send(&scene.words, &[GO_ON]), Ok(1));
    for here in scene.streams.drain(..lacking) {
        assert!(read_all(&scene.server, &here) > 0);
        scene.server.close(here);
    }
    let mut got = 0;
    while got < PIECE {
        got += scene.server.read(&scene.streams[0], PIECE).unwrap().len();
    }
    assert_eq!(scene.server.send(&scene.words, &[GO_ON]), Ok(1));
    assert!(scene.sender.0.wait().unwrap().success());
    assert_eq!(group.killed(), 0);
    scene.nothing_is_held(&group);
}
