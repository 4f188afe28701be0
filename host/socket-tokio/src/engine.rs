//! The engine of a program's sockets, and the thread that notices its end.

use std::io::{Error, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use slipway_socket::{Family, engine_path, is_told_surely};

use crate::waiters::{Waiters, lock};

/// Pause after a failed attempt to reach the engine.
const PAUSE: Duration = Duration::from_millis(200);

/// An engine, identified by its path. Cheap to clone. A program attaches to it with its first
/// socket, and again after the engine died.
#[derive(Clone)]
pub struct Engine(Arc<Attachment>);

struct Attachment {
    path: PathBuf,
    state: Mutex<EngineState>,
}

#[derive(Default)]
struct EngineState {
    session: Option<Arc<Session>>,
    not_before: Option<Instant>,
}

static SHARED: LazyLock<Engine> = LazyLock::new(|| Engine::at(&engine_path()));

impl Engine {
    /// Returns the engine at `SLIPWAY_SOCKET`, or at the usual path: that of
    /// [`crate::SocketStream::connect`].
    pub fn shared() -> &'static Self {
        &SHARED
    }

    /// Returns the engine whose socket is `path`. It need not exist yet.
    pub fn at(path: &Path) -> Self {
        Self(Arc::new(Attachment { path: path.to_owned(), state: Mutex::default() }))
    }

    /// Returns the attachment, and attaches if there is none. Returns `None` if there is no engine.
    /// Blocks until the engine answers.
    pub(crate) fn session(&self) -> Option<Arc<Session>> {
        let mut state = lock(&self.0.state);
        if let Some(session) = &state.session
            && !session.family.look()
        {
            return Some(session.clone());
        }
        state.session = None;
        if state.not_before.is_some_and(|when| Instant::now() < when) {
            return None;
        }
        state.session = Session::begin(&self.0.path).ok();
        state.not_before = state.session.is_none().then(|| Instant::now() + PAUSE);
        state.session.clone()
    }
}

/// One attachment to an engine, for as long as the engine lives.
pub(crate) struct Session {
    pub family: Arc<Family>,
    /// Waiters that must be woken when the engine is gone.
    waiting: Mutex<Vec<Weak<Waiters>>>,
    /// Eventfd that ends the thread.
    stop: OwnedFd,
}

impl Session {
    fn begin(path: &Path) -> std::io::Result<Arc<Self>> {
        if !is_told_surely() {
            return Err(ErrorKind::Unsupported.into());
        }
        let family = Family::attach(path)?;
        let connection = family.connection()?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let session = Arc::new(Self { family, waiting: Mutex::default(), stop });
        let weak = Arc::downgrade(&session);
        let watch = move || watch(&connection, &stopped, &weak);
        std::thread::Builder::new().name("slipway-engine".into()).spawn(watch)?;
        Ok(session)
    }

    /// Has `waiters` woken when the engine ends.
    pub fn enrol(&self, waiters: &Arc<Waiters>) {
        let mut waiting = lock(&self.waiting);
        // Dropped waiters are removed whenever the vector is about to grow.
        if waiting.len() == waiting.capacity() {
            waiting.retain(|one| one.strong_count() > 0);
        }
        waiting.push(Arc::downgrade(waiters));
    }

    fn bury(&self) {
        self.family.bury();
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        for waiters in waiting.iter().filter_map(Weak::upgrade) {
            waiters.wake_all();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // No other process has the eventfd, and it does not block.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
    }
}

/// Waits until the engine hangs up or the session is over.
fn watch(connection: &OwnedFd, stop: &OwnedFd, session: &Weak<Session>) {
    loop {
        let mut fds =
            [PollFd::new(connection, PollFlags::empty()), PollFd::new(stop, PollFlags::IN)];
        match poll(&mut fds, None).map_err(Error::from) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            // The engine's end could not be noticed any more: treat it as ended now.
            Err(_) => {}
            Ok(_) if !fds[1].revents().is_empty() => return,
            Ok(_) => {}
        }
        if let Some(session) = session.upgrade() {
            session.bury();
        }
        return;
    }
}
