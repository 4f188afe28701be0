//! select(2) and pselect(2).

use libc::{c_int, fd_set, sigset_t, timespec, timeval};
use slipway_socket::Deadline;

use super::guard::guard;
use super::memory::set;
use crate::real::sys;
use crate::select::{self, Sets};
use crate::time::after;

/// Returns the sets of a call if a descriptor of ours is in one of them.
///
/// # Safety
/// The contract of pselect(2).
unsafe fn with_ours<'a>(count: c_int, sets: [*mut fd_set; 3]) -> Option<Sets<'a>> {
    // SAFETY: the caller guarantees valid pointers.
    let sets = Sets::new(sets.map(|one| unsafe { set(one, count) }));
    sets.have_ours(count).then_some(sets)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    let Some(sets) = (unsafe { with_ours(count, [read, write, except]) }) else {
        return sys!(SYS_select, count, read, write, except, timeout) as c_int;
    };
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    let timeout = unsafe { timeout.as_mut() };
    let length = timeout.as_deref().map(select::timespec_of);
    let until = length.as_ref().map_or(Ok(Deadline::NEVER), after);
    let got = guard(|| select::select(count, sets, until?, std::ptr::null())) as c_int;
    // Linux stores the remaining time.
    let left = until.ok().and_then(Deadline::left);
    if let Some((time, left)) = timeout.zip(left) {
        *time = select::timeval_of(left);
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is valid if it is not null.
    let own = unsafe { timeout.as_ref() }.copied();
    // SAFETY: the caller guarantees valid pointers.
    let Some(sets) = (unsafe { with_ours(count, [read, write, except]) }) else {
        let at = own.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let mask = [mask as usize, 8];
        return sys!(SYS_pselect6, count, read, write, except, at, mask.as_ptr()) as c_int;
    };
    let until = own.as_ref().map_or(Ok(Deadline::NEVER), after);
    guard(|| select::select(count, sets, until?, mask)) as c_int
}
