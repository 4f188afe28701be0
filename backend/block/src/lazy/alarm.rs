//! A timer that wakes a sleeping thread at a time of a clock.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use slipway_telemetry::Clock;

/// A timer descriptor, and the clock by which decisions are made. The descriptor uses real time, so
/// a test that steps its clock by hand must poll.
pub(super) struct Alarm {
    timer: OwnedFd,
    clock: Arc<dyn Clock>,
    at: Option<Duration>,
}

impl Alarm {
    /// Creates an alarm that is not set.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(clock: Arc<dyn Clock>) -> rustix::io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { timer, clock, at: None })
    }

    /// Returns the clock's time.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Returns whether the alarm is set and its time has come.
    pub fn is_due(&self) -> bool {
        self.at.is_some_and(|at| at <= self.now())
    }

    /// Sets the alarm to a time, or off. The descriptor is readable from that time on, until the
    /// alarm is set anew.
    pub fn set(&mut self, at: Option<Duration>) {
        if at == self.at && !self.is_due() {
            return;
        }
        self.at = at;
        // A wait of 0 would turn the timer off.
        let wait = |at: Duration| at.saturating_sub(self.now()).max(Duration::from_nanos(1));
        let wait = at.map_or(Duration::ZERO, wait);
        let value =
            Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) };
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let setting = Itimerspec { it_interval: never, it_value: value };
        // This cannot fail with a valid time on a timer descriptor.
        let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting);
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
