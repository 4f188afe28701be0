//! sendfile(2) and splice(2).

use libc::{c_int, c_uint, off_t, size_t, ssize_t};
use slipway_socket::Errno;

use super::guard::guard;
use crate::real::{fail, sys};
use crate::{fds, files};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    if fds::stream(file).is_some() {
        return fail(Errno::INVAL);
    }
    let Some(object) = fds::stream(to) else {
        return sys!(SYS_sendfile, to, file, offset, count) as ssize_t;
    };
    // SAFETY: the caller guarantees valid pointers.
    let offset = unsafe { offset.as_mut() };
    guard(|| files::send_file(to, &object, file, offset, count))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(
    to: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { sendfile(to, file, offset, count) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    let source = fds::stream(from);
    let sink = fds::stream(to);
    if source.is_none() && sink.is_none() {
        return sys!(SYS_splice, from, from_offset, to, to_offset, count, flags) as ssize_t;
    }
    guard(|| files::splice((from, source), (to, sink), count, flags))
}
