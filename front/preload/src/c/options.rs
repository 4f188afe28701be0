//! getsockopt(2), setsockopt(2), fcntl(2) and ioctl(2). Descriptors that are not ours go to the
//! kernel; what the calls do to ours is in [`crate::options`].

use libc::{c_int, c_ulong, c_void, socklen_t};
use slipway_socket::Errno;

use super::guard::{guard, guarded};
use crate::fds::{self, DescriptorKind};
use crate::real::sys;
use crate::{copies, options};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_getsockopt, fd, level, name, value, length) as c_int;
    };
    guard(|| {
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        if value.is_null() || length.is_null() {
            return Err(Errno::FAULT);
        }
        // SAFETY: the caller guarantees valid pointers.
        if unsafe { *length }.cast_signed() < 0 {
            return Err(Errno::INVAL);
        }
        let mut bytes = [0; options::VALUE_LEN];
        let size = options::read_option(stream, level, name, &mut bytes)?;
        // SAFETY: the caller guarantees valid pointers.
        unsafe {
            let room = (*length as usize).min(size);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), room);
            *length = room as socklen_t;
        }
        Ok(0)
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    let kernel = || sys!(SYS_setsockopt, fd, level, name, value, length) as c_int;
    let Some(object) = fds::get(fd) else { return kernel() };
    match object.kind() {
        DescriptorKind::Stream(stream) => guard(|| {
            if value.is_null() {
                return Err(Errno::FAULT);
            }
            let mut bytes = [0; options::SET_LEN];
            let size = bytes.len().min(length as usize);
            // SAFETY: the caller guarantees valid pointers.
            unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), size) };
            options::write_option(stream, level, name, &bytes[..size])
        }) as c_int,
        DescriptorKind::Listener(listener) => {
            let done = kernel();
            listener.options.renew(fd);
            done
        }
        _ => kernel(),
    }
}

/// fcntl(2), which is variadic in C. One integer argument is passed as to a function that is not
/// variadic.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let kernel = || sys!(SYS_fcntl, fd, command, argument) as c_int;
    let Some(object) = fds::get(fd) else { return kernel() };
    match command {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            let new = kernel();
            guarded(|| copies::copied(fd, new));
            new
        }
        libc::F_GETFL => options::status_of(object.kind()).unwrap_or_else(kernel),
        libc::F_SETFL => {
            let nonblock = argument as c_int & libc::O_NONBLOCK != 0;
            if options::set_nonblock(object.kind(), nonblock) { 0 } else { kernel() }
        }
        _ => kernel(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller keeps the contract of fcntl(2), which is that of fcntl64(2).
    unsafe { fcntl(fd, command, argument) }
}

/// ioctl(2), which is variadic in C. One pointer argument is passed as to a function that is not
/// variadic.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: libc::Ioctl, argument: *mut c_int) -> c_int {
    let kernel = || sys!(SYS_ioctl, fd, request, argument) as c_int;
    let Some(object) = fds::get(fd) else { return kernel() };
    let argument = if options::has_number(request) { argument } else { std::ptr::null_mut() };
    // SAFETY: the argument is null, or the request is one whose argument points to an int.
    let number = unsafe { argument.as_mut() };
    match options::ioctl(object.kind(), request, number) {
        Some(done) => guard(|| done) as c_int,
        None => kernel(),
    }
}
