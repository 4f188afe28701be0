//! sendfile(2) and splice(2): move bytes between a FIFO and another descriptor.

use libc::{c_int, c_uint, off_t};
use slipway_socket::{Errno, Half};

use crate::fds;
use crate::real::{self, sys};
use crate::transfer::{PIECE, deadline, may_wait, recv_all, send_all, wait};

/// Sends `count` bytes of `file` from the offset `given` on, or else from the file's position,
/// either of which is moved by what was sent.
///
/// # Errors
/// The errors of sendfile(2).
pub fn send_file(
    to: c_int,
    object: &fds::Ref,
    file: c_int,
    given: Option<&mut off_t>,
    count: usize,
) -> Result<usize, Errno> {
    let stream = object.stream().ok_or(Errno::NOTSOCK)?;
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
                return Err(real::last_error());
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
            Err(errno) if done > 0 => {
                stream.endpoint.leave_reset(errno);
                break;
            }
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

/// Carries out splice(2) between `from` and `to`, of which at least one is a connection of ours.
///
/// # Errors
/// The errors of splice(2): `EINVAL` if both are connections.
pub fn splice(
    (from, source): (c_int, Option<fds::Ref>),
    (to, sink): (c_int, Option<fds::Ref>),
    count: usize,
    flags: c_uint,
) -> Result<usize, Errno> {
    let how = if flags & libc::SPLICE_F_NONBLOCK != 0 { libc::MSG_DONTWAIT } else { 0 };
    match (source, sink) {
        (Some(source), None) => splice_out(from, &source, to, count, how),
        (None, Some(sink)) => splice_in(from, to, &sink, count, how),
        // One of the two must be a pipe.
        _ => Err(Errno::INVAL),
    }
}

/// Moves bytes from the socket to a pipe. Takes as many out of the socket as the pipe accepted.
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
    let taken = real::outcome(written)?;
    recv_all(from, stream, &mut piece[..taken], libc::MSG_DONTWAIT)
}

/// Moves bytes from a pipe to the socket. Takes no more out of the pipe than the socket has room
/// for.
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
    // A writable FIFO has room for 2048 bytes: it has at least a page and is at least half empty.
    let got = sys!(SYS_read, pipe, piece.as_mut_ptr(), count.min(2048));
    let got = real::outcome(got)?;
    send_all(to, stream, &piece[..got], how)
}
