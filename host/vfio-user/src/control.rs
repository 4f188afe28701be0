//! The interface of an endpoint to other threads.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use slipway_peer::{Bin, Foreign};
use slipway_reactor::{Bell, Handle};

use crate::listener::{give, listen};
use crate::stats::Live;
use crate::{Admission, ServerView, Stage, Stats};

/// The state that an endpoint shares with its controls, whichever reactor it is on.
pub(crate) struct Shared {
    pub(crate) live: Arc<Live>,
    closing: AtomicBool,
    /// The function is to be polled once, whatever else there is to do.
    poked: AtomicBool,
    /// The number of polls of the function that were not idle.
    busy_polls: Arc<AtomicU64>,
    /// The clients' resources that await closing or unmapping.
    bin: Bin,
    /// The reactor that the endpoint is to move to.
    new_home: Mutex<Option<Handle>>,
    /// The thread that a client was to be moved to could not be started.
    pub(crate) move_failed: AtomicBool,
    /// The name of the socket.
    path: PathBuf,
    /// The socket of an endpoint that is shut: it does not listen yet.
    shut: Mutex<Option<Foreign>>,
    /// The client that the endpoint was opened for last, until the endpoint has adopted it.
    admission: Mutex<Option<Admission>>,
    bell: Bell,
    /// The number of tasks that the endpoint consists of: its own and those of its lanes.
    parts: Mutex<usize>,
    told: Condvar,
}

impl Shared {
    pub(crate) fn new(
        busy_polls: Arc<AtomicU64>,
        bin: &Bin,
        (shut, path): (Option<Foreign>, PathBuf),
    ) -> std::io::Result<Self> {
        Ok(Self {
            live: Arc::default(),
            closing: AtomicBool::new(false),
            poked: AtomicBool::new(false),
            busy_polls,
            bin: bin.clone(),
            new_home: Mutex::default(),
            move_failed: AtomicBool::new(false),
            path,
            shut: Mutex::new(shut),
            admission: Mutex::default(),
            bell: Bell::new()?,
            parts: Mutex::new(0),
            told: Condvar::new(),
        })
    }

    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn silence(&self) {
        self.bell.silence();
    }

    /// Carries out [`Control::poke`].
    pub(crate) fn poke(&self) {
        self.poked.store(true, Ordering::Release);
        self.bell.ring();
    }

    fn parts(&self) -> MutexGuard<'_, usize> {
        self.parts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns whether the endpoint was poked since the last call.
    pub(crate) fn take_poke(&self) -> bool {
        self.poked.swap(false, Ordering::AcqRel)
    }

    /// Returns the reactor that the endpoint was last told to move to, or `None` if it was not told
    /// since the last call.
    pub(crate) fn take_home(&self) -> Option<Handle> {
        self.new_home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    fn shut(&self) -> MutexGuard<'_, Option<Foreign>> {
        self.shut.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns whether the endpoint's socket does not listen yet.
    pub(crate) fn is_shut(&self) -> bool {
        self.shut().is_some()
    }

    /// Returns the client that the endpoint was opened for, once.
    pub(crate) fn take_admission(&self) -> Option<Admission> {
        self.admission.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// Carries out [`Control::open`], and [`Control::open_for`] with an admission.
    fn open(&self, admission: Option<Admission>) -> std::io::Result<()> {
        if self.is_closing() || *self.parts() == 0 {
            return Err(std::io::Error::other("the endpoint has ended"));
        }
        // Held to the end: of two callers, the name and the admission are the last one's.
        let mut shut = self.shut();
        if let Some(admission) = admission {
            if let Some(owner) = admission.owner {
                give(&self.path, owner)?;
            }
            // Before its client can come: the endpoint adopts it before it looks at the next one.
            let mut next = self.admission.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            *next = Some(admission);
        }
        if let Some(socket) = &*shut {
            listen(socket)?;
            *shut = None;
            drop(shut);
            self.bell.ring();
        }
        Ok(())
    }

    /// Carries out [`Control::close`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

/// Counts the tasks of an endpoint: dropping it notes that a task has ended, and with the last task
/// the endpoint. It is the last field of a task, so that everything else is dropped before.
pub(crate) struct TaskGuard(Arc<Shared>);

impl TaskGuard {
    /// Counts one more task.
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        *shared.parts() += 1;
        Self(shared.clone())
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        let mut parts = self.0.parts();
        *parts -= 1;
        if *parts == 0 {
            self.0.live.ended();
            drop(self.0.shut().take());
            self.0.told.notify_all();
        }
    }
}

/// A handle to observe, move and close an endpoint from any thread, without disturbing it. Cheap to
/// clone. It may outlive the endpoint.
#[derive(Clone)]
pub struct Control(pub(crate) Arc<Shared>);

impl Control {
    /// Returns a snapshot of the endpoint's figures.
    pub fn stats(&self) -> Stats {
        Stats { held: self.0.bin.held(), ..self.0.live.snapshot() }
    }

    /// Returns a view of the endpoint.
    pub fn inspect(&self) -> ServerView {
        let (live, client) = (&self.0.live, self.0.live.client());
        let (mut maps, mut mapped_bytes) = (0, 0_u64);
        live.each_region(|region| {
            maps += 1;
            mapped_bytes = mapped_bytes.saturating_add(region.len);
        });
        ServerView {
            stage: if self.is_closed() { Stage::Ended } else { live.stage() },
            client_pid: client.map(|client| client.pid),
            private: client.is_some_and(|client| client.private),
            maps,
            mapped_bytes,
            messages: live.messages.load(Ordering::Relaxed),
            busy_polls: self.busy_polls(),
            held: self.0.bin.held(),
            stalls: live.stalls.load(Ordering::Relaxed),
        }
    }

    /// Has an endpoint that was made shut ([`Config::shut`](crate::Config::shut)) admit clients
    /// from now on. Changes nothing if it admits them already. Does not wait for the endpoint.
    ///
    /// # Errors
    /// The endpoint has ended or was asked to, or listen(2) failed.
    pub fn open(&self) -> std::io::Result<()> {
        self.0.open(None)
    }

    /// Has an endpoint admit one client's user and memory from now on, in place of those of its
    /// configuration or of an earlier call. An endpoint that was made shut admits clients from then
    /// on. A client that is connected stays so, by what was in force before. Does not wait for the
    /// endpoint.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open), or the socket cannot be given to the user.
    pub fn open_for(&self, admission: Admission) -> std::io::Result<()> {
        self.0.open(Some(admission))
    }

    /// Asks the endpoint to end: it disconnects its client, quiesces the function, drops everything
    /// and removes the socket's name. Returns at once.
    pub fn close(&self) {
        self.0.close();
    }

    /// Has the endpoint poll its function soon, even if it sleeps: another thread left something
    /// for the function. Returns at once. While the endpoint cleans up after a client, the poll
    /// waits until that is done.
    pub fn poke(&self) {
        self.0.poke();
    }

    /// Has the endpoint move to another reactor. It moves with all of its state between two steps,
    /// and its client does not notice. An endpoint with a thread of its own moves when its client
    /// has disconnected. Of several calls before the endpoint handles one, the last counts. Returns
    /// at once.
    pub fn relocate(&self, home: &Handle) {
        let shared = &self.0;
        *shared.new_home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Some(home.clone());
        shared.bell.ring();
    }

    /// Returns the number of polls that found work for the function, for all clients: its share of
    /// the load of its reactor.
    pub fn busy_polls(&self) -> u64 {
        self.0.busy_polls.load(Ordering::Relaxed)
    }

    /// Returns whether the endpoint has a thread of its own at present because of message-only
    /// memory.
    pub fn is_private(&self) -> bool {
        self.0.live.is_private()
    }

    /// Returns whether the endpoint has ended, for any reason, and everything it owned is dropped.
    pub fn is_closed(&self) -> bool {
        *self.0.parts() == 0
    }

    /// Waits until the endpoint has ended. Returns false if `timeout` passed first. Not to be
    /// called on a reactor's thread.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        let parts = self.0.parts();
        let waited = self.0.told.wait_timeout_while(parts, timeout, |parts| *parts > 0);
        *waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0 == 0
    }
}
