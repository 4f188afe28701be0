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
    /// `most` events. `keep` is called for each, and may change it: it returns the time of an event
    /// to report, or `None` for one that stands for a connection of ours. Returns how many events
    /// came.
    ///
    /// # Errors
    /// The errors of epoll_wait(2).
    pub(super) fn wait(
        &mut self,
        set: c_int,
        most: usize,
        left: Option<u64>,
        mask: *const sigset_t,
        mut keep: impl FnMut(&mut epoll_event) -> Option<u64>,
    ) -> Result<usize, Errno> {
        let room = BATCH.min(most) - self.count;
        if room == 0 {
            return Ok(0);
        }
        let milliseconds =
            left.map_or(-1, |left| c_int::try_from(left.div_ceil(1_000_000)).unwrap_or(c_int::MAX));
        let into = self.events[self.count..].as_mut_ptr();
        let got = sys!(SYS_epoll_pwait, set, into, room, milliseconds, mask, 8);
        let got = real::outcome(got)?;
        for at in self.count..self.count + got {
            let mut event = self.events[at];
            if let Some(time) = keep(&mut event) {
                let last = self.count.checked_sub(1).map_or(0, |last| self.times[last]);
                self.events[self.count] = event;
                self.times[self.count] = time.max(last);
                self.count += 1;
            }
        }
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::super::IN;
    use super::super::control::control;
    use super::*;

    /// Makes a set with `count` raised eventfds, whose data are their numbers from 0 on.
    fn raised(count: u64) -> (c_int, Vec<c_int>) {
        let set = sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) as c_int;
        let add = |datum| {
            let eventfd = sys!(SYS_eventfd2, 1, libc::EFD_CLOEXEC) as c_int;
            assert_eq!(control(set, libc::EPOLL_CTL_ADD, eventfd, IN, datum), 0);
            eventfd
        };
        (set, (0..count).map(add).collect())
    }

    fn close((set, eventfds): (c_int, Vec<c_int>)) {
        eventfds.into_iter().chain([set]).for_each(|fd| _ = real::close(fd));
    }

    #[test]
    fn events_of_ours_are_left_out_and_times_do_not_fall() {
        let all = raised(4);
        let mut kernels = Kernels::new();
        let mut times = [Some(20), None, Some(10), Some(30)].into_iter();
        let keep = |event: &mut epoll_event| {
            event.u64 += 100;
            times.next().flatten()
        };
        assert_eq!(kernels.wait(all.0, 8, Some(0), ptr::null(), keep), Ok(4));
        assert_eq!(kernels.count(), 3);
        let told: Vec<_> = (0..4).map(|at| kernels.get(at).map(|(_, time)| time)).collect();
        assert_eq!(told, [Some(20), Some(20), Some(30), None]);
        let data: Vec<_> =
            (0..3).filter_map(|at| kernels.get(at).map(|(event, _)| event.u64)).collect();
        assert_eq!(data, [100, 102, 103], "as they were changed");
        kernels.clear();
        assert!(kernels.get(0).is_none());
        close(all);
    }

    #[test]
    fn no_more_events_are_taken_than_there_is_room_for() {
        let all = raised(4);
        let mut kernels = Kernels::new();
        let mut wait = |most| kernels.wait(all.0, most, Some(0), ptr::null(), |_| Some(0));
        assert_eq!((wait(3), wait(3)), (Ok(3), Ok(0)));
        assert_eq!(wait(4), Ok(1));
        close(all);
    }

    #[test]
    fn an_error_of_the_kernel_is_the_calls() {
        let mut kernels = Kernels::new();
        let got = kernels.wait(-1, 8, Some(0), ptr::null(), |_| Some(0));
        assert_eq!((got, kernels.count()), (Err(Errno::BADF), 0));
    }
}
