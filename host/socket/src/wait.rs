//! Sleeping on an endpoint's eventfd, by any number of threads and processes.
//!
//! Draining an eventfd wakes nobody else who sleeps on it. So one of the sleeping threads, the
//! leader, polls the eventfd, and the others sleep on a futex in the table. A leader that drained
//! the eventfd changes the futex's word (the turn) and wakes the others, and each checks for itself
//! whether its condition holds. The order is: read the turn, then arm, then sleep. A wake-up in
//! between shows as another turn. If a leader was killed, another thread notices within a second.
//! Sleepers here are many, and their number is needed to wake all of them, so turn and number are
//! not the word of `slipway_ring::sleep`, which one sleeper has to itself. futex(2) compares the
//! turn under the kernel's lock, which takes the place of the sleeper's look.
//!
//! An eventfd that several endpoints share is never drained: each thread that sleeps on it waits
//! for its edge ([`Edge`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::futex;
use slipway_peer::eventfd::drain;

use crate::edge::Edge;
use crate::endpoint::{Endpoint, Half, option};
use crate::spin::now;
use crate::table::{is_gone, low_half, thread};

/// The time until which a thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// No limit.
    pub const NEVER: Self = Self(None);

    /// Returns the deadline this many nanoseconds from now.
    pub fn after(nanoseconds: u64) -> Self {
        Self(Some(now().saturating_add(nanoseconds)))
    }

    /// Returns monotonic nanoseconds.
    pub fn now() -> u64 {
        now()
    }

    /// Returns the nanoseconds that are left, or `None` for a deadline that never passes.
    pub fn left(self) -> Option<u64> {
        self.0.map(|until| until.saturating_sub(now()))
    }

    /// Returns whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        self.left() == Some(0)
    }
}

fn timespec(nanoseconds: u64) -> Timespec {
    let tv_sec = i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: (nanoseconds % 1_000_000_000) as _ }
}

const SECOND: u64 = 1_000_000_000;

impl Endpoint {
    /// Waits until another attempt at `half` may succeed: polls, then sleeps on `eventfd`.
    ///
    /// # Errors
    /// `EINTR`: a signal came. `EAGAIN`: the deadline has passed.
    pub fn wait(&self, half: Half, eventfd: BorrowedFd<'_>, until: Deadline) -> Result<(), Errno> {
        const IN: i16 = 1;
        const OUT: i16 = 4;
        let bit = if half == Half::Receiving { IN } else { OUT };
        self.wait_for(half, 1, eventfd, until, || self.ready() & bit != 0)
    }

    /// Waits until [`Endpoint::has_arrived`] holds for `least` bytes: polls, then sleeps on
    /// `eventfd`. May return earlier.
    ///
    /// # Errors
    /// The errors of [`Endpoint::wait`].
    pub fn wait_to_peek(
        &self,
        least: usize,
        eventfd: BorrowedFd<'_>,
        until: Deadline,
    ) -> Result<(), Errno> {
        let there = || self.has_arrived(least);
        self.wait_for(Half::Receiving, self.most_arrived(least), eventfd, until, there)
    }

    /// Waits until `is_there`, for which the half is armed with `least` bytes.
    fn wait_for(
        &self,
        half: Half,
        least: usize,
        eventfd: BorrowedFd<'_>,
        until: Deadline,
        is_there: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        let limit = until.left().unwrap_or(u64::MAX);
        if self.spin.until(limit, &is_there) {
            return Ok(());
        }
        let edge = self.is_shared().then(|| self.edge(eventfd));
        let turn = low_half(self.option(option::TURN)).load(Ordering::Acquire);
        if self.arm(half, least) || self.family.is_dead() {
            return Ok(());
        }
        // Without a barrier on other processors, a wake-up may be missed: look often.
        let longest = if slipway_ring::cross::is_told_surely() { SECOND } else { SECOND / 1000 };
        let left = until.left().unwrap_or(longest).min(longest);
        if left == 0 {
            return Err(Errno::AGAIN);
        }
        self.spin.sleeps();
        let slept = match edge {
            Some(Ok(edge)) => self.watch(edge.as_fd(), left).map(drop),
            Some(Err(_)) => self.follow(turn, left.min(SECOND / 1000)),
            None => self.sleep(eventfd, turn, left),
        };
        if is_there() {
            self.spin.woke();
            return Ok(());
        }
        slept
    }

    fn sleep(&self, eventfd: BorrowedFd<'_>, turn: u32, left: u64) -> Result<(), Errno> {
        let leader = low_half(self.option(option::SLEEPERS));
        let holder = leader.load(Ordering::Relaxed);
        let from = if holder != 0 && is_gone(holder) { holder } else { 0 };
        let leads =
            leader.compare_exchange(from, thread(), Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if !leads {
            return self.follow(turn, left);
        }
        let slept = if low_half(self.option(option::TURN)).load(Ordering::Acquire) == turn {
            self.lead(eventfd, left)
        } else {
            Ok(())
        };
        leader.store(0, Ordering::Release);
        self.rouse();
        slept
    }

    /// Wakes the threads that sleep on the futex.
    pub(crate) fn rouse(&self) {
        let turn = low_half(self.option(option::TURN));
        turn.fetch_add(1, Ordering::AcqRel);
        if self.option(option::SLEEPERS).load(Ordering::Acquire) >> 32 != 0 {
            let _ = futex::wake(turn, futex::Flags::empty(), i32::MAX.unsigned_abs());
        }
    }

    fn lead(&self, eventfd: BorrowedFd<'_>, left: u64) -> Result<(), Errno> {
        if self.watch(eventfd, left)? {
            drain(eventfd);
        }
        Ok(())
    }

    /// Waits for `eventfd`, or the engine's end. Returns whether `eventfd` is readable.
    fn watch(&self, eventfd: BorrowedFd<'_>, left: u64) -> Result<bool, Errno> {
        // SAFETY: see `Family::look`.
        let engine = unsafe { BorrowedFd::borrow_raw(self.family.descriptor()) };
        let mut fds =
            [PollFd::new(&eventfd, PollFlags::IN), PollFd::new(&engine, PollFlags::empty())];
        poll(&mut fds, Some(&timespec(left)))?;
        if !fds[1].revents().is_empty() {
            self.family.bury();
        }
        Ok(!fds[0].revents().is_empty())
    }

    fn edge(&self, eventfd: BorrowedFd<'_>) -> Result<Edge, Errno> {
        let edge = Edge::new()?;
        edge.add(self, eventfd)?;
        edge.begin()?;
        Ok(edge)
    }

    fn follow(&self, turn: u32, left: u64) -> Result<(), Errno> {
        let sleepers = self.option(option::SLEEPERS);
        sleepers.fetch_add(1 << 32, Ordering::AcqRel);
        let word = low_half(self.option(option::TURN));
        let slept = futex::wait(word, futex::Flags::empty(), turn, Some(&timespec(left)));
        sleepers.fetch_sub(1 << 32, Ordering::AcqRel);
        match slept {
            Err(Errno::INTR) => Err(Errno::INTR),
            _ => Ok(()),
        }
    }
}
