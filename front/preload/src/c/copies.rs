//! close(2), dup(2) and their relatives.

use libc::{c_int, c_uint};
use slipway_socket::{Errno, hidden};

use super::guard::{guard, guarded};
use crate::copies;
use crate::real::{self, fail, sys};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if guard(|| copies::closing(fd).map(|()| 0)) < 0 {
        return -1;
    }
    real::close(fd)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let kernel = |first: c_uint, last: c_uint| sys!(SYS_close_range, first, last, flags) as c_int;
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        return kernel(first, last);
    }
    if guard(|| copies::closing_range(first, last, flags).map(|()| 0)) < 0 {
        return -1;
    }
    copies::between_hidden(first, last, hidden::is_hidden, kernel)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: the caller vouches for the descriptors that are closed.
    unsafe { close_range(first.max(0).unsigned_abs(), c_uint::MAX, 0) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    let new = sys!(SYS_dup, fd) as c_int;
    guarded(|| copies::copied(fd, new));
    new
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
    if let Err(errno) = copies::may_replace(to) {
        return fail(errno) as c_int;
    }
    let new = kernel();
    guarded(|| copies::copied(fd, new));
    new
}
