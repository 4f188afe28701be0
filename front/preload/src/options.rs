//! Socket options: getsockopt(2), setsockopt(2), and what fcntl(2) and ioctl(2) set and read of a
//! socket. An option without an effect is taken and not refused.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use libc::c_int;
use slipway_socket::{Errno, option};

use crate::fds::{DescriptorKind, Stream};
use crate::halves::{
    HalfWord, RECEIVE_BUFFER, RECEIVE_LOW_WATER, RECEIVE_TIMEOUT, SEND_BUFFER, SEND_TIMEOUT,
};
use crate::switches::switch_of;
use crate::taken::{LARGEST, aborts};
use crate::time::milliseconds;

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

/// The segment size in bytes that the kernel reports for TCP over its loopback interface.
const SEGMENT: c_int = 65_483;

/// The bytes of the kernel's `struct tcp_info` up to and with `tcpi_snd_wnd` (`linux/tcp.h`).
const TCP_INFO_LEN: usize = 232;
/// `tcpi_state` of a connection whose peer may still send (`net/tcp_states.h`).
const TCP_ESTABLISHED: u8 = 1;
/// `tcpi_state` of a connection whose program sends no more.
const TCP_FIN_WAIT2: u8 = 5;
/// `tcpi_state` of a connection that is over.
const TCP_CLOSE: u8 = 7;
/// `tcpi_state` of a connection whose peer sends no more.
const TCP_CLOSE_WAIT: u8 = 8;

/// The bytes of a name of TCP's congestion control: `TCP_CA_NAME_MAX` (`net/tcp.h`).
const CONGESTION_LEN: usize = 16;

/// The most bytes of an option's value that is read: those of [`TCP_INFO_LEN`], and room.
pub const VALUE_LEN: usize = 256;

const _: () = assert!(TCP_INFO_LEN <= VALUE_LEN);

/// The most bytes of an option's value that is set: those of a timeout. The rest is ignored.
pub const SET_LEN: usize = size_of::<libc::timeval>();

/// Writes an option's value to the beginning of `into`, and returns its length in bytes; the bytes
/// after what is written are 0. The error is ENOPROTOOPT for an unknown option.
pub fn read_option(
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
            put_timeout(into, timeout_named(name).get(endpoint));
            Ok(SET_LEN)
        }
        (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
            put(into, 0, b"cubic\0");
            Ok(CONGESTION_LEN)
        }
        (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            // TCP's other states do not exist here.
            let state = match (endpoint.has_peer_ended(), endpoint.has(option::FINISHED)) {
                _ if endpoint.is_over() => TCP_CLOSE,
                (true, _) => TCP_CLOSE_WAIT,
                (false, true) => TCP_FIN_WAIT2,
                (false, false) => TCP_ESTABLISHED,
            };
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

/// Writes a timeout of `time` milliseconds as a `struct timeval`.
fn put_timeout(into: &mut [u8; VALUE_LEN], time: u64) {
    put(into, offset_of!(libc::timeval, tv_sec), &(time / 1000).to_ne_bytes());
    put(into, offset_of!(libc::timeval, tv_usec), &(time % 1000 * 1000).to_ne_bytes());
}

/// Returns the milliseconds of the `struct timeval` in `bytes`. The error is EINVAL if it is cut,
/// and EDOM for an invalid `tv_usec`.
fn timeout_in(bytes: &[u8]) -> Result<u64, Errno> {
    let word = |at| field(bytes, at).map(i64::from_ne_bytes);
    let tv_sec = word(offset_of!(libc::timeval, tv_sec))?;
    let tv_usec = word(offset_of!(libc::timeval, tv_usec))?;
    if !(0..1_000_000).contains(&tv_usec) {
        return Err(Errno::DOM);
    }
    Ok(milliseconds(libc::timeval { tv_sec, tv_usec }))
}

/// Returns the size in bytes that is reported of a buffer that a program set to `value`.
fn buffer(value: c_int) -> u64 {
    u64::try_from(value).unwrap_or(0).clamp(SMALLEST, LARGEST) * 2
}

/// Copies the bytes of a field to offset `at` of a value; both are constants, and within it.
fn put(value: &mut [u8; VALUE_LEN], at: usize, field: &[u8]) {
    value[at..at + field.len()].copy_from_slice(field);
}

/// Returns where the timeout of `SO_RCVTIMEO` or `SO_SNDTIMEO` lies.
fn timeout_named(name: c_int) -> HalfWord {
    if name == libc::SO_SNDTIMEO { SEND_TIMEOUT } else { RECEIVE_TIMEOUT }
}

/// Sets an option to the value in `bytes`. Returns 0, which is the call's result. The error is
/// EINVAL for a value that is too short, EDOM for a timeout with an invalid `tv_usec`, and
/// ENOPROTOOPT for an option that is unknown or only read.
pub fn write_option(
    stream: &Stream,
    level: c_int,
    name: c_int,
    bytes: &[u8],
) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let number = |at| field(bytes, at).map(c_int::from_ne_bytes);
    if let Some(bit) = switch_of(level, name) {
        endpoint.set(bit, number(0)? != 0);
        return Ok(0);
    }
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
            timeout_named(name).set(endpoint, timeout_in(bytes)?);
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

/// Returns the result of fcntl(2)'s `F_GETFL`. Returns `None` for a descriptor whose flags are the
/// kernel's.
pub fn status_of(kind: &DescriptorKind) -> Option<c_int> {
    match kind {
        DescriptorKind::Stream(stream) => Some(status(stream.endpoint.has(option::NONBLOCK))),
        DescriptorKind::Listener(listener) => {
            Some(status(listener.nonblock.load(Ordering::Relaxed)))
        }
        _ => None,
    }
}

/// Returns the result of fcntl(2)'s `F_GETFL` for a socket.
fn status(nonblock: bool) -> c_int {
    libc::O_RDWR | if nonblock { libc::O_NONBLOCK } else { 0 }
}

/// Sets `O_NONBLOCK`, by fcntl(2) or ioctl(2). Returns `false` for a descriptor whose flags are the
/// kernel's.
pub fn set_nonblock(kind: &DescriptorKind, nonblock: bool) -> bool {
    match kind {
        DescriptorKind::Stream(stream) => _ = stream.endpoint.set(option::NONBLOCK, nonblock),
        DescriptorKind::Listener(listener) => listener.set_nonblock(nonblock),
        _ => return false,
    }
    true
}

/// Returns whether the argument of the ioctl(2) points to a number that is read or written here.
pub fn has_number(request: libc::Ioctl) -> bool {
    matches!(request, libc::FIONBIO | libc::FIONREAD | libc::TIOCOUTQ)
}

/// Carries out ioctl(2) for a descriptor of this kind. `number` is what the argument points to, if
/// the request has one ([`has_number`]). Returns `None` if the kernel carries it out.
pub fn ioctl(
    kind: &DescriptorKind,
    request: libc::Ioctl,
    number: Option<&mut c_int>,
) -> Option<Result<usize, Errno>> {
    let stream = match kind {
        DescriptorKind::Stream(stream) => Some(stream),
        DescriptorKind::Listener(_) if request == libc::FIONBIO => None,
        _ => return None,
    };
    if matches!(request, libc::FIOCLEX | libc::FIONCLEX) {
        return None;
    }
    if !has_number(request) {
        return Some(Err(Errno::NOTTY));
    }
    let Some(number) = number else { return Some(Err(Errno::FAULT)) };
    match (request, stream) {
        (libc::FIONREAD, Some(stream)) => *number = stream.endpoint.arrived() as c_int,
        (libc::TIOCOUTQ, Some(stream)) => *number = stream.endpoint.unread() as c_int,
        _ => _ = set_nonblock(kind, *number != 0),
    }
    Some(Ok(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_option_is_a_switch_and_a_number() {
        for (level, name, _) in NUMBERS {
            assert_eq!(switch_of(level, name), None);
            let same = NUMBERS.iter().filter(|(at, what, _)| (*at, *what) == (level, name));
            assert_eq!(same.count(), 1);
        }
    }

    #[test]
    fn a_timeout_that_is_written_reads_back() {
        for time in [0, 1, 999, 1000, 4_000_000_999] {
            let mut value = [0xff; VALUE_LEN];
            put_timeout(&mut value, time);
            assert_eq!(timeout_in(&value[..SET_LEN]), Ok(time));
            assert!(value[SET_LEN..].iter().all(|byte| *byte == 0xff));
        }
    }

    #[test]
    fn a_cut_or_invalid_timeout_is_refused() {
        let timeval = |tv_sec: i64, tv_usec: i64| {
            let mut value = [0; SET_LEN];
            let (sec, usec) =
                (offset_of!(libc::timeval, tv_sec), offset_of!(libc::timeval, tv_usec));
            value[sec..sec + 8].copy_from_slice(&tv_sec.to_ne_bytes());
            value[usec..usec + 8].copy_from_slice(&tv_usec.to_ne_bytes());
            value
        };
        let whole = timeval(1, 0);
        for cut in 0..whole.len() {
            assert_eq!(timeout_in(&whole[..cut]), Err(Errno::INVAL), "{cut}");
        }
        for tv_usec in [-1, 1_000_000, i64::MIN, i64::MAX] {
            assert_eq!(timeout_in(&timeval(1, tv_usec)), Err(Errno::DOM), "{tv_usec}");
        }
        assert_eq!(timeout_in(&timeval(i64::MIN, 999_999)), Ok(1000));
    }

    #[test]
    fn a_buffer_is_reported_twice_as_large_within_limits() {
        assert_eq!((buffer(4096), buffer(100_000)), (8192, 200_000));
        assert_eq!((buffer(0), buffer(-1), buffer(c_int::MIN)), (2304, 2304, 2304));
        assert_eq!(buffer(c_int::MAX), 4 << 20);
    }

    #[test]
    fn a_field_beyond_the_value_is_invalid() {
        let value = [1, 0, 0, 0, 2];
        assert_eq!(field(&value, 1), Ok([0, 0, 0, 2]));
        for at in [2, 5, 6, usize::MAX] {
            assert_eq!(field::<4>(&value, at), Err(Errno::INVAL));
        }
    }

    #[test]
    fn flags_of_the_kernels_descriptors_are_the_kernels() {
        let kind = DescriptorKind::Plain;
        assert_eq!((status_of(&kind), set_nonblock(&kind, true)), (None, false));
        assert_eq!(ioctl(&kind, libc::FIONBIO, Some(&mut 1)), None);
        assert_eq!((status(false), status(true)), (libc::O_RDWR, libc::O_RDWR | libc::O_NONBLOCK));
    }
}
