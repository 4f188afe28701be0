//! The listeners of this guest that the machine knows.

use std::collections::HashMap;

use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::function::LISTENERS;

use crate::address::is_meant;

/// The network namespaces of the listeners, by address.
#[derive(Default)]
pub struct Listeners(HashMap<Address, Vec<u32>>);

/// The result of [`Listeners::add`].
pub enum Added {
    /// The machine is to learn of the address.
    First,
    /// The machine knows the address: another namespace has a listener there.
    Another,
    /// The machine takes no more addresses. The listener was not added.
    TooMany,
}

impl Listeners {
    /// Adds a listener of a network namespace.
    pub fn add(&mut self, namespace: u32, at: Address) -> Added {
        let count = self.0.len();
        match self.0.get_mut(&at) {
            Some(namespaces) => {
                namespaces.push(namespace);
                Added::Another
            }
            None if count < LISTENERS => {
                self.0.insert(at, vec![namespace]);
                Added::First
            }
            None => Added::TooMany,
        }
    }

    /// Removes a listener of a network namespace. Returns whether it was the last one at its
    /// address.
    pub fn remove(&mut self, namespace: u32, at: &Address) -> bool {
        let Some(namespaces) = self.0.get_mut(at) else { return false };
        if let Some(own) = namespaces.iter().position(|own| *own == namespace) {
            namespaces.swap_remove(own);
        }
        let is_last = namespaces.is_empty();
        if is_last {
            self.0.remove(at);
        }
        is_last
    }

    /// Returns the network namespace of a listener at `to`. One at exactly that address goes before
    /// one at all addresses.
    pub fn namespace_at(&self, to: &Address) -> Option<u32> {
        let exact = self.0.get(to);
        let mut others = self.0.iter();
        let meant = || others.find(|(at, _)| is_meant(at, false, to)).map(|(_, all)| all);
        exact.or_else(meant)?.first().copied()
    }

    /// Returns whether there is no listener.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_announced_once_and_withdrawn_after_its_last_listener() {
        let mut listeners = Listeners::default();
        let at = Address::v4([10, 9, 0, 1], 80);
        assert!(matches!(listeners.add(1, at), Added::First));
        assert!(matches!(listeners.add(2, at), Added::Another));
        assert_eq!(listeners.namespace_at(&at), Some(1));
        assert!(!listeners.remove(1, &at));
        assert_eq!(listeners.namespace_at(&at), Some(2));
        assert!(listeners.remove(2, &at) && listeners.is_empty());
        assert!(!listeners.remove(2, &at), "no listener was left");
        assert_eq!(listeners.namespace_at(&at), None);
    }

    #[test]
    fn the_machine_learns_of_a_limited_number_of_addresses() {
        let mut listeners = Listeners::default();
        for number in 0..LISTENERS {
            let at = Address::v4([10, 9, (number >> 8) as u8, number as u8], 80);
            assert!(matches!(listeners.add(1, at), Added::First));
        }
        let one_more = Address::v4([10, 8, 0, 1], 80);
        assert!(matches!(listeners.add(1, one_more), Added::TooMany));
    }
}
