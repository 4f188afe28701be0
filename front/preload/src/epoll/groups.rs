//! Groups of connections in a set that share an eventfd. One member is in the kernel's set, for
//! all.

use std::collections::HashMap;

use libc::c_int;

/// The key of a group ([`slipway_socket::Endpoint::group`]).
pub type Key = (usize, u32);

struct Group {
    key: Key,
    /// The members' descriptors. The first one is in the kernel's set.
    members: Vec<c_int>,
}

/// All groups of a set. Each has a number of its own, since a descriptor may be reused by the time
/// that the kernel reports an event with it.
#[derive(Default)]
pub struct Groups {
    all: Vec<Option<Group>>,
    by_key: HashMap<Key, usize>,
}

impl Groups {
    /// Returns the group's number, if one of its members is in the kernel's set.
    pub fn find(&self, key: Key) -> Option<usize> {
        self.by_key.get(&key).copied()
    }

    /// Returns the number that the next group will have.
    pub fn next(&self) -> usize {
        self.all.iter().position(Option::is_none).unwrap_or(self.all.len())
    }

    /// Begins a group with `fd`, which is in the kernel's set.
    pub fn begin(&mut self, key: Key, fd: c_int) {
        let (at, group) = (self.next(), Some(Group { key, members: vec![fd] }));
        if at == self.all.len() {
            self.all.push(group);
        } else {
            self.all[at] = group;
        }
        self.by_key.insert(key, at);
    }

    pub fn join(&mut self, at: usize, fd: c_int) {
        if let Some(Some(group)) = self.all.get_mut(at)
            && !group.members.contains(&fd)
        {
            group.members.push(fd);
        }
    }

    /// Takes `fd` out of its group. If `fd` was the member in the kernel's set, returns the group's
    /// number and the next member, if there is one.
    pub fn leave(&mut self, key: Key, fd: c_int) -> Option<(usize, Option<c_int>)> {
        let number = self.find(key)?;
        let group = self.all.get_mut(number)?.as_mut()?;
        let at = group.members.iter().position(|member| *member == fd)?;
        group.members.remove(at);
        let next = group.members.first().copied();
        if next.is_none() {
            self.by_key.remove(&group.key);
            self.all[number] = None;
        }
        (at == 0).then_some((number, next))
    }

    /// Returns the descriptors of all members of a group.
    pub fn members(&self, at: usize) -> &[c_int] {
        self.all.get(at).and_then(Option::as_ref).map_or(&[], |group| &group.members)
    }

    /// Returns all groups: number, key, and the member in the kernel's set.
    pub fn watched(&self) -> impl Iterator<Item = (usize, Key, c_int)> + '_ {
        let all = self.all.iter().enumerate();
        all.filter_map(|(at, group)| {
            let Group { key, members } = group.as_ref()?;
            Some((at, *key, *members.first()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_in_the_kernels_set_for_all() {
        let (mut groups, key, other) = (Groups::default(), (1, 2), (1, 3));
        assert_eq!((groups.find(key), groups.watched().next(), groups.next()), (None, None, 0));
        groups.begin(key, 5);
        groups.begin(other, 8);
        for fd in [6, 7, 6] {
            groups.join(0, fd);
        }
        assert_eq!((groups.find(key), groups.find(other)), (Some(0), Some(1)));
        assert_eq!(
            (groups.members(0), groups.watched().next()),
            (&[5, 6, 7][..], Some((0, key, 5)))
        );
        assert_eq!(groups.leave(key, 9), None);
        assert_eq!(groups.leave(key, 6), None);
        assert_eq!(groups.leave(key, 5), Some((0, Some(7))));
        assert_eq!(groups.leave(key, 7), Some((0, None)));
        assert!(groups.find(key).is_none() && groups.members(0).is_empty());
        assert_eq!((groups.next(), groups.watched().next()), (0, Some((1, other, 8))));
    }
}
