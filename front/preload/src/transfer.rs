//! Moves bytes between a program's memory and a FIFO, and waits where a kernel socket would.

use std::sync::atomic::{AtomicPtr, Ordering};

use libc::c_int;
use slipway_socket::{Deadline, Endpoint, Errno, Half, fetch, fetch_to_write, option};

use crate::fds::Stream;
use crate::halves::{RECEIVE_TIMEOUT, SEND_TIMEOUT};
use crate::real::borrowed;
use crate::signals::{restarts, sigpipe};

/// The most bytes of the next connection's memory that are prefetched while this one is served.
const AHEAD: usize = 4 << 10;
/// Bytes that are copied at a time where an intermediate copy is needed.
pub const PIECE: usize = 16 << 10;

/// Returns whether a call with these flags may wait on the stream.
pub fn may_wait(stream: &Stream, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0 && !stream.endpoint.has(option::NONBLOCK)
}

/// Returns when a call that waits for this half gives up: after the program's timeout, or never.
pub fn deadline(endpoint: &Endpoint, half: Half) -> Deadline {
    let timeout = if half == Half::Receiving { RECEIVE_TIMEOUT } else { SEND_TIMEOUT };
    let milliseconds = timeout.get(endpoint);
    if milliseconds == 0 { Deadline::NEVER } else { Deadline::after(milliseconds * 1_000_000) }
}

/// Waits for `half`. Ignores an interruption if all signal handlers restart calls.
pub fn wait(fd: c_int, endpoint: &Endpoint, half: Half, until: Deadline) -> Result<(), Errno> {
    match endpoint.wait(half, borrowed(fd), until) {
        Err(Errno::INTR) if until == Deadline::NEVER && restarts() => Ok(()),
        other => other,
    }
}

/// Waits for `half` up to the socket's timeout, which begins with the first wait of a call and is
/// kept in `until`. A call that has moved bytes, as `done` says, is never restarted after a signal:
/// it returns their number.
fn wait_within(
    fd: c_int,
    endpoint: &Endpoint,
    half: Half,
    until: &mut Option<Deadline>,
    done: usize,
) -> Result<(), Errno> {
    let until = *until.get_or_insert_with(|| deadline(endpoint, half));
    if done > 0 {
        return endpoint.wait(half, borrowed(fd), until);
    }
    wait(fd, endpoint, half, until)
}

/// Takes the address to prefetch for the next connection: once for each report.
#[inline]
fn once(next: &AtomicPtr<u8>) -> Option<*mut u8> {
    let at = next.load(Ordering::Relaxed);
    if at.is_null() {
        return None;
    }
    next.store(std::ptr::null_mut(), Ordering::Relaxed);
    Some(at)
}

/// Returns `outcome`, that of a piece of a call, and notes in `moved` whether the call has moved
/// bytes. If it had before, the error of a reset is left to the next call.
pub fn after_piece(
    endpoint: &Endpoint,
    moved: &mut bool,
    outcome: Result<usize, Errno>,
) -> Result<usize, Errno> {
    match outcome {
        Ok(count) => *moved |= count > 0,
        Err(errno) if *moved => endpoint.leave_reset(errno),
        Err(_) => {}
    }
    outcome
}

/// Sends all of `bytes`, or as much as fits without waiting on a non-blocking socket or call.
pub fn send_all(fd: c_int, stream: &Stream, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    if let Some(next) = once(&stream.writes_next) {
        // A program that sends to many connections in turn likely sends as much to the next.
        fetch_to_write(next, bytes.len().min(AHEAD));
    }
    let mut done = 0;
    let mut until = None;
    let failed = loop {
        match endpoint.send(&bytes[done..]) {
            Ok(count) => {
                done += count;
                if done == bytes.len() {
                    return Ok(done);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => break errno,
        }
        // There is no room for the rest.
        if may_wait(stream, flags) {
            match wait_within(fd, endpoint, Half::Sending, &mut until, done) {
                Ok(()) => continue,
                Err(errno) => break errno,
            }
        }
        stream.blocked.store(true, Ordering::Relaxed);
        // An armed poller must be told when there is room; if there is room by now, use it.
        let has_room = endpoint.arm(Half::Sending, 1) && endpoint.ready() & libc::POLLOUT != 0;
        if !has_room {
            break Errno::AGAIN;
        }
    };
    if done > 0 {
        endpoint.leave_reset(failed);
        return Ok(done);
    }
    if failed == Errno::PIPE && flags & libc::MSG_NOSIGNAL == 0 {
        sigpipe();
    }
    Err(failed)
}

/// Receives into `into` what has arrived, or with `MSG_WAITALL` until it is full. Waits for the
/// first byte unless the socket or the call does not wait. Returns the number of bytes; 0 at the
/// end of the stream.
pub fn recv_all(fd: c_int, stream: &Stream, into: &mut [u8], flags: c_int) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let (peek, whole) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::INVAL);
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN);
    }
    if let Some(next) = once(&stream.reads_next) {
        fetch(next, endpoint.arrived().min(into.len()).min(AHEAD));
    }
    let mut done = 0;
    let mut until = None;
    let failed = loop {
        let got = if peek { endpoint.peek(into) } else { endpoint.recv(&mut into[done..]) };
        match got {
            Ok(0) => return Ok(done),
            Ok(count) if peek => return Ok(count),
            Ok(count) => {
                done += count;
                if done == into.len() || !whole {
                    return Ok(done);
                }
            }
            Err(Errno::AGAIN) => {}
            Err(errno) => break errno,
        }
        // More is wanted than has arrived.
        if !may_wait(stream, flags) {
            break Errno::AGAIN;
        }
        if let Err(errno) = wait_within(fd, endpoint, Half::Receiving, &mut until, done) {
            break errno;
        }
    };
    if done > 0 {
        endpoint.leave_reset(failed);
        return Ok(done);
    }
    Err(failed)
}

/// Carries out a recv(2) without room: it waits as others do, and takes nothing. Returns 0. A
/// read(2) of nothing does not wait.
///
/// # Errors
/// The errors of [`recv_all`].
pub fn recv_nothing(fd: c_int, stream: &Stream, flags: c_int) -> Result<usize, Errno> {
    recv_all(fd, stream, &mut [0], flags | libc::MSG_PEEK).map(|_| 0)
}

/// Waits for the bytes of a peek of `length` bytes that has `MSG_WAITALL` among its flags, and does
/// nothing for other calls. The peek, which follows, sees fewer if no more may come before some are
/// read ([`Endpoint::has_arrived`]), or if a signal or the timeout ended the wait.
///
/// # Errors
/// The errors of [`Endpoint::wait`], if there is nothing to see.
pub fn wait_to_peek(fd: c_int, stream: &Stream, length: usize, flags: c_int) -> Result<(), Errno> {
    let (both, others) = (libc::MSG_PEEK | libc::MSG_WAITALL, libc::MSG_OOB | libc::MSG_ERRQUEUE);
    if flags & (both | others) != both || !may_wait(stream, flags) {
        return Ok(());
    }
    let endpoint = &stream.endpoint;
    let until = deadline(endpoint, Half::Receiving);
    while !endpoint.has_arrived(length) {
        match endpoint.wait_to_peek(length, borrowed(fd), until) {
            Ok(()) => {}
            Err(_) if endpoint.arrived() > 0 => break,
            Err(Errno::INTR) if until == Deadline::NEVER && restarts() => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// `MSG_TRUNC`: receives bytes and discards them (tcp(7)). With `MSG_PEEK` it only counts those
/// that have arrived, up to `length`.
pub fn discard(fd: c_int, stream: &Stream, length: usize, flags: c_int) -> Result<usize, Errno> {
    let mut piece = [0; PIECE];
    if flags & libc::MSG_PEEK != 0 && length > 0 {
        let seen = recv_all(fd, stream, &mut piece[..length.min(PIECE)], flags)?;
        // An end has no bytes behind it.
        let all = if seen > 0 { stream.endpoint.arrived() } else { 0 };
        return Ok(all.min(length).max(seen));
    }
    let mut done = 0;
    while done < length {
        let room = (length - done).min(PIECE);
        let more = if done > 0 { flags | libc::MSG_DONTWAIT } else { flags };
        match recv_all(fd, stream, &mut piece[..room], more) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(errno) if done > 0 => {
                stream.endpoint.leave_reset(errno);
                break;
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_to_prefetch_is_taken_once() {
        let mut byte = 0u8;
        let next = AtomicPtr::new(&raw mut byte);
        assert_eq!(once(&next), Some(&raw mut byte));
        assert_eq!(once(&next), None);
    }
}
