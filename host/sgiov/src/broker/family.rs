//! A family: processes that descend from one process by fork, and share a table.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use slipway_ring::cross::Side;

use slipway_sgiov_spec::table::entry;

use crate::accounts::{Account, ResourceHold};
use crate::peer::Peer;
use crate::table::{ENTRIES, LINKS, Table};

/// The number of descriptors that a family costs: two for its table, and its eventfd.
pub const DESCRIPTORS: u64 = 3;

pub struct Family {
    pub table: Table,
    /// The account that the family counts against.
    pub account: Arc<Account>,
    /// The account's shares for its descriptors and for its table's mapping.
    _held: [ResourceHold; 2],
    /// The process that began the family.
    pub peer: Peer,
    /// The number of the family's network namespace.
    pub namespace: u32,
    /// The eventfd that the family raises when the engine sleeps.
    pub bell: Arc<OwnedFd>,
    /// The clients that are the family's processes.
    pub members: HashSet<u32>,
    /// By entry: the connection, and the family's side of it.
    entries: Vec<Option<(u32, Side)>>,
    /// Bytes sent and received by endpoints that are closed.
    pub past: (u64, u64),
    free: Vec<u32>,
    /// By the family's number: the link, and the family's side of it.
    links: Vec<Option<(u32, Side)>>,
}

impl Family {
    /// Returns a family whose network namespace has no number yet.
    pub fn new(
        peer: Peer,
        account: Arc<Account>,
        held: [ResourceHold; 2],
    ) -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = Arc::new(eventfd(0, flags)?);
        let table = Table::new()?;
        let members = HashSet::new();
        let (entries, free, links) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self {
            table,
            account,
            _held: held,
            peer,
            namespace: 0,
            bell,
            members,
            entries,
            past: (0, 0),
            free,
            links,
        })
    }

    pub fn has_room(&self, entries: u32) -> bool {
        self.free.len() as u32 + (ENTRIES - self.entries.len() as u32) >= entries
    }

    /// Takes an entry for one side of a connection. Returns `None` if none is left.
    pub fn take_entry(&mut self, connection: u32, side: Side) -> Option<u32> {
        if let Some(entry) = self.free.pop() {
            self.entries[entry as usize] = Some((connection, side));
            return Some(entry);
        }
        let entry = self.entries.len() as u32;
        (entry < ENTRIES).then(|| {
            self.entries.push(Some((connection, side)));
            entry
        })
    }

    pub fn give_entry(&mut self, entry: u32) {
        if let Some(place) = self.entries.get_mut(entry as usize)
            && place.take().is_some()
        {
            let word = |word| self.table.word(entry, word);
            self.past.0 = self.past.0.wrapping_add(word(entry::SENT));
            self.past.1 = self.past.1.wrapping_add(word(entry::RECEIVED));
            self.table.clear(entry);
            self.free.push(entry);
        }
    }

    pub fn entry(&self, entry: u32) -> Option<(u32, Side)> {
        *self.entries.get(entry as usize)?
    }

    /// Returns the entries in use, each with its connection and side.
    pub fn entries(&self) -> impl Iterator<Item = (u32, u32, Side)> {
        let used = |(entry, place): (usize, &Option<(u32, Side)>)| {
            place.map(|(connection, side)| (entry as u32, connection, side))
        };
        self.entries.iter().enumerate().filter_map(used)
    }

    /// Returns the bytes sent and received by all endpoints that the family ever had, by its own
    /// counters.
    pub fn totals(&self) -> (u64, u64) {
        self.entries().fold(self.past, |(sent, received), (entry, ..)| {
            let word = |word| self.table.word(entry, word);
            let sent = sent.wrapping_add(word(entry::SENT));
            (sent, received.wrapping_add(word(entry::RECEIVED)))
        })
    }

    /// Returns a number that the family uses for no link, and that [`Family::set_link`] takes.
    pub fn free_link(&self, but: Option<u16>) -> Option<u16> {
        let taken =
            |number: &u16| self.links.get(usize::from(*number)).is_some_and(Option::is_some);
        (0..LINKS).find(|number| !taken(number) && Some(*number) != but)
    }

    pub fn set_link(&mut self, number: u16, link: Option<(u32, Side)>) {
        let at = usize::from(number);
        if self.links.len() <= at {
            self.links.resize(at + 1, None);
        }
        self.links[at] = link;
        self.table.clear_bits(number);
    }
}
