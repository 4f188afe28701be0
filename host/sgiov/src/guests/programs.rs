//! The programs of this node whose streams end at guests: their pairs, and the claims of families
//! whose signals the links' carrier takes.

use std::collections::{BTreeMap, HashMap};
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

    /// Removes a family. Its pairs stay.
    pub fn part(&mut self, number: u32) {
        self.claims.remove(&number);
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
        let all = self.entries.range((number, 0)..=(number, u32::MAX));
        all.map(|(_, pair)| *pair).collect()
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
        self.connections.remove(&connection);
        self.entries.remove(&(line.family, line.entry));
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
