//! The table of this process's descriptors that are ours, by number.

mod objects;
mod table;

use std::sync::atomic::{AtomicU32, Ordering};

use libc::c_int;
use slipway_socket::Endpoint;
use slipway_socket::hidden::NUMBERS;
use slipway_socket::lock::Lock;

pub use objects::{DescriptorKind, FREE, Object, Ref, Stream, make};
use table::Table;

static TABLE: Table<NUMBERS> = Table::empty();
/// The number of the walks of [`streams_of_all`] so far. Held for each walk, which leaves its
/// number in the objects that it meets, and while this process forks.
pub static WALKS: Lock<u32> = Lock::new(0);
/// The id of the process that the table describes. A child of vfork(2) has another id and the same
/// memory.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns whether `fd` is in the table.
#[inline]
pub fn is_known(fd: c_int) -> bool {
    TABLE.is_known(fd)
}

/// Returns the object of `fd`, or `None` if `fd` is not ours.
#[inline]
pub fn get(fd: c_int) -> Option<Ref> {
    TABLE.get(fd)
}

/// Returns the object of `fd`, or `None` if `fd` is no connection of ours.
#[inline]
pub fn stream(fd: c_int) -> Option<Ref> {
    get(fd).filter(|object| object.stream().is_some())
}

/// Puts `object` into the table at `fd`, and releases the object that was there before.
pub fn put(fd: c_int, object: &Ref) {
    if OWNER.load(Ordering::Relaxed) == 0 {
        own();
    }
    if let Some(closed) = TABLE.put(fd, object) {
        crate::epoll::forget(&closed);
    }
}

/// Removes `fd` from the table, just before or after it is closed.
pub fn remove(fd: c_int) {
    if let Some(closed) = TABLE.remove(fd) {
        crate::epoll::forget(&closed);
    }
}

/// Makes this process the owner of the table.
pub fn own() {
    OWNER.store(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(), Ordering::Relaxed);
}

/// Returns the id of the process that owns the table, or 0 before there is one.
pub fn owner() -> u32 {
    OWNER.load(Ordering::Relaxed)
}

/// Returns whether this process is a child of vfork(2), which shares the memory and the table of
/// its parent.
pub fn in_vfork_child() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

/// Returns the numbers in the table from `first` to `last`, with their objects.
pub fn all(first: c_int, last: c_int) -> impl Iterator<Item = (c_int, Ref)> {
    TABLE.all(first, last)
}

/// Sets reference counts right in the child of a fork, where the parent's other threads and their
/// calls do not exist.
pub fn recount() {
    TABLE.recount();
}

/// Calls `each` once for each connection of the living family, however many numbers it has, and
/// however many threads do so at once.
pub fn streams_of_all(mut each: impl FnMut(&Endpoint)) {
    let mut walks = WALKS.hold();
    *walks = walks.wrapping_add(1);
    for (_, object) in all(0, c_int::MAX - 1) {
        if let Some(stream) = object.stream()
            && object.is_first_in(*walks)
            && !stream.endpoint.family().is_dead()
        {
            each(&stream.endpoint);
        }
    }
}
