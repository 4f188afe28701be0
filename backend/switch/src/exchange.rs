//! Hands a device's data path over between the device's function and its port.
//!
//! The path has one owner at a time: the function, while the device is configured, reset or
//! quiesced; the port, on the switch's thread, while the driver runs. Each side polls one word, and
//! takes the lock of the slot only if that word is set. A holder of the lock only moves boxes. The
//! function never waits: it asks for the path and finds it in a later poll or register access.
//!
//! New rules reach the port through the same slot. A driver writes registers first, which makes
//! rules, and then a tail, which must not be used with older rules. So the function gives the rules
//! before it stores the tail, and the port looks for rules after it has loaded the tail. A client
//! may store tails itself, in memory that it shares with the port. It must then wait for the
//! answers to its writes of registers before it stores a tail. A client that does not wait harms
//! its own guest only.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::port::LinkSetting;
use crate::waker::Waker;

/// A data path: the queues of a device and the state that moving a frame needs.
pub trait Exchanged {
    /// Settings of the path that may change while frames move.
    type Rules;

    /// Takes new rules.
    fn set_rules(&mut self, rules: Self::Rules);

    /// Releases all guest memory, and gives back every buffer of the driver's that was not used.
    fn rest(&mut self);
}

/// The place where function and port hand over a data path, and the state that both look at.
pub struct Exchange<P: Exchanged> {
    /// `true` if the slot has something for the port.
    for_port: AtomicBool,
    /// `true` if the slot has the path for the function.
    for_function: AtomicBool,
    /// The number of rules that the function gave, and how many of them the port follows by now.
    asked: AtomicU32,
    applied: AtomicU32,
    /// Set by the function: `true` while the driver runs, so that the port may move frames.
    up: AtomicBool,
    /// The link state that the host set.
    link: AtomicBool,
    slot: Mutex<Slot<P>>,
}

struct Slot<P: Exchanged> {
    to_port: Option<Box<P>>,
    to_function: Option<Box<P>>,
    rules: Option<P::Rules>,
    recalled: bool,
    waker: Option<Waker>,
    /// `true` if the port is gone.
    closed: bool,
    /// `true` if the function is gone. A path that comes back is dropped then: in this slot it
    /// would keep the guest's memory alive for as long as the port lives.
    abandoned: bool,
}

impl<P: Exchanged> Default for Slot<P> {
    fn default() -> Self {
        let (recalled, closed, abandoned) = (false, false, false);
        let (to_port, to_function, rules, waker) = (None, None, None, None);
        Self { to_port, to_function, rules, recalled, waker, closed, abandoned }
    }
}

impl<P: Exchanged> Slot<P> {
    /// Puts the path where the function finds it. If the function is gone, drops the path and
    /// returns `false`.
    fn give_back(&mut self, path: Box<P>) -> bool {
        let there = !self.abandoned;
        self.to_function = there.then_some(path);
        there
    }
}

impl<P: Exchanged> Exchange<P> {
    /// Makes an exchange without a path. The link is up, the function is not.
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            for_port: AtomicBool::new(false),
            for_function: AtomicBool::new(false),
            asked: AtomicU32::new(0),
            applied: AtomicU32::new(0),
            up: AtomicBool::new(false),
            link: AtomicBool::new(true),
            slot: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Slot<P>> {
        // Boxes are moved in single steps, so a panic leaves the slot whole.
        self.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    // The function's side.

    /// Gives the path to the port. If the port is gone, the path comes back at once.
    pub fn send(&self, path: Box<P>) {
        let mut slot = self.lock();
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

    /// Asks the port for the path. The caller must wake the switch afterwards.
    pub fn recall(&self) {
        let mut slot = self.lock();
        if let Some(path) = slot.to_port.take() {
            // The port has not taken the path yet.
            slot.to_function = Some(path);
            self.for_function.store(true, Ordering::Release);
            return;
        }
        slot.recalled = true;
        drop(slot);
        self.for_port.store(true, Ordering::Release);
    }

    /// Takes the path if it has come back.
    pub fn take_back(&self) -> Option<Box<P>> {
        if !self.for_function.swap(false, Ordering::AcqRel) {
            return None;
        }
        let mut slot = self.lock();
        // Drops rules that the port has not taken: the function has them, too.
        slot.rules = None;
        self.settle();
        slot.to_function.take()
    }

    /// Gives new rules to the port. [`Exchange::is_settled`] tells when the port follows them.
    pub fn update(&self, rules: P::Rules) {
        let mut slot = self.lock();
        slot.rules = Some(rules);
        // Under the lock, together with the rules: the side that takes the rules settles what was
        // asked with them.
        self.asked.fetch_add(1, Ordering::Relaxed);
        drop(slot);
        self.for_port.store(true, Ordering::Release);
    }

    /// Returns whether the port follows the rules that were given last.
    pub fn is_settled(&self) -> bool {
        self.applied.load(Ordering::Acquire) == self.asked.load(Ordering::Relaxed)
    }

    /// Marks all rules as followed. The caller has the lock, and the rules or the path.
    fn settle(&self) {
        self.applied.store(self.asked.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Ends the function's side: the path is dropped, wherever it is, as soon as its owner can let
    /// go of it.
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

    /// Sets whether the port may have frames and take some.
    pub fn set_up(&self, up: bool) {
        self.up.store(up, Ordering::Release);
    }

    /// Makes the switch look at the port.
    pub fn wake(&self) {
        let waker = self.lock().waker.clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    // The port's side.

    /// Sets the waker with which the function makes the switch look.
    pub fn set_waker(&self, waker: Waker) {
        self.lock().waker = Some(waker);
    }

    /// Returns whether the slot has something for the port.
    #[inline]
    pub fn has_post(&self) -> bool {
        self.for_port.load(Ordering::Acquire)
    }

    /// Takes what the slot has for the port, and gives the path back if it was recalled.
    #[cold]
    pub fn serve(&self, path: &mut Option<Box<P>>) {
        // Before the look: a change that comes after the look sets the word again.
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

    /// Takes new rules while frames of another port are delivered. Returns `false` if the function
    /// wants the path back, which must then not be used.
    #[cold]
    pub fn serve_rules(&self, path: &mut P) -> bool {
        let mut slot = self.lock();
        if let Some(rules) = slot.rules.take() {
            path.set_rules(rules);
            self.settle();
        }
        if slot.to_port.is_none() && !slot.recalled {
            // Under the lock, so that no other post is missed.
            self.for_port.store(false, Ordering::SeqCst);
        }
        !slot.recalled
    }

    /// Ends the port's side: the path goes back for good.
    pub fn close(&self, path: Option<Box<P>>) {
        let mut slot = self.lock();
        slot.closed = true;
        slot.waker = None;
        if let Some(mut path) = slot.to_port.take().or(path) {
            path.rest();
            let given = slot.give_back(path);
            self.for_function.store(given, Ordering::Release);
        }
    }

    /// Returns whether the port may have frames and take some.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Acquire)
    }

    // The host's side.

    /// Sets the link's state.
    pub fn set_link(&self, up: bool) {
        self.link.store(up, Ordering::Release);
    }

    /// Returns the link's state.
    pub fn link(&self) -> bool {
        self.link.load(Ordering::Acquire)
    }
}

/// The function's side of an exchange: the path while the function owns it, and else how far its
/// return has come.
pub enum PathHolder<P> {
    /// The function owns the path. Without one (`None`) the function makes one before it runs.
    Function(Option<Box<P>>),
    /// The port owns the path.
    Port {
        /// The function has asked for the path.
        recalled: bool,
    },
}

impl<P> Default for PathHolder<P> {
    fn default() -> Self {
        Self::Function(None)
    }
}

impl<P: Exchanged> PathHolder<P> {
    /// Returns whether the port owns the path.
    #[inline]
    pub fn is_port(&self) -> bool {
        matches!(self, Self::Port { .. })
    }

    /// Returns whether the port owns the path and was asked for it.
    pub fn is_recalled(&self) -> bool {
        matches!(self, Self::Port { recalled: true })
    }

    /// Returns the path. Returns `None` while the port owns it, and if there is none.
    pub fn path_mut(&mut self) -> Option<&mut P> {
        match self {
            Self::Function(path) => path.as_deref_mut(),
            Self::Port { .. } => None,
        }
    }

    /// Takes the path off the function, which then has none. Returns `None` while the port owns
    /// the path, and if there is none.
    pub fn take(&mut self) -> Option<Box<P>> {
        match self {
            Self::Function(path) => path.take(),
            Self::Port { .. } => None,
        }
    }

    /// Gives `path` to the port of `exchange`.
    pub fn send(&mut self, path: Box<P>, exchange: &Exchange<P>) {
        *self = Self::Port { recalled: false };
        exchange.send(path);
        exchange.wake();
    }

    /// Asks the port for the path, once, if the port owns it and the function has `wanted` it.
    /// Returns whether the path has come back now, which it also does when the port is gone.
    pub fn fetch(&mut self, wanted: bool, exchange: &Exchange<P>) -> bool {
        let Self::Port { recalled } = self else { return false };
        if wanted && !*recalled {
            *recalled = true;
            exchange.recall();
            exchange.wake();
        }
        let Some(path) = exchange.take_back() else { return false };
        *self = Self::Function(Some(path));
        true
    }
}

/// The port's side of an exchange: the path while the port owns it, and the link that the host set.
/// When this is dropped, the path goes back for good, and the link is down unless it was set to
/// stay [`LinkSetting::Up`].
pub struct ExchangePort<P: Exchanged> {
    exchange: Arc<Exchange<P>>,
    path: Option<Box<P>>,
    /// `true` if the driver sees a carrier even when the port is gone.
    stays_up: bool,
}

impl<P: Exchanged> ExchangePort<P> {
    /// Makes the port's side without a path.
    pub fn new(exchange: Arc<Exchange<P>>) -> Self {
        Self { exchange, path: None, stays_up: false }
    }

    /// Returns the path. Returns `None` while the function owns it.
    #[inline]
    pub fn path(&self) -> Option<&P> {
        self.path.as_deref()
    }

    /// Returns the path, to be used. Returns `None` while the function owns it.
    #[inline]
    pub fn path_mut(&mut self) -> Option<&mut P> {
        self.path.as_deref_mut()
    }

    /// Returns the exchange, and the path beside it as [`ExchangePort::path_mut`] does.
    #[inline]
    pub fn parts(&mut self) -> (&Exchange<P>, Option<&mut P>) {
        (&self.exchange, self.path.as_deref_mut())
    }

    /// Returns whether the function has something for the port; see [`Exchange::has_post`].
    #[inline]
    pub fn has_post(&self) -> bool {
        self.exchange.has_post()
    }

    /// Takes what the function has for the port; see [`Exchange::serve`].
    #[inline]
    pub fn serve(&mut self) {
        self.exchange.serve(&mut self.path);
    }

    /// Returns whether the port may have frames and take some.
    #[inline]
    pub fn is_up(&self) -> bool {
        self.exchange.is_up()
    }

    /// Sets the waker with which the function makes the switch look.
    pub fn set_waker(&self, waker: Waker) {
        self.exchange.set_waker(waker);
    }

    /// Sets the link's state, and the state that it has when the port is gone.
    pub fn set_link(&mut self, link: LinkSetting) {
        self.stays_up = link == LinkSetting::Up;
        self.exchange.set_link(link != LinkSetting::Down);
    }
}

impl<P: Exchanged> Drop for ExchangePort<P> {
    fn drop(&mut self) {
        self.exchange.close(self.path.take());
        if !self.stays_up {
            self.exchange.set_link(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Path;

    impl Exchanged for Path {
        type Rules = ();

        fn set_rules(&mut self, (): ()) {}

        fn rest(&mut self) {}
    }

    #[test]
    fn a_path_comes_back_when_it_is_wanted_or_the_port_is_gone() {
        let exchange = Exchange::<Path>::new();
        let mut port = ExchangePort::new(Arc::clone(&exchange));
        let mut holder = PathHolder::default();
        assert!(holder.path_mut().is_none() && !holder.fetch(true, &exchange));
        holder.send(Box::new(Path), &exchange);
        port.serve();
        assert!(holder.is_port() && holder.take().is_none());
        assert!(!holder.fetch(false, &exchange) && !holder.is_recalled());
        assert!(!holder.fetch(true, &exchange) && holder.is_recalled());
        port.serve();
        assert!(holder.fetch(false, &exchange) && !holder.is_port());
        let path = holder.take().unwrap();
        assert!(holder.path_mut().is_none());
        holder.send(path, &exchange);
        port.serve();
        drop(port);
        assert!(holder.fetch(false, &exchange) && holder.path_mut().is_some());
    }
}
