//! A decorator that delays a disk's completions.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use slipway_telemetry::Clock;

use crate::{Completion, Disk, OpenError, Request};

/// A disk that hands each completion on no earlier than a fixed time after the submission.
///
/// The time is the clock's. The wake descriptor uses real time, so a test that steps its clock by
/// hand must poll.
pub struct DelayDisk<D> {
    inner: D,
    clock: Arc<dyn Clock>,
    delay: Duration,
    /// The earliest ends of the requests in flight, by tag.
    due: HashMap<u64, Duration>,
    /// Completions that wait, in the order of their earliest ends.
    waiting: VecDeque<(Duration, Completion)>,
    ended: Vec<Completion>,
    timer: OwnedFd,
    /// Readable if the timer or the inner disk's descriptor is.
    wake: OwnedFd,
}

impl<D: Disk> DelayDisk<D> {
    /// Wraps `inner`, so that every request takes at least `delay`.
    ///
    /// # Errors
    /// [`OpenError::Wake`] if the process has no descriptor left.
    pub fn new(inner: D, clock: Arc<dyn Clock>, delay: Duration) -> Result<Self, OpenError> {
        let (timer, wake) = descriptors(&inner).map_err(|errno| OpenError::Wake(errno.into()))?;
        Ok(Self {
            inner,
            clock,
            delay,
            due: HashMap::new(),
            waiting: VecDeque::new(),
            ended: Vec::new(),
            timer,
            wake,
        })
    }

    /// Puts the inner disk's completions in line.
    fn collect(&mut self) {
        for completion in self.ended.drain(..) {
            let due = self.due.remove(&completion.tag).unwrap_or_default();
            let at = self.waiting.partition_point(|(other, _)| *other <= due);
            self.waiting.insert(at, (due, completion));
        }
    }

    fn hand_on(&mut self, completions: &mut Vec<Completion>) {
        let now = self.clock.now();
        while self.waiting.front().is_some_and(|(due, _)| *due <= now) {
            completions.extend(self.waiting.pop_front().map(|(_, completion)| completion));
        }
        self.arm(now);
    }

    /// Sets the timer to the next completion, or off; either way the descriptor is cleared.
    fn arm(&self, now: Duration) {
        let wait = self.waiting.front().map_or(Duration::ZERO, |(due, _)| *due - now);
        let value =
            Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = Itimerspec { it_interval: never, it_value: value };
        // This cannot fail with a valid time on a timer descriptor.
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting);
    }
}

fn descriptors(inner: &dyn Disk) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
    let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let add = |fd: BorrowedFd<'_>| {
        epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
    };
    add(timer.as_fd())?;
    inner.wake_descriptor().map_or(Ok(()), add)?;
    Ok((timer, wake))
}

impl<D: Disk> Disk for DelayDisk<D> {
    super::forward_to_inner!();

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        let due = self.clock.now() + self.delay;
        self.due.extend(requests.iter().map(|request| (request.tag, due)));
        self.inner.submit(requests, &mut self.ended);
        self.collect();
        self.hand_on(completions);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inner.poll(&mut self.ended);
        self.collect();
        self.hand_on(completions);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        let cancelled = self.inner.cancel(tag, &mut self.ended);
        self.collect();
        self.hand_on(completions);
        cancelled
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }
}
