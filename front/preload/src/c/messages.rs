//! readv(2), writev(2), sendmsg(2), recvmsg(2), sendmmsg(2) and recvmmsg(2).

use libc::{c_int, c_uint, iovec, mmsghdr, msghdr, ssize_t};
use slipway_socket::{Deadline, Errno};

use super::guard::guard;
use super::memory::{bytes, iovecs, room};
use crate::fds::{self, Stream};
use crate::real::sys;
use crate::time::{after, timespec_of};
use crate::transfer::{after_piece, discard, recv_all, recv_nothing, send_all, wait_to_peek};
use crate::vectors;

/// The most messages of a call.
const MOST: usize = 1024;

/// Returns the pieces that are not empty.
fn filled(pieces: &[iovec]) -> impl Iterator<Item = &iovec> {
    pieces.iter().filter(|piece| piece.iov_len > 0)
}

fn lengths(pieces: &[iovec]) -> impl ExactSizeIterator<Item = usize> {
    pieces.iter().map(|piece| piece.iov_len)
}

/// Sends the pieces in turn.
///
/// # Safety
/// The contract of writev(2).
unsafe fn send_vectors(
    fd: c_int,
    stream: &Stream,
    pieces: &[iovec],
    flags: c_int,
) -> Result<usize, Errno> {
    if let Some(all) = vectors::expected(lengths(pieces)) {
        stream.endpoint.expect(all);
    }
    // SAFETY: the caller guarantees valid pointers.
    let all = filled(pieces).map(|piece| unsafe { bytes(piece.iov_base, piece.iov_len) });
    let mut moved = false;
    vectors::send(all, flags, |bytes, flags| {
        after_piece(&stream.endpoint, &mut moved, send_all(fd, stream, bytes, flags))
    })
}

/// Receives into the pieces in turn.
///
/// # Safety
/// The contract of readv(2).
unsafe fn recv_vectors(
    fd: c_int,
    stream: &Stream,
    pieces: &[iovec],
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees valid pointers.
    let all = filled(pieces).map(|piece| unsafe { room(piece.iov_base, piece.iov_len) });
    let mut moved = false;
    vectors::receive(all, flags, |room, flags, skip| {
        if skip > 0 {
            return Ok(stream.endpoint.peek_behind(skip, room));
        }
        after_piece(&stream.endpoint, &mut moved, recv_all(fd, stream, room, flags))
    })
}

/// Makes a call with `count` vectors: `moves` for a connection of ours, or else `kernel`.
///
/// # Safety
/// The contract of readv(2).
unsafe fn vectored(
    fd: c_int,
    pieces: *const iovec,
    count: c_int,
    kernel: impl FnOnce() -> libc::c_long,
    moves: impl FnOnce(&Stream, &[iovec]) -> Result<usize, Errno>,
) -> ssize_t {
    let Some(object) = fds::stream(fd) else { return kernel() as ssize_t };
    guard(|| {
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        // SAFETY: the caller guarantees valid pointers.
        moves(stream, unsafe { iovecs(pieces, count) }?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    let kernel = || sys!(SYS_readv, fd, pieces, count);
    // SAFETY: the caller guarantees valid pointers, here and below.
    let moves = |stream: &Stream, all: &[iovec]| unsafe { recv_vectors(fd, stream, all, 0) };
    // SAFETY: the caller guarantees valid pointers.
    unsafe { vectored(fd, pieces, count, kernel, moves) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    let kernel = || sys!(SYS_writev, fd, pieces, count);
    // SAFETY: the caller guarantees valid pointers, here and below.
    let moves = |stream: &Stream, all: &[iovec]| unsafe { send_vectors(fd, stream, all, 0) };
    // SAFETY: the caller guarantees valid pointers.
    unsafe { vectored(fd, pieces, count, kernel, moves) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_sendmsg, fd, message, flags) as ssize_t;
    };
    // SAFETY: the caller guarantees valid pointers.
    guard(|| unsafe { send_message(fd, &object, message, flags) })
}

#[allow(clippy::unnecessary_cast)] // musl has an int there
unsafe fn send_message(
    fd: c_int,
    object: &fds::Ref,
    message: *const msghdr,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees valid pointers.
    let message = unsafe { message.as_ref() }.ok_or(Errno::FAULT)?;
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    // SAFETY: the caller guarantees valid pointers.
    unsafe {
        send_vectors(fd, stream, iovecs(message.msg_iov, message.msg_iovlen as usize)?, flags)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvmsg, fd, message, flags) as ssize_t;
    };
    // SAFETY: the caller guarantees valid pointers.
    guard(|| unsafe { recv_message(fd, &object, message, flags) })
}

#[allow(clippy::unnecessary_cast)] // musl has an int there
unsafe fn recv_message(
    fd: c_int,
    object: &fds::Ref,
    message: *mut msghdr,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller guarantees valid pointers.
    let message = unsafe { message.as_mut() }.ok_or(Errno::FAULT)?;
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    // SAFETY: the caller guarantees valid pointers.
    let pieces = unsafe { iovecs(message.msg_iov, message.msg_iovlen as usize) }?;
    let length = vectors::total(lengths(pieces));
    wait_to_peek(fd, stream, length, flags)?;
    let got = if length == 0 {
        recv_nothing(fd, stream, flags)
    } else if flags & libc::MSG_TRUNC != 0 {
        discard(fd, stream, length, flags)
    } else {
        // SAFETY: the caller guarantees valid pointers.
        unsafe { recv_vectors(fd, stream, pieces, flags) }
    }?;
    message.msg_namelen = 0;
    message.msg_controllen = 0;
    message.msg_flags = 0;
    Ok(got)
}

/// Returns the messages of a call.
///
/// # Safety
/// The contract of sendmmsg(2).
unsafe fn messages<'a>(messages: *mut mmsghdr, count: c_uint) -> Result<&'a mut [mmsghdr], Errno> {
    match (count as usize).min(MOST) {
        0 => Ok(&mut []),
        _ if messages.is_null() => Err(Errno::FAULT),
        // SAFETY: the caller guarantees valid pointers.
        count => Ok(unsafe { std::slice::from_raw_parts_mut(messages, count) }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    all: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_sendmmsg, fd, all, count, flags) as c_int;
    };
    guard(|| {
        // SAFETY: the caller guarantees valid pointers.
        let all = unsafe { messages(all, count) }?;
        vectors::each_message(all, |message, _| {
            // SAFETY: the caller guarantees valid pointers.
            let sent = unsafe { send_message(fd, &object, &raw const message.msg_hdr, flags) }?;
            message.msg_len = sent as c_uint;
            Ok(true)
        })
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    all: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvmmsg, fd, all, count, flags, timeout) as c_int;
    };
    guard(|| {
        // SAFETY: the caller guarantees valid pointers.
        let all = unsafe { messages(all, count) }?;
        // SAFETY: the caller guarantees that the pointer is valid if it is not null.
        let time = unsafe { timeout.as_mut() };
        let until = time.as_deref().map(after).transpose()?;
        let received = vectors::each_message(all, |message, is_first| {
            if !is_first && until.is_some_and(Deadline::has_passed) {
                return Ok(false);
            }
            let waits = is_first || flags & libc::MSG_WAITFORONE == 0;
            let how = if waits { flags } else { flags | libc::MSG_DONTWAIT };
            // SAFETY: the caller guarantees valid pointers.
            let got = unsafe { recv_message(fd, &object, &raw mut message.msg_hdr, how) };
            if let (Err(errno), false, Some(stream)) = (got, is_first, object.stream()) {
                stream.endpoint.leave_reset(errno);
            }
            message.msg_len = got? as c_uint;
            Ok(true)
        })?;
        if let Some((time, left)) = time.zip(until.and_then(Deadline::left)) {
            *time = timespec_of(left);
        }
        Ok(received)
    }) as c_int
}
