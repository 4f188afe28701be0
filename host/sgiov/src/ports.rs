//! The ports of the connections that begin in one network namespace.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;

use slipway_sgiov_spec::Address;

/// Ports for connections whose program asks for none: the kernel's own range
/// (`net.ipv4.ip_local_port_range`).
pub const PORTS: RangeInclusive<u16> = 32_768..=60_999;

/// The ports in use.
#[derive(Default)]
pub struct Ports {
    /// The source and destination of each connection.
    taken: HashSet<(Address, Address)>,
    /// The number of ports of [`PORTS`] that a source address has in use for a destination.
    counts: HashMap<([u8; 16], Address), u16>,
    /// The port at which the last search for a free port ended, from the first of [`PORTS`].
    last: u16,
}

impl Ports {
    /// Takes the port of `from` for a connection to `to`. Returns `false` if it is in use.
    pub fn take(&mut self, from: Address, to: Address) -> bool {
        let is_free = self.taken.insert((from, to));
        if is_free && PORTS.contains(&from.port) {
            *self.counts.entry((from.ip, to)).or_default() += 1;
        }
        is_free
    }

    /// Takes a free port of `ip` for a connection to `to`, and returns the address with it. Returns
    /// `None`, without a search, if all are in use.
    pub fn choose(&mut self, ip: [u8; 16], to: Address) -> Option<Address> {
        let count = PORTS.end() - PORTS.start() + 1;
        if self.counts.get(&(ip, to)).is_some_and(|taken| *taken >= count) {
            return None;
        }
        for _ in 0..count {
            self.last = (self.last + 1) % count;
            let from = Address { ip, port: PORTS.start() + self.last };
            if self.take(from, to) {
                return Some(from);
            }
        }
        None
    }

    /// Frees the port of a connection, if it is in use.
    pub fn release(&mut self, from: Address, to: Address) {
        if !self.taken.remove(&(from, to)) || !PORTS.contains(&from.port) {
            return;
        }
        if let Entry::Occupied(mut count) = self.counts.entry((from.ip, to)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: Address = Address::v4([10, 0, 0, 1], 80);
    const FROM: Address = Address::v4([10, 0, 0, 2], 0);

    #[test]
    fn every_port_is_given_once_and_again_when_it_is_free() {
        let mut ports = Ports::default();
        let chosen = Address { port: 40_000, ..FROM };
        assert!(ports.take(chosen, TO));
        assert!(!ports.take(chosen, TO));
        let all: HashSet<u16> =
            std::iter::from_fn(|| ports.choose(FROM.ip, TO)).map(|from| from.port).collect();
        assert_eq!(all.len(), PORTS.len() - 1);
        assert!(!all.contains(&40_000));
        ports.release(chosen, TO);
        ports.release(chosen, TO);
        assert_eq!(ports.choose(FROM.ip, TO), Some(chosen));
        assert_eq!(ports.choose(FROM.ip, TO), None);
        // Another destination has ports of its own.
        let other = Address { port: 81, ..TO };
        assert!(ports.choose(FROM.ip, other).is_some());
        assert!(ports.take(Address { port: 7, ..FROM }, TO));
    }

    #[test]
    fn all_ports_in_use_are_known_without_a_search() {
        let mut ports = Ports::default();
        ports.counts.insert((FROM.ip, TO), PORTS.len() as u16);
        assert_eq!(ports.choose(FROM.ip, TO), None);
        assert_eq!(ports.last, 0);
    }

    #[test]
    fn nothing_is_left_of_connections_that_ended() {
        let mut ports = Ports::default();
        let own = Address { port: 7, ..FROM };
        assert!(ports.take(own, TO));
        let some = [ports.choose(FROM.ip, TO).unwrap(), ports.choose(FROM.ip, TO).unwrap(), own];
        for from in some {
            ports.release(from, TO);
        }
        assert!(ports.taken.is_empty() && ports.counts.is_empty());
    }
}
