//! epoll_wait(2) and its relatives.

use std::sync::atomic::Ordering;

use libc::{c_int, epoll_event, sigset_t, timespec};
use slipway_socket::{Deadline, Errno, is_told_surely};

use super::active::{
    activate_all, activate_raised, are_few, arm_all, look, look_at_armed, look_back, may_be_raised,
    report,
};
use super::control::control;
use super::kernels::Kernels;
use super::{EDGE, ENGINE, GROUP, IN, Inner, Set};
use crate::fds::{self, DescriptorKind};
use crate::guard::guard;
use crate::real::{self, sys};
use crate::session;
use crate::time::after;

/// Nanoseconds between two polls of the kernel's set while connections of ours have events.
const KERNEL_EVERY: u64 = 5_000;
/// The longest sleep in nanoseconds where a wake-up may be lost.
const A_BIT: u64 = 1_000_000;
/// The kernel's set, and what this library has of it.
#[derive(Clone, Copy)]
struct Waited<'a> {
    set: c_int,
    own: &'a Set,
    mask: *const sigset_t,
}

impl Waited<'_> {
    /// Waits for events of the kernel, for a report of `most` events. Adds those of its own
    /// descriptors to `kernels`, and activates what the others stand for. Returns how many came.
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
        // What came before the kernel was last asked came before its events of now. So did, of what
        // it reports of ours, whatever is before an event in the kernel's list.
        let mut time = looked;
        kernels.wait(self.set, most, left, self.mask, |event| {
            let data = event.u64;
            if (data >> 32) as u32 != own.tag {
                return Some(time);
            }
            match data as u32 {
                ENGINE => self.engine_ended(),
                number => {
                    let mut inner = own.inner.hold();
                    time = time.max(since(&inner, number).unwrap_or(0));
                    activate_raised(&mut inner, number);
                }
            }
            None
        })
    }

    /// Looks whether the engine is gone. The event may be of an earlier engine's connection, and
    /// another thread may have had it already. Not under the set's lock: a thread that forks takes
    /// the family's lock first.
    fn engine_ended(&self) {
        let gone = session::known().is_none_or(|family| family.look());
        let descriptor = self.own.engine.swap(0, Ordering::Relaxed);
        if gone && descriptor != 0 {
            control(self.set, libc::EPOLL_CTL_DEL, descriptor, 0, 0);
        }
        activate_all(&mut self.own.inner.hold());
    }

    /// Asks the kernel without waiting, at the time `now`. Activates our connections that the
    /// kernel reports.
    fn poll_kernel(&self, kernels: &mut Kernels, most: usize, now: u64) {
        let looked = std::mem::replace(&mut self.own.inner.hold().looked, now);
        let saved = real::errno();
        if self.ask_kernel(kernels, most, Some(0), looked).is_err() {
            // A pending signal is left for the sleep, when there is nothing to report.
            real::set_errno(saved);
        }
    }

    /// Reports what is ready. Returns how many events there are.
    fn look(&self, into: &mut [epoll_event], kernels: &mut Kernels, pass: Pass) -> usize {
        kernels.clear();
        let now = Deadline::now();
        let passed = now.wrapping_sub(self.own.inner.hold().looked);
        if passed >= KERNEL_EVERY {
            self.poll_kernel(kernels, into.len(), now);
        }
        self.collect(into, kernels, pass, now)
    }

    /// Reports what is ready of ours and the events in `kernels`, in order. `now` is a time before
    /// the look. Returns how many events there are.
    fn collect(
        &self,
        into: &mut [epoll_event],
        kernels: &mut Kernels,
        pass: Pass,
        now: u64,
    ) -> usize {
        let mut inner = self.own.inner.hold();
        // These came before the last look, so before whatever another look would find.
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
            // Earlier bytes may be at a connection that was looked at already.
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
    /// Another one.
    Later,
    /// The look after a sleep: what was raised before it is active.
    Woken,
}

/// Returns the time when the connection that a number of the kernel's data stands for became ready.
/// Returns `None` for a group.
fn since(inner: &Inner, number: u32) -> Option<u64> {
    let fd = c_int::try_from(number).ok().filter(|_| number & GROUP == 0)?;
    inner.object(fd)?.stream()?.endpoint.since()
}

fn wait_both(
    waited: Waited<'_>,
    into: &mut [epoll_event],
    until: Deadline,
) -> Result<usize, Errno> {
    let Waited { set, own, .. } = waited;
    let mut kernels = Kernels::new();
    let mut pass = Pass::First;
    loop {
        let mut found = waited.look(into, &mut kernels, pass);
        let worth = pass == Pass::First && !own.inner.hold().active.is_empty();
        if found == 0 && worth && !until.has_passed() {
            own.spin.until(until.left().unwrap_or(u64::MAX), || {
                found = waited.look(into, &mut kernels, Pass::Later);
                found > 0
            });
        }
        if found > 0 {
            if found == into.len() {
                wake_another(set, own);
            }
            return Ok(found);
        }
        pass = Pass::Later;
        if !until.has_passed() && !arm_all(&mut own.inner.hold()) {
            continue;
        }
        own.spin.sleeps();
        let left = if is_told_surely() {
            until.left()
        } else {
            Some(until.left().unwrap_or(A_BIT).min(A_BIT))
        };
        let looked = own.inner.hold().looked;
        own.sleepers.fetch_add(1, Ordering::Relaxed);
        let got = waited.ask_kernel(&mut kernels, into.len(), left, looked);
        own.sleepers.fetch_sub(1, Ordering::Relaxed);
        let got = got?;
        if kernels.count() < got {
            own.spin.woke();
        }
        if !is_told_surely() {
            activate_all(&mut own.inner.hold());
        }
        let count = waited.collect(into, &mut kernels, Pass::Woken, Deadline::now());
        if count > 0 || (got == 0 && until.has_passed()) {
            if count == into.len() {
                wake_another(set, own);
            }
            return Ok(count);
        }
    }
}

/// Wakes another sleeping thread, since this one's events are full and active connections remain.
/// The kernel wakes one thread for each eventfd that is raised, but for a whole group it woke only
/// this thread.
fn wake_another(set: c_int, own: &Set) {
    if own.sleepers.load(Ordering::Relaxed) == 0 {
        return;
    }
    let inner = own.inner.hold();
    if let Some((group, fd)) = inner.watched()
        && !inner.active.is_empty()
    {
        // The eventfd was raised once and stays so: changing its entry makes a new edge.
        let saved = real::errno();
        control(set, libc::EPOLL_CTL_MOD, fd, IN | EDGE, own.datum(GROUP | group as u32));
        real::set_errno(saved);
    }
}

unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    until: Deadline,
    mask: *const sigset_t,
) -> Option<c_int> {
    let known = fds::get(set)?;
    let DescriptorKind::Epoll(own) = known.kind() else { return None };
    let most = usize::try_from(most).ok().filter(|most| (1..1 << 20).contains(most))?;
    if events.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees room for `most` events, which are only written.
    let into = unsafe { std::slice::from_raw_parts_mut(events, most) };
    let waited = Waited { set, own, mask };
    Some(guard(|| wait_both(waited, into, until)) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { epoll_pwait(set, events, most, timeout, std::ptr::null()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    if fds::is_known(set) {
        let until = match u64::try_from(timeout) {
            Ok(milliseconds) => Deadline::after(milliseconds * 1_000_000),
            Err(_) => Deadline::NEVER,
        };
        // SAFETY: the caller guarantees valid pointers.
        if let Some(got) = unsafe { wait(set, events, most, until, mask) } {
            return got;
        }
    }
    sys!(SYS_epoll_pwait, set, events, most, timeout, mask, 8) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    if fds::is_known(set) {
        // SAFETY: the caller guarantees valid pointers.
        let until = unsafe { timeout.as_ref() }.map_or(Deadline::NEVER, after);
        // SAFETY: the caller guarantees valid pointers.
        if let Some(got) = unsafe { wait(set, events, most, until, mask) } {
            return got;
        }
    }
    sys!(SYS_epoll_pwait2, set, events, most, timeout, mask, 8) as c_int
}
