//! The system calls themselves. libc's wrappers, syscall(2) among them, have the names that this
//! library exports.
#![allow(unsafe_code)] // system calls, and libc's errno

/// Makes a system call; -1 and errno if it failed.
macro_rules! sys {
    ($number:ident) => { $crate::real::call(libc::$number, [0; 6]) };
    ($number:ident, $($argument:expr),+ $(,)?) => {{
        let mut arguments = [0; 6];
        let mut places = arguments.iter_mut();
        $(if let Some(place) = places.next() {
            *place = $argument as libc::c_long;
        })+
        $crate::real::call(libc::$number, arguments)
    }};
}
pub(crate) use sys;

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use libc::c_int;
use slipway_socket::Errno;

/// Makes a system call with these arguments; -1 and errno if it failed.
#[inline]
pub fn call(number: libc::c_long, arguments: [libc::c_long; 6]) -> libc::c_long {
    let result = trap(number, arguments);
    if (-4095..0).contains(&result) {
        set_errno(-result as c_int);
        return -1;
    }
    result
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn trap(number: libc::c_long, [a, b, c, d, e, f]: [libc::c_long; 6]) -> libc::c_long {
    let result;
    // SAFETY: the x86-64 convention of Linux; the kernel checks the caller's pointers, and what it
    // does to memory is what the caller asked for.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn trap(number: libc::c_long, [a, b, c, d, e, f]: [libc::c_long; 6]) -> libc::c_long {
    let result;
    // SAFETY: the AArch64 convention of Linux; the kernel checks the caller's pointers, and what it
    // does to memory is what the caller asked for.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, options(nostack));
    }
    result
}

/// Returns errno of this thread.
pub fn errno() -> c_int {
    // SAFETY: libc's own variable of this thread.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(errno: c_int) {
    // SAFETY: libc's own variable of this thread.
    unsafe { *libc::__errno_location() = errno };
}

/// Sets errno and returns -1.
#[cold]
pub fn fail(errno: Errno) -> isize {
    set_errno(errno.raw_os_error());
    -1
}

/// Returns the error of this thread's last system call.
pub fn last_error() -> Errno {
    Errno::from_raw_os_error(errno())
}

/// Returns the result of a system call, or the thread's error if the call returned less than 0.
#[inline]
pub fn outcome(returned: libc::c_long) -> Result<usize, Errno> {
    usize::try_from(returned).map_err(|_| last_error())
}

/// Returns an integer option of a kernel socket, or `None` if the call failed.
pub fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut length: libc::socklen_t = 4;
    let got = sys!(SYS_getsockopt, fd, level, name, &raw mut value, &raw mut length);
    (got == 0).then_some(value)
}

/// Returns the domain of a kernel TCP socket, or `None` if `fd` is none.
pub fn tcp_domain(fd: c_int) -> Option<c_int> {
    let saved = errno();
    let domain = option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN);
    let domain = domain
        .filter(|domain| [libc::AF_INET, libc::AF_INET6].contains(domain))
        .filter(|_| option(fd, libc::SOL_SOCKET, libc::SO_PROTOCOL) == Some(libc::IPPROTO_TCP));
    set_errno(saved);
    domain
}

pub fn close(fd: c_int) -> c_int {
    sys!(SYS_close, fd) as c_int
}

/// Borrows `fd` for a call that does not close it.
pub fn borrowed<'a>(fd: c_int) -> BorrowedFd<'a> {
    // SAFETY: the program's own descriptor, which it has open during the call.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Owns `fd`, a hidden descriptor that a previous image or another thread left for this one.
pub fn inherited(fd: c_int) -> OwnedFd {
    // SAFETY: nothing else in this process knows the hidden number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_system_call_returns_less_than_0_and_sets_errno() {
        set_errno(0);
        assert_eq!(sys!(SYS_close, -1), -1);
        assert_eq!((errno(), last_error()), (libc::EBADF, Errno::BADF));
        assert_eq!(outcome(sys!(SYS_close, -1)), Err(Errno::BADF));
        // A system call that succeeds leaves errno as it is.
        assert!(outcome(sys!(SYS_getpid)).is_ok_and(|id| id > 1));
        assert_eq!(errno(), libc::EBADF);
    }

    #[test]
    fn a_socket_of_another_kind_has_no_domain_of_tcp_and_errno_stays() {
        set_errno(7);
        assert_eq!(tcp_domain(-1), None);
        assert_eq!(errno(), 7);
        let socket = |domain, kind| sys!(SYS_socket, domain, kind | libc::SOCK_CLOEXEC, 0) as c_int;
        let sockets = [
            (socket(libc::AF_INET, libc::SOCK_STREAM), Some(libc::AF_INET)),
            (socket(libc::AF_INET, libc::SOCK_DGRAM), None),
            (socket(libc::AF_UNIX, libc::SOCK_STREAM), None),
        ];
        for (socket, domain) in sockets {
            assert!(socket >= 0);
            assert_eq!(tcp_domain(socket), domain);
            assert_eq!(close(socket), 0);
        }
        assert_eq!(errno(), 7);
    }
}
