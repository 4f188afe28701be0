//! The programs of this node whose streams end at guests: their pairs, and the claims of families
//! whose signals the links' carrier takes.

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::claims::Claims;
use crate::remote::Line;

/// Pairs with a program of this node at one end, and the families of those programs.
#[derive(Default)]
pub struct Programs {
    /// The pair, by connection.
    connections: HashMap<u32, u32>,
    /// The pair, by family and entry. Sorted, so that those of one family are found without a look
    /// at the others': a program may say without end that any of its entries may have changed.
    entries: BTreeMap<(u32, u32), u32>,
    /// Families whose signals the links' carrier takes.
    claims: HashMap<u32, Arc<Claims>>,
    /// Pairs whose program could not be woken.
    unwoken: Vec<u32>,
}

impl Programs {
    /// Adds a family whose signals the links' carrier takes.
    pub fn join_claimed(&mut self, number: u32, claims: Arc<Claims>) {
        self.claims.insert(number, claims);
    }

    /// Returns whether these are the claims of a family. They are not if the family has ended,
    /// although another one may have its number by now.
    pub fn has_claims(&self, number: u32, claims: &Arc<Claims>) -> bool {
        self.claims.get(&number).is_some_and(|own| Arc::ptr_eq(own, claims))
    }

    /// Returns whether the links' carrier takes the signals of a family and passes them on.
    pub fn is_claimed(&self, number: u32) -> bool {
        self.claims.contains_key(&number)
    }

    /// Removes a family, whose signals are not heard any more. Its pairs stay, as far as their
    /// bytes still move, but are not found by its number, which may be another family's soon.
    pub fn part(&mut self, number: u32) {
        self.claims.remove(&number);
        let entries: Vec<_> = self.entries.range(family(number)).map(|(entry, _)| *entry).collect();
        entries.iter().for_each(|entry| _ = self.entries.remove(entry));
    }

    /// Notes a signal that the links' carrier has taken. Without an entry, any entry of the family
    /// may have changed. The pairs are to be looked at after this call, or a signal that comes
    /// meanwhile would be lost.
    pub fn seen(&self, number: u32, entry: Option<u32>) {
        if let Some(claims) = self.claims.get(&number) {
            claims.seen(entry);
        }
    }

    /// Returns the pair of a family's entry.
    pub fn at_entry(&self, number: u32, entry: u32) -> Option<u32> {
        self.entries.get(&(number, entry)).copied()
    }

    /// Returns the pairs with programs of a family.
    pub fn of_family(&self, number: u32) -> Vec<u32> {
        self.entries.range(family(number)).map(|(_, pair)| *pair).collect()
    }

    /// Returns the pair of a connection.
    pub fn pair(&self, connection: u32) -> Option<u32> {
        self.connections.get(&connection).copied()
    }

    /// Returns all pairs.
    pub fn pairs(&self) -> Vec<u32> {
        self.connections.values().copied().collect()
    }

    /// Returns whether there is no pair.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }

    /// Records that a connection and its line are an end of a pair.
    pub fn enter(&mut self, connection: u32, line: &Line, pair: u32) {
        self.connections.insert(connection, pair);
        self.entries.insert((line.family, line.entry), pair);
        if let Some(claims) = self.claims.get(&line.family) {
            claims.claim(line.entry);
        }
    }

    /// Forgets a connection and its line.
    pub fn forget(&mut self, connection: u32, line: &Line) {
        let Some(pair) = self.connections.remove(&connection) else { return };
        let entry = (line.family, line.entry);
        // The engine frees the entry when the program closes the connection. What the program has
        // sent may move for long after that, and the entry may be a later connection's by now.
        if self.entries.get(&entry) != Some(&pair) {
            return;
        }
        self.entries.remove(&entry);
        if let Some(claims) = self.claims.get(&line.family) {
            claims.give_up(line.entry);
        }
    }

    /// Wakes the program at the other side of `line`, an end of `pair`. A pair whose program cannot
    /// be woken without waiting is noted for [`Programs::take_unwoken`].
    pub fn wake(&mut self, line: &Line, pair: u32) {
        if !slipway_peer::eventfd::raise(line.eventfd.as_fd()) {
            self.unwoken.push(pair);
        }
    }

    /// Takes the pairs whose program could not be woken.
    pub fn take_unwoken(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.unwoken)
    }
}

/// Returns the range of a family's entries.
fn family(number: u32) -> RangeInclusive<(u32, u32)> {
    (number, 0)..=(number, u32::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use slipway_ring::cross::{Arena, Regions, Side};

    use super::*;

    /// Returns a line of family 1.
    pub(in crate::guests) fn line(entry: u32) -> Line {
        Line {
            arena: Arena::new(Regions::shape(1)).unwrap(),
            stream: 0,
            side: Side::One,
            eventfd: Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()),
            tenant: "a".into(),
            family: 1,
            entry,
            regions: Arc::new([]),
        }
    }

    /// A guest decides how long the last bytes of a closed connection move. The next connection of
    /// the program, to whatever guest, has the same entry.
    #[test]
    fn the_end_of_a_connection_takes_no_entry_from_a_later_one() {
        let (mut programs, claims) = (Programs::default(), Arc::<Claims>::default());
        programs.join_claimed(1, claims.clone());
        let (closed, later) = (line(5), line(5));
        programs.enter(70, &closed, 7);
        programs.enter(80, &later, 8);
        programs.forget(70, &closed);
        assert_eq!((programs.pair(70), programs.pair(80)), (None, Some(8)));
        assert_eq!((programs.at_entry(1, 5), programs.of_family(1)), (Some(8), vec![8]));
        assert!(claims.pass_on(5), "signals of the entry are lost");
        programs.forget(80, &later);
        assert_eq!((programs.at_entry(1, 5), programs.is_empty()), (None, true));
        claims.seen(Some(5));
        assert!(!claims.pass_on(5));
    }

    /// The bytes of a program may move for long after its end. The next family that attaches has
    /// the number of its family, and may be another tenant's.
    #[test]
    fn a_family_that_has_ended_leaves_the_next_one_no_pair() {
        let mut programs = Programs::default();
        programs.enter(70, &line(5), 7);
        programs.part(1);
        assert_eq!((programs.of_family(1), programs.pair(70)), (vec![], Some(7)));
        programs.enter(80, &line(5), 8);
        programs.forget(70, &line(5));
        assert_eq!((programs.of_family(1), programs.pairs()), (vec![8], vec![8]));
    }
}
