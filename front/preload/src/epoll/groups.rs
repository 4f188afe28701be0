//! Members of a set that share an eventfd: one of them is in the kernel's set, for all.

use std::collections::HashMap;

use libc::c_int;

/// What they have in common ([`slipway_socket::Endpoint::group`]).
pub type Key = (usize, u32);

/// By what they have in common: members, of which the first is in the kernel's set.
#[derive(Default)]
pub struct Groups(HashMap<Key, Vec<c_int>>);

impl Groups {
    /// Whether one of them is in the kernel's set.
    pub fn is_watched(&self, key: Key) -> bool {
        self.0.contains_key(&key)
    }

    pub fn join(&mut self, key: Key, fd: c_int) {
        let members = self.0.entry(key).or_default();
        if !members.contains(&fd) {
            members.push(fd);
        }
    }

    /// `fd` leaves. If it was the one in the kernel's set: who comes after it, if anybody does.
    pub fn leave(&mut self, key: Key, fd: c_int) -> Option<Option<c_int>> {
        let members = self.0.get_mut(&key)?;
        let at = members.iter().position(|member| *member == fd)?;
        members.remove(at);
        let next = members.first().copied();
        if next.is_none() {
            self.0.remove(&key);
        }
        (at == 0).then_some(next)
    }

    /// All of them.
    pub fn members(&self, key: Key) -> &[c_int] {
        self.0.get(&key).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_in_the_kernels_set_for_all() {
        let (mut groups, key) = (Groups::default(), (1, 2));
        assert!(!groups.is_watched(key));
        for fd in [5, 6, 7, 6] {
            groups.join(key, fd);
            assert!(groups.is_watched(key));
        }
        assert_eq!(groups.members(key), [5, 6, 7]);
        assert_eq!(groups.leave(key, 9), None);
        assert_eq!(groups.leave(key, 6), None);
        assert_eq!(groups.leave(key, 5), Some(Some(7)));
        assert_eq!(groups.leave(key, 7), Some(None));
        assert!(!groups.is_watched(key) && groups.members(key).is_empty());
    }
}
