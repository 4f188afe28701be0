//! The table of our descriptors, by number.
//!
//! An object is kept while a number or a call refers to it. An object's memory is never freed, only
//! reused. So a call that lost a race against close(2) still reads a valid object, though perhaps a
//! different one, and the table shows which.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use libc::c_int;
use slipway_socket::Endpoint;
use slipway_socket::hidden::{Hidden, NUMBERS};

use crate::epoll::Set;
use crate::listener::Listener;
use slipway_socket::lock::Lock;

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
    pub blocked: std::sync::atomic::AtomicBool,
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
    /// The last walk over the table that met the object, see [`WALKS`].
    round: AtomicU32,
    /// The epoll sets that contain the object: (number of the set, number of the object in the
    /// set).
    pub sets: Lock<Vec<(c_int, c_int)>>,
}

// SAFETY: the kind changes only while nobody refers to the object.
unsafe impl Sync for Object {}

static TABLE: [AtomicPtr<Object>; NUMBERS] = [const { AtomicPtr::new(ptr::null_mut()) }; NUMBERS];
/// Objects without references, for reuse. Held while this process forks, and for each change of the
/// table: the table does not change during a fork.
pub static FREE: Lock<Vec<Free>> = Lock::new(Vec::new());
/// The number of the walks of [`streams_of_all`] so far. Held for each walk, which leaves its
/// number in the objects that it meets, and while this process forks.
pub static WALKS: Lock<u32> = Lock::new(0);
/// One more than the highest number that was ever in the table.
static HIGHEST: AtomicI32 = AtomicI32::new(0);
/// The id of the process that the table describes. A child of vfork(2) has another id and the same
/// memory.
static OWNER: AtomicU32 = AtomicU32::new(0);

pub struct Free(*const Object);
// SAFETY: an object may be used by any thread.
unsafe impl Send for Free {}

/// A reference to an object.
pub struct Ref(&'static Object);

impl Object {
    /// Returns the object's kind. The caller holds a reference, or has the object in an epoll set,
    /// which the object leaves before its last reference goes.
    pub fn kind(&self) -> &DescriptorKind {
        // SAFETY: the kind does not change while there is a reference.
        unsafe { &*self.kind.get() }
    }

    /// Marks the object as met in walk `round`. Returns whether this was the first time.
    fn is_first_in(&self, round: u32) -> bool {
        self.round.swap(round, Ordering::Relaxed) != round
    }

    #[inline]
    pub fn stream(&self) -> Option<&Stream> {
        if let DescriptorKind::Stream(stream) = self.kind() { Some(stream) } else { None }
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

fn slot(fd: c_int) -> Option<&'static AtomicPtr<Object>> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// Returns whether `fd` is in the table.
#[inline]
pub fn is_known(fd: c_int) -> bool {
    slot(fd).is_some_and(|slot| !slot.load(Ordering::Relaxed).is_null())
}

/// Returns the object of `fd`, or `None` if `fd` is not ours.
#[inline]
pub fn get(fd: c_int) -> Option<Ref> {
    let slot = slot(fd)?;
    let found = slot.load(Ordering::Relaxed);
    if found.is_null() { None } else { get_slowly(slot) }
}

fn get_slowly(slot: &AtomicPtr<Object>) -> Option<Ref> {
    loop {
        let found = slot.load(Ordering::Acquire);
        // SAFETY: objects are never freed.
        let object: &'static Object = unsafe { found.as_ref()? };
        let refs = object.refs.load(Ordering::Relaxed);
        let taken = refs != 0
            && object
                .refs
                .compare_exchange(refs, refs + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if taken {
            let held = Ref(object);
            if slot.load(Ordering::Acquire) == found {
                return Some(held);
            }
        }
    }
}

/// Returns the object of `fd`, or `None` if `fd` is no connection of ours.
#[inline]
pub fn stream(fd: c_int) -> Option<Ref> {
    get(fd).filter(|object| object.stream().is_some())
}

/// Makes an object that has no number yet.
pub fn make(kind: DescriptorKind) -> Ref {
    let free = FREE.hold().pop();
    let object: &'static Object = match free {
        // SAFETY: objects are never freed.
        Some(Free(object)) => unsafe { &*object },
        None => Box::leak(Box::new(Object {
            refs: AtomicU32::new(0),
            numbers: AtomicU32::new(0),
            kind: UnsafeCell::new(DescriptorKind::Nothing),
            round: AtomicU32::new(0),
            sets: Lock::new(Vec::new()),
        })),
    };
    // SAFETY: nobody refers to the object yet.
    unsafe { *object.kind.get() = kind };
    object.sets.hold().clear();
    object.numbers.store(0, Ordering::Relaxed);
    object.refs.store(1, Ordering::Release);
    Ref(object)
}

/// Puts `object` into the table at `fd`, and releases the object that was there before.
pub fn put(fd: c_int, object: &Ref) {
    let Some(slot) = slot(fd) else { return };
    if OWNER.load(Ordering::Relaxed) == 0 {
        own();
    }
    let held = object.clone();
    let not_during_a_fork = FREE.hold();
    held.0.numbers.fetch_add(1, Ordering::Relaxed);
    HIGHEST.fetch_max(fd + 1, Ordering::Relaxed);
    let before = slot.swap(ptr::from_ref(held.0).cast_mut(), Ordering::AcqRel);
    drop(not_during_a_fork);
    std::mem::forget(held);
    let_go(before);
}

/// Removes `fd` from the table, just before or after it is closed.
pub fn remove(fd: c_int) {
    let Some(slot) = slot(fd) else { return };
    let not_during_a_fork = FREE.hold();
    let before = slot.swap(ptr::null_mut(), Ordering::AcqRel);
    drop(not_during_a_fork);
    let_go(before);
}

fn let_go(object: *mut Object) {
    // SAFETY: objects are never freed.
    let Some(object) = (unsafe { object.as_ref::<'static>() }) else { return };
    // The reference of the number itself.
    let held = Ref(object);
    if object.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
        crate::epoll::forget(&held);
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
    let end = last.saturating_add(1).min(HIGHEST.load(Ordering::Relaxed));
    (first.max(0)..end).filter_map(|fd| get(fd).map(|object| (fd, object)))
}

/// Sets reference counts right in the child of a fork, where the parent's other threads and their
/// calls do not exist.
pub fn recount() {
    for (_, object) in all(0, c_int::MAX - 1) {
        // One for each number, and one for `object`.
        let numbers = object.numbers.load(Ordering::Relaxed);
        object.refs.store(numbers + 1, Ordering::Relaxed);
    }
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
