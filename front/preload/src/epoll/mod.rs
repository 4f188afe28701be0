//! epoll(7) with our descriptors and the kernel's in one set.
//!
//! The program's set stays a kernel set. A connection of ours is in it by its eventfd,
//! edge-triggered, with a datum that only this library uses: the set's tag and the descriptor. The
//! events and the datum that the program asked for are stored here.
//!
//! Each connection in a set is *active* or *armed*. epoll_wait(2) examines the active ones itself,
//! without a system call. Before it sleeps it arms them, which makes the other side raise the
//! eventfd. A raised eventfd makes its connection active again, or all connections that share it:
//! of those, only one is in the kernel's set. An edge is one of: bytes arrived; a send that found
//! no room would now find some; an event bit is set that was not set in the last report.
//!
//! # Order
//! The other side notes when it writes into an empty FIFO of a member (`Endpoint::since`), and
//! epoll_wait(2) reports members in the order of these times. So what came on one connection before
//! something else came on another is reported before it, as by the kernel. A member that was
//! reported with bytes that the program did not read comes after all that came before that report.
//! epoll_wait(2) reports nothing that came after it began to look, since it may have looked at the
//! members with earlier bytes before they came; if there is nothing else, it looks at the other
//! members once more. Nor does it report something unless it knows of the armed members that were
//! raised before: if a program has raised an eventfd since the last look, it looks at the armed
//! members, too, or asks the kernel if there are many.
//!
//! The kernel does not tell when its own descriptors became ready. Those that became ready together
//! with connections of ours keep their place if this thread slept; otherwise they come after what
//! came before the kernel was last asked, and before the rest. The kernel is asked once in a few
//! microseconds.
//!
//! # Speed
//! With thousands of active connections two things decide how fast they are. A connection's data
//! has left the processor's caches when its turn comes, so it is prefetched some turns ahead. And
//! raising an eventfd costs more than a message of a few KiB, so a connection that is not ready
//! stays active for as long as the other side may need to get round to it.

mod active;
mod control;
mod forking;
mod groups;
mod kernels;
mod members;
mod peers;
mod ready;
mod wait;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

use libc::c_int;
use slipway_socket::Spin;
use slipway_socket::lock::Lock;

use crate::fds::Object;
use groups::Groups;
use peers::Peers;
use ready::Found;

pub use control::{
    became_listener, became_ours, carry_out, forget, put_back, stopped_listening, take_out, touch,
};
pub use forking::{Locked, hold_all};
pub use wait::{Waited, room_for, wait};

const EDGE: u32 = libc::EPOLLET as u32;
const ONCE: u32 = libc::EPOLLONESHOT as u32;
/// The flags among the bits of an interest: the others are events.
const FLAGS: u32 = EDGE | ONCE | EXCLUSIVE | libc::EPOLLWAKEUP as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
const IN: u32 = libc::EPOLLIN as u32;
const OUT: u32 = libc::EPOLLOUT as u32;
/// Events for bytes that have arrived, or an end.
const READ: u32 = IN | libc::EPOLLRDNORM as u32;
/// Events for room to send.
const WRITE: u32 = OUT | libc::EPOLLWRNORM as u32;
/// The number, in a datum, that stands for the engine's connection.
const ENGINE: u32 = u32::MAX;
/// Added to a group's number in a datum; descriptors are lower.
const GROUP: u32 = 1 << 30;
/// Added, in a datum, to the number of a listener whose second queue has a connection.
const QUEUE: u32 = 1 << 29;

/// A program's wish for a descriptor in a set, by epoll_ctl(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// Event bits and flags (`EPOLLIN`, `EPOLLET`).
    pub events: u32,
    /// The program's own value, which comes back with each event.
    pub datum: u64,
}

impl Interest {
    /// Returns whether epoll_ctl(2) refuses this interest of a descriptor with `before` for its
    /// flag `EPOLLEXCLUSIVE`: an exclusive one has no other events than these, and does not change.
    fn is_refused(self, how: c_int, before: Option<Self>) -> bool {
        let changes = how == libc::EPOLL_CTL_MOD;
        let was_exclusive = before.is_some_and(|before| before.events & EXCLUSIVE != 0);
        let may_be = IN | OUT | ALWAYS | FLAGS & !ONCE;
        let is_exclusive = self.events & EXCLUSIVE != 0;
        is_exclusive && (changes || self.events & !may_be != 0) || changes && was_exclusive
    }
}

/// A descriptor in a set.
struct Item {
    interest: Interest,
    /// The connection, or `None` for a kernel descriptor, which may become ours.
    object: Option<&'static Object>,
    active: bool,
    /// `EPOLLONESHOT` was reported and not re-armed.
    spent: bool,
    /// The time when it was last ready, or became active.
    busy: u64,
    /// The time of the last report, or of the moment when it came into the set if there was none.
    last_report: u64,
    /// The time of the last look that found events.
    found: u64,
    /// The stream's marks at the last report.
    marks: (u64, u64),
    reported: u32,
}

#[derive(Default)]
struct Inner {
    items: Vec<Option<Item>>,
    groups: Groups,
    active: std::collections::VecDeque<c_int>,
    /// All connections of ours in the set.
    ours: Vec<c_int>,
    /// The programs at the other ends of `ours`.
    peers: Peers,
    /// The number of connections in the set that are `spent`.
    spent: usize,
    /// The active connections with events, as the last look found them.
    found: Found,
    /// The active descriptors that are to be armed. Empty between two passes.
    quiet: Vec<c_int>,
    /// The time when the kernel's set was last polled. Whatever was raised before is active.
    looked: u64,
    count: usize,
}

impl Inner {
    /// Returns the object that has the number `fd` in the set.
    fn object(&self, fd: c_int) -> Option<&'static Object> {
        self.items.get(usize::try_from(fd).ok()?)?.as_ref()?.object
    }

    /// Returns the number of a group, and the descriptor that stands for it in the kernel's set, if
    /// that descriptor still belongs to the group.
    fn watched(&self) -> Option<(usize, c_int)> {
        let has_it = |key, fd| {
            let stream = self.object(fd).and_then(Object::stream);
            stream.and_then(|stream| stream.endpoint.group()) == Some(key)
        };
        self.groups.watched().find_map(|(at, key, fd)| has_it(key, fd).then_some((at, fd)))
    }
}

/// This process's state for a kernel epoll set.
pub struct Set {
    inner: Lock<Inner>,
    tag: u32,
    spin: Spin,
    /// The descriptor of the engine's connection in the kernel's set; 0: none.
    engine: AtomicI32,
    /// The kernel's set belongs to the process that this one was forked from.
    is_inherited: AtomicBool,
    /// The number of threads that sleep on the kernel's set, or are about to: each counts itself
    /// before it arms the connections.
    sleepers: AtomicU32,
}

/// Returns a tag that no datum of a program begins with by chance: the tag resembles neither an
/// address nor a small number.
fn tag() -> u32 {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let count = SEED.fetch_add(1, Ordering::Relaxed) as u32;
    (u32::from_ne_bytes(bytes) ^ count) & 0x3fff_ffff | 0x8000_0000
}

impl Set {
    pub fn new() -> Self {
        let inner = Lock::new(Inner::default());
        let (engine, is_inherited, sleepers) = Default::default();
        Self { inner, tag: tag(), spin: Spin::default(), engine, is_inherited, sleepers }
    }

    fn datum(&self, number: u32) -> u64 {
        u64::from(self.tag) << 32 | u64::from(number)
    }

    /// Forgets the engine's connection in the child of a fork, which has another one.
    pub fn forked(&self) {
        self.engine.store(0, Ordering::Relaxed);
        self.is_inherited.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_interest_has_few_events_and_stays() {
        let (add, change) = (libc::EPOLL_CTL_ADD, libc::EPOLL_CTL_MOD);
        let of = |events| Interest { events, datum: 0 };
        let exclusive = of(IN | EXCLUSIVE);
        assert!(!exclusive.is_refused(add, None));
        assert!(!of(IN | OUT | EDGE | ALWAYS | EXCLUSIVE).is_refused(add, None));
        for refused in [ONCE, libc::EPOLLRDHUP as u32, libc::EPOLLRDNORM as u32] {
            assert!(of(IN | EXCLUSIVE | refused).is_refused(add, None));
            assert!(!of(IN | refused).is_refused(add, None));
        }
        assert!(exclusive.is_refused(change, Some(of(IN))));
        assert!(of(IN).is_refused(change, Some(exclusive)));
        assert!(!of(OUT | ONCE).is_refused(change, Some(of(IN))));
    }
}
