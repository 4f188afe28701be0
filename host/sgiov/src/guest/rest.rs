//! Waking, polling and sleeping of [`FunctionRemote`].

use std::time::{Duration, Instant};

use rustix::time::Timespec;

use super::FunctionError;
use super::remote::FunctionRemote;
use super::watches::Woken;
use crate::remote::Family;

/// The time for which it polls after the last work. An interrupt costs the guest several exits,
/// which together take about as long.
const POLL: Duration = Duration::from_micros(250);
/// The time for which it polls before the engine's programs have their turn.
const SHIFT: Duration = Duration::from_millis(1);
/// The interval at which a function without interrupts is polled.
const NAP: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
/// The interval at which the function's status is read while there are streams: a function that is
/// gone does not interrupt.
const PULSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 500_000_000 };

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
                self.watches.come_back();
                break;
            }
        }
    }

    /// Handles the events that woke the thread.
    fn wake(&mut self) {
        for woken in self.watches.take() {
            match woken {
                Woken::Interrupt => {
                    if self.machine.acknowledge() {
                        self.check_status();
                    }
                }
                Woken::Tick => {
                    if self.machine.is_status_due() {
                        self.check_status();
                    }
                }
                Woken::Family(family) => _ = self.families.get(&family).map(Family::lower_bell),
            }
        }
    }

    /// Reads the function's status, and ends the function if it is broken.
    fn check_status(&mut self) {
        if let Some(error) = self.machine.fault() {
            self.fail(&error);
        }
    }

    /// Announces that this side sleeps, and looks for work once more. Returns `false` if there was
    /// some.
    fn rest(&mut self) -> Result<bool, FunctionError> {
        if !self.machine.is_running() {
            return Ok(true);
        }
        self.machine.announce_sleep();
        self.families.values().for_each(|family| family.set_asleep(true));
        // Pairs with the barrier of the machine and of families, between their stores and their
        // look at these words.
        slipway_ring::barrier();
        if !self.turn()? {
            return Ok(true);
        }
        self.rise();
        Ok(false)
    }

    /// Announces that this side is awake.
    fn rise(&self) {
        self.machine.withdraw_sleep();
        self.families.values().for_each(|family| family.set_asleep(false));
    }

    /// Starts or stops the timer by which the function is polled while it is in use: for work, or
    /// for its end.
    pub(super) fn update_timer(&mut self) {
        let (is_used, period) = if self.machine.interrupt().is_some() {
            (!self.streams.is_empty(), PULSE)
        } else {
            let sends = self.machine.has_waiting() || !self.welcome;
            (sends || !self.streams.is_empty() || !self.listeners.is_empty(), NAP)
        };
        let ticks = self.machine.is_running() && is_used;
        self.watches.tick(ticks.then_some(period));
    }
}
