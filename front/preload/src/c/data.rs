//! read(2), write(2), send(2), recv(2), and their relatives with a single buffer.

use libc::{c_int, c_void, size_t, sockaddr, socklen_t, ssize_t};
use slipway_socket::Errno;

use super::guard::{assert_fits, guard};
use super::memory::{bytes, room};
use crate::fds;
use crate::real::sys;
use crate::transfer::{discard, recv_all, recv_nothing, send_all, wait_to_peek};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    match fds::stream(fd) {
        None => sys!(SYS_read, fd, buffer, length) as ssize_t,
        Some(_) if length == 0 => 0,
        // SAFETY: the caller guarantees valid pointers, here and below.
        Some(object) => guard(|| unsafe { recv_into(&object, fd, buffer, length, 0) }),
    }
}

unsafe fn recv_into(
    object: &fds::Ref,
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    if length == 0 {
        return recv_nothing(fd, stream, flags);
    }
    wait_to_peek(fd, stream, length, flags)?;
    if flags & libc::MSG_TRUNC != 0 {
        return discard(fd, stream, length, flags);
    }
    // SAFETY: the caller guarantees valid pointers.
    recv_all(fd, stream, unsafe { room(buffer, length) }?, flags)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    let kernel = || sys!(SYS_write, fd, buffer, length);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { ours_or(fd, buffer, length, 0, kernel) }
}

unsafe fn ours_or(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    kernel: impl FnOnce() -> libc::c_long,
) -> ssize_t {
    let Some(object) = fds::stream(fd) else { return kernel() as ssize_t };
    guard(|| {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        // SAFETY: the caller guarantees valid pointers.
        send_all(fd, stream, unsafe { bytes(buffer, length) }?, flags)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    let kernel = || sys!(SYS_sendto, fd, buffer, length, flags, 0, 0);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { ours_or(fd, buffer, length, flags, kernel) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_length: socklen_t,
) -> ssize_t {
    let kernel = || sys!(SYS_sendto, fd, buffer, length, flags, to, to_length);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { ours_or(fd, buffer, length, flags, kernel) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { recvfrom(fd, buffer, length, flags, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    sender: *mut sockaddr,
    sender_length: *mut socklen_t,
) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvfrom, fd, buffer, length, flags, sender, sender_length) as ssize_t;
    };
    // SAFETY: the caller guarantees valid pointers.
    let got = guard(|| unsafe { recv_into(&object, fd, buffer, length, flags) });
    if got >= 0 && !sender.is_null() && !sender_length.is_null() {
        // A connection's bytes have no sender address (recvfrom(2)).
        // SAFETY: the caller guarantees that the pointer is valid if it is not null.
        unsafe { *sender_length = 0 };
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { read(fd, buffer, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { recv(fd, buffer, length, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
    sender: *mut sockaddr,
    sender_length: *mut socklen_t,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: the caller guarantees valid pointers.
    unsafe { recvfrom(fd, buffer, length, flags, sender, sender_length) }
}
