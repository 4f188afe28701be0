//! The socket where launchers ask for memory.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{Shutdown, SocketFlags, SocketType};
use slipway_peer::Bin;
use slipway_pool_spec::{Completion, Request};
use slipway_pool_wire::{WireError, receive};

use crate::complete;
use crate::lease::Lease;
use crate::shared::Shared;

/// The number of launchers that may wait for the pool to look at them.
const BACKLOG: i32 = 128;
/// The time that a launcher may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(10);

/// The server of launchers. Dropping it ends the server and removes the socket; memory that was
/// given stays served.
pub struct Server {
    path: PathBuf,
    listener: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn start(shared: &Arc<Shared>, path: &Path) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = slipway_private::listen(path, SocketType::SEQPACKET, None, BACKLOG)?;
        let listener = Arc::new(listener);
        let (shared, theirs) = (Arc::clone(shared), Arc::clone(&listener));
        let run = move || accept_all(&shared, &theirs);
        let thread = std::thread::Builder::new().name("pool-door".into()).spawn(run)?;
        Ok(Self { path: path.to_owned(), listener, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Has a thread that waits in accept(2) return.
        let _ = rustix::net::shutdown(&self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn accept_all(shared: &Arc<Shared>, listener: &OwnedFd) {
    loop {
        match rustix::net::accept_with(listener.as_fd(), SocketFlags::CLOEXEC) {
            Ok(connection) => begin(shared, connection),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                tracing::error!("no descriptor is left for memory of a sandbox");
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
            Err(_) => return,
        }
    }
}

/// Serves a launcher on a thread of its own: a copy takes a while, and the faults of its VMM, and
/// requests that change the VMM's address space, wait for what the VMM does.
fn begin(shared: &Arc<Shared>, connection: OwnedFd) {
    let shared = Arc::clone(shared);
    let run = move || {
        if let Err(error) = serve(&shared, connection) {
            tracing::warn!(%error, "memory was not given");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("pool-lease".into()).spawn(run) {
        tracing::error!(%error, "no thread is left for memory of a sandbox");
    }
}

/// Does what the launcher at `connection` asks for. Serves its VMM, if it asks for memory.
fn serve(shared: &Arc<Shared>, connection: OwnedFd) -> Result<(), WireError> {
    let bin = Bin::new();
    deadline(&connection, Some(PATIENCE))?;
    let (message, []) = receive(connection.as_fd(), &bin)?;
    deadline(&connection, None)?;
    if let Some(completion) = Completion::decode(&message) {
        return complete::answer(shared, &connection, completion);
    }
    let request = Request::decode(&message).ok_or(WireError::Malformed)?;
    Lease::give(shared, connection, request, &bin)?.serve();
    Ok(())
}

fn deadline(connection: &OwnedFd, limit: Option<Duration>) -> Result<(), WireError> {
    let set = set_socket_timeout(connection, Timeout::Recv, limit);
    set.map_err(WireError::io("setting a deadline"))
}
