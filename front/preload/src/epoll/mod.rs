//! epoll(7) with descriptors of both kinds in one set.
//!
//! The kernel's set stays the program's. A connection is in it as well, by its eventfd, edge-triggered, with a
//! datum that nobody else has: the set's tag and the descriptor. What it is asked for and how lies here.
//!
//! Each connection in a set is *active* or *armed*. epoll_wait(2) looks at the active ones itself, without a
//! system call; before it sleeps it arms them, which makes the other side raise the eventfd; an eventfd that was
//! raised makes its connection active again, or all that share it: then one of them is in the kernel's set for all.
//! An edge is: bytes arrived, a send that found no room would find some, or a bit that was not set when it was
//! reported last.
//!
//! With thousands of active ones two things decide how fast they are. What belongs to one has left the processor's
//! caches when its turn comes, so it is fetched some turns ahead. And an eventfd costs more than a message of a few
//! KiB, so who is not ready stays active for as long as the other side may need to get round to it.

mod active;
mod control;
mod groups;
mod wait;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use libc::c_int;
use slipway_socket::Spin;
use slipway_socket::lock::Lock;

use crate::fds::{self, Kind, Object};
use groups::Groups;

pub use control::{became_listener, became_ours, forget, touch};

const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
/// The number, in a datum, of the engine's connection.
const ENGINE: u32 = u32::MAX;
/// Added to a group's number in a datum; descriptors are lower.
const GROUP: u32 = 1 << 30;

/// What a set knows of a descriptor.
struct Item {
    events: u32,
    data: u64,
    /// None: the kernel's, which may become ours.
    object: Option<&'static Object>,
    active: bool,
    /// `EPOLLONESHOT` has shot.
    spent: bool,
    /// When it was ready, or became active.
    busy: u64,
    /// Marks and bits when it was reported last.
    marks: (u64, u64),
    reported: u32,
}

#[derive(Default)]
struct Inner {
    items: Vec<Option<Item>>,
    groups: Groups,
    active: std::collections::VecDeque<c_int>,
    /// Of those the ones to be armed: empty between two looks.
    quiet: Vec<c_int>,
    /// When the kernel's were looked at last.
    looked: u64,
    count: usize,
}

impl Inner {
    /// What has that number in the set.
    fn object(&self, fd: c_int) -> Option<&'static Object> {
        self.items.get(usize::try_from(fd).ok()?)?.as_ref()?.object
    }

    /// A group, and its one that is in the kernel's set by a number that it still has.
    fn watched(&self) -> Option<(usize, c_int)> {
        let has_it = |key, fd| {
            let stream = self.object(fd).and_then(Object::stream);
            stream.and_then(|stream| stream.endpoint.group()) == Some(key)
        };
        self.groups.watched().find_map(|(at, key, fd)| has_it(key, fd).then_some((at, fd)))
    }
}

/// What this process knows of a kernel's epoll.
pub struct Set {
    inner: Lock<Inner>,
    tag: u32,
    spin: Spin,
    /// The descriptor of the engine's connection that is in the kernel's set; 0: none.
    engine: AtomicI32,
    /// The kernel's set is that of the process that this one was forked from.
    is_inherited: AtomicBool,
    /// Threads that sleep on the kernel's set.
    sleepers: AtomicU32,
}

/// A tag that no datum of a program begins with by chance: neither an address nor a small number.
fn tag() -> u32 {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let count = SEED.fetch_add(1, Ordering::Relaxed) as u32;
    (u32::from_ne_bytes(bytes) ^ count) & 0x3fff_ffff | 0x8000_0000
}

impl Set {
    fn new() -> Self {
        let inner = Lock::new(Inner::default());
        let (engine, is_inherited, sleepers) = Default::default();
        Self { inner, tag: tag(), spin: Spin::default(), engine, is_inherited, sleepers }
    }

    fn datum(&self, number: u32) -> u64 {
        u64::from(self.tag) << 32 | u64::from(number)
    }

    /// In the child of a fork: the engine's connection is another one.
    pub fn forked(&self) {
        self.engine.store(0, Ordering::Relaxed);
        self.is_inherited.store(true, Ordering::Relaxed);
    }
}

/// Before fork(2): nobody else is in the middle of a set.
pub fn hold_all() {
    for (_, object) in fds::all(0, c_int::MAX - 1) {
        if let Kind::Epoll(set) = object.kind() {
            set.inner.take();
        }
    }
}

/// After it.
pub fn release_all() {
    for (_, object) in fds::all(0, c_int::MAX - 1) {
        if let Kind::Epoll(set) = object.kind() {
            set.inner.release();
        }
    }
}
