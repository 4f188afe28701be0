//! Invocations that wait for a replica: a bounded queue that no client can have for itself.
//!
//! Each client has a line of its own, and lines are served in turn. If the queue is full, a client
//! with a shorter line gets the place of the newest invocation in the longest one.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Instant;

/// The number of an invocation, unique in its server.
pub type Ticket = u64;

/// A client, as far as the server tells clients apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// Root of this host, by the server's own socket.
    Root,
    /// An IPv4 address, or the first 64 bits of an IPv6 address: one host has all of the rest.
    Address(IpAddr),
}

impl Client {
    /// Returns the client of a connection from `address`.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                Self::Address(Ipv6Addr::from_bits(network).into())
            }
            address => Self::Address(address),
        }
    }
}

/// The waiting invocations of one client, the oldest first. Never empty.
#[derive(Debug)]
struct Line {
    client: Client,
    waiting: VecDeque<(Ticket, Instant)>,
}

/// The waiting invocations of all clients.
#[derive(Debug)]
pub struct Queue {
    most: usize,
    /// The lines, in the order of their turns.
    lines: VecDeque<Line>,
}

impl Queue {
    /// Makes an empty queue for at most `most` invocations.
    pub fn new(most: usize) -> Self {
        Self { most, lines: VecDeque::new() }
    }

    /// Returns the number of waiting invocations.
    pub fn len(&self) -> usize {
        self.lines.iter().map(|line| line.waiting.len()).sum()
    }

    /// Enters an invocation. If the queue is full, returns the invocation that leaves it: the new
    /// one, or one of a client that has more of them.
    pub fn push(&mut self, client: Client, ticket: Ticket, now: Instant) -> Option<Ticket> {
        let own = self.lines.iter().find(|line| line.client == client);
        let own = own.map_or(0, |line| line.waiting.len());
        let mut left = None;
        if self.len() >= self.most {
            left = self.shorten(own + 1);
            if left.is_none() {
                return Some(ticket);
            }
        }
        match self.lines.iter_mut().find(|line| line.client == client) {
            Some(line) => line.waiting.push_back((ticket, now)),
            None => self.lines.push_back(Line { client, waiting: [(ticket, now)].into() }),
        }
        left
    }

    /// Takes the newest invocation of the longest line, if that has more than `above`, which is at
    /// least 1.
    fn shorten(&mut self, above: usize) -> Option<Ticket> {
        let longest = self.lines.iter_mut().max_by_key(|line| line.waiting.len())?;
        if longest.waiting.len() <= above {
            return None;
        }
        longest.waiting.pop_back().map(|(ticket, _)| ticket)
    }

    /// Takes the oldest invocation of the client whose turn it is.
    pub fn pop(&mut self) -> Option<Ticket> {
        let mut line = self.lines.pop_front()?;
        let first = line.waiting.pop_front();
        if !line.waiting.is_empty() {
            self.lines.push_back(line);
        }
        first.map(|(ticket, _)| ticket)
    }

    /// Removes an invocation, if it is in the queue.
    pub fn remove(&mut self, ticket: Ticket) {
        self.keep(|&(other, _)| other != ticket);
    }

    /// Takes the invocations that came at `until` or before.
    pub fn take_until(&mut self, until: Instant) -> Vec<Ticket> {
        let mut taken = Vec::new();
        self.keep(|&(ticket, since)| {
            let stays = since > until;
            if !stays {
                taken.push(ticket);
            }
            stays
        });
        taken
    }

    /// Takes all invocations.
    pub fn take_all(&mut self) -> Vec<Ticket> {
        let lines = std::mem::take(&mut self.lines);
        lines.into_iter().flat_map(|line| line.waiting).map(|(ticket, _)| ticket).collect()
    }

    /// Returns the time at which the oldest invocation came, or `None` if none waits.
    pub fn oldest(&self) -> Option<Instant> {
        self.lines.iter().filter_map(|line| line.waiting.front()).map(|(_, since)| *since).min()
    }

    fn keep(&mut self, mut keeps: impl FnMut(&(Ticket, Instant)) -> bool) {
        for line in &mut self.lines {
            line.waiting.retain(&mut keeps);
        }
        self.lines.retain(|line| !line.waiting.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn client(last: u8) -> Client {
        Client::of([10, 0, 0, last].into())
    }

    #[test]
    fn clients_take_turns() {
        let (mut queue, now) = (Queue::new(8), Instant::now());
        for (last, ticket) in [(1, 10), (1, 11), (1, 12), (2, 20), (3, 30)] {
            assert_eq!(queue.push(client(last), ticket, now), None);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [10, 20, 30, 11, 12]);
        assert_eq!((queue.len(), queue.oldest()), (0, None));
    }

    #[test]
    fn a_full_queue_is_shared() {
        let (mut queue, now) = (Queue::new(4), Instant::now());
        for ticket in 10..14 {
            assert_eq!(queue.push(client(1), ticket, now), None);
        }
        assert_eq!(queue.push(client(1), 14, now), Some(14));
        assert_eq!(queue.push(client(2), 20, now), Some(13));
        assert_eq!(queue.push(client(2), 21, now), Some(12));
        // Both have two: nobody gets the other one's place.
        assert_eq!(queue.push(client(2), 22, now), Some(22));
        assert_eq!(queue.push(client(1), 15, now), Some(15));
        assert_eq!(queue.len(), 4);
    }

    #[test]
    fn invocations_leave_by_name_and_by_age() {
        let (mut queue, start) = (Queue::new(8), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        queue.push(client(1), 1, at(1));
        queue.push(client(2), 2, at(2));
        queue.push(client(1), 3, at(3));
        queue.remove(1);
        queue.remove(7);
        assert_eq!((queue.len(), queue.oldest()), (2, Some(at(2))));
        assert_eq!(queue.take_until(at(2)), [2]);
        assert_eq!(queue.take_all(), [3]);
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn one_host_is_one_client() {
        let of = |text: &str| Client::of(text.parse().unwrap());
        assert_eq!(of("fd00::1"), of("fd00::ffff:2"));
        assert_ne!(of("fd00::1"), of("fd00:0:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }
}
