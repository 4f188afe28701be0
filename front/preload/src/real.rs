//! The system calls themselves. libc's wrappers have the names that this library exports.

/// A system call by libc's syscall(2): -1 and errno when it failed.
macro_rules! sys {
    ($number:ident $(, $argument:expr)* $(,)?) => {
        // SAFETY: the caller's pointers are handed on as they are, and the kernel checks them.
        unsafe { libc::syscall(libc::$number $(, $argument as libc::c_long)*) }
    };
}
pub(crate) use sys;

use libc::c_int;
use slipway_socket::Errno;

/// errno of this thread.
pub fn errno() -> c_int {
    // SAFETY: libc's own place for it.
    unsafe { *libc::__errno_location() }
}

pub fn set_errno(errno: c_int) {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// -1, with errno set.
#[cold]
pub fn fail(errno: Errno) -> isize {
    set_errno(errno.raw_os_error());
    -1
}

/// An integer option of a kernel's socket.
pub fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let mut value: c_int = 0;
    let mut length: libc::socklen_t = 4;
    let got = sys!(SYS_getsockopt, fd, level, name, &raw mut value, &raw mut length);
    (got == 0).then_some(value)
}

/// The domain of a TCP socket of the kernel's; None: it is none.
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
