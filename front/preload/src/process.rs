//! fork(2): the child belongs to the same family, and gets its own connection to the engine.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_socket::{Family, forget_thread};

use crate::fds::{self, DescriptorKind};
use crate::session::FAMILY;
use slipway_socket::lock::Lock;

/// The child's connection to the engine, made by the forking thread.
static PREPARED: Lock<Option<OwnedFd>> = Lock::new(None);

/// Installs the fork handlers. Called once, when there is a family.
pub fn begin() {
    // SAFETY: functions that live as long as the library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

fn current() -> Option<Arc<Family>> {
    FAMILY.hold().clone()
}

extern "C" fn prepare() {
    let connection = current().filter(|family| !family.is_dead()).and_then(|family| {
        let connection = family.fork().ok()?;
        fds::streams_of_all(slipway_socket::Endpoint::hold);
        Some(connection)
    });
    PREPARED.take();
    // SAFETY: the lock was taken just above; a `Held` guard would release it at the end of this
    // function.
    *unsafe { PREPARED.peek() } = connection;
    FAMILY.take();
    // SAFETY: the lock was taken just above.
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
    // SAFETY: `prepare` took the lock.
    if let Some(family) = unsafe { FAMILY.peek() } {
        family.release();
    }
    FAMILY.release();
    // SAFETY: `prepare` took the lock.
    let connection = unsafe { PREPARED.peek() }.take();
    PREPARED.release();
    connection
}

extern "C" fn parent() {
    // The child has its own copy of the connection.
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
        if let DescriptorKind::Epoll(set) = object.kind() {
            set.forked();
        }
    }
}
