//! Interrupts as eventfds that a client passed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use rustix::fs::OFlags;
use slipway_pci::InterruptSink;

use crate::mask::{Level, Mask};

/// One interrupt of a type.
#[derive(Default)]
pub(crate) struct Line {
    route: ArcSwapOption<OwnedFd>,
    gate: Gate,
}

/// What an interrupt passes on its way out.
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
    /// A level that masks itself when it is delivered.
    pub(crate) fn level() -> Self {
        Self { route: ArcSwapOption::default(), gate: Gate::Level(Level::default()) }
    }

    /// Routes it to an eventfd, or nowhere. A level that is asserted is delivered at once.
    pub(crate) fn route(&self, file: Option<Arc<OwnedFd>>) {
        self.route.store(file);
        if let Gate::Level(level) = &self.gate {
            self.look(level);
        }
    }

    /// Delivers, or keeps it pending while masked. Of a level: delivers and nothing else, as a client
    /// wants that tries the way.
    pub(crate) fn signal(&self) {
        match &self.gate {
            Gate::Edge(mask) => mask.signal(|| self.deliver()),
            Gate::Level(_) => self.deliver(),
        }
    }

    /// Asserts or deasserts a level.
    fn set(&self, asserted: bool) {
        if let Gate::Level(level) = &self.gate {
            level.set(asserted);
            self.look(level);
        }
    }

    /// Without a route nobody is told, so it is not delivered before there is one.
    fn look(&self, level: &Level) {
        if self.route.load().is_some() {
            level.look(|| self.deliver());
        }
    }

    /// Where it is routed to.
    pub(crate) fn routed(&self) -> Option<Arc<OwnedFd>> {
        self.route.load_full()
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

    /// Unmasks and delivers what came meanwhile, or what is still asserted.
    pub(crate) fn unmask(&self) {
        match &self.gate {
            Gate::Edge(mask) => mask.unmask(|| self.deliver()),
            Gate::Level(level) => {
                level.unmask();
                self.look(level);
            }
        }
    }

    /// As at the start: no route, not masked, nothing pending. A level stays as it is.
    pub(crate) fn clear(&self) {
        self.route.store(None);
        match &self.gate {
            Gate::Edge(mask) => mask.clear(),
            Gate::Level(level) => level.unmask(),
        }
    }

    fn deliver(&self) {
        if let Some(file) = &*self.route.load() {
            slipway_eventfd::raise(file.as_fd());
        }
    }
}

/// The MSI-X vectors of a function, and its pin. Signalling takes no lock.
pub(crate) struct EventSink {
    /// Set when the function is known; before that nothing can be signalled.
    vectors: OnceLock<Box<[Line]>>,
    pub(crate) pin: Line,
}

impl Default for EventSink {
    fn default() -> Self {
        Self { vectors: OnceLock::new(), pin: Line::level() }
    }
}

impl EventSink {
    pub(crate) fn size(&self, vectors: u16) {
        let _ = self.vectors.set((0..vectors).map(|_| Line::default()).collect());
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

/// Takes a descriptor as an interrupt's route: only eventfds. They are made nonblocking for the
/// rare host where [`slipway_eventfd::raise`] has to write to them.
pub(crate) fn adopt(file: OwnedFd) -> Option<Arc<OwnedFd>> {
    use std::os::fd::AsRawFd;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let target = rustix::fs::readlink(link, Vec::new()).ok()?;
    if target.as_bytes() != b"anon_inode:[eventfd]" {
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(&file).ok()?;
    rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK).ok()?;
    Some(Arc::new(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

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
}
