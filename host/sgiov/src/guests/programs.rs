//! The programs of this node whose streams end at guests: their pairs, and their families' signals.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::sync::Arc;

use slipway_family::Family;

use super::SIGNALS;
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
    /// Families whose signals this carrier takes.
    families: HashMap<u32, Family>,
    /// Families whose signals the links' carrier takes.
    claims: HashMap<u32, Arc<Claims>>,
    /// Pairs whose program could not be woken.
    unwoken: Vec<u32>,
}

/// Signals of families.
#[derive(Default)]
pub struct FamilySignals {
    /// Set if there was any signal.
    pub any: bool,
    /// The pairs that the signals concern.
    pub pairs: Vec<u32>,
    /// A family whose signals are invalid.
    pub spoiled: Option<u32>,
}

impl Programs {
    /// Adds a family whose signals this carrier takes.
    pub fn join(&mut self, number: u32, family: Family) {
        self.families.insert(number, family);
    }

    /// Adds a family whose signals the links' carrier takes.
    pub fn join_claimed(&mut self, number: u32, claims: Arc<Claims>) {
        self.claims.insert(number, claims);
    }

    /// Removes a family. Returns it if this carrier took its signals.
    pub fn part(&mut self, number: u32) -> Option<Family> {
        self.claims.remove(&number);
        self.families.remove(&number)
    }

    /// Takes a limited number of signals of each family.
    pub fn take_signals(&mut self) -> FamilySignals {
        let mut signals = FamilySignals::default();
        for (number, family) in &mut self.families {
            for _ in 0..SIGNALS {
                match family.take() {
                    Ok(Some(entry)) => {
                        signals.any = true;
                        let entry = u32::try_from(entry).ok();
                        let pair = entry.and_then(|entry| self.entries.get(&(*number, entry)));
                        signals.pairs.extend(pair);
                    }
                    Ok(None) => break,
                    Err(_) => {
                        signals.spoiled = Some(*number);
                        break;
                    }
                }
            }
            if family.overflowed() {
                signals.any = true;
                let all = self.entries.range((*number, 0)..=(*number, u32::MAX));
                signals.pairs.extend(all.map(|(_, pair)| *pair));
            }
        }
        signals
    }

    /// Notes a signal that the links' carrier has taken. Without an entry, any entry of the family
    /// may have changed. Returns the pairs to look at.
    pub fn signalled(&self, number: u32, entry: Option<u32>) -> Vec<u32> {
        // Before the look, or a signal that comes meanwhile would be lost.
        if let Some(claims) = self.claims.get(&number) {
            claims.seen(entry);
        }
        match entry {
            Some(entry) => self.entries.get(&(number, entry)).copied().into_iter().collect(),
            None => self.of_family(number),
        }
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

    /// Sets whether families whose signals this carrier takes must raise their bell after a signal.
    pub fn set_asleep(&self, asleep: bool) {
        self.families.values().for_each(|family| family.set_asleep(asleep));
    }

    /// Lowers the bell of a family. Returns `false` if its program keeps it raised.
    pub fn lower_bell(&self, number: u32) -> bool {
        self.families.get(&number).is_none_or(Family::lower_bell)
    }
}
