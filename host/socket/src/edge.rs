//! Sleeping on eventfds that nobody empties, for their edges.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;

use crate::endpoint::{Endpoint, option};
use crate::hidden::Hidden;

/// Eventfds whose edges somebody waits for. What was raised before [`Edge::begin`] is none.
///
/// Costs some system calls each time: for who sleeps on shared endpoints alone, which is rare.
pub struct Edge(Hidden);

impl Edge {
    /// Waits for none yet.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> Result<Self, Errno> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Hidden::new(set).map(Self).map_err(|_| Errno::MFILE)
    }

    /// One more: `eventfd` is what `endpoint` sleeps on.
    ///
    /// # Errors
    /// No memory.
    pub fn add(&self, endpoint: &Endpoint, eventfd: BorrowedFd<'_>) -> Result<(), Errno> {
        if !endpoint.set(option::ALONE, true) {
            endpoint.family().sharing().slept_alone();
        }
        let (data, flags) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        match epoll::add(&self.0, eventfd, data, flags | epoll::EventFlags::ET) {
            // A number that is there twice is one.
            Err(Errno::EXIST) => Ok(()),
            done => done,
        }
    }

    /// From now on: what is raised after this is an edge.
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

/// Readable when there was an edge.
impl AsFd for Edge {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
