//! How function and port hand the data path to each other.
//!
//! The [`DataPath`] has one owner at a time: the function, while queues are configured, reset or
//! quiesced; the port, on the switch's thread, while the driver runs. Each side looks at one word; only
//! when that says so it takes the lock of the slot, whose holder does nothing but move a box. The
//! function never waits: it asks for the path and finds it in a later poll, or register access.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use slipway_switch::Waker;

use crate::counters::Live;
use crate::path::{DataPath, Rules};

/// What both sides share.
pub(crate) struct Exchange {
    /// Something is in the slot for the port.
    for_port: AtomicBool,
    /// The path is in the slot for the function.
    for_function: AtomicBool,
    /// How many rules the function gave, and how many of them count by now.
    asked: AtomicU32,
    applied: AtomicU32,
    /// The path has met what needs a reset.
    broken: AtomicBool,
    /// The driver runs.
    up: AtomicBool,
    /// What the host says of the link.
    link: AtomicBool,
    pub live: Live,
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    to_port: Option<Box<DataPath>>,
    to_function: Option<Box<DataPath>>,
    rules: Option<Rules>,
    recalled: bool,
    waker: Option<Waker>,
    /// There is no port any more.
    closed: bool,
    /// There is no function any more. A path shares the exchange: one that stayed in here would keep
    /// itself, and the guest's memory, for ever.
    abandoned: bool,
}

impl Slot {
    /// Puts the path where the function finds it. False: there is none, and the path is gone.
    fn give_back(&mut self, path: Box<DataPath>) -> bool {
        let there = !self.abandoned;
        self.to_function = there.then_some(path);
        there
    }
}

impl Exchange {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            for_port: AtomicBool::new(false),
            for_function: AtomicBool::new(false),
            asked: AtomicU32::new(0),
            applied: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            up: AtomicBool::new(false),
            link: AtomicBool::new(true),
            live: Live::default(),
            slot: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        // Boxes are moved in single steps: a panic leaves the slot whole.
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    // The function's side.

    /// Gives the path to the port. Without a port it comes back at once.
    pub fn send(&self, path: Box<DataPath>) {
        let mut slot = self.lock();
        self.broken.store(false, Ordering::Relaxed);
        slot.recalled = false;
        if slot.closed {
            slot.to_function = Some(path);
            self.for_function.store(true, Ordering::Release);
            return;
        }
        slot.to_port = Some(path);
        drop(slot);
        self.for_port.store(true, Ordering::Release);
    }

    /// Asks for the path. The switch has to be woken for it.
    pub fn recall(&self) {
        let mut slot = self.lock();
        if let Some(path) = slot.to_port.take() {
            // The port has not even seen it.
            slot.to_function = Some(path);
            self.for_function.store(true, Ordering::Release);
            return;
        }
        slot.recalled = true;
        drop(slot);
        self.for_port.store(true, Ordering::Release);
    }

    /// The path, if it has come back.
    pub fn take_back(&self) -> Option<Box<DataPath>> {
        if !self.for_function.swap(false, Ordering::AcqRel) {
            return None;
        }
        let mut slot = self.lock();
        // Rules that the port did not see are the function's own as well.
        slot.rules = None;
        slot.to_function.take()
    }

    /// Gives rules to whoever has the path. They count when [`Exchange::is_settled`].
    pub fn update(&self, rules: Rules) {
        let mut slot = self.lock();
        slot.rules = Some(rules);
        // With the rules, under the lock: who takes them settles what was asked with them.
        self.asked.fetch_add(1, Ordering::Relaxed);
        drop(slot);
        self.for_port.store(true, Ordering::Release);
    }

    /// Whether the rules given last count.
    pub fn is_settled(&self) -> bool {
        self.applied.load(Ordering::Acquire) == self.asked.load(Ordering::Relaxed)
    }

    /// The function has the path, and with it its own rules.
    pub fn settle(&self) {
        self.applied.store(self.asked.load(Ordering::Relaxed), Ordering::Release);
    }

    /// There will be no function: the path goes, wherever it is, as soon as whoever has it can let go.
    pub fn abandon(&self) {
        let mut slot = self.lock();
        slot.abandoned = true;
        slot.recalled = true;
        let paths = (slot.to_port.take(), slot.to_function.take());
        drop(slot);
        drop(paths);
        self.for_port.store(true, Ordering::Release);
        self.wake();
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    pub fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Release);
    }

    /// Has the switch look at the port.
    pub fn wake(&self) {
        let waker = self.lock().waker.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    // The port's side.

    /// How the function has the switch look.
    pub fn set_waker(&self, waker: Waker) {
        self.lock().waker = Some(waker);
    }

    /// Whether there is something for the port.
    #[inline]
    pub fn has_post(&self) -> bool {
        self.for_port.load(Ordering::Acquire)
    }

    /// Takes and gives what there is to.
    #[cold]
    pub fn serve(&self, path: &mut Option<Box<DataPath>>) {
        // Before the look: what comes after it sets the word again.
        self.for_port.store(false, Ordering::SeqCst);
        let mut slot = self.lock();
        if let Some(sent) = slot.to_port.take() {
            *path = Some(sent);
        }
        if let (Some(path), Some(rules)) = (path.as_mut(), slot.rules.take()) {
            path.set_rules(rules);
            self.settle();
        }
        if std::mem::take(&mut slot.recalled)
            && let Some(mut path) = path.take()
        {
            path.rest();
            let given = slot.give_back(path);
            drop(slot);
            self.for_function.store(given, Ordering::Release);
        }
    }

    /// There will be no port: the path goes back for good.
    pub fn close(&self, path: Option<Box<DataPath>>) {
        let mut slot = self.lock();
        slot.closed = true;
        slot.waker = None;
        if let Some(mut path) = slot.to_port.take().or(path) {
            path.rest();
            let given = slot.give_back(path);
            self.for_function.store(given, Ordering::Release);
        }
    }

    pub fn set_broken(&self) {
        self.broken.store(true, Ordering::Release);
    }

    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    // The host's side.

    /// Sets the link's state.
    pub fn set_link(&self, up: bool) {
        self.link.store(up, Ordering::Release);
    }

    pub fn link(&self) -> bool {
        self.link.load(Ordering::Acquire)
    }
}
