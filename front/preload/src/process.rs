//! fork(2): the child belongs to the same family, and gets its own connection to the engine.
#![allow(unsafe_code)] // locks are taken in one handler of a fork, and released in another

use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_socket::{Family, forget_thread};

use crate::fds::{self, DescriptorKind};
use crate::session::FAMILY;
use crate::{epoll, numbers};
use slipway_socket::lock::Lock;

/// The results of `prepare`. One thread at a time forks.
static PREPARED: Lock<Prepared> =
    Lock::new(Prepared { connection: None, locked: epoll::Locked::none() });

struct Prepared {
    /// The child's connection to the engine.
    connection: Option<OwnedFd>,
    /// The objects whose locks this thread has.
    locked: epoll::Locked,
}

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
        let connection = family.fork().ok();
        // Also for a child that gets no connection: it closes its copies of the streams as well.
        fds::streams_of_all(slipway_socket::Endpoint::hold);
        connection
    });
    PREPARED.take();
    // Before the others: a walk takes some of these for objects whose last reference it drops.
    fds::WALKS.take();
    FAMILY.take();
    // SAFETY: the lock was taken just above.
    if let Some(family) = unsafe { FAMILY.peek() } {
        family.hold();
    }
    fds::FREE.take();
    numbers::ACTIONS.take();
    let locked = epoll::hold_all();
    // SAFETY: the lock was taken above. A `Held` guard would release it when this function
    // ends.
    *unsafe { PREPARED.peek() } = Prepared { connection, locked };
}

fn release() -> Option<OwnedFd> {
    let nothing = Prepared { connection: None, locked: epoll::Locked::none() };
    // SAFETY: `prepare` took the lock.
    let Prepared { connection, locked } = std::mem::replace(unsafe { PREPARED.peek() }, nothing);
    locked.release();
    numbers::ACTIONS.release();
    fds::FREE.release();
    // SAFETY: `prepare` took the lock.
    if let Some(family) = unsafe { FAMILY.peek() } {
        family.release();
    }
    FAMILY.release();
    fds::WALKS.release();
    PREPARED.release();
    // Only now: the drop of an object's last reference takes some of these locks.
    drop(locked);
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
