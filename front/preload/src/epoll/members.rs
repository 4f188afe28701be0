//! The members of a set: what is counted and listed of them is kept in step with them here.

use std::ptr;

use libc::c_int;
use slipway_socket::Deadline;

use super::{Inner, Interest, Item};
use crate::fds::Object;

impl Item {
    /// Makes a member of which nothing was reported yet. It has its turn since `turn`.
    fn new(interest: Interest, object: Option<&'static Object>, now: u64, turn: u64) -> Self {
        Self {
            interest,
            object,
            active: object.is_some(),
            spent: false,
            busy: now,
            turn,
            found: 0,
            // Nothing was reported yet, so the present state is an edge.
            marks: (u64::MAX, u64::MAX),
            reported: 0,
        }
    }
}

impl Inner {
    /// Puts a member at the number `at`, in place of the one that is there. A connection, which is
    /// passed as `ours`, is active at first.
    pub(super) fn put(&mut self, at: usize, interest: Interest, ours: Option<&'static Object>) {
        if self.items.len() <= at {
            self.items.resize_with(at + 1, || None);
        }
        let before = self.items[at].take();
        let was = before.as_ref();
        let (address, now) = (ours.map(ptr::from_ref), Deadline::now());
        let same = was.filter(|item| item.object.map(ptr::from_ref) == address);
        let turn = same.map_or(now, |item| item.turn);
        self.items[at] = Some(Item::new(interest, ours, now, turn));
        self.spent -= usize::from(was.is_some_and(|item| item.spent));
        self.count += usize::from(was.is_none());
        let fd = at as c_int;
        if ours.is_some() {
            self.enlist(fd, was);
        }
        if same.is_none() {
            self.change_peer(was.and_then(|item| item.object), ours);
        }
        self.want_times(fd);
    }

    /// Adds a connection to the lists in which the member `was` at its number is not yet.
    fn enlist(&mut self, fd: c_int, was: Option<&Item>) {
        if !was.is_some_and(|item| item.active) {
            self.active.reserve(self.count);
            self.found.reserve(self.count);
            self.active.push_back(fd);
        }
        if was.is_none_or(|item| item.object.is_none()) {
            self.ours.push(fd);
        }
    }

    /// Replaces the connection `left` among the peers by `joined`.
    fn change_peer(&mut self, left: Option<&'static Object>, joined: Option<&'static Object>) {
        if let Some(stream) = left.and_then(Object::stream) {
            self.peers.leave(&stream.endpoint);
        }
        if let Some(stream) = joined.and_then(Object::stream) {
            self.peers.join(&stream.endpoint);
        }
    }

    /// Has the other side of `fd`, which joined the set, note the times by which the set is
    /// ordered. A connection that is alone needs no order, so its time is wanted when the second
    /// one joins.
    fn want_times(&self, fd: c_int) {
        let want = |fd: &c_int| {
            if let Some(stream) = self.object(*fd).and_then(Object::stream) {
                stream.endpoint.want_times();
            }
        };
        match self.ours.len() {
            0 | 1 => {}
            2 => self.ours.iter().for_each(want),
            _ => want(&fd),
        }
    }

    /// Takes the member with the number `fd` out. Returns `None` if there is none.
    pub(super) fn take(&mut self, fd: c_int) -> Option<Item> {
        let item = self.items.get_mut(usize::try_from(fd).ok()?)?.take()?;
        self.count -= 1;
        self.spent -= usize::from(item.spent);
        self.active.retain(|one| *one != fd);
        if let Some(at) = self.ours.iter().position(|one| *one == fd) {
            self.ours.swap_remove(at);
        }
        self.change_peer(item.object, None);
        Some(item)
    }
}
