//! Ports of programs on this host: packet rings in memory that the switch and a program share.
//!
//! The switch trusts the program only with the program's own packets: see `slipway_ring`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use slipway_ring::Link;

use super::rings::Rings;
use crate::{Abilities, Burst, Delivered, Pick, Port};

/// Two eventfds, by which each side wakes the other.
#[derive(Debug)]
pub struct Tell {
    /// The program writes to this one while the switch sleeps.
    pub server: OwnedFd,
    /// The switch writes to this one while the program sleeps.
    pub peer: OwnedFd,
}

impl Tell {
    /// Creates two eventfds.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn new() -> std::io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self { server: eventfd(0, flags)?, peer: eventfd(0, flags)? })
    }
}

/// A port whose peer is a program with a [`Link`].
pub struct MemoryPort {
    rings: Rings,
    tell: Tell,
}

impl MemoryPort {
    /// Creates the switch's side of `link`. `abilities` are the program's. Only a thread that [can
    /// raise eventfds](slipway_peer::eventfd::can_raise) can wake a program that sleeps.
    pub fn new(link: &Link, tell: Tell, abilities: Abilities) -> Self {
        Self { rings: Rings::of_program(link, abilities), tell }
    }

    /// Returns whether the link is broken: the program moved a counter to an impossible value, or
    /// cannot be woken. Nothing passes any more.
    pub fn is_broken(&self) -> bool {
        self.rings.broken
    }
}

impl Port for MemoryPort {
    fn abilities(&self) -> Abilities {
        self.rings.abilities
    }

    fn is_up(&self) -> bool {
        !self.rings.broken
    }

    #[inline]
    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        self.rings.take(burst, limit)
    }

    #[inline]
    fn release(&mut self) {
        self.rings.release();
    }

    #[inline]
    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        self.rings.deliver(burst, picks)
    }

    #[inline]
    fn notify(&mut self) {
        // The program shares the eventfd's open file description, so it could make a write block
        // for ever.
        if self.rings.output.must_tell() && !slipway_peer::eventfd::raise(self.tell.peer.as_fd()) {
            self.rings.broken = true;
        }
    }

    #[inline]
    fn prepare(&self, frames: usize) {
        self.rings.prepare(frames);
    }

    fn arm(&mut self) -> bool {
        // Clear the eventfd first, so that no later wake-up is lost.
        slipway_peer::eventfd::drain(self.tell.server.as_fd());
        !self.rings.broken && self.rings.input.arm()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tell.server.as_fd())
    }

    fn malformed(&mut self) -> u64 {
        self.rings.malformed()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};
    use slipway_ring::Geometry;

    use super::*;
    use crate::Offload;

    /// A pipe instead of an eventfd stands for a thread that cannot raise eventfds.
    #[test]
    fn a_program_that_cannot_be_told_has_a_broken_port() {
        let link = Link::new(Geometry { slots: 16, payload: 64 }).unwrap();
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let server = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let tell = Tell { server, peer: writer };
        let mut port = MemoryPort::new(&link, tell, Abilities::NONE);
        port.notify();
        assert!(port.is_up(), "the program is awake");
        let (mut input, _) = link.peer();
        assert!(!input.arm());
        let mut burst = Burst::new();
        burst.begin().finish(Offload::NONE);
        assert_eq!(port.deliver(&burst, &[Pick::default()]).frames, 1);
        port.notify();
        assert!(port.is_broken() && !port.is_up());
    }

    /// A program shares the open file descriptions: it may make them blocking, and fill a counter.
    #[test]
    fn a_program_has_the_switch_wait_for_nothing() {
        let (done, is_done) = channel();
        std::thread::spawn(move || {
            let link = Link::new(Geometry { slots: 16, payload: 64 }).unwrap();
            let waits = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            let tell = Tell { server: waits(), peer: waits() };
            rustix::io::write(&tell.peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            let mut port = MemoryPort::new(&link, tell, Abilities::NONE);
            let (mut input, _) = link.peer();
            assert!(!port.arm(), "nothing is there");
            assert!(!input.arm(), "nothing either: the program sleeps");
            let mut burst = Burst::new();
            burst.begin().finish(Offload::NONE);
            assert_eq!(port.deliver(&burst, &[Pick::default()]).frames, 1);
            port.notify();
            done.send(()).unwrap();
        });
        is_done.recv_timeout(Duration::from_secs(60)).unwrap();
    }
}
