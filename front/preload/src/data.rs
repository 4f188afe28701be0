//! Moving bytes: read(2), write(2), and all their relatives.

use std::sync::atomic::Ordering;

use libc::{
    c_int, c_uint, c_void, iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
};
use slipway_socket::{Deadline, Endpoint, Errno, Half, fetch_to_write, option};

use crate::fds::{self, Stream};
use crate::guard::guard;
use crate::open::borrowed;
use crate::real::{self, fail, sys};

/// Bytes of the next connection's memory that are fetched at most while there is something to do with this one.
const AHEAD: usize = 4 << 10;
/// Bytes that are copied at a time where there must be a copy.
const PIECE: usize = 16 << 10;

pub fn interrupted() -> bool {
    real::errno() == libc::EINTR
}

/// Whether a call that a signal interrupted goes on afterwards (signal(7)): all handlers that there are were
/// installed with `SA_RESTART`. Which signal it was nobody tells.
pub fn restarts() -> bool {
    (1..=64).all(|signal| {
        // `struct sigaction` of the kernel: handler, flags, restorer, mask.
        let mut action = [0u64; 4];
        let got = sys!(SYS_rt_sigaction, signal, 0, action.as_mut_ptr(), 8);
        let handled = got == 0 && action[0] > 1;
        !handled || action[1] & libc::SA_RESTART as u64 != 0
    })
}

/// `SIGPIPE` for this thread, as a write to a closed connection has it.
#[cold]
fn sigpipe() {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let process = rustix::process::getpid().as_raw_nonzero().get();
    sys!(SYS_tgkill, process, thread, libc::SIGPIPE);
}

fn may_wait(stream: &Stream, flags: c_int) -> bool {
    flags & libc::MSG_DONTWAIT == 0 && !stream.endpoint.has(option::NONBLOCK)
}

fn deadline(endpoint: &Endpoint, half: Half) -> Deadline {
    let both = endpoint.option(option::TIMEOUTS).load(Ordering::Relaxed);
    let milliseconds = if half == Half::Receiving { both & 0xffff_ffff } else { both >> 32 };
    if milliseconds == 0 { Deadline::NEVER } else { Deadline::after(milliseconds * 1_000_000) }
}

/// Waits for `half`; a signal whose handlers all restart calls is as if it had not come.
fn wait(fd: c_int, endpoint: &Endpoint, half: Half, until: Deadline) -> Result<(), Errno> {
    match endpoint.wait(half, borrowed(fd), until) {
        Err(Errno::INTR) if until == Deadline::NEVER && restarts() => Ok(()),
        other => other,
    }
}

/// Sends all of `bytes`, or what can be sent without waiting if that is what is asked for.
fn send_all(fd: c_int, stream: &Stream, bytes: &[u8], flags: c_int) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let ahead = stream.ahead.load(Ordering::Relaxed);
    if !ahead.is_null() {
        // Once for each report. Who sends to many in turn sends as much to the next.
        stream.ahead.store(std::ptr::null_mut(), Ordering::Relaxed);
        fetch_to_write(ahead, bytes.len().min(AHEAD));
    }
    let mut done = 0;
    let mut until = None;
    loop {
        let failed = match endpoint.send(&bytes[done..]) {
            Ok(count) => {
                done += count;
                if done == bytes.len() {
                    return Ok(done);
                }
                Errno::AGAIN
            }
            Err(errno) => errno,
        };
        let failed = match failed {
            Errno::AGAIN if may_wait(stream, flags) => {
                let until = *until.get_or_insert_with(|| deadline(endpoint, Half::Sending));
                match wait(fd, endpoint, Half::Sending, until) {
                    Ok(()) => continue,
                    Err(errno) => errno,
                }
            }
            Errno::AGAIN => {
                stream.blocked.store(true, Ordering::Relaxed);
                // Somebody may sleep until there is room; if there is by now it is used.
                if endpoint.arm(Half::Sending, 1) && endpoint.ready() & libc::POLLOUT != 0 {
                    continue;
                }
                Errno::AGAIN
            }
            errno => errno,
        };
        if done > 0 {
            return Ok(done);
        }
        if failed == Errno::PIPE && flags & libc::MSG_NOSIGNAL == 0 {
            sigpipe();
        }
        return Err(failed);
    }
}

fn recv_all(fd: c_int, stream: &Stream, into: &mut [u8], flags: c_int) -> Result<usize, Errno> {
    let endpoint = &stream.endpoint;
    let (peek, whole) = (flags & libc::MSG_PEEK != 0, flags & libc::MSG_WAITALL != 0);
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::INVAL);
    }
    if flags & libc::MSG_ERRQUEUE != 0 {
        return Err(Errno::AGAIN);
    }
    let mut done = 0;
    let mut until = None;
    loop {
        let got = if peek { endpoint.peek(into) } else { endpoint.recv(&mut into[done..]) };
        let failed = match got {
            Ok(0) => return Ok(done),
            Ok(count) if peek => return Ok(count),
            Ok(count) => {
                done += count;
                if done == into.len() || !whole {
                    return Ok(done);
                }
                Errno::AGAIN
            }
            Err(errno) => errno,
        };
        let failed = if failed == Errno::AGAIN && may_wait(stream, flags) {
            let until = *until.get_or_insert_with(|| deadline(endpoint, Half::Receiving));
            match wait(fd, endpoint, Half::Receiving, until) {
                Ok(()) => continue,
                Err(errno) => errno,
            }
        } else {
            failed
        };
        return if done > 0 { Ok(done) } else { Err(failed) };
    }
}

/// The bytes that the caller wants to send.
///
/// # Safety
/// As for write(2).
unsafe fn from<'a>(buffer: *const c_void, length: size_t) -> Result<&'a [u8], Errno> {
    if length == 0 {
        return Ok(&[]);
    }
    if buffer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: as the caller says.
    Ok(unsafe { std::slice::from_raw_parts(buffer.cast(), length.min(isize::MAX as usize)) })
}

/// # Safety
/// As for read(2). The bytes may be uninitialised: they are only written.
unsafe fn into<'a>(buffer: *mut c_void, length: size_t) -> Result<&'a mut [u8], Errno> {
    if length == 0 {
        return Ok(&mut []);
    }
    if buffer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: as the caller says.
    Ok(unsafe { std::slice::from_raw_parts_mut(buffer.cast(), length.min(isize::MAX as usize)) })
}

/// # Safety
/// As for readv(2).
unsafe fn vectors<'a>(vectors: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    match count {
        0 => Ok(&[]),
        1..=1024 if !vectors.is_null() => {
            // SAFETY: as the caller says.
            Ok(unsafe { std::slice::from_raw_parts(vectors, count) })
        }
        1..=1024 => Err(Errno::FAULT),
        _ => Err(Errno::INVAL),
    }
}

/// Sends all vectors in turn, until one is sent in part only.
unsafe fn send_vectors(
    fd: c_int,
    stream: &Stream,
    pieces: &[iovec],
    flags: c_int,
) -> Result<usize, Errno> {
    let mut done = 0;
    for piece in pieces.iter().filter(|piece| piece.iov_len > 0) {
        // SAFETY: as the caller says.
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
        // SAFETY: as the caller says.
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, length: size_t) -> ssize_t {
    match fds::stream(fd) {
        None => sys!(SYS_read, fd, buffer, length) as ssize_t,
        // SAFETY: as the caller says, here and below.
        Some(object) => guard(|| unsafe { recv_into(&object, fd, buffer, length, 0) }),
    }
}

unsafe fn recv_into(
    object: &fds::Ref,
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    if length == 0 {
        return Ok(0);
    }
    if flags & libc::MSG_TRUNC != 0 {
        return discard(fd, stream, length, flags);
    }
    // SAFETY: as the caller says.
    recv_all(fd, stream, unsafe { into(buffer, length) }?, flags)
}

/// `MSG_TRUNC`: takes bytes and throws them away (tcp(7)).
fn discard(fd: c_int, stream: &Stream, length: usize, flags: c_int) -> Result<usize, Errno> {
    let mut piece = [0; PIECE];
    let mut done = 0;
    while done < length {
        let room = (length - done).min(PIECE);
        let more = if done > 0 { flags | libc::MSG_DONTWAIT } else { flags };
        match recv_all(fd, stream, &mut piece[..room], more) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, length: size_t) -> ssize_t {
    let kernel = || sys!(SYS_write, fd, buffer, length);
    // SAFETY: as the caller says.
    unsafe { ours_or(fd, buffer, length, 0, kernel) }
}

unsafe fn ours_or(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    kernel: impl FnOnce() -> libc::c_long,
) -> ssize_t {
    let Some(object) = fds::stream(fd) else { return kernel() as ssize_t };
    guard(|| {
        if flags & libc::MSG_OOB != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        // SAFETY: as the caller says.
        send_all(fd, stream, unsafe { from(buffer, length) }?, flags)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    let kernel = || sys!(SYS_sendto, fd, buffer, length, flags, 0, 0);
    // SAFETY: as the caller says.
    unsafe { ours_or(fd, buffer, length, flags, kernel) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    buffer: *const c_void,
    length: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_length: socklen_t,
) -> ssize_t {
    let kernel = || sys!(SYS_sendto, fd, buffer, length, flags, to, to_length);
    // SAFETY: as the caller says.
    unsafe { ours_or(fd, buffer, length, flags, kernel) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: as the caller says.
    unsafe { recvfrom(fd, buffer, length, flags, std::ptr::null_mut(), std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    flags: c_int,
    sender: *mut sockaddr,
    sender_length: *mut socklen_t,
) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvfrom, fd, buffer, length, flags, sender, sender_length) as ssize_t;
    };
    // SAFETY: as the caller says.
    let got = guard(|| unsafe { recv_into(&object, fd, buffer, length, flags) });
    if got >= 0 && !sender.is_null() && !sender_length.is_null() {
        // A stream names nobody.
        // SAFETY: as above.
        unsafe { *sender_length = 0 };
    }
    got
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_readv, fd, pieces, count) as ssize_t;
    };
    guard(|| {
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        // SAFETY: as the caller says.
        unsafe { recv_vectors(fd, stream, vectors(pieces, count)?, 0) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, pieces: *const iovec, count: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_writev, fd, pieces, count) as ssize_t;
    };
    guard(|| {
        let stream = object.stream().ok_or(Errno::NOTSOCK)?;
        let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
        // SAFETY: as the caller says.
        unsafe { send_vectors(fd, stream, vectors(pieces, count)?, 0) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_sendmsg, fd, message, flags) as ssize_t;
    };
    // SAFETY: as the caller says.
    guard(|| unsafe { send_message(fd, &object, message, flags) })
}

#[allow(clippy::unnecessary_cast)] // musl has an int there
unsafe fn send_message(
    fd: c_int,
    object: &fds::Ref,
    message: *const msghdr,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: as the caller says.
    let message = unsafe { message.as_ref() }.ok_or(Errno::FAULT)?;
    if flags & libc::MSG_OOB != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    // SAFETY: as above.
    unsafe {
        send_vectors(fd, stream, vectors(message.msg_iov, message.msg_iovlen as usize)?, flags)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let Some(object) = fds::stream(fd) else {
        return sys!(SYS_recvmsg, fd, message, flags) as ssize_t;
    };
    // SAFETY: as the caller says.
    guard(|| unsafe { recv_message(fd, &object, message, flags) })
}

#[allow(clippy::unnecessary_cast)] // as above
unsafe fn recv_message(
    fd: c_int,
    object: &fds::Ref,
    message: *mut msghdr,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: as the caller says.
    let message = unsafe { message.as_mut() }.ok_or(Errno::FAULT)?;
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    // SAFETY: as above.
    let pieces = unsafe { vectors(message.msg_iov, message.msg_iovlen as usize) }?;
    let got = if flags & libc::MSG_TRUNC != 0 {
        discard(fd, stream, pieces.iter().map(|piece| piece.iov_len).sum(), flags)
    } else {
        // SAFETY: as above.
        unsafe { recv_vectors(fd, stream, pieces, flags) }
    }?;
    message.msg_namelen = 0;
    message.msg_controllen = 0;
    message.msg_flags = 0;
    Ok(got)
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
    guard(|| {
        let mut done = 0;
        for at in 0..count.min(1024) as usize {
            // SAFETY: as the caller says.
            let message = unsafe { &mut *messages.add(at) };
            // SAFETY: as above.
            match unsafe { send_message(fd, &object, &raw const message.msg_hdr, flags) } {
                Ok(sent) => message.msg_len = sent as c_uint,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
            done += 1;
        }
        Ok(done)
    }) as c_int
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
    guard(|| {
        let mut done = 0;
        for at in 0..count.min(1024) as usize {
            // SAFETY: as the caller says.
            let message = unsafe { &mut *messages.add(at) };
            let more = if done > 0 { flags | libc::MSG_DONTWAIT } else { flags };
            // SAFETY: as above.
            match unsafe { recv_message(fd, &object, &raw mut message.msg_hdr, more) } {
                Ok(0) if done > 0 => break,
                Ok(got) => message.msg_len = got as c_uint,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(errno),
            }
            done += 1;
        }
        Ok(done)
    }) as c_int
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: as the caller says.
    unsafe { read(fd, buffer, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: as the caller says.
    unsafe { recv(fd, buffer, length, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buffer: *mut c_void,
    length: size_t,
    room: size_t,
    flags: c_int,
    sender: *mut sockaddr,
    sender_length: *mut socklen_t,
) -> ssize_t {
    assert_fits(length, room);
    // SAFETY: as the caller says.
    unsafe { recvfrom(fd, buffer, length, flags, sender, sender_length) }
}

/// What `_FORTIFY_SOURCE` promises: a program that would write beyond its buffer ends here.
pub fn assert_fits(length: usize, room: usize) {
    if length > room {
        let text = "*** buffer overflow detected ***: terminated\n";
        sys!(SYS_write, 2, text.as_ptr(), text.len());
        std::process::abort();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    to: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    if fds::stream(file).is_some() {
        return fail(Errno::INVAL);
    }
    let Some(object) = fds::stream(to) else {
        return sys!(SYS_sendfile, to, file, offset, count) as ssize_t;
    };
    // SAFETY: as the caller says.
    guard(|| unsafe { send_file(to, &object, file, offset, count) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(
    to: c_int,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> ssize_t {
    // SAFETY: as the caller says.
    unsafe { sendfile(to, file, offset, count) }
}

unsafe fn send_file(
    to: c_int,
    object: &fds::Ref,
    file: c_int,
    offset: *mut off_t,
    count: size_t,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    // SAFETY: as the caller says.
    let given = unsafe { offset.as_mut() };
    let here = given.as_ref().map_or_else(|| sys!(SYS_lseek, file, 0, libc::SEEK_CUR), |at| **at);
    if here < 0 {
        return Err(Errno::INVAL);
    }
    let mut piece = [0; PIECE];
    let mut done = 0;
    while done < count {
        let room = (count - done).min(PIECE);
        let at = here + done as libc::c_long;
        let got = sys!(SYS_pread64, file, piece.as_mut_ptr(), room, at);
        if got <= 0 {
            if got < 0 && done == 0 {
                return Err(Errno::from_raw_os_error(real::errno()));
            }
            break;
        }
        match send_all(to, stream, &piece[..got as usize], 0) {
            Ok(sent) => {
                done += sent;
                if sent < got as usize {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    let after = here + done as libc::c_long;
    match given {
        Some(at) => *at = after,
        None => drop(sys!(SYS_lseek, file, after, libc::SEEK_SET)),
    }
    Ok(done)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    count: size_t,
    flags: c_uint,
) -> ssize_t {
    let source = fds::stream(from);
    let sink = fds::stream(to);
    if source.is_none() && sink.is_none() {
        return sys!(SYS_splice, from, from_offset, to, to_offset, count, flags) as ssize_t;
    }
    let how = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
    guard(|| match (source, sink) {
        (Some(source), None) => splice_out(from, &source, to, count, how),
        (None, Some(sink)) => splice_in(from, to, &sink, count, how),
        // One of the two must be a pipe.
        _ => Err(Errno::INVAL),
    })
}

/// From the socket to a pipe: what the pipe takes is taken.
fn splice_out(
    from: c_int,
    object: &fds::Ref,
    pipe: c_int,
    count: usize,
    how: c_int,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    let mut piece = [0; PIECE];
    let room = count.min(PIECE);
    let got = recv_all(from, stream, &mut piece[..room], how | libc::MSG_PEEK)?;
    let written = sys!(SYS_write, pipe, piece.as_ptr(), got);
    let taken = usize::try_from(written).map_err(|_| Errno::from_raw_os_error(real::errno()))?;
    recv_all(from, stream, &mut piece[..taken], libc::MSG_DONTWAIT)
}

/// From a pipe to the socket: no more than there is room for is taken out of the pipe.
fn splice_in(
    pipe: c_int,
    to: c_int,
    object: &fds::Ref,
    count: usize,
    how: c_int,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
    let mut piece = [0; PIECE];
    if stream.endpoint.ready() & libc::POLLOUT == 0 {
        if !may_wait(stream, how) {
            return Err(Errno::AGAIN);
        }
        let until = deadline(&stream.endpoint, Half::Sending);
        wait(to, &stream.endpoint, Half::Sending, until)?;
    }
    // An empty FIFO has a page, one that is half empty as much.
    let got = sys!(SYS_read, pipe, piece.as_mut_ptr(), count.min(2048));
    let got = usize::try_from(got).map_err(|_| Errno::from_raw_os_error(real::errno()))?;
    send_all(to, stream, &piece[..got], how)
}
