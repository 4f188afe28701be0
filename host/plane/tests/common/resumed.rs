//! A function for a client that connects again whenever its server was killed.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
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
