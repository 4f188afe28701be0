//! epoll_wait(2) and its relatives.

use std::sync::atomic::Ordering;

use libc::{c_int, epoll_event, sigset_t, timespec};
use slipway_socket::{Deadline, Errno, is_told_surely};

use super::active::{activate_all, activate_raised, arm_all, collect};
use super::control::control;
use super::{EDGE, ENGINE, GROUP, IN, Set};
use crate::fds::{self, DescriptorKind};
use crate::guard::guard;
use crate::real::{self, sys};
use crate::session;
use crate::time::after;

/// Nanoseconds between two polls of the kernel's set while connections of ours have events.
const KERNEL_EVERY: u64 = 5_000;
/// The longest sleep in nanoseconds where a wake-up may be lost.
const A_BIT: u64 = 1_000_000;
/// The most events that are taken from the kernel at a time.
const BATCH: usize = 64;

fn wait_kernel(
    set: c_int,
    into: &mut [epoll_event],
    left: Option<u64>,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let count = into.len().min(BATCH);
    let milliseconds =
        left.map_or(-1, |left| c_int::try_from(left.div_ceil(1_000_000)).unwrap_or(c_int::MAX));
    let got = sys!(SYS_epoll_pwait, set, into.as_mut_ptr(), count, milliseconds, mask, 8);
    usize::try_from(got).map_err(|_| Errno::from_raw_os_error(real::errno()))
}

/// Removes our own data from the kernel's events and activates what they stand for. Returns how
/// many events are left.
fn translate(set: c_int, own: &Set, events: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for at in 0..events.len() {
        let event = events[at];
        let data = event.u64;
        if (data >> 32) as u32 != own.tag {
            events[kept] = event;
            kept += 1;
            continue;
        }
        let number = data as u32;
        if number != ENGINE {
            activate_raised(&mut own.inner.hold(), number);
            continue;
        }
        // Not under the set's lock: a thread that forks takes the family's lock first. The event
        // may be of an earlier engine's connection, and another thread may have had it already.
        let gone = session::known().is_none_or(|family| family.look());
        let descriptor = own.engine.swap(0, Ordering::Relaxed);
        if gone && descriptor != 0 {
            control(set, libc::EPOLL_CTL_DEL, descriptor, 0, 0);
        }
        activate_all(&mut own.inner.hold());
    }
    kept
}

/// Returns the number of the kernel's events, or 0 if the kernel was polled just now. Activates our
/// connections that the kernel reports.
fn of_kernel(
    set: c_int,
    own: &Set,
    into: &mut [epoll_event],
    mask: *const sigset_t,
    now: u64,
) -> usize {
    {
        let mut inner = own.inner.hold();
        if now.wrapping_sub(inner.looked) < KERNEL_EVERY {
            return 0;
        }
        inner.looked = now;
    }
    let saved = real::errno();
    let Ok(got) = wait_kernel(set, into, Some(0), mask) else {
        // A pending signal is left for the sleep, when there is nothing to report.
        real::set_errno(saved);
        return 0;
    };
    translate(set, own, &mut into[..got])
}

fn wait_both(
    set: c_int,
    own: &Set,
    into: &mut [epoll_event],
    until: Deadline,
    mask: *const sigset_t,
) -> Result<usize, Errno> {
    let look = |into: &mut [epoll_event], first| {
        let now = Deadline::now();
        let kernels = of_kernel(set, own, into, mask, now);
        kernels + collect(&mut own.inner.hold(), &mut into[kernels..], first, now)
    };
    let mut first = true;
    loop {
        let mut found = look(into, first);
        let worth = first && !own.inner.hold().active.is_empty();
        if found == 0 && worth && !until.has_passed() {
            own.spin.until(until.left().unwrap_or(u64::MAX), || {
                found = look(into, false);
                found > 0
            });
        }
        if found > 0 {
            if found == into.len() {
                wake_another(set, own);
            }
            return Ok(found);
        }
        first = false;
        if !until.has_passed() && !arm_all(&mut own.inner.hold()) {
            continue;
        }
        own.spin.sleeps();
        let left = if is_told_surely() {
            until.left()
        } else {
            Some(until.left().unwrap_or(A_BIT).min(A_BIT))
        };
        own.sleepers.fetch_add(1, Ordering::Relaxed);
        let got = wait_kernel(set, into, left, mask);
        own.sleepers.fetch_sub(1, Ordering::Relaxed);
        let got = got?;
        let kept = translate(set, own, &mut into[..got]);
        if kept < got {
            own.spin.woke();
        }
        if !is_told_surely() {
            activate_all(&mut own.inner.hold());
        }
        let more = collect(&mut own.inner.hold(), &mut into[kept..], false, Deadline::now());
        if kept + more > 0 || (got == 0 && until.has_passed()) {
            if kept + more == into.len() {
                wake_another(set, own);
            }
            return Ok(kept + more);
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
    Some(guard(|| wait_both(set, own, into, until, mask)) as c_int)
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
