//! The members of an epoll set, and the lists and counters that depend on them.
//!
//! [`Inner`] (`mod.rs`, whose head explains active and armed members, and their order) has a table
//! of members by descriptor number. Beside it are the connections of ours (`ours`), those that are
//! active (`active`), the programs at their other ends (`peers`), and the counts of all members and
//! of spent ones. The methods of this file add, replace and remove members, and update all of these
//! together.

use std::ptr;

use libc::c_int;
use slipway_socket::Deadline;

use super::{Inner, Interest, Item};
use crate::fds::Object;

impl Item {
    /// Makes a member whose events are not reported yet. `last_report` is the time that decides
    /// where it comes in the order of reports: the last report of the same connection, or `now`.
    fn new(
        interest: Interest,
        object: Option<&'static Object>,
        now: u64,
        last_report: u64,
    ) -> Self {
        Self {
            interest,
            object,
            active: object.is_some(),
            spent: false,
            busy: now,
            last_report,
            found: 0,
            // Nothing was reported yet, so the present state is an edge.
            marks: (u64::MAX, u64::MAX),
            reported: 0,
        }
    }
}

impl Inner {
    /// Adds a member with the descriptor number `at`, or replaces the one with that number. `ours`
    /// is the connection if the descriptor is one of ours, which is active at first; `None` stands
    /// for a descriptor of the kernel's.
    pub(super) fn put(&mut self, at: usize, interest: Interest, ours: Option<&'static Object>) {
        if self.items.len() <= at {
            self.items.resize_with(at + 1, || None);
        }
        let before = self.items[at].take();
        let was = before.as_ref();
        let (address, now) = (ours.map(ptr::from_ref), Deadline::now());
        let same = was.filter(|item| item.object.map(ptr::from_ref) == address);
        let last_report = same.map_or(now, |item| item.last_report);
        self.items[at] = Some(Item::new(interest, ours, now, last_report));
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

    /// Adds the connection `fd` to the lists of active members and of connections. `was` is the
    /// former member with this number: a list in which it was has the number already.
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

    /// Updates the list of peers after the connection `left` has left the set and `joined` has come
    /// into it.
    fn change_peer(&mut self, left: Option<&'static Object>, joined: Option<&'static Object>) {
        if let Some(stream) = left.and_then(Object::stream) {
            self.peers.leave(&stream.endpoint);
        }
        if let Some(stream) = joined.and_then(Object::stream) {
            self.peers.join(&stream.endpoint);
        }
    }

    /// Asks the other side of the new connection `fd` to note when it writes into an empty FIFO
    /// (`Endpoint::since`): reports are in the order of these times. One connection alone needs no
    /// order, so the first one is asked when the second one joins.
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

    /// Removes the member with the number `fd` and returns it. Returns `None` if there is none.
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

#[cfg(test)]
mod tests {
    use super::super::active::{activate, activate_all, activate_raised};
    use super::super::{EDGE, GROUP, IN, ONCE};
    use super::*;
    use crate::fds::{DescriptorKind, Ref, make};

    fn interest(datum: u64) -> Interest {
        Interest { events: IN | EDGE, datum }
    }

    /// Makes an object that can be a member like a connection, and never has events.
    fn quiet() -> Ref {
        make(DescriptorKind::Plain)
    }

    fn active(inner: &Inner) -> Vec<c_int> {
        inner.active.iter().copied().collect()
    }

    #[test]
    fn the_kernels_descriptors_are_members_and_never_active() {
        let mut inner = Inner::default();
        inner.put(5, interest(1), None);
        inner.put(5, interest(2), None);
        assert_eq!((inner.count, inner.items.len()), (1, 6));
        activate_all(&mut inner);
        assert!(inner.active.is_empty() && inner.ours.is_empty());
        assert_eq!(inner.take(5).map(|item| item.interest), Some(interest(2)));
        assert!(inner.take(5).is_none());
        assert_eq!(inner.count, 0);
    }

    #[test]
    fn numbers_that_are_no_members_are_none() {
        let mut inner = Inner::default();
        for fd in [-1, 0, c_int::MIN, c_int::MAX] {
            assert!(inner.take(fd).is_none() && inner.object(fd).is_none());
            activate(&mut inner, fd);
        }
        activate_raised(&mut inner, 7);
        activate_raised(&mut inner, GROUP | 7);
        assert!(inner.active.is_empty() && inner.watched().is_none());
    }

    #[test]
    fn a_connection_is_active_once_and_leaves_all_lists() {
        let (object, mut inner) = (quiet(), Inner::default());
        inner.put(3, interest(1), Some(object.object()));
        inner.put(3, interest(2), Some(object.object()));
        activate(&mut inner, 3);
        assert_eq!((active(&inner), inner.ours.as_slice(), inner.count), (vec![3], &[3][..], 1));
        assert!(inner.object(3).is_some_and(|its| ptr::eq(its, object.object())));
        assert_eq!(inner.take(3).map(|item| item.interest.datum), Some(2));
        assert!(inner.active.is_empty() && inner.ours.is_empty() && inner.object(3).is_none());
    }

    #[test]
    fn a_number_that_stands_for_another_object_counts_as_reported_now() {
        let (first, second, mut inner) = (quiet(), quiet(), Inner::default());
        let last_report = |inner: &Inner| inner.items[3].as_ref().map(|item| item.last_report);
        inner.put(3, interest(1), Some(first.object()));
        inner.items[3].as_mut().unwrap().last_report = 1;
        inner.put(3, interest(1), Some(first.object()));
        assert_eq!(last_report(&inner), Some(1), "it stays itself");
        inner.put(3, interest(1), Some(second.object()));
        assert!(last_report(&inner) > Some(1));
        assert_eq!((active(&inner), inner.ours.as_slice()), (vec![3], &[3][..]));
    }

    #[test]
    fn a_socket_that_becomes_ours_joins_the_lists() {
        let (object, mut inner) = (quiet(), Inner::default());
        inner.put(3, interest(1), None);
        inner.put(4, interest(1), None);
        inner.put(3, interest(1), Some(object.object()));
        assert_eq!((active(&inner), inner.ours.as_slice(), inner.count), (vec![3], &[3][..], 2));
    }

    #[test]
    fn a_spent_member_counts_until_it_is_armed_again_or_leaves() {
        let (object, mut inner) = (quiet(), Inner::default());
        let once = Interest { events: IN | ONCE, datum: 0 };
        for again in [true, false] {
            inner.put(3, once, Some(object.object()));
            inner.items[3].as_mut().unwrap().spent = true;
            inner.spent += 1;
            if again {
                inner.put(3, once, Some(object.object()));
                assert_eq!(inner.items[3].as_ref().map(|item| item.spent), Some(false));
            } else {
                _ = inner.take(3);
            }
            assert_eq!(inner.spent, 0);
        }
    }

    #[test]
    fn a_raised_eventfd_makes_its_whole_group_active() {
        let (objects, mut inner) = ([quiet(), quiet(), quiet()], Inner::default());
        for (fd, object) in objects.iter().enumerate() {
            inner.put(fd, interest(0), Some(object.object()));
        }
        inner.groups.begin((1, 1), 2);
        inner.groups.join(0, 0);
        inner.active.clear();
        inner.items.iter_mut().flatten().for_each(|item| item.active = false);
        activate_raised(&mut inner, GROUP);
        assert_eq!(active(&inner), [2, 0]);
        activate_raised(&mut inner, 1);
        activate_raised(&mut inner, GROUP);
        assert_eq!(active(&inner), [2, 0, 1], "in the order in which they were raised");
    }
}
