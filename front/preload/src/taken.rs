//! Options of a kernel's socket that connections of ours begin with: those that the program set
//! before connect(2), or at the listener of an accepted connection.

use std::sync::atomic::{AtomicU64, Ordering};

use libc::{c_int, socklen_t};
use slipway_socket::{Endpoint, option};

use crate::halves::{
    HalfWord, RECEIVE_BUFFER, RECEIVE_LOW_WATER, RECEIVE_TIMEOUT, SEND_BUFFER, SEND_TIMEOUT,
};
use crate::real::{self, sys};
use crate::switches::{SWITCHES, switch_of};
use crate::time::milliseconds;

/// The largest size in bytes of a buffer that a program may set.
pub const LARGEST: u64 = 2 << 20;
/// The bit of `SO_BUF_LOCK` for a program that set `SO_SNDBUF` (`SOCK_SNDBUF_LOCK`,
/// `linux/socket.h`).
const SEND_LOCK: c_int = 1;
/// The bit of `SO_BUF_LOCK` for a program that set `SO_RCVBUF` (`SOCK_RCVBUF_LOCK`).
const RECEIVE_LOCK: c_int = 2;

/// The values that are taken over.
const HALVES: [HalfWord; 5] =
    [RECEIVE_TIMEOUT, SEND_TIMEOUT, RECEIVE_BUFFER, SEND_BUFFER, RECEIVE_LOW_WATER];

/// Options of a kernel's socket, as an endpoint's entry has them.
pub struct Taken {
    /// Bits of [`option::FLAGS`].
    flags: AtomicU64,
    /// The values of [`HALVES`].
    halves: [AtomicU64; HALVES.len()],
}

impl Taken {
    /// Reads the options of the kernel's socket `fd`.
    pub fn of(fd: c_int) -> Self {
        Self { flags: flags_of(fd).into(), halves: halves_of(fd).map(AtomicU64::from) }
    }

    /// Reads them again, after a setsockopt(2) that the kernel made.
    pub fn renew(&self, fd: c_int) {
        self.flags.store(flags_of(fd), Ordering::Relaxed);
        for (place, value) in self.halves.iter().zip(halves_of(fd)) {
            place.store(value, Ordering::Relaxed);
        }
    }

    /// Gives the options to an endpoint that has none yet.
    pub fn give(&self, endpoint: &Endpoint) {
        endpoint.set(self.flags.load(Ordering::Relaxed), true);
        for (half, value) in HALVES.iter().zip(&self.halves) {
            half.set(endpoint, value.load(Ordering::Relaxed));
        }
    }

    /// Returns `SO_RCVTIMEO` in milliseconds; 0 for none.
    pub fn receive_timeout(&self) -> u32 {
        let [timeout, ..] = &self.halves;
        timeout.load(Ordering::Relaxed) as u32
    }
}

/// Returns the on/off options of a kernel's socket, and whether its close(2) is a reset.
fn flags_of(fd: c_int) -> u64 {
    let is_on = |(level, name, _): &(c_int, c_int, u32)| {
        real::option(fd, *level, *name).is_some_and(|value| value != 0)
    };
    let on = SWITCHES.into_iter().filter(is_on);
    let bits = on.filter_map(|(level, name, _)| switch_of(level, name));
    let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut length = size_of::<libc::linger>() as socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
    sys!(SYS_getsockopt, fd, level, name, &raw mut linger, &raw mut length);
    let abort = if aborts(linger.l_onoff, linger.l_linger) { option::ABORT } else { 0 };
    bits.fold(abort, |flags, bit| flags | bit)
}

/// Returns a kernel socket's values of [`HALVES`].
fn halves_of(fd: c_int) -> [u64; HALVES.len()] {
    [
        timeout_of(fd, libc::SO_RCVTIMEO),
        timeout_of(fd, libc::SO_SNDTIMEO),
        buffer_of(fd, libc::SO_RCVBUF, RECEIVE_LOCK),
        buffer_of(fd, libc::SO_SNDBUF, SEND_LOCK),
        number_of(fd, libc::SO_RCVLOWAT),
    ]
}

/// Returns a kernel socket's timeout in milliseconds; 0: none.
fn timeout_of(fd: c_int, name: c_int) -> u64 {
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut length = size_of::<libc::timeval>() as socklen_t;
    sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, name, &raw mut time, &raw mut length);
    milliseconds(time)
}

/// Returns a number among a kernel socket's options of `SOL_SOCKET`; 0 if it is negative or the
/// kernel does not know the option.
fn number_of(fd: c_int, name: c_int) -> u64 {
    let value = real::option(fd, libc::SOL_SOCKET, name);
    value.and_then(|value| u64::try_from(value).ok()).unwrap_or(0)
}

/// Returns the size in bytes that is reported of a kernel socket's buffer, if the program set it by
/// the option `name`, for which `SO_BUF_LOCK` has the bit `lock`. Returns 0 if the program set
/// none, and on kernels before Linux 5.14, which do not tell.
fn buffer_of(fd: c_int, name: c_int, lock: c_int) -> u64 {
    let locks = real::option(fd, libc::SOL_SOCKET, libc::SO_BUF_LOCK).unwrap_or(0);
    if locks & lock == 0 { 0 } else { number_of(fd, name).min(LARGEST * 2) }
}

/// Returns whether a `struct linger` with these fields makes close(2) a reset.
pub fn aborts(l_onoff: c_int, l_linger: c_int) -> bool {
    l_onoff != 0 && l_linger == 0
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_buffer_is_taken_over_if_the_program_set_its_size() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let fd = socket.as_raw_fd();
        let sizes = || {
            let send = buffer_of(fd, libc::SO_SNDBUF, SEND_LOCK);
            (send, buffer_of(fd, libc::SO_RCVBUF, RECEIVE_LOCK))
        };
        let set = |name: c_int, size: c_int| {
            let (at, length) = (&raw const size, size_of::<c_int>());
            assert_eq!(sys!(SYS_setsockopt, fd, libc::SOL_SOCKET, name, at, length), 0);
        };
        assert_eq!(sizes(), (0, 0), "the kernel's own sizes are not the program's");
        set(libc::SO_SNDBUF, 50_000);
        assert_eq!(sizes(), (100_000, 0));
        set(libc::SO_RCVBUF, 30_000);
        assert_eq!(sizes(), (100_000, 60_000));
        assert_eq!(number_of(fd, libc::SO_RCVLOWAT), 1);
        set(libc::SO_RCVLOWAT, 100);
        assert_eq!(number_of(fd, libc::SO_RCVLOWAT), 100);
        assert_eq!((buffer_of(-1, libc::SO_SNDBUF, SEND_LOCK), number_of(fd, -1)), (0, 0));
    }

    #[test]
    fn close_is_a_reset_only_with_a_linger_of_no_time() {
        assert!(aborts(1, 0) && aborts(-1, 0));
        assert!(!aborts(0, 0) && !aborts(1, 1) && !aborts(1, -1));
    }

    #[test]
    fn what_was_set_since_is_read_again() {
        let socket = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let fd = socket.as_raw_fd();
        let taken = Taken::of(fd);
        assert_eq!(taken.receive_timeout(), 0);
        let time = libc::timeval { tv_sec: 3, tv_usec: 1 };
        let (at, length) = (&raw const time, size_of::<libc::timeval>());
        let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVTIMEO);
        assert_eq!(sys!(SYS_setsockopt, fd, level, name, at, length), 0);
        let on: c_int = 1;
        let (at, length) = (&raw const on, size_of::<c_int>());
        assert_eq!(sys!(SYS_setsockopt, fd, level, libc::SO_KEEPALIVE, at, length), 0);
        taken.renew(fd);
        assert!(taken.receive_timeout() > 3000);
        let keep_alive = switch_of(level, libc::SO_KEEPALIVE).unwrap();
        assert_ne!(taken.flags.load(Ordering::Relaxed) & keep_alive, 0);
        assert_eq!(taken.flags.load(Ordering::Relaxed) & option::ABORT, 0);
    }
}
