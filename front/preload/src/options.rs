//! Socket options and names. An option without an effect is taken and not refused.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use libc::{c_int, c_ulong, c_void, sockaddr, socklen_t};
use slipway_socket::{Address, Endpoint, Errno, option};

use crate::address::write_address;
use crate::fds::{self, DescriptorKind, Stream};
use crate::guard::guard;
use crate::halves::{
    HalfWord, RECEIVE_BUFFER, RECEIVE_LOW_WATER, RECEIVE_TIMEOUT, SEND_BUFFER, SEND_TIMEOUT,
};
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
    (libc::IPPROTO_TCP, libc::TCP_MAXSEG, SEGMENT),
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
/// The size in bytes of a buffer for which the program set none.
const BUFFER: u64 = 1 << 20;
/// The least size in bytes of a buffer that a program may set. As the kernel does, we report twice
/// what was set (socket(7)).
const SMALLEST: u64 = 1152;
/// The largest size in bytes of a buffer that a program may set.
const LARGEST: u64 = 2 << 20;

/// The segment size in bytes that the kernel reports for TCP over its loopback interface.
const SEGMENT: c_int = 65_483;

/// The bytes of the kernel's `struct tcp_info` up to and with `tcpi_snd_wnd` (`linux/tcp.h`).
const TCP_INFO_LEN: usize = 232;
/// `tcpi_state` of a connection whose peer may still send (`net/tcp_states.h`).
const TCP_ESTABLISHED: u8 = 1;
/// `tcpi_state` of a connection whose peer sends no more.
const TCP_CLOSE_WAIT: u8 = 8;

/// The bytes of a name of TCP's congestion control: `TCP_CA_NAME_MAX` (`net/tcp.h`).
const CONGESTION_LEN: usize = 16;

/// The most bytes of an option's value: those of [`TCP_INFO_LEN`], and room.
const VALUE_LEN: usize = 256;

const _: () = assert!(TCP_INFO_LEN <= VALUE_LEN);

/// Returns the bit of `FLAGS` that stores an on/off option, or `None` if the option is no row of
/// [`SWITCHES`].
fn switch_of(level: c_int, name: c_int) -> Option<u64> {
    let found = SWITCHES.iter().find(|(at, what, _)| (*at, *what) == (level, name));
    found.map(|(_, _, bit)| 1 << (option::FREE + bit))
}

/// Returns a kernel socket's timeout in milliseconds; 0: none.
pub fn timeout_of(fd: c_int, name: c_int) -> u64 {
    let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
    let mut length = size_of::<libc::timeval>() as socklen_t;
    sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, name, &raw mut time, &raw mut length);
    milliseconds(time)
}

/// Converts a timeout to milliseconds, rounded up, and at most 4,000,000 s and a second, so that it
/// fits 32 bits.
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
    RECEIVE_TIMEOUT.set(endpoint, timeout_of(fd, libc::SO_RCVTIMEO));
    SEND_TIMEOUT.set(endpoint, timeout_of(fd, libc::SO_SNDTIMEO));
    let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
    let mut length = size_of::<libc::linger>() as socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
    sys!(SYS_getsockopt, fd, level, name, &raw mut linger, &raw mut length);
    endpoint.set(option::ABORT, aborts(linger.l_onoff, linger.l_linger));
}

/// Returns whether a `struct linger` with these fields makes close(2) a reset.
fn aborts(l_onoff: c_int, l_linger: c_int) -> bool {
    l_onoff != 0 && l_linger == 0
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
        let mut bytes = [0; VALUE_LEN];
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

/// Writes an option's value to the beginning of `into`, and returns its length in bytes; the bytes
/// after what is written are 0. The error is ENOPROTOOPT for an unknown option.
fn read_option(
    stream: &Stream,
    level: c_int,
    name: c_int,
    into: &mut [u8; VALUE_LEN],
) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let mut numbers = |values: &[c_int]| {
        for (place, value) in into.chunks_mut(4).zip(values) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        Ok(values.len() * 4)
    };
    if let Some(bit) = switch_of(level, name) {
        return numbers(&[c_int::from(endpoint.has(bit))]);
    }
    let size = |asked: u64| (if asked == 0 { BUFFER } else { asked }) as c_int;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => {
            numbers(&[endpoint.take_error().map_or(0, Errno::raw_os_error)])
        }
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => numbers(&[stream.domain]),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => numbers(&[size(RECEIVE_BUFFER.get(endpoint))]),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => numbers(&[size(SEND_BUFFER.get(endpoint))]),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
            numbers(&[(RECEIVE_LOW_WATER.get(endpoint) as c_int).max(1)])
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            // The fields of `struct linger`. A time other than 0 has no effect and is not kept.
            numbers(&[c_int::from(endpoint.has(option::ABORT)), 0])
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
            let time = timeout_named(name).get(endpoint);
            put(into, offset_of!(libc::timeval, tv_sec), &(time / 1000).to_ne_bytes());
            put(into, offset_of!(libc::timeval, tv_usec), &(time % 1000 * 1000).to_ne_bytes());
            Ok(size_of::<libc::timeval>())
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
            put(into, 0, b"cubic\0");
            Ok(CONGESTION_LEN)
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            // TCP's other states do not exist here.
            let ended = endpoint.ready() & libc::POLLRDHUP != 0;
            let state = if ended { TCP_CLOSE_WAIT } else { TCP_ESTABLISHED };
            put(into, offset_of!(libc::tcp_info, tcpi_state), &[state]);
            put(into, offset_of!(libc::tcp_info, tcpi_snd_mss), &SEGMENT.to_ne_bytes());
            Ok(TCP_INFO_LEN)
        }
        _ => {
            let found = NUMBERS.iter().find(|(at, what, _)| (*at, *what) == (level, name));
            found.map_or(Err(Errno::NOPROTOOPT), |(_, _, value)| numbers(&[*value]))
        }
    }
}

/// Copies the bytes of a field to offset `at` of a value; both are constants, and within it.
fn put(value: &mut [u8; VALUE_LEN], at: usize, field: &[u8]) {
    value[at..at + field.len()].copy_from_slice(field);
}

/// Returns where the timeout of `SO_RCVTIMEO` or `SO_SNDTIMEO` lies.
fn timeout_named(name: c_int) -> HalfWord {
    if name == libc::SO_SNDTIMEO { SEND_TIMEOUT } else { RECEIVE_TIMEOUT }
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
        let mut bytes = [0; size_of::<libc::timeval>()];
        let size = bytes.len().min(length as usize);
        // SAFETY: the caller guarantees valid pointers.
        unsafe { std::ptr::copy_nonoverlapping(value.cast(), bytes.as_mut_ptr(), size) };
        write_option(stream, level, name, &bytes[..size])
    }) as c_int
}

/// Sets an option to the value in `bytes`. Returns 0, which is the call's result. The error is
/// EINVAL for a value that is too short, EDOM for a timeout with an invalid `tv_usec`, and
/// ENOPROTOOPT for an option that is unknown or only read.
fn write_option(stream: &Stream, level: c_int, name: c_int, bytes: &[u8]) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let number = |at| field(bytes, at).map(c_int::from_ne_bytes);
    if let Some(bit) = switch_of(level, name) {
        endpoint.set(bit, number(0)? != 0);
        return Ok(0);
    }
    let buffer = |value: c_int| u64::try_from(value).unwrap_or(0).clamp(SMALLEST, LARGEST) * 2;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF | libc::SO_RCVBUFFORCE) => {
            RECEIVE_BUFFER.set(endpoint, buffer(number(0)?));
        }
        (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_SNDBUFFORCE) => {
            SEND_BUFFER.set(endpoint, buffer(number(0)?));
        }
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
            let bytes = u64::try_from(number(0)?).unwrap_or(0).max(1);
            RECEIVE_LOW_WATER.set(endpoint, bytes);
        }
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let l_onoff = number(offset_of!(libc::linger, l_onoff))?;
            let l_linger = number(offset_of!(libc::linger, l_linger))?;
            endpoint.set(option::ABORT, aborts(l_onoff, l_linger));
        }
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) => {
            let word = |at| field(bytes, at).map(i64::from_ne_bytes);
            let tv_sec = word(offset_of!(libc::timeval, tv_sec))?;
            let tv_usec = word(offset_of!(libc::timeval, tv_usec))?;
            if !(0..1_000_000).contains(&tv_usec) {
                return Err(Errno::DOM);
            }
            let time = milliseconds(libc::timeval { tv_sec, tv_usec });
            timeout_named(name).set(endpoint, time);
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION)
        | (libc::IPPROTO_IPV6, _)
        | (libc::IPPROTO_IP, _) => {}
        (
            libc::SOL_SOCKET,
            libc::SO_TYPE
            | libc::SO_PROTOCOL
            | libc::SO_ACCEPTCONN
            | libc::SO_DOMAIN
            | libc::SO_ERROR,
        ) => {
            return Err(Errno::NOPROTOOPT);
        }
        _ if NUMBERS.iter().any(|(at, what, _)| (*at, *what) == (level, name)) => {}
        _ => return Err(Errno::NOPROTOOPT),
    }
    Ok(0)
}

/// Returns the `N` bytes of a field at offset `at` of a value, or EINVAL if the value is shorter.
fn field<const N: usize>(value: &[u8], at: usize) -> Result<[u8; N], Errno> {
    value.get(at..).and_then(<[u8]>::first_chunk).copied().ok_or(Errno::INVAL)
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
    unsafe { write_name(&object, Endpoint::local, to, length) }
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
    unsafe { write_name(&object, Endpoint::remote, to, length) }
}

/// Writes one of a connection's two addresses, in the format of getsockname(2).
unsafe fn write_name(
    object: &fds::Ref,
    address: fn(&Endpoint) -> Address,
    to: *mut sockaddr,
    length: *mut socklen_t,
) -> c_int {
    if to.is_null() || length.is_null() {
        return fail(Errno::FAULT) as c_int;
    }
    if let Some(stream) = object.stream() {
        let address = address(&stream.endpoint);
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

/// Returns the result of fcntl(2)'s `F_GETFL` for a socket.
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
        (DescriptorKind::Stream(stream), _) => {
            let endpoint = &stream.endpoint;
            match (request, number()) {
                (libc::FIONBIO | libc::FIONREAD | libc::TIOCOUTQ, None) => {
                    fail(Errno::FAULT) as c_int
                }
                (libc::FIONBIO, Some(number)) => {
                    endpoint.set(option::NONBLOCK, *number != 0);
                    0
                }
                (libc::FIONREAD, Some(number)) => {
                    *number = endpoint.arrived() as c_int;
                    0
                }
                (libc::TIOCOUTQ, Some(number)) => {
                    *number = endpoint.unread() as c_int;
                    0
                }
                _ => fail(Errno::NOTTY) as c_int,
            }
        }
        _ => kernel(),
    }
}
