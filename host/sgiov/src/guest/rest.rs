//! Waking, polling and sleeping of [`FunctionRemote`].

use std::os::fd::AsFd;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec};
use slipway_sgiov_spec::function::{BROKEN, asleep, register};

use super::remote::{AGAIN, BETWEEN, FunctionRemote, INTERRUPT, NAP, POLL, PULSE, SHIFT, TIMER};
use super::{FunctionError, broken};
use crate::remote::Family;

impl FunctionRemote {
    /// Works until there is nothing to do, or until it is the turn of the engine's programs.
    pub(super) fn work(&mut self) {
        self.wake();
        let begun = Instant::now();
        let mut worked: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let turned = self.turn();
            match self.checked(turned) {
                None => break,
                Some(true) => {
                    if worked.replace(now).is_none() {
                        self.rise();
                    }
                }
                Some(false) if worked.is_some_and(|last| now - last < POLL) => {
                    std::thread::yield_now();
                }
                Some(false) => {
                    let rested = self.rest();
                    if self.checked(rested).unwrap_or(true) {
                        break;
                    }
                    worked = Some(now);
                }
            }
            if !self.events.is_empty() || now - begun > SHIFT {
                slipway_family::wake(&self.again);
                break;
            }
        }
    }

    /// Handles the events that woke the thread.
    fn wake(&mut self) {
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; 64];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.epoll, &mut events, Some(&zero)).unwrap_or(0);
        for event in &events[..count] {
            match event.data.u64() {
                INTERRUPT => self.interrupted(),
                AGAIN => drop(slipway_peer::eventfd::drain(self.again.as_fd())),
                TIMER => {
                    let mut ticks = [0; 8];
                    let _ = rustix::io::read(&self.timer, &mut ticks);
                    if self.asked.elapsed() > BETWEEN {
                        self.ask();
                    }
                }
                family => {
                    let family = u32::try_from(family).ok().and_then(|n| self.families.get(&n));
                    family.map(Family::lower_bell);
                }
            }
        }
    }

    /// Reads the function's status, and ends it if it is broken.
    fn ask(&mut self) {
        self.asked = Instant::now();
        if let Some(error) = broken(self.device.read(register::STATUS)) {
            self.fail(&error);
        }
    }

    fn interrupted(&mut self) {
        self.device.take_interrupt();
        let cause = self.device.read(register::CAUSE);
        self.device.unmask();
        if cause & BROKEN != 0 {
            self.ask();
        }
    }

    /// Announces that this side sleeps, and looks for work once more. Returns `false` if there was
    /// some.
    fn rest(&mut self) -> Result<bool, FunctionError> {
        let full = !self.waiting.is_empty();
        let Some(control) = &self.control else { return Ok(true) };
        control.sleep(if full { asleep::FOR_WORK_AND_ROOM } else { asleep::FOR_WORK });
        self.families.values().for_each(|family| family.set_asleep(true));
        // Pairs with the barrier of the machine and of families, between their stores and their
        // look at these words.
        fence(Ordering::SeqCst);
        if !self.turn()? {
            return Ok(true);
        }
        self.rise();
        Ok(false)
    }

    /// Announces that this side is awake.
    fn rise(&self) {
        if let Some(control) = &self.control {
            control.sleep(asleep::AWAKE);
        }
        self.families.values().for_each(|family| family.set_asleep(false));
    }

    /// Starts or stops the timer by which the function is polled while it is in use: for work, or
    /// for whether it still exists.
    pub(super) fn look_or_not(&mut self) {
        let (anybody, period) = if self.device.interrupt().is_some() {
            (!self.streams.is_empty(), PULSE)
        } else {
            let speaks = !self.waiting.is_empty() || !self.welcome;
            (speaks || !self.streams.is_empty() || !self.listeners.is_empty(), NAP)
        };
        let wanted = self.control.is_some() && anybody;
        if wanted != self.is_looking {
            self.is_looking = wanted;
            let nap = if wanted { period } else { Timespec { tv_sec: 0, tv_nsec: 0 } };
            let period = Itimerspec { it_interval: nap, it_value: nap };
            let flags = TimerfdTimerFlags::empty();
            let _ = rustix::time::timerfd_settime(&self.timer, flags, &period);
        }
    }
}
