//! A listener of the kernel with a second queue at the engine.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libc::c_int;
use slipway_socket::Family;
use slipway_socket::hidden::Hidden;

use crate::real::sys;
use crate::taken::Taken;

/// A kernel listener that also has a queue at the engine. The kernel's socket is made non-blocking,
/// so that no thread waits for one of the two queues alone.
pub struct Listener {
    pub family: Arc<Family>,
    pub number: u64,
    /// An eventfd that is readable when a connection waits in the engine's queue.
    pub eventfd: Hidden,
    pub domain: c_int,
    /// The backlog that the program gave to listen(2).
    pub backlog: c_int,
    /// Monotonic milliseconds before which the listener is not registered again.
    pub not_before: AtomicU64,
    /// The program's own `O_NONBLOCK` setting.
    pub nonblock: AtomicBool,
    /// The options of the kernel's socket, with which connections begin.
    pub options: Taken,
    /// The engine's queue has ended for this process.
    pub has_ended: AtomicBool,
}

impl Listener {
    /// Sets `O_NONBLOCK`. Sets it on the eventfd, too, where the next image of this process finds
    /// it; nobody ever blocks on that eventfd.
    pub fn set_nonblock(&self, nonblock: bool) {
        self.nonblock.store(nonblock, Ordering::Relaxed);
        let flags = if nonblock { libc::O_NONBLOCK } else { 0 };
        sys!(SYS_fcntl, self.eventfd.as_raw_fd(), libc::F_SETFL, flags);
    }

    /// Ends the engine's queue for this process. The engine resets the connections in it with the
    /// last process that has it.
    pub fn end(&self) {
        if !self.has_ended.swap(true, Ordering::Relaxed) {
            self.family.unlisten(self.number);
        }
    }
}
