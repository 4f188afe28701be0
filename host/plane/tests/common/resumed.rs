//! A function for a client that connects again whenever its server was killed.
#![allow(dead_code)] // each test program uses a part

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use slipway_nvme::driver::{AccessError, RegisterAccess};
use slipway_vfio_user_client::{ConnectionState, Continuity, RemoteFunction};

/// Connects to the function at `path` once it is served, and again whenever the connection is lost,
/// for as long as the function is used. Each time it must go on where it was.
pub fn connect(path: &Path, patience: Duration) -> Arc<RemoteFunction> {
    let begun = Instant::now();
    let function = loop {
        let made = open(path).and_then(|socket| {
            RemoteFunction::new(socket, patience).map_err(|error| error.to_string())
        });
        match made {
            Ok(function) => break Arc::new(function),
            Err(error) => assert!(begun.elapsed() < patience, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let (used, path) = (Arc::downgrade(&function), path.to_owned());
    std::thread::spawn(move || keep_connected(&used, &path));
    function
}

fn open(path: &Path) -> Result<OwnedFd, String> {
    let stream = std::os::unix::net::UnixStream::connect(path);
    stream.map(OwnedFd::from).map_err(|error| error.to_string())
}

fn keep_connected(used: &Weak<RemoteFunction>, path: &Path) {
    while let Some(function) = used.upgrade() {
        let state = function.state();
        assert!(!matches!(state, ConnectionState::Broken(_)), "{state:?}");
        if state == ConnectionState::Connected {
            let timeout = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
            let mut wait = [PollFd::new(&*function, PollFlags::IN)];
            let _ = rustix::event::poll(&mut wait, Some(&timeout));
            continue;
        }
        let attempt = open(path)
            .and_then(|socket| function.reconnect(socket).map_err(|error| error.to_string()));
        match attempt {
            Ok(continuity) => assert_eq!(continuity, Continuity::Resumed),
            // A server that is killed meanwhile refuses, or ends the connection.
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// The registers of BAR 0, for a driver that gives up after `patience` without an answer.
pub struct ResumedRegisters {
    function: Arc<RemoteFunction>,
    patience: Duration,
    /// The time of the last write.
    since: Instant,
}

impl ResumedRegisters {
    pub fn new(function: Arc<RemoteFunction>, patience: Duration) -> Self {
        Self { function, patience, since: Instant::now() }
    }
}

impl RegisterAccess for ResumedRegisters {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.function.read(0, offset, into).map_err(|error| AccessError(error.to_string()))
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        self.function.write(0, offset, from).map_err(|error| AccessError(error.to_string()))
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        self.function.post(0, offset, from).map_err(|error| AccessError(error.to_string()))
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        if self.since.elapsed() > self.patience {
            return Err(AccessError("the function does not answer".into()));
        }
        std::thread::yield_now();
        Ok(())
    }
}
