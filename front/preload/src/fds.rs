//! Which descriptors are ours.
//!
//! A table by number holds what each one is. An object is kept while a number or a call refers to it; its
//! memory is never given back, only used again, so that a call which lost a race against close(2) looks at an
//! object, if perhaps at another one, and sees that by the table.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use libc::c_int;
use slipway_socket::Endpoint;
use slipway_socket::hidden::NUMBERS;

use crate::epoll::Set;
use crate::open::Listener;
use slipway_socket::lock::Lock;

/// What a descriptor is.
pub enum Kind {
    /// A connection.
    Stream(Stream),
    /// A kernel's listener that also has a queue of the engine's.
    Listener(Listener),
    /// A kernel's epoll with something of ours in it.
    Epoll(Set),
    /// A kernel's TCP socket that waits in sets of epoll and may become ours.
    Plain,
    /// Nothing.
    Nothing,
}

pub struct Stream {
    pub endpoint: Endpoint,
    /// `AF_INET` or `AF_INET6`: how addresses are written.
    pub domain: c_int,
    /// A non-blocking send found too little room: who waits for an edge wants to know.
    pub blocked: std::sync::atomic::AtomicBool,
    /// Where the connection that was reported after this one will read and write: to be fetched, and nothing else.
    pub reads_next: AtomicPtr<u8>,
    pub writes_next: AtomicPtr<u8>,
}

impl Stream {
    pub fn new(endpoint: Endpoint, domain: c_int) -> Self {
        let (reads_next, writes_next) = Default::default();
        Self { endpoint, domain, blocked: false.into(), reads_next, writes_next }
    }
}

pub struct Object {
    /// Calls and numbers that refer to it; 0: it is free.
    refs: AtomicU32,
    /// Numbers that refer to it.
    numbers: AtomicU32,
    kind: UnsafeCell<Kind>,
    /// The last round that it was in, see [`next_round`].
    round: AtomicU32,
    /// The sets of epoll that it is in: (number of the set, number it has there).
    pub sets: Lock<Vec<(c_int, c_int)>>,
}

// SAFETY: the kind changes only while nobody refers to the object.
unsafe impl Sync for Object {}

static TABLE: [AtomicPtr<Object>; NUMBERS] = [const { AtomicPtr::new(ptr::null_mut()) }; NUMBERS];
/// Objects that nobody refers to.
pub static FREE: Lock<Vec<Free>> = Lock::new(Vec::new());
/// One more than the highest number that ever was in the table.
static HIGHEST: AtomicI32 = AtomicI32::new(0);
/// The process that the table is of: a child of vfork(2) is another one with the same memory.
static OWNER: AtomicU32 = AtomicU32::new(0);

pub struct Free(*const Object);
// SAFETY: an object may be used by any thread.
unsafe impl Send for Free {}

/// A reference to an object.
pub struct Ref(&'static Object);

impl Object {
    /// What it is. For who has a reference, or has it in a set that it leaves before the last one goes.
    pub fn kind(&self) -> &Kind {
        // SAFETY: it does not change while there is a reference.
        unsafe { &*self.kind.get() }
    }

    /// Whether it has not been in that round yet; now it has.
    pub fn is_first_in(&self, round: u32) -> bool {
        self.round.swap(round, Ordering::Relaxed) != round
    }

    #[inline]
    pub fn stream(&self) -> Option<&Stream> {
        if let Kind::Stream(stream) = self.kind() { Some(stream) } else { None }
    }
}

impl Ref {
    /// The object itself.
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
    // SAFETY: nobody refers to it, and nobody will before it is in the list of free ones.
    let kind = unsafe { std::mem::replace(&mut *object.kind.get(), Kind::Nothing) };
    match &kind {
        Kind::Stream(stream) => stream.endpoint.close(),
        Kind::Listener(listener) => listener.end(),
        _ => {}
    }
    drop(kind);
    FREE.hold().push(Free(object));
}

fn slot(fd: c_int) -> Option<&'static AtomicPtr<Object>> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// Whether `fd` is in the table at all.
#[inline]
pub fn is_known(fd: c_int) -> bool {
    slot(fd).is_some_and(|slot| !slot.load(Ordering::Relaxed).is_null())
}

/// The object that `fd` is, if it is ours.
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

/// The connection that `fd` is.
#[inline]
pub fn stream(fd: c_int) -> Option<Ref> {
    get(fd).filter(|object| object.stream().is_some())
}

/// A new object, in no table yet.
pub fn make(kind: Kind) -> Ref {
    let free = FREE.hold().pop();
    let object: &'static Object = match free {
        // SAFETY: objects are never freed.
        Some(Free(object)) => unsafe { &*object },
        None => Box::leak(Box::new(Object {
            refs: AtomicU32::new(0),
            numbers: AtomicU32::new(0),
            kind: UnsafeCell::new(Kind::Nothing),
            round: AtomicU32::new(0),
            sets: Lock::new(Vec::new()),
        })),
    };
    // SAFETY: nobody refers to it.
    unsafe { *object.kind.get() = kind };
    object.sets.hold().clear();
    object.numbers.store(0, Ordering::Relaxed);
    object.refs.store(1, Ordering::Release);
    Ref(object)
}

/// `fd` is `object` from now on. What it was is let go.
pub fn put(fd: c_int, object: &Ref) {
    let Some(slot) = slot(fd) else { return };
    if OWNER.load(Ordering::Relaxed) == 0 {
        own();
    }
    let held = object.clone();
    held.0.numbers.fetch_add(1, Ordering::Relaxed);
    HIGHEST.fetch_max(fd + 1, Ordering::Relaxed);
    let before = slot.swap(ptr::from_ref(held.0).cast_mut(), Ordering::AcqRel);
    std::mem::forget(held);
    let_go(before);
}

/// `fd` is nothing of ours any more: just before, or after, it is closed.
pub fn remove(fd: c_int) {
    if let Some(slot) = slot(fd) {
        let_go(slot.swap(ptr::null_mut(), Ordering::AcqRel));
    }
}

fn let_go(object: *mut Object) {
    // SAFETY: objects are never freed.
    let Some(object) = (unsafe { object.as_ref::<'static>() }) else { return };
    // The reference that the number had.
    let held = Ref(object);
    if object.numbers.fetch_sub(1, Ordering::AcqRel) == 1 {
        crate::epoll::forget(&held);
    }
}

/// This process is the one whose descriptors the table has.
pub fn own() {
    OWNER.store(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(), Ordering::Relaxed);
}

/// That process.
pub fn owner() -> u32 {
    OWNER.load(Ordering::Relaxed)
}

/// Whether this process shares its memory with the parent, whose table this is.
pub fn is_borrowed() -> bool {
    let owner = OWNER.load(Ordering::Relaxed);
    owner != 0 && owner != rustix::process::getpid().as_raw_nonzero().get().unsigned_abs()
}

/// Every number in the table from `first` to `last`, with its object.
pub fn all(first: c_int, last: c_int) -> impl Iterator<Item = (c_int, Ref)> {
    let end = last.saturating_add(1).min(HIGHEST.load(Ordering::Relaxed));
    (first.max(0)..end).filter_map(|fd| get(fd).map(|object| (fd, object)))
}

/// A walk over the table that meets each object once.
pub fn next_round() -> u32 {
    static ROUND: AtomicU32 = AtomicU32::new(0);
    ROUND.fetch_add(1, Ordering::Relaxed) + 1
}

/// In the child of a fork: calls that other threads were in are not in here.
pub fn recount() {
    for (_, object) in all(0, c_int::MAX - 1) {
        // One for each number, and `object`.
        let numbers = object.numbers.load(Ordering::Relaxed);
        object.refs.store(numbers + 1, Ordering::Relaxed);
    }
}
