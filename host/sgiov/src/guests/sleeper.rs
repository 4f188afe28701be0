//! The wait of the carrying thread, for the engine's thread and for families.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use super::mailbox::Bell;

/// The datum in epoll of the eventfd that wakes the thread; families have lower ones.
const WAKE: u64 = u64::MAX;

/// The eventfds that end the carrying thread's sleep.
pub struct Sleeper {
    epoll: OwnedFd,
    wake: Arc<Bell>,
}

impl Sleeper {
    /// Makes a sleeper that `wake` wakes.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(wake: Arc<Bell>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, wake.descriptor(), data, epoll::EventFlags::IN)?;
        Ok(Self { epoll, wake })
    }

    /// Has the bell of a family end the sleep. Returns `false` if no memory is left for that.
    pub fn watch(&self, family: u32, bell: BorrowedFd<'_>) -> bool {
        let data = epoll::EventData::new_u64(family.into());
        epoll::add(&self.epoll, bell, data, epoll::EventFlags::IN).is_ok()
    }

    /// Ends the watch of a family's bell.
    pub fn unwatch(&self, bell: BorrowedFd<'_>) {
        // Fails if the bell is not watched, which is what was asked for.
        let _ = epoll::delete(&self.epoll, bell);
    }

    /// Sleeps until an eventfd was raised or the time is over. `lower_bell` lowers the bell of the
    /// family of this number, and returns `false` if the bell stays raised.
    pub fn wait(&self, timeout: Option<Duration>, lower_bell: impl Fn(u32) -> bool) {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; 64];
        let count = epoll::wait(&self.epoll, &mut events, timeout.as_ref()).unwrap_or(0);
        for event in &events[..count] {
            let lowered = match event.data.u64() {
                WAKE => self.wake.lower(),
                family => u32::try_from(family).ok().is_none_or(&lower_bell),
            };
            if !lowered {
                // The program itself keeps its bell from being lowered, which costs only its own
                // share of wake-ups.
                std::thread::yield_now();
            }
        }
    }
}
