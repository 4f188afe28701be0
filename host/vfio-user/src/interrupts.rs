//! Interrupts that are delivered by eventfds of the client.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Waker;

use arc_swap::ArcSwapOption;
use slipway_pci::InterruptSink;
use slipway_peer::Foreign;

use crate::mask::{Level, Mask};

/// One interrupt of a type.
#[derive(Default)]
pub(crate) struct Line {
    /// The eventfd. A store, and the drop, look at every thread that has ever delivered an
    /// interrupt, and most vectors of a function never have a route: those have no cell either.
    route: OnceLock<ArcSwapOption<OwnedFd>>,
    gate: Gate,
    /// The flag for failed deliveries, shared by all lines of an endpoint.
    failure: Arc<Failure>,
}

/// A flag that an interrupt could not be delivered without waiting for the client, which is then
/// disconnected.
#[derive(Default)]
pub(crate) struct Failure {
    happened: AtomicBool,
    /// Has the endpoint check the flag.
    waker: OnceLock<Waker>,
}

impl Failure {
    /// Sets the waker that a failure wakes.
    pub(crate) fn tell(&self, waker: Waker) {
        let _ = self.waker.set(waker);
    }

    fn note(&self) {
        self.happened.store(true, Ordering::Release);
        if let Some(waker) = self.waker.get() {
            waker.wake_by_ref();
        }
    }

    /// Returns whether a failure happened since the last call.
    pub(crate) fn take(&self) -> bool {
        self.happened.load(Ordering::Relaxed) && self.happened.swap(false, Ordering::AcqRel)
    }
}

/// The mask that an interrupt passes before it is delivered.
enum Gate {
    Edge(Mask),
    Level(Level),
}

impl Default for Gate {
    fn default() -> Self {
        Self::Edge(Mask::default())
    }
}

impl Line {
    /// Returns a level-triggered interrupt, which masks itself when it is delivered.
    pub(crate) fn level() -> Self {
        Self { gate: Gate::Level(Level::default()), ..Self::default() }
    }

    /// Sets the flag that notes failures of this line.
    pub(crate) fn failing_to(self, failure: &Arc<Failure>) -> Self {
        Self { failure: failure.clone(), ..self }
    }

    /// Routes the interrupt to an eventfd, or nowhere. A level that is asserted is delivered at
    /// once.
    pub(crate) fn route(&self, file: Option<Arc<OwnedFd>>) {
        self.set_route(file);
        if let Gate::Level(level) = &self.gate {
            self.look(level);
        }
    }

    fn set_route(&self, file: Option<Arc<OwnedFd>>) {
        match (file, self.route.get()) {
            (None, None) => {}
            (None, Some(cell)) if cell.load().is_none() => {}
            (file, _) => self.route.get_or_init(ArcSwapOption::default).store(file),
        }
    }

    /// Delivers an edge-triggered interrupt, or keeps it pending while masked. A level-triggered
    /// one is delivered unconditionally, for a client that tests the route.
    pub(crate) fn signal(&self) {
        match &self.gate {
            Gate::Edge(mask) => mask.signal(|| self.deliver_or_drop()),
            Gate::Level(_) => self.deliver_or_drop(),
        }
    }

    /// Asserts or deasserts a level.
    fn set(&self, asserted: bool) {
        if let Gate::Level(level) = &self.gate {
            level.set(asserted);
            self.look(level);
        }
    }

    /// Delivers the level if it is due. Without a route it is not delivered, so that it is still
    /// due when there is one. Another thread may remove the route meanwhile, and set a new one.
    fn look(&self, level: &Level) {
        while self.routed().is_some() && !level.look(|| self.deliver()) {}
    }

    /// Returns the eventfd that the interrupt is routed to, or `None` without a route.
    pub(crate) fn routed(&self) -> Option<Arc<OwnedFd>> {
        self.route.get()?.load_full()
    }

    pub(crate) fn is_masked(&self) -> bool {
        match &self.gate {
            Gate::Edge(mask) => mask.is_masked(),
            Gate::Level(level) => level.is_masked(),
        }
    }

    pub(crate) fn mask(&self) {
        match &self.gate {
            Gate::Edge(mask) => mask.mask(),
            Gate::Level(level) => level.mask(),
        }
    }

    /// Unmasks the interrupt, and delivers it if it is pending or still asserted.
    pub(crate) fn unmask(&self) {
        match &self.gate {
            Gate::Edge(mask) => mask.unmask(|| self.deliver_or_drop()),
            Gate::Level(level) => {
                level.unmask();
                self.look(level);
            }
        }
    }

    /// Removes the route and unmasks the interrupt; nothing is pending. A level stays asserted or
    /// deasserted.
    pub(crate) fn clear(&self) {
        self.set_route(None);
        match &self.gate {
            Gate::Edge(mask) => mask.clear(),
            Gate::Level(level) => level.unmask(),
        }
    }

    /// Delivers an interrupt, which is lost without a route.
    fn deliver_or_drop(&self) {
        let _ = self.deliver();
    }

    /// Delivers an interrupt. Returns `false` without a route.
    fn deliver(&self) -> bool {
        let Some(route) = self.route.get() else { return false };
        let failed = match &*route.load() {
            Some(file) => !slipway_peer::eventfd::raise(file.as_fd()),
            None => return false,
        };
        if failed {
            // This thread has no means to raise the eventfd without waiting, and a write could wait
            // for the client for ever.
            route.store(None);
            self.failure.note();
        }
        true
    }
}

/// The MSI-X vectors of a function, and its pin. Signalling takes no lock.
pub(crate) struct EventSink {
    /// The vectors; empty until the function is known, and nothing can be signalled before.
    vectors: OnceLock<Box<[Line]>>,
    pub(crate) pin: Line,
    pub(crate) failure: Arc<Failure>,
}

impl Default for EventSink {
    fn default() -> Self {
        let failure = Arc::<Failure>::default();
        Self { vectors: OnceLock::new(), pin: Line::level().failing_to(&failure), failure }
    }
}

impl EventSink {
    pub(crate) fn size(&self, vectors: u16) {
        let line = |_| Line::default().failing_to(&self.failure);
        let _ = self.vectors.set((0..vectors).map(line).collect());
    }

    pub(crate) fn lines(&self) -> &[Line] {
        self.vectors.get().map_or(&[], |lines| lines)
    }
}

impl InterruptSink for EventSink {
    fn signal(&self, vector: u16) {
        if let Some(line) = self.lines().get(usize::from(vector)) {
            line.signal();
        }
    }

    fn set_pin(&self, asserted: bool) {
        self.pin.set(asserted);
    }
}

/// Takes a descriptor as an interrupt's route. Returns `None` if it is no eventfd: the last close
/// of an eventfd never waits.
pub(crate) fn adopt(file: Foreign) -> Option<Arc<OwnedFd>> {
    slipway_peer::is_eventfd(&file).then(|| Arc::new(file.into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use slipway_peer::Bin;

    fn adopt(file: OwnedFd) -> Option<Arc<OwnedFd>> {
        super::adopt(Foreign::new(file, &Bin::new()))
    }

    fn count(file: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        match rustix::io::read(file, &mut bytes) {
            Ok(_) => u64::from_ne_bytes(bytes),
            Err(_) => 0,
        }
    }

    #[test]
    fn a_masked_interrupt_waits_and_comes_once() {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let line = Line::default();
        line.route(adopt(file.try_clone().unwrap()));
        line.signal();
        assert_eq!(count(&file), 1);
        line.mask();
        line.signal();
        line.signal();
        assert_eq!(count(&file), 0);
        line.unmask();
        assert_eq!(count(&file), 1);
    }

    #[test]
    fn a_level_is_delivered_once_and_again_after_each_unmask() {
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let line = Line::level();
        line.set(true);
        line.route(adopt(file.try_clone().unwrap()));
        assert_eq!(count(&file), 1, "it was asserted before there was a route");
        line.set(true);
        assert_eq!(count(&file), 0);
        line.unmask();
        assert_eq!(count(&file), 1);
        line.set(false);
        line.unmask();
        assert_eq!(count(&file), 0);
        line.mask();
        assert!(line.is_masked());
        line.set(true);
        line.set(false);
        line.set(true);
        assert_eq!(count(&file), 0);
        line.unmask();
        assert_eq!(count(&file), 1);
        assert!(!line.is_masked(), "that it waits for the client is no mask of the client's");
        line.clear();
        line.set(false);
        line.set(true);
        assert_eq!(count(&file), 0);
        line.route(adopt(file.try_clone().unwrap()));
        assert_eq!(count(&file), 1);
        line.signal();
        assert_eq!(count(&file), 1, "tried by the client");
    }

    #[test]
    fn a_full_counter_and_a_missing_route_do_not_block() {
        let file = eventfd(0, EventfdFlags::empty()).unwrap();
        let line = Line::default();
        line.signal();
        line.route(adopt(file.try_clone().unwrap()));
        rustix::io::write(&file, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        line.signal();
    }

    #[test]
    fn only_eventfds_are_adopted() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(adopt(reader).is_none());
        assert!(adopt(writer).is_none());
    }

    /// A waker that counts how often it was woken.
    #[derive(Default)]
    struct Woken(std::sync::atomic::AtomicU32);

    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_interrupt_that_cannot_be_delivered_is_noted_and_its_route_goes() {
        let (sink, woken) = (EventSink::default(), Arc::<Woken>::default());
        sink.size(2);
        sink.failure.tell(Waker::from(woken.clone()));
        let line = &sink.lines()[1];
        let file = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        line.route(adopt(file.try_clone().unwrap()));
        sink.signal(1);
        assert!(!sink.failure.take() && line.routed().is_some());
        // A pipe stands for a thread that cannot raise an eventfd: `raise` returns the same for
        // both.
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        line.route(Some(Arc::new(writer)));
        sink.signal(1);
        assert!(line.routed().is_none());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1);
        assert!(sink.failure.take() && !sink.failure.take());
    }
}
