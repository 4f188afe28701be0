//! A descriptor that tells when a connection has ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};

/// A descriptor that is readable while a function has no connection. It stays the same when the
/// connection changes.
pub(crate) struct Watch {
    /// Watches the connection for its end, and `ended`.
    epoll: OwnedFd,
    /// Readable while there is no connection. Only this process has it.
    ended: OwnedFd,
}

impl Watch {
    pub fn new() -> rustix::io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let ended = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &ended, EventData::new_u64(0), EventFlags::IN)?;
        Ok(Self { epoll, ended })
    }

    /// Watches `connection` from now on.
    pub fn follow(&self, connection: BorrowedFd<'_>) -> rustix::io::Result<()> {
        // A hang-up is reported even if no event is asked for.
        epoll::add(&self.epoll, connection, EventData::new_u64(1), EventFlags::empty())?;
        // Fails if there was a connection all the time.
        let _ = rustix::io::read(&self.ended, &mut [0; 8]);
        Ok(())
    }

    /// Watches `connection` no more: it has ended. Call it before the connection is closed, since
    /// duplicates of it may live on.
    pub fn leave(&self, connection: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, connection);
        // Nobody else counts, so there is always room.
        let _ = rustix::io::write(&self.ended, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
