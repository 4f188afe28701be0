//! epoll_wait(2) and its relatives.
//!
//! A call looks at the set ([`Waited::look`]), looks again for a while if that is worth it
//! ([`Waited::look_and_spin`]), arms the connections, and sleeps on the kernel's set
//! ([`Waited::sleep`]); [`wait`] has the order of these. Each look ends in
//! [`Waited::collect`], which puts connections and the kernel's events in order.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, epoll_event, sigset_t};
use slipway_socket::{Deadline, Errno, is_told_surely};

use super::active::{
    activate_all, activate_raised, are_few, arm_all, look, look_at_armed, look_back, may_be_raised,
    report,
};
use super::control::control;
use super::kernels::Kernels;
use super::{EDGE, ENGINE, GROUP, IN, Inner, Interest, QUEUE, READ, Set};
use crate::real;
use crate::session;

/// The most events that a program may ask for: those in as many bytes as an `int` counts
/// (`EP_MAX_EVENTS` of `fs/eventpoll.c`).
const MOST_ASKED: usize = i32::MAX as usize / size_of::<epoll_event>();
/// The most events of a report. A program that asks for more gets the rest from its next call.
const MOST: usize = 1 << 20;
/// Nanoseconds between two polls of the kernel's set while connections of ours have events.
const KERNEL_EVERY: u64 = 5_000;
/// The longest sleep in nanoseconds if a wake-up may be lost ([`is_told_surely`] is `false`).
const LONGEST_UNSURE_SLEEP: u64 = 1_000_000;

/// Returns the most events of a report to a program that has room for `most`. Returns `None` for a
/// number that epoll_wait(2) refuses.
pub fn room_for(most: c_int) -> Option<usize> {
    let most = usize::try_from(most).ok()?;
    (1..=MOST_ASKED).contains(&most).then(|| most.min(MOST))
}

/// A set that a thread waits for.
#[derive(Clone, Copy)]
pub struct Waited<'a> {
    /// The kernel's set.
    pub set: c_int,
    /// The library's part of the set.
    pub own: &'a Set,
    /// The signal mask during a sleep, or null. Only the kernel reads it.
    pub mask: *const sigset_t,
}

/// A thread that is about to sleep on the kernel's set, or sleeps. It counts among the set's
/// sleepers until this is dropped.
struct Sleeper<'a>(&'a AtomicU32);

impl<'a> Sleeper<'a> {
    /// Counts this thread among `sleepers`, and then has `arm` look at the connections for the last
    /// time before the sleep. Returns `None` if `arm` returns `false`: an event is to be reported.
    ///
    /// `arm` takes the set's lock, and so does a thread that activates and reports connections
    /// before [`wake_another`] reads the count. If that thread has the lock first, `arm` finds the
    /// connections that remain active. Otherwise that thread finds this one counted, and wakes it.
    /// Counted after `arm`, this thread could miss both, and sleep on.
    fn new(sleepers: &'a AtomicU32, arm: impl FnOnce() -> bool) -> Option<Self> {
        sleepers.fetch_add(1, Ordering::Relaxed);
        let counted = Self(sleepers);
        arm().then_some(counted)
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waited<'_> {
    /// Waits up to `left` nanoseconds (`None`: without limit) for events of the kernel's set, for a
    /// report of `most` events. Adds the events of the kernel's own descriptors to `kernels`, and
    /// activates the connections whose eventfds were raised. `looked` is the time when the kernel
    /// was last asked. Returns the number of events that came.
    ///
    /// # Errors
    /// The errors of epoll_wait(2).
    fn ask_kernel(
        &self,
        kernels: &mut Kernels,
        most: usize,
        left: Option<u64>,
        looked: u64,
    ) -> Result<usize, Errno> {
        let own = self.own;
        // Events are reported in the order in which they came. `time` is the time before which the
        // next kernel event cannot have come: at first the last look, at which the kernel had no
        // event. The kernel lists events in their order, so each connection of ours in its list
        // moves `time` on to when that became ready. Connections ready by then are reported first.
        let mut time = looked;
        kernels.wait(self.set, most, left, self.mask, |event| {
            let data = event.u64;
            if (data >> 32) as u32 != own.tag {
                return Some(time);
            }
            match data as u32 {
                ENGINE => self.engine_ended(),
                number if number & (GROUP | QUEUE) == QUEUE => {
                    *event = self.waiting_connection(number & !QUEUE)?;
                    return Some(time);
                }
                number => {
                    let mut inner = own.inner.hold();
                    time = time.max(since(&inner, number).unwrap_or(0));
                    activate_raised(&mut inner, number);
                }
            }
            None
        })
    }

    /// Returns the event of the listener `fd`, in whose second queue a connection waits, as the
    /// program asked for it. Returns `None` if the program asks for none, or the listener has left
    /// the set.
    fn waiting_connection(&self, fd: u32) -> Option<epoll_event> {
        let inner = self.own.inner.hold();
        let item = inner.items.get(usize::try_from(fd).ok()?)?.as_ref()?;
        let Interest { events, datum } = item.interest;
        (events & READ != 0).then_some(epoll_event { events: events & READ, u64: datum })
    }

    /// Handles an event of the engine's descriptor: removes the descriptor from the kernel's set if
    /// the engine is gone, and activates all connections. The event may be of an earlier engine's
    /// descriptor, or another thread may have handled it already. The caller must not hold the
    /// set's lock, since a thread that forks takes the family's lock first.
    fn engine_ended(&self) {
        let gone = session::known().is_none_or(|family| family.look());
        let descriptor = self.own.engine.swap(0, Ordering::Relaxed);
        if gone && descriptor != 0 {
            control(self.set, libc::EPOLL_CTL_DEL, descriptor, 0, 0);
        }
        activate_all(&mut self.own.inner.hold());
    }

    /// Asks the kernel without waiting, at the time `now`. Adds the events of its own descriptors
    /// to `kernels`, and activates the connections whose eventfds were raised.
    fn poll_kernel(&self, kernels: &mut Kernels, most: usize, now: u64) {
        let looked = std::mem::replace(&mut self.own.inner.hold().looked, now);
        let saved = real::errno();
        if self.ask_kernel(kernels, most, Some(0), looked).is_err() {
            // The sleep reports a signal, if there are no events to report before it.
            real::set_errno(saved);
        }
    }

    /// Reports ready connections and kernel events, without sleeping. Asks the kernel only if it
    /// was not asked for [`KERNEL_EVERY`]. Returns the number of events in `into`.
    fn look(&self, into: &mut [epoll_event], kernels: &mut Kernels, pass: Pass) -> usize {
        kernels.clear();
        let now = Deadline::now();
        let passed = now.wrapping_sub(self.own.inner.hold().looked);
        if passed >= KERNEL_EVERY {
            self.poll_kernel(kernels, into.len(), now);
        }
        self.collect(into, kernels, pass, now)
    }

    /// Reports as [`look`](Self::look) does. If the first look of a call finds nothing, looks again
    /// for as long as connections that are active are worth it, up to `until`.
    fn look_and_spin(
        &self,
        into: &mut [epoll_event],
        kernels: &mut Kernels,
        pass: Pass,
        until: Deadline,
    ) -> usize {
        let mut found = self.look(into, kernels, pass);
        let worth = pass == Pass::First && !self.own.inner.hold().active.is_empty();
        if found == 0 && worth && !until.has_passed() {
            self.own.spin.until(until.left().unwrap_or(u64::MAX), || {
                found = self.look(into, kernels, Pass::Later);
                found > 0
            });
        }
        found
    }

    /// Sleeps until `until` on the kernel's set, as `sleeper`, for a report of `most` events, and
    /// activates the connections whose eventfds were raised. Returns the number of events that
    /// came.
    ///
    /// # Errors
    /// The errors of epoll_wait(2).
    fn sleep(
        &self,
        sleeper: Sleeper<'_>,
        kernels: &mut Kernels,
        most: usize,
        until: Deadline,
    ) -> Result<usize, Errno> {
        let own = self.own;
        own.spin.sleeps();
        let left = if is_told_surely() {
            until.left()
        } else {
            Some(until.left().unwrap_or(LONGEST_UNSURE_SLEEP).min(LONGEST_UNSURE_SLEEP))
        };
        let looked = own.inner.hold().looked;
        let got = self.ask_kernel(kernels, most, left, looked);
        drop(sleeper);
        let got = got?;
        if kernels.count() < got {
            own.spin.woke();
        }
        if !is_told_surely() {
            activate_all(&mut own.inner.hold());
        }
        Ok(got)
    }

    /// Reports ready connections and the events in `kernels`, in the order in which they came.
    /// `now` is a time before this call. Returns the number of events in `into`.
    fn collect(
        &self,
        into: &mut [epoll_event],
        kernels: &mut Kernels,
        pass: Pass,
        now: u64,
    ) -> usize {
        let mut inner = self.own.inner.hold();
        // Connections that the last report had no room for became ready before those that another
        // look would find.
        if !inner.found.is_empty() || kernels.count() == into.len() {
            let count = report(&mut inner, into, kernels, now, true);
            if count > 0 {
                return count;
            }
        }
        look(&mut inner, pass == Pass::First, now);
        if pass != Pass::Woken && may_be_raised(&mut inner) {
            if are_few(&inner) {
                look_at_armed(&mut inner, now);
            } else {
                drop(inner);
                self.poll_kernel(kernels, into.len(), now);
                inner = self.own.inner.hold();
                look(&mut inner, false, now);
            }
        }
        let mut cutoff = now;
        if inner.ours.len() > 1
            && let Some(latest) = inner.found.all_late(now)
        {
            // All of these became ready during the look, and may have been preceded by bytes at a
            // connection that the look had already passed.
            cutoff = latest;
            look_back(&mut inner, now);
        }
        inner.found.drop_late(cutoff);
        report(&mut inner, into, kernels, now, false)
    }
}

/// The occasion of a look at a set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// The first look of a call.
    First,
    /// A further look, before a sleep.
    Later,
    /// The look after a sleep. The connections whose eventfds ended the sleep are active already.
    Woken,
}

/// Returns the time when a connection became ready, by its number in the kernel's data. Returns
/// `None` if the number is a group's, or the time is unknown.
fn since(inner: &Inner, number: u32) -> Option<u64> {
    let fd = c_int::try_from(number).ok().filter(|_| number & GROUP == 0)?;
    inner.object(fd)?.stream()?.endpoint.since()
}

/// Waits until `until` for events of connections and of the kernel's own descriptors. Returns the
/// number of events in `into`.
///
/// # Errors
/// The errors of epoll_wait(2).
pub fn wait(waited: Waited<'_>, into: &mut [epoll_event], until: Deadline) -> Result<usize, Errno> {
    let Waited { set, own, .. } = waited;
    let mut kernels = Kernels::new();
    let mut pass = Pass::First;
    let count = loop {
        let found = waited.look_and_spin(into, &mut kernels, pass, until);
        if found > 0 {
            break found;
        }
        pass = Pass::Later;
        let arm = || until.has_passed() || arm_all(&mut own.inner.hold());
        let Some(sleeper) = Sleeper::new(&own.sleepers, arm) else { continue };
        let got = waited.sleep(sleeper, &mut kernels, into.len(), until)?;
        let count = waited.collect(into, &mut kernels, Pass::Woken, Deadline::now());
        if count > 0 || (got == 0 && until.has_passed()) {
            break count;
        }
    };
    if count == into.len() {
        wake_another(set, own);
    }
    Ok(count)
}

/// Wakes another sleeping thread if active connections remain, for a thread whose report is full.
/// The kernel wakes one thread for each raised eventfd. The connections of a group share an
/// eventfd, so it woke only this thread for all of them.
fn wake_another(set: c_int, own: &Set) {
    if own.sleepers.load(Ordering::Relaxed) == 0 {
        return;
    }
    let inner = own.inner.hold();
    if let Some((group, fd)) = inner.watched()
        && !inner.active.is_empty()
    {
        // The eventfd is still raised. The kernel reports it again when its entry is changed.
        let saved = real::errno();
        control(set, libc::EPOLL_CTL_MOD, fd, IN | EDGE, own.datum(GROUP | group as u32));
        real::set_errno(saved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::real::sys;

    #[test]
    fn a_thread_counts_as_a_sleeper_before_it_arms_and_until_it_has_slept() {
        let sleepers = AtomicU32::new(0);
        let count = || sleepers.load(Ordering::Relaxed);
        let mut counted = 0;
        let sleeper = Sleeper::new(&sleepers, || {
            counted = count();
            true
        });
        assert!(sleeper.is_some());
        assert_eq!((counted, count()), (1, 1));
        drop(sleeper);
        assert_eq!(count(), 0);
        assert!(Sleeper::new(&sleepers, || false).is_none());
        assert_eq!(count(), 0, "a thread with an event to report does not sleep");
    }

    /// The kernel's own answer would have this library's data in it.
    #[test]
    fn a_program_may_ask_for_as_many_events_as_the_kernel_allows() {
        assert_eq!([1, 1 << 20].map(room_for), [Some(1), Some(MOST)]);
        let most = c_int::try_from(MOST_ASKED).unwrap();
        assert_eq!([1 << 21, most].map(room_for), [Some(MOST); 2]);
        assert_eq!([0, -1, most + 1, c_int::MAX].map(room_for), [None; 4]);
    }

    #[test]
    fn no_way_out_of_a_wait_leaves_a_sleeper() {
        let own = Set::new();
        let mut into = [epoll_event { events: 0, u64: 0 }];
        let mut wait_on = |set, until| {
            let waited = Waited { set, own: &own, mask: std::ptr::null() };
            (wait(waited, &mut into, until), own.sleepers.load(Ordering::Relaxed))
        };
        assert_eq!(wait_on(-1, Deadline::NEVER), (Err(Errno::BADF), 0));
        let set = sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) as c_int;
        assert_eq!(wait_on(set, Deadline::after(0)), (Ok(0), 0));
        real::close(set);
    }
}
