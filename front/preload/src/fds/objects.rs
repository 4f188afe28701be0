//! The objects that descriptors stand for.
//!
//! An object is kept while a number or a call refers to it. An object's memory is never freed, only
//! reused. So a call that lost a race against close(2) still reads a valid object, though perhaps a
//! different one, and the table shows which.
#![allow(unsafe_code)] // an object's kind changes while nobody refers to the object

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use libc::c_int;
use slipway_socket::Endpoint;
use slipway_socket::hidden::Hidden;
use slipway_socket::lock::Lock;

use crate::epoll::Set;
use crate::listener::Listener;

/// The kind of a descriptor.
pub enum DescriptorKind {
    /// A connection.
    Stream(Stream),
    /// A kernel listener that also has a queue at the engine.
    Listener(Listener),
    /// A kernel epoll set with something of ours in it.
    Epoll(Set),
    /// A kernel TCP socket that waits in epoll sets and may become ours.
    Plain,
    /// The kind of a free object.
    Nothing,
}

pub struct Stream {
    pub endpoint: Endpoint,
    /// `AF_INET` or `AF_INET6`: the format of addresses.
    pub domain: c_int,
    /// The kernel's socket, if the program had bound it before connect(2). It keeps the port, which
    /// the kernel could otherwise give to another socket.
    pub bound: Option<Hidden>,
    /// Set when a non-blocking send found too little room: an edge-triggered poller then needs an
    /// event as soon as there is room.
    pub blocked: AtomicBool,
    /// Addresses where the connection reported after this one will read and write. They are only
    /// prefetched, never dereferenced.
    pub reads_next: AtomicPtr<u8>,
    pub writes_next: AtomicPtr<u8>,
}

impl Stream {
    pub fn new(endpoint: Endpoint, domain: c_int) -> Self {
        let (bound, reads_next, writes_next) = Default::default();
        Self { endpoint, domain, bound, blocked: false.into(), reads_next, writes_next }
    }
}

pub struct Object {
    /// The number of calls and descriptor numbers that refer to the object; 0: the object is free.
    refs: AtomicU32,
    /// The number of descriptor numbers that refer to the object.
    numbers: AtomicU32,
    kind: UnsafeCell<DescriptorKind>,
    /// The last walk over the table that met the object, see [`super::WALKS`].
    round: AtomicU32,
    /// The epoll sets that contain the object: (number of the set, number of the object in the
    /// set).
    pub sets: Lock<Vec<(c_int, c_int)>>,
}

// SAFETY: the kind changes only while nobody refers to the object.
unsafe impl Sync for Object {}

/// Objects without references, for reuse. Held while this process forks, and for each change of the
/// table: the table does not change during a fork.
pub static FREE: Lock<Vec<Free>> = Lock::new(Vec::new());

pub struct Free(*const Object);
// SAFETY: an object may be used by any thread.
unsafe impl Send for Free {}

/// A reference to an object.
pub struct Ref(&'static Object);

impl Object {
    fn free() -> Self {
        Self {
            refs: AtomicU32::new(0),
            numbers: AtomicU32::new(0),
            kind: UnsafeCell::new(DescriptorKind::Nothing),
            round: AtomicU32::new(0),
            sets: Lock::new(Vec::new()),
        }
    }

    /// Returns the object's kind. The caller holds a reference, or has the object in an epoll set,
    /// which the object leaves before its last reference goes.
    pub fn kind(&self) -> &DescriptorKind {
        // SAFETY: the kind does not change while there is a reference.
        unsafe { &*self.kind.get() }
    }

    /// Marks the object as met in walk `round`. Returns whether this was the first time.
    pub(super) fn is_first_in(&self, round: u32) -> bool {
        self.round.swap(round, Ordering::Relaxed) != round
    }

    #[inline]
    pub fn stream(&self) -> Option<&Stream> {
        if let DescriptorKind::Stream(stream) = self.kind() { Some(stream) } else { None }
    }

    /// Takes a reference. Returns `None` if the object is free, or another thread took or dropped a
    /// reference at the same time.
    #[inline]
    pub(super) fn try_hold(&'static self) -> Option<Ref> {
        let refs = self.refs.load(Ordering::Relaxed);
        let taken = refs != 0
            && self
                .refs
                .compare_exchange(refs, refs + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        taken.then(|| Ref(self))
    }

    /// Returns the object at `at`, or `None` if `at` is null.
    ///
    /// # Safety
    /// `at` is null or the address of an object that [`make`] returned.
    #[inline]
    pub(super) unsafe fn at(at: *mut Object) -> Option<&'static Object> {
        // SAFETY: objects are never freed.
        unsafe { at.as_ref() }
    }

    /// Counts one more number of the object. A reference of the caller's becomes the number's.
    pub(super) fn add_number(&self) {
        self.numbers.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes over the reference of a number that stands for the object no more. Returns it, and
    /// whether this was the last number.
    pub(super) fn remove_number(&'static self) -> (Ref, bool) {
        let held = Ref(self);
        let is_last = self.numbers.fetch_sub(1, Ordering::AcqRel) == 1;
        (held, is_last)
    }

    /// Sets the count of references to those of the numbers and `more`. Only the one thread of a
    /// fork's child may do so.
    pub(super) fn recount(&self, more: u32) {
        self.refs.store(self.numbers.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }
}

impl Ref {
    /// Returns the object itself.
    pub fn object(&self) -> &'static Object {
        self.0
    }
}

impl Deref for Ref {
    type Target = Object;

    fn deref(&self) -> &Object {
        self.0
    }
}

impl Clone for Ref {
    fn clone(&self) -> Self {
        self.0.refs.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl Drop for Ref {
    #[inline]
    fn drop(&mut self) {
        if self.0.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            retire(self.0);
        }
    }
}

#[cold]
fn retire(object: &'static Object) {
    // SAFETY: nobody refers to the object, and nobody will before it is in the list of free ones.
    let kind = unsafe { std::mem::replace(&mut *object.kind.get(), DescriptorKind::Nothing) };
    match &kind {
        DescriptorKind::Stream(stream) => stream.endpoint.close(),
        DescriptorKind::Listener(listener) => listener.end(),
        _ => {}
    }
    drop(kind);
    FREE.hold().push(Free(object));
}

/// Makes an object that has no number yet.
pub fn make(kind: DescriptorKind) -> Ref {
    let free = FREE.hold().pop();
    let object: &'static Object = match free {
        // SAFETY: objects are never freed.
        Some(Free(object)) => unsafe { &*object },
        None => Box::leak(Box::new(Object::free())),
    };
    begin(object, kind)
}

/// Begins to use a free object, which nobody refers to.
fn begin(object: &'static Object, kind: DescriptorKind) -> Ref {
    // SAFETY: nobody refers to the object yet.
    unsafe { *object.kind.get() = kind };
    object.sets.hold().clear();
    object.numbers.store(0, Ordering::Relaxed);
    object.refs.store(1, Ordering::Release);
    Ref(object)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes an object that no other test had before, so that none of their calls still looks at
    /// its count of references.
    pub(in super::super) fn fresh() -> Ref {
        begin(Box::leak(Box::new(Object::free())), DescriptorKind::Plain)
    }

    pub(in super::super) fn refs(object: &Object) -> u32 {
        object.refs.load(Ordering::Relaxed)
    }

    #[test]
    fn a_free_object_cannot_be_held() {
        let object: &'static Object = Box::leak(Box::new(Object::free()));
        assert!(object.try_hold().is_none());
        let made = begin(object, DescriptorKind::Plain);
        let second = object.try_hold();
        assert!(second.is_some());
        assert_eq!(refs(object), 2);
        drop(made);
        assert!(object.try_hold().is_some(), "a call still has it");
        drop(second);
    }

    #[test]
    fn an_object_is_met_once_in_each_walk() {
        let made = fresh();
        assert!(made.is_first_in(u32::MAX));
        assert!(!made.is_first_in(u32::MAX));
        assert!(made.is_first_in(u32::MAX - 1));
    }

    #[test]
    fn an_object_that_is_reused_is_in_no_set_and_has_no_number() {
        let object = Box::leak(Box::new(Object::free()));
        object.sets.hold().push((3, 4));
        object.add_number();
        let made = begin(object, DescriptorKind::Epoll(Set::new()));
        assert!(made.sets.hold().is_empty());
        assert_eq!(made.numbers.load(Ordering::Relaxed), 0);
        assert!(matches!(made.kind(), DescriptorKind::Epoll(_)) && made.stream().is_none());
    }

    #[test]
    fn references_are_counted_anew_from_the_numbers() {
        let made = fresh();
        // Two numbers, and a call of a thread that a fork's child does not have.
        std::mem::forget((made.clone(), made.clone(), made.clone()));
        made.add_number();
        made.add_number();
        assert_eq!(refs(&made), 4);
        made.recount(1);
        assert_eq!(refs(&made), 3);
        assert!(!made.object().remove_number().1);
        assert!(made.object().remove_number().1);
        assert_eq!(refs(&made), 1);
    }
}
