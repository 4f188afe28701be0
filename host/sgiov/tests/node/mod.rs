//! An engine in a process of its own, and processes beside it. A test file that uses this has a
//! test `in_a_child_process`, which plays the role that [`role`] returns.
#![allow(dead_code)] // not every test needs all of it

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slipway_sgiov::{Engine, Settings, report};
use slipway_sgiov_spec::Address;

use crate::client::{Client, PATIENCE};

pub fn at(port: u16) -> Address {
    Address::v4([127, 0, 0, 1], port)
}

/// Returns the role of this process, its argument, and the engine's socket. Returns `None` in the
/// process that runs the tests.
pub fn role() -> Option<(String, String, PathBuf)> {
    let role = std::env::var("SGIOV_TEST_ROLE").ok()?;
    let socket = PathBuf::from(std::env::var("SGIOV_TEST_SOCKET").unwrap());
    let (what, with) = role.split_once(' ').unwrap();
    Some((what.into(), with.into(), socket))
}

/// Plays the role "engine", with at most `files` descriptors.
pub fn serve(files: &str, socket: PathBuf) {
    let limit = files.parse().unwrap();
    let limit = Rlimit { current: Some(limit), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, limit).unwrap();
    Engine::bind(Settings { socket, ..Settings::default() }).unwrap().run().unwrap();
}

/// A process of a test. It is killed when this is dropped.
pub struct Process(pub Child);

impl Process {
    pub fn new(role: &str, socket: &Path) -> Self {
        Self(Self::command(role, socket).spawn().unwrap())
    }

    pub fn command(role: &str, socket: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "in_a_child_process", "--nocapture", "--test-threads=1"])
            .env("SGIOV_TEST_ROLE", role)
            .env("SGIOV_TEST_SOCKET", socket)
            .stdout(Stdio::null());
        command
    }

    /// Kills the process with SIGKILL and reaps it.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub struct Node {
    pub dir: tempfile::TempDir,
    pub engine: Process,
}

impl Node {
    pub fn new() -> Self {
        Self::with_files(4000)
    }

    pub fn with_files(files: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let engine = Process::new(&format!("engine {files}"), &dir.path().join("s"));
        Self { dir, engine }
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    pub fn attach(&self) -> Client {
        Client::attach(&self.socket())
    }

    /// Waits until no connection is left, and no page of `server` but those of inboxes.
    pub fn all_is_given_back(&self, server: &Client) {
        let begun = Instant::now();
        loop {
            let report = report(&self.socket()).unwrap();
            let pages = server.arenas.values().map(|arena| {
                rustix::fs::fstat(arena.file().unwrap()).unwrap().st_blocks * 512 / 4096
            });
            if report.connections_in_all == 0 && pages.sum::<i64>() <= 4 {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "{report:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
