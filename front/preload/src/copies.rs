//! Closing and copying descriptors: close(2), dup(2) and their relatives.

use libc::{c_int, c_uint};
use slipway_socket::{Errno, hidden};

use crate::fds;
use crate::guard::guard;
use crate::numbers;
use crate::real::{self, fail, sys};

/// The highest number that loops which close all descriptors visit.
const LAST: c_int = hidden::NUMBERS as c_int - 1;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if fds::is_known(fd) && !fds::in_vfork_child() {
        let closed = guard(|| {
            fds::remove(fd);
            Ok(0)
        });
        if closed < 0 {
            return -1;
        }
    } else if hidden::is_hidden(fd) {
        return fail(Errno::BADF) as c_int;
    }
    real::close(fd)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let begin = c_int::try_from(first).unwrap_or(LAST).min(LAST);
    let end = c_int::try_from(last).unwrap_or(LAST).min(LAST);
    let only_marks = flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0;
    if !only_marks && first <= last && !fds::in_vfork_child() {
        let closed = guard(|| {
            fds::all(begin, end).for_each(|(fd, _)| fds::remove(fd));
            Ok(0)
        });
        if closed < 0 {
            return -1;
        }
    }
    if only_marks {
        return sys!(SYS_close_range, first, last, flags) as c_int;
    }
    between_hidden(first, last, flags)
}

/// Closes a range of descriptors, except for the hidden ones.
fn between_hidden(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    let mut done = 0;
    let end = last.min(LAST as c_uint);
    for fd in first..=end {
        if hidden::is_hidden(fd as c_int) {
            if fd > from {
                done = sys!(SYS_close_range, from, fd - 1, flags) as c_int;
            }
            from = fd + 1;
        }
    }
    if from <= last { sys!(SYS_close_range, from, last, flags) as c_int } else { done }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller vouches for the descriptors that are closed.
    unsafe { close_range(first.max(0).unsigned_abs(), c_uint::MAX, 0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let new = sys!(SYS_dup, fd) as c_int;
    copied(fd, new);
    new
}

/// Records that `new` is a copy of `fd` now, unless the call failed.
pub fn copied(fd: c_int, new: c_int) {
    if new >= 0 && fds::in_vfork_child() {
        return numbers::copied(fd, new);
    }
    if new >= 0 && (fds::is_known(fd) || fds::is_known(new)) {
        guard(|| {
            match fds::get(fd) {
                Some(object) => fds::put(new, &object),
                None => fds::remove(new),
            }
            Ok(0)
        });
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    if fd == to {
        return sys!(SYS_dup2, fd, to) as c_int;
    }
    replace(fd, to, || sys!(SYS_dup2, fd, to) as c_int)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    if fd == to {
        return fail(Errno::INVAL) as c_int;
    }
    replace(fd, to, || sys!(SYS_dup3, fd, to, flags) as c_int)
}

fn replace(fd: c_int, to: c_int, kernel: impl FnOnce() -> c_int) -> c_int {
    if hidden::is_hidden(to) && !fds::in_vfork_child() {
        return fail(Errno::BUSY) as c_int;
    }
    let new = kernel();
    copied(fd, new);
    new
}
