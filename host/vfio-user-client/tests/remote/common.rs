//! A server of the test function, in this process or in one that is killed.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, Knobs, Scratch};
use slipway_vfio_user::{Config, Control, DoorbellMode, Endpoint, EndpointParts};
use slipway_vfio_user_client::RemoteFunction;

pub use slipway_vfio_user::testing::{PATIENCE, eventually};

/// The variables that make a test of this binary the server of another one.
const PATH: &str = "SLIPWAY_TEST_SERVE";
const KIND: &str = "SLIPWAY_TEST_KIND";

pub struct Served {
    pub path: PathBuf,
    pub control: Control,
    _reactor: Reactor,
    _directory: Option<tempfile::TempDir>,
}

pub fn serve(doorbells: DoorbellMode) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let config = Config { doorbells, ..Config::at(directory.path().join("socket")) };
    let served = serve_as(config);
    Served { _directory: Some(directory), ..served }
}

fn serve_as(config: Config) -> Served {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let path = config.location.socket();
    let mut parts = EndpointParts::new(&config);
    let (cells, knobs) = (parts.doorbells(DOORBELLS).unwrap(), Arc::<Knobs>::default());
    let function = Scratch::new(parts.memory(), &parts.interrupts(), cells, knobs);
    let endpoint =
        Endpoint::new(config, parts, Box::new(function), Vec::new(), &reactor.handle()).unwrap();
    let control = endpoint.control();
    reactor.handle().add(Box::new(endpoint)).unwrap();
    Served { path, control, _reactor: reactor, _directory: None }
}

impl Served {
    pub fn connect(&self) -> RemoteFunction {
        RemoteFunction::new(connect(&self.path), PATIENCE).unwrap()
    }
}

pub fn connect(path: &Path) -> OwnedFd {
    UnixStream::connect(path).unwrap().into()
}

/// A server in a process of its own, killed when dropped.
pub struct Process {
    child: Child,
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Process {
    /// Starts one whose doorbells are `mapped`, or `rung`, or `rung` and whose function ends with
    /// its `only` connection.
    pub fn start(kind: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "common::serve_for_another_test", "--nocapture"])
            .env(PATH, &path)
            .env(KIND, kind)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        eventually("it listens", || UnixStream::connect(&path).is_ok());
        Self { child, path, _directory: directory }
    }

    pub fn connect(&self) -> RemoteFunction {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // The connection that looked whether it listens may still be the present client.
            match RemoteFunction::new(connect(&self.path), PATIENCE) {
                Ok(function) => return function,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    }

    /// Reconnects `function` to this server.
    pub fn take_over(&self, function: &RemoteFunction) {
        let mut last = Ok(());
        let done = || {
            last = function.reconnect(connect(&self.path)).map(drop);
            last.is_ok()
        };
        eventually("it is connected again", done);
        last.unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// No test of its own: the body of [`Process`].
#[test]
fn serve_for_another_test() {
    let Some(path) = std::env::var_os(PATH) else { return };
    let is = |kind: &str| std::env::var_os(KIND).is_some_and(|one| one == kind);
    let doorbells = if is("mapped") { DoorbellMode::Mapped } else { DoorbellMode::Rung };
    let _served = serve_as(Config {
        doorbells,
        one_connection: is("only"),
        ..Config::at(PathBuf::from(path))
    });
    // Ends with the test that wanted it, however that ends.
    let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
}

pub fn memory(len: u64) -> OwnedFd {
    slipway_vfio_user_client::sealed_memory(len).unwrap()
}

pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

pub fn count(file: impl AsFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(file, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

pub fn is_readable(file: impl AsFd) -> bool {
    poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&Timespec::default())).unwrap() == 1
}

pub fn read_u32(function: &RemoteFunction, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    let _ = function.read(0, offset, &mut bytes);
    u32::from_le_bytes(bytes)
}

pub fn write_u32(function: &RemoteFunction, offset: u64, value: u32) {
    function.write(0, offset, &value.to_le_bytes()).unwrap();
}

/// Has the function copy `len` bytes of guest memory, and returns its status register.
pub fn copy(function: &RemoteFunction, from: u64, to: u64, len: u32) -> u32 {
    function.write(0, 0x40, &from.to_le_bytes()).unwrap();
    function.write(0, 0x48, &to.to_le_bytes()).unwrap();
    write_u32(function, 0x50, len);
    write_u32(function, 0x54, 1);
    read_u32(function, 0x54)
}
