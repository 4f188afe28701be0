//! epoll_ctl(2), epoll_wait(2) and their relatives.

use libc::{c_int, epoll_event, sigset_t, timespec};
use slipway_socket::Deadline;

use super::guard::guard;
use crate::epoll::{self, Interest, Waited};
use crate::fds::{self, DescriptorKind};
use crate::real::{self, sys};
use crate::time::{after, after_milliseconds};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epoll_ctl(
    set: c_int,
    how: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let kernel = || real::outcome(sys!(SYS_epoll_ctl, set, how, fd, event));
    // The call ignores the pointer for a descriptor that leaves: it may be anything.
    let event = if how == libc::EPOLL_CTL_DEL { std::ptr::null_mut() } else { event };
    // SAFETY: the caller guarantees valid pointers.
    let interest = unsafe { event.as_ref() };
    let interest = interest.map(|event| Interest { events: event.events, datum: event.u64 });
    guard(|| epoll::carry_out(set, how, fd, interest, kernel)) as c_int
}

/// Waits for events of a set. Returns `None` if the set is the kernel's alone, or an argument is
/// invalid: the caller makes the system call then.
///
/// # Safety
/// The contract of epoll_pwait(2).
unsafe fn wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    until: Deadline,
    mask: *const sigset_t,
) -> Option<c_int> {
    let known = fds::get(set)?;
    let DescriptorKind::Epoll(own) = known.kind() else { return None };
    let most = epoll::room_for(most)?;
    if events.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees room for `most` events, which are only written.
    let into = unsafe { std::slice::from_raw_parts_mut(events, most) };
    let waited = Waited { set, own, mask };
    Some(guard(|| epoll::wait(waited, into, until)) as c_int)
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
        let until = after_milliseconds(timeout);
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
        let until = unsafe { timeout.as_ref() }.map_or(Ok(Deadline::NEVER), after);
        // SAFETY: the caller guarantees valid pointers.
        let waited = |until| unsafe { wait(set, events, most, until, mask) };
        // The system call below refuses an invalid timeout.
        if let Some(got) = until.ok().and_then(waited) {
            return got;
        }
    }
    sys!(SYS_epoll_pwait2, set, events, most, timeout, mask, 8) as c_int
}
