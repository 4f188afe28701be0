//! Sockets return to the state before listen(2) or connect(2).
//!
//! connect(2) to an address of the family `AF_UNSPEC` dissolves a connection ([`connection`]): its
//! peer sees a reset, and its numbers are a kernel's socket again, which may connect anew.
//!
//! The kernel stops a listener at shutdown(2) for reading, and at connect(2) to an address of the
//! family `AF_UNSPEC`. [`follow`] asks the kernel whether it did: the listener's second queue ends
//! then, and its numbers are the kernel's alone. listen(2) makes a new listener of them.

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use libc::c_int;
use slipway_socket::{Endpoint, Errno, option};

use crate::epoll;
use crate::fds::{self, DescriptorKind, Ref};
use crate::halves::{
    RECEIVE_BUFFER, RECEIVE_LOW_WATER, RECEIVE_TIMEOUT, SEND_BUFFER, SEND_TIMEOUT,
};
use crate::listener::Listener;
use crate::real::{self, sys};
use crate::select::timeval_of;
use crate::switches::{SWITCHES, switch_of};

/// Ends the second queue of the listener `fd`, which has `object`, if the kernel's socket listens
/// no more. Leaves errno as it is.
pub fn follow(fd: c_int, object: &Ref) {
    let DescriptorKind::Listener(listener) = object.kind() else { return };
    // A thread that still has the object of a listener that was stopped: the kernel's socket has
    // the program's own flags again, and may be another listener by now.
    if listener.has_ended.load(Ordering::Relaxed) {
        return;
    }
    let saved = real::errno();
    if real::option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(0) && !fds::in_vfork_child()
    {
        stop(fd, object, listener);
    }
    real::set_errno(saved);
}

fn stop(fd: c_int, before: &Ref, listener: &Listener) {
    listener.end();
    if !listener.nonblock.load(Ordering::Relaxed) {
        // A listener with two queues is non-blocking, whatever the program set.
        let flags = sys!(SYS_fcntl, fd, libc::F_GETFL, 0) as c_int;
        sys!(SYS_fcntl, fd, libc::F_SETFL, flags & !libc::O_NONBLOCK);
    }
    let sets = std::mem::take(&mut *before.sets.hold());
    let after = (!sets.is_empty()).then(|| fds::make(DescriptorKind::Plain));
    replace(before, after.as_ref(), |_| {});
    for (set, number) in sets {
        if let Some(after) = &after {
            epoll::stopped_listening(set, number, listener, after);
        }
    }
}

/// Dissolves the connection `fd`, which has `before`, for all that hold it. The socket that takes
/// its place in this process has the options of the connection, and the port of a connection that
/// was bound before connect(2). Leaves errno as it is. Returns 0, which is the call's result.
///
/// # Errors
/// The errors of socket(2). `EOPNOTSUPP` in a child of vfork(2), which shares the parent's table.
pub fn connection(fd: c_int, before: &Ref) -> Result<usize, Errno> {
    let stream = before.stream().ok_or(Errno::NOTSOCK)?;
    if fds::in_vfork_child() {
        return Err(Errno::OPNOTSUPP);
    }
    let saved = real::errno();
    let (socket, is_new) = match &stream.bound {
        Some(kept) => (kept.as_raw_fd(), false),
        None => (new_socket(stream.domain)?, true),
    };
    hand_back(&stream.endpoint, socket);
    stream.endpoint.abort();
    stream.endpoint.wake(real::borrowed(fd));
    let sets = std::mem::take(&mut *before.sets.hold());
    // While the numbers are still the eventfd's: the kernel's sets know it by number and file.
    let take_out = |(set, number)| Some((set, number, epoll::take_out(set, number, before)?));
    let waiting: Vec<_> = sets.into_iter().filter_map(take_out).collect();
    let after = (!waiting.is_empty()).then(|| fds::make(DescriptorKind::Plain));
    replace(before, after.as_ref(), |number| {
        let cloexec = sys!(SYS_fcntl, number, libc::F_GETFD, 0) as c_int & libc::FD_CLOEXEC != 0;
        sys!(SYS_dup3, socket, number, if cloexec { libc::O_CLOEXEC } else { 0 });
    });
    for (set, number, interest) in waiting {
        if let Some(after) = &after {
            epoll::put_back(set, number, interest, after);
        }
    }
    if is_new {
        real::close(socket);
    }
    real::set_errno(saved);
    Ok(0)
}

fn new_socket(domain: c_int) -> Result<c_int, Errno> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    real::outcome(sys!(SYS_socket, domain, kind, 0)).map(|fd| fd as c_int)
}

/// Sets the options of a connection on the kernel's socket that takes its place: the reverse of
/// [`taken`](crate::taken). One that the kernel refuses stays as it is there.
fn hand_back(endpoint: &Endpoint, socket: c_int) {
    for (level, name, _) in SWITCHES {
        if let Some(bit) = switch_of(level, name) {
            set(socket, level, name, &c_int::from(endpoint.has(bit)));
        }
    }
    let of_socket = libc::SOL_SOCKET;
    for (name, half) in [(libc::SO_RCVTIMEO, RECEIVE_TIMEOUT), (libc::SO_SNDTIMEO, SEND_TIMEOUT)] {
        set(socket, of_socket, name, &timeval_of(half.get(endpoint) * 1_000_000));
    }
    // The kernel doubles the size that is set of a buffer.
    for (name, size) in [
        (libc::SO_RCVBUF, RECEIVE_BUFFER.get(endpoint) / 2),
        (libc::SO_SNDBUF, SEND_BUFFER.get(endpoint) / 2),
        (libc::SO_RCVLOWAT, RECEIVE_LOW_WATER.get(endpoint)),
    ] {
        if size > 0 {
            set(socket, of_socket, name, &(size as c_int));
        }
    }
    let l_onoff = c_int::from(endpoint.has(option::ABORT));
    set(socket, of_socket, libc::SO_LINGER, &libc::linger { l_onoff, l_linger: 0 });
    let status = if endpoint.has(option::NONBLOCK) { libc::O_NONBLOCK } else { 0 };
    sys!(SYS_fcntl, socket, libc::F_SETFL, status);
}

fn set<T>(socket: c_int, level: c_int, name: c_int, value: &T) {
    let (at, length) = (std::ptr::from_ref(value), size_of::<T>());
    sys!(SYS_setsockopt, socket, level, name, at, length);
}

/// Makes each number of `before` one of `after`, or the kernel's alone. Calls `first` with each.
fn replace(before: &Ref, after: Option<&Ref>, first: impl Fn(c_int)) {
    for (number, known) in fds::all(0, c_int::MAX - 1) {
        if std::ptr::eq(known.object(), before.object()) {
            first(number);
            match after {
                Some(after) => fds::put(number, after),
                None => fds::remove(number),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fds::make;

    // The numbers of this test are beyond those that a test program has open.
    #[test]
    fn all_numbers_of_an_object_are_replaced_and_no_others() {
        let first = 720_000;
        let (before, other, after) =
            (make(DescriptorKind::Plain), make(DescriptorKind::Plain), make(DescriptorKind::Plain));
        fds::put(first, &before);
        fds::put(first + 1, &other);
        fds::put(first + 2, &before);
        replace(&before, Some(&after), |fd| assert_ne!(fd, first + 1));
        let is = |fd: c_int, object: &Ref| {
            fds::get(fd).is_some_and(|its| std::ptr::eq(its.object(), object.object()))
        };
        assert!(is(first, &after) && is(first + 1, &other) && is(first + 2, &after));
        replace(&after, None, |_| {});
        assert!(!fds::is_known(first) && is(first + 1, &other) && !fds::is_known(first + 2));
        fds::remove(first + 1);
    }
}
