//! Sockets return to the state before listen(2).
//!
//! The kernel stops a listener at shutdown(2) for reading, and at connect(2) to an address of the
//! family `AF_UNSPEC`. [`follow`] asks the kernel whether it did: the listener's second queue ends
//! then, and its numbers are the kernel's alone. listen(2) makes a new listener of them.

use std::sync::atomic::Ordering;

use libc::c_int;

use crate::epoll;
use crate::fds::{self, DescriptorKind, Ref};
use crate::listener::Listener;
use crate::real::{self, sys};

/// Ends the second queue of the listener `fd`, which has `object`, if the kernel's socket listens
/// no more. Leaves errno as it is.
pub fn follow(fd: c_int, object: &Ref) {
    let DescriptorKind::Listener(listener) = object.kind() else { return };
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
    replace(before, after.as_ref());
    for (set, number) in sets {
        if let Some(after) = &after {
            epoll::stopped_listening(set, number, listener, after);
        }
    }
}

/// Makes each number of `before` one of `after`, or the kernel's alone.
fn replace(before: &Ref, after: Option<&Ref>) {
    for (number, known) in fds::all(0, c_int::MAX - 1) {
        if std::ptr::eq(known.object(), before.object()) {
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
        replace(&before, Some(&after));
        let is = |fd: c_int, object: &Ref| {
            fds::get(fd).is_some_and(|its| std::ptr::eq(its.object(), object.object()))
        };
        assert!(is(first, &after) && is(first + 1, &other) && is(first + 2, &after));
        replace(&after, None);
        assert!(!fds::is_known(first) && is(first + 1, &other) && !fds::is_known(first + 2));
        fds::remove(first + 1);
    }
}
