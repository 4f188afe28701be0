//! poll(2) and ppoll(2).

use libc::{c_int, nfds_t, pollfd, sigset_t, timespec};
use slipway_socket::{Deadline, Errno};

use super::guard::{assert_fits, guard};
use super::memory::polled;
use crate::polling;
use crate::real::sys;
use crate::time::{after, after_milliseconds};

/// The most descriptors of a set.
const MOST: usize = 1 << 20;

/// Polls a set with a descriptor of ours. Returns `None` if none is ours.
///
/// # Safety
/// The contract of ppoll(2).
unsafe fn poll_ours(
    fds: *mut pollfd,
    count: nfds_t,
    until: impl FnOnce() -> Result<Deadline, Errno>,
    mask: *const sigset_t,
) -> Option<c_int> {
    // SAFETY: the caller guarantees valid pointers.
    let set = unsafe { polled(fds, count) }.filter(|set| polling::has_ours(set))?;
    let ready = || {
        let until = until()?;
        if set.len() > MOST { Err(Errno::INVAL) } else { polling::poll(set, until, mask) }
    };
    Some(guard(ready) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    let until = || Ok(after_milliseconds(timeout));
    // SAFETY: the caller guarantees valid pointers.
    let ours = unsafe { poll_ours(fds, count, until, std::ptr::null()) };
    ours.unwrap_or_else(|| sys!(SYS_poll, fds, count, timeout) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    room: usize,
) -> c_int {
    assert_fits(count as usize * size_of::<pollfd>(), room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { poll(fds, count, timeout) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    let own = unsafe { timeout.as_ref() }.copied();
    let until = || own.as_ref().map_or(Ok(Deadline::NEVER), after);
    // SAFETY: the caller guarantees valid pointers.
    let ours = unsafe { poll_ours(fds, count, until, mask) };
    ours.unwrap_or_else(|| {
        // The system call writes the remaining time to the timeout; libc's function does not.
        let at = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        sys!(SYS_ppoll, fds, count, at, mask, 8) as c_int
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    room: usize,
) -> c_int {
    assert_fits(count as usize * size_of::<pollfd>(), room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { ppoll(fds, count, timeout, mask) }
}
