//! syscall(2), which programs call for some of the functions that this library exports.

use libc::c_int;

use super::{copies, messages, open};
use crate::real::call;

/// syscall(2), which libuv closes and accepts with. In C it is variadic; six integer arguments are
/// passed the same way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: libc::c_long,
    a: libc::c_long,
    b: libc::c_long,
    c: libc::c_long,
    d: libc::c_long,
    e: libc::c_long,
    f: libc::c_long,
) -> libc::c_long {
    // SAFETY: the caller vouches for the arguments, which have these types.
    unsafe {
        match number {
            libc::SYS_close => copies::close(a as c_int).into(),
            libc::SYS_close_range => {
                copies::close_range(a as libc::c_uint, b as libc::c_uint, c as c_int).into()
            }
            libc::SYS_dup3 => copies::dup3(a as c_int, b as c_int, c as c_int).into(),
            libc::SYS_accept4 => {
                open::accept4(a as c_int, pointer(b), pointer(c), d as c_int).into()
            }
            libc::SYS_sendmmsg => {
                messages::sendmmsg(a as c_int, pointer(b), c as libc::c_uint, d as c_int).into()
            }
            libc::SYS_recvmmsg => {
                let timeout = pointer(e);
                messages::recvmmsg(a as c_int, pointer(b), c as libc::c_uint, d as c_int, timeout)
                    .into()
            }
            _ => call(number, [a, b, c, d, e, f]),
        }
    }
}

fn pointer<T>(argument: libc::c_long) -> *mut T {
    std::ptr::with_exposed_provenance_mut(argument as usize)
}
