//! Sleeping on eventfds that are never drained, by waiting for their edges.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::endpoint::{Endpoint, option};
use crate::hidden::Hidden;

/// A set of eventfds whose edges are waited for. An eventfd raised before [`Edge::begin`] is no
/// edge.
///
/// Costs some system calls each time: meant for threads that sleep on shared endpoints alone, which
/// is rare.
pub struct Edge(Hidden);

impl Edge {
    /// Makes an empty set.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> Result<Self, Errno> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Hidden::new(set).map(Self).map_err(|_| Errno::MFILE)
    }

    /// Adds `eventfd`, which `endpoint` sleeps on.
    ///
    /// # Errors
    /// No memory is left.
    pub fn add(&self, endpoint: &Endpoint, eventfd: BorrowedFd<'_>) -> Result<(), Errno> {
        if !endpoint.set(option::ALONE, true) {
            endpoint.family().sharing().slept_alone();
        }
        let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        match epoll::add(&self.0, eventfd, data, flags | epoll::EventFlags::ET) {
            // The same descriptor may be added twice.
            Err(Errno::EXIST) => Ok(()),
            done => done,
        }
    }

    /// Begins to wait: an eventfd raised from now on is an edge.
    ///
    /// # Errors
    /// `EINTR`.
    pub fn begin(&self) -> Result<(), Errno> {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [NOTHING; 64];
        while epoll::wait(&self.0, &mut events[..], Some(&at_once))? == events.len() {}
        Ok(())
    }
}

const NOTHING: epoll::Event =
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };

/// Readable after an edge.
impl AsFd for Edge {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
