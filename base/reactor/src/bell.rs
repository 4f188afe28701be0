//! The wake-up of a thread that sleeps in epoll: an eventfd, which stays readable until it is
//! silenced.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// An eventfd that any thread can ring. Its descriptor, watched by epoll, is readable until it is
/// silenced.
pub struct Bell(OwnedFd);

impl Bell {
    /// Returns a silent bell.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Makes the descriptor readable. Never blocks.
    pub fn ring(&self) {
        // Fails only if the counter is full, and then the bell rings already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next ring. Never blocks.
    pub fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
