//! An endpoint as other threads see it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use slipway_peer::Bin;
use slipway_reactor::{Bell, Handle};

use crate::Stats;
use crate::stats::Live;

/// What the endpoint and its controls share, wherever the endpoint is.
pub(crate) struct Shared {
    pub(crate) live: Arc<Live>,
    closing: AtomicBool,
    /// The function shall be polled once, whatever else there is to do.
    poked: AtomicBool,
    /// Polls of its function that were not idle.
    busy_polls: Arc<AtomicU64>,
    /// What its clients left to be closed or unmapped.
    bin: Bin,
    /// The reactor that it shall live on from now on.
    new_home: Mutex<Option<Handle>>,
    /// The thread that a client was to be moved to could not be had.
    pub(crate) move_failed: AtomicBool,
    bell: Bell,
    /// Tasks that it consists of: the endpoint's and those of its lanes.
    parts: Mutex<usize>,
    told: Condvar,
}

impl Shared {
    pub(crate) fn new(busy_polls: Arc<AtomicU64>, bin: &Bin) -> std::io::Result<Self> {
        Ok(Self {
            live: Arc::default(),
            closing: AtomicBool::new(false),
            poked: AtomicBool::new(false),
            busy_polls,
            bin: bin.clone(),
            new_home: Mutex::default(),
            move_failed: AtomicBool::new(false),
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

    /// See [`Control::poke`].
    pub(crate) fn poke(&self) {
        self.poked.store(true, Ordering::Release);
        self.bell.ring();
    }

    fn parts(&self) -> MutexGuard<'_, usize> {
        self.parts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether the endpoint was poked since it was asked last.
    pub(crate) fn take_poke(&self) -> bool {
        self.poked.swap(false, Ordering::AcqRel)
    }

    /// The reactor that it was told to move to since it was asked last.
    pub(crate) fn take_home(&self) -> Option<Handle> {
        self.new_home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take()
    }

    /// See [`Control::close`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }
}

/// Tells that a task of an endpoint is gone, and with the last one the endpoint; its last field, so
/// that everything else is dropped before.
pub(crate) struct Gone(Arc<Shared>);

impl Gone {
    /// Of one more task.
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        *shared.parts() += 1;
        Self(shared.clone())
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        let mut parts = self.0.parts();
        *parts -= 1;
        if *parts == 0 {
            self.0.live.ended();
            self.0.told.notify_all();
        }
    }
}

/// Closes an endpoint and looks at it, from any thread and without disturbing it. Cheap to clone;
/// outlives the endpoint harmlessly.
#[derive(Clone)]
pub struct Control(pub(crate) Arc<Shared>);

impl Control {
    /// A snapshot.
    pub fn stats(&self) -> Stats {
        Stats { held: self.0.bin.held(), ..self.0.live.snapshot() }
    }

    /// Asks the endpoint to go: its client is hung up on, the function quiesced, everything
    /// dropped, the socket's name removed. Returns at once.
    pub fn close(&self) {
        self.0.close();
    }

    /// Has the endpoint poll its function soon, also when it sleeps: another thread left something
    /// for the function. Returns at once. While a client is being cleared away the poll waits until
    /// that is done.
    pub fn poke(&self) {
        self.0.poke();
    }

    /// Has the endpoint live on another reactor: it goes there with all that it has between two of
    /// its steps, and its client notices nothing. One that has a thread of its own goes there when its
    /// client has gone. Of several calls before it gets to one the last counts. Returns at once.
    pub fn relocate(&self, home: &Handle) {
        let shared = &self.0;
        *shared.new_home.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
            Some(home.clone());
        shared.bell.ring();
    }

    /// How often a poll of the function found work, of all clients: what it has to do, as a part of
    /// what others on its reactor have.
    pub fn busy_polls(&self) -> u64 {
        self.0.busy_polls.load(Ordering::Relaxed)
    }

    /// Whether it has a thread of its own at present, because of message-only memory.
    pub fn is_private(&self) -> bool {
        self.0.live.is_private()
    }

    /// Whether the endpoint is gone, for whatever reason, with everything it owned.
    pub fn is_closed(&self) -> bool {
        *self.0.parts() == 0
    }

    /// Waits for that; false when `timeout` passed first. Not for reactor threads.
    pub fn wait_closed(&self, timeout: Duration) -> bool {
        let parts = self.0.parts();
        let waited = self.0.told.wait_timeout_while(parts, timeout, |parts| *parts > 0);
        *waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0 == 0
    }
}
