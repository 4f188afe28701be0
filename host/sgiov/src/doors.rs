//! The two sockets that processes connect to: the programs', and the administrator's.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{SocketFlags, accept_with};

/// The pause in accepting connections after accept(2) failed, as when descriptors have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// The name of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Door {
    /// The socket that everybody may connect to.
    Programs,
    /// The socket that only the user that runs the engine can reach.
    Administrator,
}

struct Listener {
    socket: OwnedFd,
    /// The socket's datum in the epoll.
    datum: u64,
    /// Set while the socket is in the epoll.
    is_watched: bool,
}

impl Listener {
    fn watch(&mut self, epoll: &OwnedFd) {
        let data = EventData::new_u64(self.datum);
        self.is_watched |= epoll::add(epoll, &self.socket, data, EventFlags::IN).is_ok();
    }
}

/// The sockets, which an epoll watches.
pub struct Doors {
    /// By [`Door`].
    all: [Listener; 2],
    /// The time at which connections are accepted again at sockets that are paused.
    resumes: Option<Instant>,
}

impl Doors {
    /// Watches the programs' socket and the administrator's, each with its datum.
    pub fn new(programs: (OwnedFd, u64), administrator: (OwnedFd, u64), epoll: &OwnedFd) -> Self {
        let mut all = [programs, administrator].map(|(socket, datum)| Listener {
            socket,
            datum,
            is_watched: false,
        });
        all.iter_mut().for_each(|listener| listener.watch(epoll));
        Self { all, resumes: None }
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// The errors of accept(2), and AGAIN if no connection waits.
    pub fn accept(&self, door: Door) -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        accept_with(&self.all[door as usize].socket, flags)
    }

    /// Stops accepting at a socket for a moment. Otherwise the epoll would report its waiting
    /// connections over and over.
    pub fn pause(&mut self, door: Door, epoll: &OwnedFd) {
        let listener = &mut self.all[door as usize];
        if std::mem::take(&mut listener.is_watched) {
            let _ = epoll::delete(epoll, &listener.socket);
        }
        self.resumes = Some(Instant::now() + PAUSE);
    }

    /// Accepts at paused sockets again, if it is time. A socket that cannot be watched is paused
    /// once more.
    pub fn resume(&mut self, epoll: &OwnedFd) {
        if self.resumes.is_none_or(|at| at > Instant::now()) {
            return;
        }
        let paused = self.all.iter_mut().filter(|listener| !listener.is_watched);
        paused.for_each(|listener| listener.watch(epoll));
        let all = self.all.iter().all(|listener| listener.is_watched);
        self.resumes = if all { None } else { Some(Instant::now() + PAUSE) };
    }

    /// Returns the time for [`Doors::resume`]. Returns `None` if no socket is paused.
    pub fn resumes_at(&self) -> Option<Instant> {
        self.resumes
    }
}
