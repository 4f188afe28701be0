//! The locks of epoll sets and of their members, across fork(2).
//!
//! The child of a fork has one thread. A lock that another thread of the parent had taken would
//! stay taken in the child for ever, and what it protects would be half changed.

use std::ptr;

use libc::c_int;

use crate::fds::{self, DescriptorKind, Object, Ref};

/// The objects whose locks [`hold_all`] took.
pub struct Locked(Vec<Ref>);

/// Takes the locks of all objects in the table before fork(2), so that no thread is in the middle
/// of changing an epoll set or the list of sets that contain an object.
///
/// The caller has taken [`fds::FREE`], which keeps the table as it is, and other locks of this
/// library. So a thread that has an object's lock must not wait for any other lock.
pub fn hold_all() -> Locked {
    let mut all: Vec<Ref> = fds::all(0, c_int::MAX - 1).map(|(_, object)| object).collect();
    // An object with several numbers has its locks taken once.
    all.sort_unstable_by_key(address);
    all.dedup_by_key(|object| address(object));
    for object in &all {
        object.sets.take();
        if let DescriptorKind::Epoll(set) = object.kind() {
            set.inner.take();
        }
    }
    Locked(all)
}

fn address(object: &Ref) -> *const Object {
    ptr::from_ref(object.object())
}

impl Locked {
    /// Returns the value before any fork.
    pub const fn none() -> Self {
        Self(Vec::new())
    }

    /// Releases the locks after fork(2), in the parent or in the child.
    ///
    /// The caller drops the value after it has released its own locks: the drop of an object's last
    /// reference takes [`fds::FREE`] and the family's locks.
    pub fn release(&self) {
        for object in &self.0 {
            if let DescriptorKind::Epoll(set) = object.kind() {
                set.inner.release();
            }
            object.sets.release();
        }
    }
}
