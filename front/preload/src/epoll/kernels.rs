//! The events of the kernel's own descriptors in a set, until they are reported.

use libc::{c_int, epoll_event, sigset_t};
use slipway_socket::Errno;

use crate::real::{self, sys};

/// The most events that are taken from the kernel at a time.
const BATCH: usize = 64;

/// Events of the kernel, in its order. All of them must be reported: the kernel tells an edge once.
pub(super) struct Kernels {
    events: [epoll_event; BATCH],
    /// For each event, the time before which nothing of ours is reported after it.
    times: [u64; BATCH],
    count: usize,
}

impl Kernels {
    pub(super) fn new() -> Self {
        let nothing = epoll_event { events: 0, u64: 0 };
        Self { events: [nothing; BATCH], times: [0; BATCH], count: 0 }
    }

    /// Returns the number of events.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns an event and its time. Times do not fall from one event to the next.
    pub(super) fn get(&self, at: usize) -> Option<(epoll_event, u64)> {
        (at < self.count).then(|| (self.events[at], self.times[at]))
    }

    pub(super) fn clear(&mut self) {
        self.count = 0;
    }

    /// Waits for events of the kernel's set, and adds as many as there is room for in a report of
    /// `most` events. `keep` is called for each: it returns the time of an event of the kernel's
    /// own, or `None` for one that stands for something of ours. Returns how many events came.
    ///
    /// # Errors
    /// The errors of epoll_wait(2).
    pub(super) fn wait(
        &mut self,
        set: c_int,
        most: usize,
        left: Option<u64>,
        mask: *const sigset_t,
        mut keep: impl FnMut(&epoll_event) -> Option<u64>,
    ) -> Result<usize, Errno> {
        let room = BATCH.min(most) - self.count;
        if room == 0 {
            return Ok(0);
        }
        let milliseconds =
            left.map_or(-1, |left| c_int::try_from(left.div_ceil(1_000_000)).unwrap_or(c_int::MAX));
        let into = self.events[self.count..].as_mut_ptr();
        let got = sys!(SYS_epoll_pwait, set, into, room, milliseconds, mask, 8);
        let got = usize::try_from(got).map_err(|_| Errno::from_raw_os_error(real::errno()))?;
        for at in self.count..self.count + got {
            let event = self.events[at];
            if let Some(time) = keep(&event) {
                let last = self.count.checked_sub(1).map_or(0, |last| self.times[last]);
                self.events[self.count] = event;
                self.times[self.count] = time.max(last);
                self.count += 1;
            }
        }
        Ok(got)
    }
}
