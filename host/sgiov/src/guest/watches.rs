//! The descriptors that wake the engine's thread for its socket function.
//!
//! They are in an epoll that the engine's own epoll watches, so that the engine need not know
//! them. No reactor watches them: the thread that serves the guest's programs also uses the
//! function, and carries no bytes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

/// Data in the epoll; families have lower ones.
const INTERRUPT: u64 = u64::MAX;
const AGAIN: u64 = u64::MAX - 1;
const TIMER: u64 = u64::MAX - 2;

const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The reason why the thread was woken.
pub enum Woken {
    /// The function has interrupted.
    Interrupt,
    /// The timer's period is over.
    Tick,
    /// The bell of this family is raised.
    Family(u32),
}

/// An epoll, which the engine's thread waits for, and the descriptors in it that are this side's
/// own.
pub struct Watches {
    epoll: OwnedFd,
    /// An eventfd that is raised when there is more to do than a turn had room for.
    again: OwnedFd,
    timer: OwnedFd,
    /// Set while the timer runs.
    is_ticking: bool,
}

impl Watches {
    /// Watches a function's interrupt, if it has one.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new(interrupt: Option<BorrowedFd<'_>>) -> std::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let again = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        watch(&epoll, again.as_fd(), AGAIN)?;
        watch(&epoll, timer.as_fd(), TIMER)?;
        if let Some(interrupt) = interrupt {
            watch(&epoll, interrupt, INTERRUPT)?;
        }
        Ok(Self { epoll, again, timer, is_ticking: false })
    }

    /// Returns a descriptor that is readable when one of the watched ones is.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches the bell of a family. Returns `false` if no memory is left for that.
    pub fn watch_family(&self, number: u32, bell: BorrowedFd<'_>) -> bool {
        watch(&self.epoll, bell, number.into()).is_ok()
    }

    /// Ends the watch of a bell or an interrupt.
    pub fn unwatch(&self, file: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, file);
    }

    /// Has the thread come back at once.
    pub fn come_back(&self) {
        slipway_family::wake(&self.again);
    }

    /// Returns the reasons for which the thread is awake, without waiting. Bells and interrupts are
    /// left for the caller to lower.
    pub fn take(&self) -> impl Iterator<Item = Woken> + use<> {
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; 64];
        let count = epoll::wait(&self.epoll, &mut events, Some(&ZERO)).unwrap_or(0);
        for event in &events[..count] {
            match event.data.u64() {
                AGAIN => _ = slipway_peer::eventfd::drain(self.again.as_fd()),
                TIMER => _ = rustix::io::read(&self.timer, &mut [0; 8]),
                _ => {}
            }
        }
        events.into_iter().take(count).filter_map(|event| match event.data.u64() {
            INTERRUPT => Some(Woken::Interrupt),
            AGAIN => None,
            TIMER => Some(Woken::Tick),
            family => u32::try_from(family).ok().map(Woken::Family),
        })
    }

    /// Starts the timer with this period if it does not run, or stops it.
    pub fn tick(&mut self, period: Option<Timespec>) {
        if period.is_some() != self.is_ticking {
            self.is_ticking = period.is_some();
            let period = period.unwrap_or(ZERO);
            let period = Itimerspec { it_interval: period, it_value: period };
            let flags = TimerfdTimerFlags::empty();
            let _ = rustix::time::timerfd_settime(&self.timer, flags, &period);
        }
    }
}

fn watch(epoll: &OwnedFd, file: BorrowedFd<'_>, number: u64) -> std::io::Result<()> {
    let data = epoll::EventData::new_u64(number);
    Ok(epoll::add(epoll, file, data, epoll::EventFlags::IN)?)
}
