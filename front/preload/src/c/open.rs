//! Calls that begin and end connections, and their names: socket(2), connect(2), accept(2).

use libc::{c_int, sockaddr, socklen_t};
use slipway_socket::{Address, Endpoint, Errno};

use super::guard::{guard, guarded};
use super::memory::{is_of_no_family, read_address, write_name};
use crate::address::Name;
use crate::fds::{self, DescriptorKind};
use crate::real::{self, fail, sys};
use crate::{copies, dissolve, open};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = sys!(SYS_socket, domain, kind, protocol) as c_int;
    guarded(|| copies::fresh(fd));
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, at: *const sockaddr, length: socklen_t) -> c_int {
    match fds::stream(fd) {
        Some(_) => fail(Errno::INVAL) as c_int,
        None => sys!(SYS_bind, fd, at, length) as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn connect(fd: c_int, to: *const sockaddr, length: socklen_t) -> c_int {
    if let Some(object) = fds::stream(fd) {
        // SAFETY: the caller guarantees valid pointers.
        let dissolves = unsafe { is_of_no_family(to, length) };
        return guard(|| {
            if dissolves { dissolve::connection(fd, &object) } else { open::connect_again(&object) }
        }) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    let address = unsafe { read_address(to, length) };
    let saved = real::errno();
    match guard(|| open::connect(fd, address).map(usize::from)) {
        0 => {
            real::set_errno(saved);
            let done = sys!(SYS_connect, fd, to, length) as c_int;
            // An address of no family stops a listener.
            guarded(|| fds::get(fd).iter().for_each(|object| dissolve::follow(fd, object)));
            done
        }
        connected if connected > 0 => 0,
        _ => -1,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if fds::stream(fd).is_some() {
        return fail(Errno::INVAL) as c_int;
    }
    let done = sys!(SYS_listen, fd, backlog) as c_int;
    if done == 0 {
        let saved = real::errno();
        guarded(|| open::listen(fd, backlog));
        real::set_errno(saved);
    }
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept(fd: c_int, from: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { accept4(fd, from, length, 0) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    length: *mut socklen_t,
    flags: c_int,
) -> c_int {
    let kernel = || sys!(SYS_accept4, fd, from, length, flags);
    let Some(object) = fds::get(fd) else { return kernel() as c_int };
    match object.kind() {
        DescriptorKind::Listener(listener) => guard(|| {
            let accepted = open::accept(fd, &object, listener, flags, kernel)?;
            if let Some(name) = accepted.name {
                // SAFETY: the caller guarantees valid pointers.
                unsafe { write_name(&name, from, length) };
            }
            Ok(accepted.fd as usize)
        }) as c_int,
        DescriptorKind::Stream(_) => fail(Errno::INVAL) as c_int,
        _ => kernel() as c_int,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    let kernel = || sys!(SYS_shutdown, fd, how) as c_int;
    let Some(object) = fds::get(fd) else { return kernel() };
    if object.stream().is_some() {
        return guard(|| open::shutdown(fd, &object, how)) as c_int;
    }
    let done = kernel();
    guarded(|| dissolve::follow(fd, &object));
    done
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockname(
    fd: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_getsockname, fd, to, length) as c_int;
    };
    // SAFETY: the caller guarantees valid pointers.
    unsafe { write_name_of(&object, Endpoint::local, to, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getpeername(
    fd: c_int,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_getpeername, fd, to, length) as c_int;
    };
    if object.stream().is_some_and(|stream| stream.endpoint.is_over()) {
        return fail(Errno::NOTCONN) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    unsafe { write_name_of(&object, Endpoint::remote, to, length) }
}

/// Writes the name of one of a connection's two ends.
unsafe fn write_name_of(
    object: &fds::Ref,
    address: fn(&Endpoint) -> Address,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if to.is_null() || length.is_null() {
        return fail(Errno::FAULT) as c_int;
    }
    // SAFETY: the caller guarantees valid pointers.
    if unsafe { *length }.cast_signed() < 0 {
        return fail(Errno::INVAL) as c_int;
    }
    if let Some(stream) = object.stream() {
        let name = Name::new(address(&stream.endpoint), stream.domain);
        // SAFETY: the caller guarantees valid pointers.
        unsafe { write_name(&name, to, length) };
    }
    0
}
