//! Interrupts as eventfds that a client passed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use rustix::fs::OFlags;
use slipway_pci::InterruptSink;

use crate::bell;
use crate::mask::Mask;

/// One interrupt of a type.
#[derive(Default)]
pub(crate) struct Line {
    route: ArcSwapOption<OwnedFd>,
    mask: Mask,
}

impl Line {
    /// Routes it to an eventfd, or nowhere.
    pub(crate) fn route(&self, file: Option<Arc<OwnedFd>>) {
        self.route.store(file);
    }

    /// Delivers, or keeps it pending while masked.
    pub(crate) fn signal(&self) {
        self.mask.signal(|| self.deliver());
    }

    /// Where it is routed to.
    pub(crate) fn routed(&self) -> Option<Arc<OwnedFd>> {
        self.route.load_full()
    }

    pub(crate) fn is_masked(&self) -> bool {
        self.mask.is_masked()
    }

    pub(crate) fn mask(&self) {
        self.mask.mask();
    }

    /// Unmasks and delivers what came meanwhile.
    pub(crate) fn unmask(&self) {
        self.mask.unmask(|| self.deliver());
    }

    /// As at the start: no route, not masked, nothing pending.
    pub(crate) fn clear(&self) {
        self.route.store(None);
        self.mask.clear();
    }

    fn deliver(&self) {
        if let Some(file) = &*self.route.load() {
            bell::ring(file.as_fd());
        }
    }
}

/// The MSI-X vectors of a function. Signalling takes no lock.
#[derive(Default)]
pub(crate) struct EventSink {
    /// Set when the function is known; before that nothing can be signalled.
    vectors: OnceLock<Box<[Line]>>,
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
}

/// Takes a descriptor as an interrupt's route: only eventfds. They are made nonblocking for the
/// rare host where [`bell::ring`] has to write to them.
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
