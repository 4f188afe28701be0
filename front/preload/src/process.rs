//! fork(2): the child is of the same family, with a connection to the engine of its own.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_socket::{Family, forget_thread};

use crate::fds::{self, Kind};
use crate::session::FAMILY;
use slipway_socket::lock::Lock;

/// What the forking thread prepared: the child's connection.
static PREPARED: Lock<Option<OwnedFd>> = Lock::new(None);

/// Once, when there is a family.
pub fn begin() {
    // SAFETY: functions that live as long as the library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

fn current() -> Option<Arc<Family>> {
    FAMILY.hold().clone()
}

/// Each connection of the living family once, whatever numbers it has: at the first of them.
pub fn streams_of_all(mut each: impl FnMut(&slipway_socket::Endpoint)) {
    let round = fds::next_round();
    for (_, object) in fds::all(0, i32::MAX - 1) {
        if let Some(stream) = object.stream()
            && object.is_first_in(round)
            && !stream.endpoint.family().is_dead()
        {
            each(&stream.endpoint);
        }
    }
}

extern "C" fn prepare() {
    let connection = current().filter(|family| !family.is_dead()).and_then(|family| {
        let connection = family.fork().ok()?;
        streams_of_all(slipway_socket::Endpoint::hold);
        Some(connection)
    });
    PREPARED.take();
    // SAFETY: taken just now; `Held` would release it at the end of this function.
    *unsafe { PREPARED.peek() } = connection;
    FAMILY.take();
    // SAFETY: taken just now.
    if let Some(family) = unsafe { FAMILY.peek() } {
        family.hold();
    }
    fds::FREE.take();
    crate::numbers::ACTIONS.take();
    crate::epoll::hold_all();
}

fn release() -> Option<OwnedFd> {
    crate::epoll::release_all();
    crate::numbers::ACTIONS.release();
    fds::FREE.release();
    // SAFETY: taken by `prepare`.
    if let Some(family) = unsafe { FAMILY.peek() } {
        family.release();
    }
    FAMILY.release();
    // SAFETY: taken by `prepare`.
    let connection = unsafe { PREPARED.peek() }.take();
    PREPARED.release();
    connection
}

extern "C" fn parent() {
    // The child has its own copy.
    drop(release());
}

extern "C" fn child() {
    forget_thread();
    slipway_peer::eventfd::forget();
    let connection = release();
    fds::own();
    fds::recount();
    crate::exec::forget_ticket();
    if let Some(family) = current() {
        family.forked(connection);
    }
    for (_, object) in fds::all(0, i32::MAX - 1) {
        if let Kind::Epoll(set) = object.kind() {
            set.forked();
        }
    }
}
