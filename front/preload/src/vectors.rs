//! readv(2), writev(2), sendmsg(2), recvmsg(2), sendmmsg(2) and recvmmsg(2).

use libc::{c_int, c_uint, iovec, mmsghdr, msghdr, ssize_t};
use slipway_socket::Errno;

use crate::fds::{self, Stream};
use crate::guard::guard;
use crate::real::sys;
use crate::transfer::{discard, from, into, recv_all, send_all};

/// The most bytes of a message that any FIFO has room for when it is empty.
const PAGE: usize = 4096;

/// # Safety
/// The contract of readv(2).
unsafe fn vectors<'a>(vectors: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    match count {
        0 => Ok(&[]),
        1..=1024 if !vectors.is_null() => {
            // SAFETY: the caller guarantees valid pointers.
            Ok(unsafe { std::slice::from_raw_parts(vectors, count) })
        }
        1..=1024 => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}

/// Sends the vectors in turn, and stops at the first that is sent in part only.
unsafe fn send_vectors(
    fd: c_int,
    stream: &Stream,
    pieces: &[iovec],
    flags: c_int,
) -> Result<usize, Errno> {
    let mut done = 0;
    let all = pieces.iter().fold(0usize, |all, piece| all.saturating_add(piece.iov_len));
    if all > PAGE && pieces.len() > 1 {
        stream.endpoint.expect(all);
    }
    for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
        // SAFETY: the caller guarantees valid pointers.
        let bytes = unsafe { from(piece.iov_base, piece.iov_len) }?;
        match send_all(fd, stream, bytes, if done > 0 { flags | libc::MSG_NOSIGNAL } else { flags })
        {
            Ok(count) => {
                done += count;
                if count < bytes.len() {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

unsafe fn recv_vectors(
    fd: c_int,
    stream: &Stream,
    pieces: &[iovec],
    flags: c_int,
) -> Result<usize, Errno> {
    let mut done = 0;
    for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
        // SAFETY: the caller guarantees valid pointers.
        let bytes = unsafe { into(piece.iov_base, piece.iov_len) }?;
        let more = done > 0 && flags & libc::MSG_WAITALL == 0;
        match recv_all(fd, stream, bytes, if more { flags | libc::MSG_DONTWAIT } else { flags }) {
            Ok(count) => {
                done += count;
                if count < bytes.len() || flags & libc::MSG_PEEK != 0 {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
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
        moves(stream, unsafe { vectors(pieces, count) }?)
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
        send_vectors(fd, stream, vectors(message.msg_iov, message.msg_iovlen as usize)?, flags)
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
    let pieces = unsafe { vectors(message.msg_iov, message.msg_iovlen as usize) }?;
    let got = if flags & libc::MSG_TRUNC != 0 {
        discard(fd, stream, pieces.iter().map(|piece| piece.iov_len).sum(), flags)
    } else {
        // SAFETY: the caller guarantees valid pointers.
        unsafe { recv_vectors(fd, stream, pieces, flags) }
    }?;
    message.msg_namelen = 0;
    message.msg_controllen = 0;
    message.msg_flags = 0;
    Ok(got)
}

/// Moves each of `count` messages in turn, until `moves` fails or returns `None` for no message.
/// Returns how many were moved. An error of the first message is the call's.
///
/// # Safety
/// The contract of sendmmsg(2).
unsafe fn each_message(
    messages: *mut mmsghdr,
    count: c_uint,
    mut moves: impl FnMut(&mut msghdr, bool) -> Result<Option<usize>, Errno>,
) -> Result<usize, Errno> {
    let count = count.min(1024) as usize;
    for at in 0..count {
        // SAFETY: the caller guarantees valid pointers.
        let message = unsafe { &mut *messages.add(at) };
        match moves(&mut message.msg_hdr, at == 0) {
            Ok(Some(moved)) => message.msg_len = moved as c_uint,
            Err(errno) if at == 0 => return Err(errno),
            Ok(None) | Err(_) => return Ok(at),
        }
    }
    Ok(count)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_sendmmsg, fd, messages, count, flags) as c_int;
    };
    // SAFETY: the caller guarantees valid pointers, here and below.
    let send =
        |message: &mut msghdr, _| unsafe { send_message(fd, &object, message, flags) }.map(Some);
    // SAFETY: the caller guarantees valid pointers.
    guard(|| unsafe { each_message(messages, count, send) }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvmmsg, fd, messages, count, flags, timeout) as c_int;
    };
    let receive = |message: &mut msghdr, is_first: bool| {
        let how = if is_first { flags } else { flags | libc::MSG_DONTWAIT };
        // SAFETY: the caller guarantees valid pointers, here and below.
        let got = unsafe { recv_message(fd, &object, message, how) }?;
        // No bytes mean the end of the stream, which counts as a message only if it is the first.
        Ok((got > 0 || is_first).then_some(got))
    };
    // SAFETY: the caller guarantees valid pointers.
    guard(|| unsafe { each_message(messages, count, receive) }) as c_int
}
