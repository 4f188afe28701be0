//! Socket options and names. An option without an effect is taken and not refused.
//!
//! On/off options are bits of the endpoint ([`SWITCHES`]); numbers without an effect always read as
//! the same value ([`NUMBERS`]); the others are in [`read_option`] and [`write_option`], which keep
//! two values of 32 bits in a word ([`Half`]). fcntl(2) and ioctl(2) are here for the flags and the
//! counts that they share with options.

use std::sync::atomic::Ordering;

use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use slipway_socket::{Address, Endpoint, Errno, option};

use crate::address::write_address;
use crate::fds::{self, DescriptorKind, Stream};
use crate::guard::guard;
use crate::real::{self, fail, sys};

/// On/off options that are stored but have no effect, each with the bit that stores it.
const SWITCHES: [(c_int, c_int, u32); 11] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, 1),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT, 2),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE, 3),
    (libc::SOL_SOCKET, libc::SO_BROADCAST, 4),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, 5),
    (libc::SOL_SOCKET, libc::SO_ZEROCOPY, 6),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY, 7),
    (libc::IPPROTO_TCP, libc::TCP_CORK, 8),
    (libc::IPPROTO_TCP, libc::TCP_QUICKACK, 9),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 10),
];

/// Integer options that may be set to anything and always read as the given value.
const NUMBERS: [(c_int, c_int, c_int); 20] = [
    (libc::SOL_SOCKET, libc::SO_TYPE, libc::SOCK_STREAM),
    (libc::SOL_SOCKET, libc::SO_PROTOCOL, libc::IPPROTO_TCP),
    (libc::SOL_SOCKET, libc::SO_ACCEPTCONN, 0),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, 0),
    (libc::SOL_SOCKET, libc::SO_MARK, 0),
    (libc::SOL_SOCKET, libc::SO_SNDLOWAT, 1),
    (libc::SOL_SOCKET, libc::SO_INCOMING_CPU, 0),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL, 0),
    (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, -1),
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG, 65_483),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 7200),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 75),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 9),
    (libc::IPPROTO_TCP, libc::TCP_SYNCNT, 6),
    (libc::IPPROTO_TCP, libc::TCP_LINGER2, 60),
    (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0),
    (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 0),
    (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, -1),
    (libc::IPPROTO_IP, libc::IP_TOS, 0),
    (libc::IPPROTO_IP, libc::IP_TTL, 64),
];
/// The default size of a buffer, and the largest one, in bytes.
const BUFFER: u64 = 1 << 20;
const LARGEST: u64 = 4 << 20;

fn switch_of(level: c_int, name: c_int) -> Option<u64> {
    let found = SWITCHES.iter().find(|(at, what, _)| (*at, *what) == (level, name));
    found.map(|(_, _, bit)| 1 << (option::FREE + bit))
}

/// A half of an option's word, of 32 bits: most words hold the receiver's value and the sender's.
#[derive(Clone, Copy)]
enum Half {
    Low,
    High,
}

impl Half {
    fn shift(self) -> u32 {
        match self {
            Self::Low => 0,
            Self::High => 32,
        }
    }

    fn of(self, endpoint: &Endpoint, word: usize) -> u64 {
        endpoint.option(word).load(Ordering::Relaxed) >> self.shift() & 0xffff_ffff
    }

    fn store(self, endpoint: &Endpoint, word: usize, value: u64) {
        let shift = self.shift();
        let place = endpoint.option(word);
        let changed =
            |old: u64| Some(old & !(0xffff_ffff << shift) | (value & 0xffff_ffff) << shift);
        let _ = place.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
    }
}

/// Returns the half of the word of timeouts that an option of either has.
fn half_of_timeout(name: c_int) -> Half {
    if name == libc::SO_SNDTIMEO { Half::High } else { Half::Low }
}

/// Returns a kernel socket's timeout in milliseconds; 0: none.
pub fn timeout_of(fd: c_int, name: c_int) -> u64 {
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut length = size_of::<libc::timeval>() as socklen_t;
    sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, name, &raw mut time, &raw mut length);
    milliseconds(time)
}

fn milliseconds(time: libc::timeval) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0).min(4_000_000);
    seconds * 1000 + u64::try_from(time.tv_usec).unwrap_or(0).div_ceil(1000)
}

/// Copies the options that were set on the kernel's socket before it became ours.
pub fn take_over(fd: c_int, endpoint: &Endpoint) {
    for (level, name, _) in SWITCHES {
        if let Some(bit) = switch_of(level, name)
            && real::option(fd, level, name).is_some_and(|value| value != 0)
        {
            endpoint.set(bit, true);
        }
    }
    Half::Low.store(endpoint, option::TIMEOUTS, timeout_of(fd, libc::SO_RCVTIMEO));
    Half::High.store(endpoint, option::TIMEOUTS, timeout_of(fd, libc::SO_SNDTIMEO));
    let mut linger = [0 as c_int; 2];
    let mut length: socklen_t = 8;
    let at = linger.as_mut_ptr();
    sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_LINGER, at, &raw mut length);
    endpoint.set(option::ABORT, linger[0] != 0 && linger[1] == 0);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        let got = sys!(SYS_getsockopt, fd, level, name, value, length) as c_int;
        return got;
    };
    guard(|| {
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        if value.is_null() || length.is_null() {
            return Err(Errno::FAULT);
        }
        let mut bytes = [0; 256];
        let size = read_option(stream, level, name, &mut bytes)?;
        // SAFETY: the caller guarantees valid pointers.
        unsafe {
            let room = (*length as usize).min(size);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast(), room);
            *length = room as socklen_t;
        }
        Ok(0)
    }) as c_int
}

/// Writes the value of an option `into` the bytes that a program gets. Returns their number.
///
/// # Errors
/// The errors of getsockopt(2).
fn read_option(
    stream: &Stream,
    level: c_int,
    name: c_int,
    into: &mut [u8; 256],
) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            put_number(into, c_int::from(endpoint.has(option::ABORT)));
            into[4..8].fill(0);
            Ok(8)
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
            let time = half_of_timeout(name).of(endpoint, option::TIMEOUTS);
            into[..8].copy_from_slice(&(time / 1000).to_ne_bytes());
            into[8..16].copy_from_slice(&(time % 1000 * 1000).to_ne_bytes());
            Ok(16)
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
            into[..6].copy_from_slice(b"cubic\0");
            Ok(16)
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            // The state is ESTABLISHED or CLOSE_WAIT; TCP's other states do not exist here.
            into[0] = if endpoint.ready() & 0x2000 == 0 { 1 } else { 8 };
            into[16..20].copy_from_slice(&65_483u32.to_ne_bytes());
            Ok(232)
        }
        _ => {
            put_number(into, read_number(stream, level, name)?);
            Ok(4)
        }
    }
}

fn put_number(into: &mut [u8; 256], number: c_int) {
    into[..4].copy_from_slice(&number.to_ne_bytes());
}

/// Returns the value of an option that is one number.
///
/// # Errors
/// [`Errno::NOPROTOOPT`]: there is no such option.
fn read_number(stream: &Stream, level: c_int, name: c_int) -> Result<c_int, Errno> {
    let endpoint = &stream.endpoint;
    if let Some(bit) = switch_of(level, name) {
        return Ok(c_int::from(endpoint.has(bit)));
    }
    let size = |half: Half| match half.of(endpoint, option::BUFFERS) {
        0 => BUFFER as c_int,
        asked => asked as c_int,
    };
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            Ok(endpoint.take_error().map_or(0, Errno::raw_os_error))
        }
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => Ok(stream.domain),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Ok(size(Half::Low)),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Ok(size(Half::High)),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
            Ok((Half::High.of(endpoint, option::HOLDERS) as c_int).max(1))
        }
        _ => {
            let found = NUMBERS.iter().find(|(at, what, _)| (*at, *what) == (level, name));
            found.map(|(_, _, value)| *value).ok_or(Errno::NOPROTOOPT)
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    let Some(object) = fds::get(fd) else {
        return sys!(SYS_setsockopt, fd, level, name, value, length) as c_int;
    };
    let Some(stream) = object.stream() else {
        let done = sys!(SYS_setsockopt, fd, level, name, value, length) as c_int;
        if let DescriptorKind::Listener(listener) = object.kind() {
            let time = timeout_of(fd, libc::SO_RCVTIMEO);
            listener.timeout.store(time as i32, Ordering::Relaxed);
        }
        return done;
    };
    guard(|| {
        if value.is_null() {
            return Err(Errno::FAULT);
        }
        let mut bytes = [0; 16];
        let size = bytes.len().min(length as usize);
        // SAFETY: the caller guarantees valid pointers.
        unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), size) };
        write_option(stream, level, name, &bytes[..size])
    }) as c_int
}

/// Sets an option to the value in `bytes`. Returns 0.
///
/// # Errors
/// The errors of setsockopt(2).
fn write_option(stream: &Stream, level: c_int, name: c_int, bytes: &[u8]) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    if let Some(bit) = switch_of(level, name) {
        endpoint.set(bit, number_at(bytes, 0)? != 0);
        return Ok(0);
    }
    // The kernel doubles what it is asked for (socket(7)).
    let buffer = |value: c_int| u64::try_from(value).unwrap_or(0).clamp(1152, LARGEST / 2) * 2;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_RCVBUFFORCE) => {
            Half::Low.store(endpoint, option::BUFFERS, buffer(number_at(bytes, 0)?));
        }
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) => {
            Half::High.store(endpoint, option::BUFFERS, buffer(number_at(bytes, 0)?));
        }
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
            let least = u64::try_from(number_at(bytes, 0)?).unwrap_or(0).max(1);
            Half::High.store(endpoint, option::HOLDERS, least);
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            endpoint.set(option::ABORT, number_at(bytes, 0)? != 0 && number_at(bytes, 4)? == 0);
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
            half_of_timeout(name).store(endpoint, option::TIMEOUTS, timeout_in(bytes)?);
        }
        _ if has_no_effect(level, name) => {}
        _ => return Err(Errno::NOPROTOOPT),
    }
    Ok(0)
}

/// Returns whether an option is taken without an effect. Those that only tell something are not.
fn has_no_effect(level: c_int, name: c_int) -> bool {
    match (level, name) {
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION)
        | (libc::IPPROTO_IPV6, _)
        | (libc::IPPROTO_IP, _) => true,
        (libc::SOL_SOCKET, libc::SO_TYPE | libc::SO_PROTOCOL | libc::SO_ACCEPTCONN) => false,
        _ => NUMBERS.iter().any(|(at, what, _)| (*at, *what) == (level, name)),
    }
}

/// Returns the number at byte `at` of an option's value.
///
/// # Errors
/// [`Errno::INVAL`]: the value is too short.
fn number_at(bytes: &[u8], at: usize) -> Result<c_int, Errno> {
    let bytes = bytes.get(at..at + 4).ok_or(Errno::INVAL)?;
    Ok(c_int::from_ne_bytes(bytes.try_into().map_err(|_| Errno::INVAL)?))
}

/// Returns the milliseconds of a timeout, a `struct timeval`.
///
/// # Errors
/// [`Errno::INVAL`]: the value is too short. [`Errno::DOM`]: it has a second or more in its
/// microseconds.
fn timeout_in(bytes: &[u8]) -> Result<u64, Errno> {
    let half = |at: usize| {
        let bytes = bytes.get(at..at + 8).ok_or(Errno::INVAL)?;
        Ok::<_, Errno>(i64::from_ne_bytes(bytes.try_into().map_err(|_| Errno::INVAL)?))
    };
    let (tv_sec, tv_usec) = (half(0)?, half(8)?);
    if !(0..1_000_000).contains(&tv_usec) {
        return Err(Errno::DOM);
    }
    Ok(milliseconds(libc::timeval { tv_sec, tv_usec }))
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
    unsafe { name(&object, Endpoint::local, to, length) }
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
    // SAFETY: the caller guarantees valid pointers.
    unsafe { name(&object, Endpoint::remote, to, length) }
}

/// Writes the address of one end of a connection.
///
/// # Safety
/// The contract of getsockname(2).
unsafe fn name(
    object: &fds::Ref,
    end: fn(&Endpoint) -> Address,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if to.is_null() || length.is_null() {
        return fail(Errno::FAULT) as c_int;
    }
    if let Some(stream) = object.stream() {
        let address = end(&stream.endpoint);
        // SAFETY: the caller guarantees valid pointers.
        unsafe { write_address(address, stream.domain, to, length) };
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn bind(fd: c_int, at: *const sockaddr, length: socklen_t) -> c_int {
    match fds::stream(fd) {
        Some(_) => fail(Errno::INVAL) as c_int,
        None => sys!(SYS_bind, fd, at, length) as c_int,
    }
}

/// fcntl(2). In C it is variadic; one integer argument is passed the same way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    let Some(object) = fds::get(fd) else {
        return sys!(SYS_fcntl, fd, command, argument) as c_int;
    };
    let flags = argument as c_int;
    match (command, object.kind()) {
        (libc::F_DUPFD | libc::F_DUPFD_CLOEXEC, _) => {
            let new = sys!(SYS_fcntl, fd, command, argument) as c_int;
            crate::copies::copied(fd, new);
            new
        }
        (libc::F_GETFL, DescriptorKind::Stream(stream)) => {
            status(stream.endpoint.has(option::NONBLOCK))
        }
        (libc::F_SETFL, DescriptorKind::Stream(stream)) => {
            stream.endpoint.set(option::NONBLOCK, flags & libc::O_NONBLOCK != 0);
            0
        }
        (libc::F_GETFL, DescriptorKind::Listener(listener)) => {
            status(listener.nonblock.load(Ordering::Relaxed))
        }
        (libc::F_SETFL, DescriptorKind::Listener(listener)) => {
            listener.set_nonblock(flags & libc::O_NONBLOCK != 0);
            0
        }
        _ => sys!(SYS_fcntl, fd, command, argument) as c_int,
    }
}

fn status(nonblock: bool) -> c_int {
    libc::O_RDWR | if nonblock { libc::O_NONBLOCK } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller guarantees valid pointers.
    unsafe { fcntl(fd, command, argument) }
}

/// ioctl(2). In C it is variadic; one pointer argument is passed the same way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: libc::Ioctl, argument: *mut c_int) -> c_int {
    let Some(object) = fds::get(fd) else {
        return sys!(SYS_ioctl, fd, request, argument) as c_int;
    };
    let kernel = || sys!(SYS_ioctl, fd, request, argument) as c_int;
    // SAFETY: the argument of the requests below points to an int.
    let number = || unsafe { argument.as_mut() };
    match (object.kind(), request) {
        (DescriptorKind::Listener(listener), libc::FIONBIO) => {
            let Some(number) = number() else { return fail(Errno::FAULT) as c_int };
            listener.set_nonblock(*number != 0);
            0
        }
        (DescriptorKind::Stream(_), libc::FIOCLEX | libc::FIONCLEX) => kernel(),
        (DescriptorKind::Stream(stream), _) => control(&stream.endpoint, request, number()),
        _ => kernel(),
    }
}

/// Carries out a request of ioctl(2) for a connection of ours.
fn control(endpoint: &Endpoint, request: libc::Ioctl, number: Option<&mut c_int>) -> c_int {
    match (request, number) {
        (libc::FIONBIO | libc::FIONREAD | libc::TIOCOUTQ, None) => {
            return fail(Errno::FAULT) as c_int;
        }
        (libc::FIONBIO, Some(number)) => {
            endpoint.set(option::NONBLOCK, *number != 0);
        }
        (libc::FIONREAD, Some(number)) => *number = endpoint.arrived() as c_int,
        (libc::TIOCOUTQ, Some(number)) => *number = endpoint.unread() as c_int,
        _ => return fail(Errno::NOTTY) as c_int,
    }
    0
}
