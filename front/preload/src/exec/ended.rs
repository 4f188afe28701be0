//! Connections that end with execve(2), since the next program will not have the library, or cannot
//! be given them.
//!
//! Each descriptor is replaced by a socket whose other end is closed: it reads end-of-file, and
//! writes fail with `EPIPE`. A call that fails must restore the connection, so a copy of the
//! original descriptor is kept at a high number, or at a low one if the program's limit is below
//! the high ones. Where there is no copy, since no number is left
//! for it or since [`MOST`] connections have one, the descriptor is marked to be closed by
//! execve(2).

use libc::c_int;

use super::streams::Streams;
use crate::real::{self, sys};

/// The most connections that are replaced by a socket. Their copies' numbers are on the stack.
const MOST: usize = 512;

/// Connections that were ended, so that a failed call can restore them.
pub struct Ended {
    streams: Streams,
    /// The copies of the first descriptors of `streams`, in the same order.
    copies: [Option<c_int>; MOST],
}

impl Ended {
    /// Ends `streams`. Copies get numbers from `first_copy` on, if any of these is left.
    pub fn new(streams: Streams, first_copy: c_int) -> Self {
        let mut copies = [None; MOST];
        let socket = if streams.is_empty() { None } else { hung_up() };
        let mut places = copies.iter_mut();
        // The lowest are first, and so standard input and output get a socket before others do.
        for fd in streams.iter() {
            let copy = places.next().zip(socket).and_then(|(place, socket)| {
                *place = replace(fd, socket, first_copy);
                *place
            });
            if copy.is_none() {
                mark(fd, libc::FD_CLOEXEC);
            }
        }
        socket.into_iter().for_each(|socket| _ = real::close(socket));
        Self { streams, copies }
    }

    /// Restores the connections after the call failed.
    pub fn take_back(self) {
        let copies = self.copies.into_iter().chain(std::iter::repeat(None));
        for (fd, copy) in self.streams.iter().zip(copies) {
            match copy {
                Some(copy) => {
                    sys!(SYS_dup3, copy, fd, 0);
                    real::close(copy);
                }
                None => mark(fd, 0),
            }
        }
    }
}

/// Makes a socket whose other end is closed. Returns `None` if no descriptors are left.
fn hung_up() -> Option<c_int> {
    let mut pair = [-1 as c_int; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    if sys!(SYS_socketpair, libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) < 0 {
        return None;
    }
    let [socket, other] = pair;
    real::close(other);
    Some(socket)
}

/// Puts `socket` in the place of `fd`. Returns a copy of `fd` as it was before, with a number from
/// `first_copy` on, or another one if none of these is left. Returns `None` if no number is left
/// for the copy; `fd` is unchanged then.
fn replace(fd: c_int, socket: c_int, first_copy: c_int) -> Option<c_int> {
    let copy_from = |first: c_int| sys!(SYS_fcntl, fd, libc::F_DUPFD_CLOEXEC, first) as c_int;
    let copy = [first_copy, 0].into_iter().map(copy_from).find(|copy| *copy >= 0)?;
    if sys!(SYS_dup3, socket, fd, 0) < 0 {
        real::close(copy);
        return None;
    }
    Some(copy)
}

/// Sets the flags of a descriptor.
fn mark(fd: c_int, flags: c_int) {
    sys!(SYS_fcntl, fd, libc::F_SETFD, flags);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eventfd(count: u32) -> c_int {
        let fd = sys!(SYS_eventfd2, count, libc::EFD_NONBLOCK) as c_int;
        assert!(fd >= 0);
        fd
    }

    /// Returns the result of read(2) with room for 8 bytes.
    fn read(fd: c_int) -> libc::c_long {
        let mut bytes = [0u8; 8];
        sys!(SYS_read, fd, bytes.as_mut_ptr(), bytes.len())
    }

    fn flags(fd: c_int) -> c_int {
        sys!(SYS_fcntl, fd, libc::F_GETFD, 0) as c_int
    }

    #[test]
    fn connections_read_as_ended_until_the_call_fails() {
        let fds = [eventfd(1), eventfd(2)];
        let mut streams = Streams::default();
        fds.into_iter().for_each(|fd| streams.insert(fd));
        let ended = Ended::new(streams, 0);
        for fd in fds {
            assert_eq!((read(fd), flags(fd)), (0, 0), "the end, also after execve(2)");
        }
        let copies: Vec<_> = ended.copies.iter().flatten().copied().collect();
        assert_eq!(copies.len(), 2);
        assert!(copies.iter().all(|copy| flags(*copy) == libc::FD_CLOEXEC));
        ended.take_back();
        for fd in fds {
            assert_eq!((read(fd), flags(fd)), (8, 0), "it is the eventfd again");
            real::close(fd);
        }
    }

    #[test]
    fn without_connections_nothing_is_opened() {
        let ended = Ended::new(Streams::default(), 0);
        assert!(ended.copies.iter().all(Option::is_none));
        ended.take_back();
    }
}
