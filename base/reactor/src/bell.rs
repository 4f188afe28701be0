//! What wakes a thread that sleeps in epoll: an eventfd, which stays readable until it is silenced.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::EventfdFlags;

/// Rings from any thread; whoever watches its descriptor finds it readable until it is silenced.
pub struct Bell(OwnedFd);

impl Bell {
    /// One that does not ring.
    ///
    /// # Errors
    /// No descriptors left.
    pub fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    /// Rings, or goes on ringing. Never waits.
    pub fn ring(&self) {
        // It can only fail when the counter is full, and then it rings already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Ends the ringing. Never waits.
    pub fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
