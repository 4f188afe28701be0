//! A family's table, from the engine's side.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::Lasting;
use slipway_ring::cross::{Own, Regions};
use slipway_sgiov_spec::table::{self, ENTRY, LINK, entry};

/// The number of a table's entries: the most sockets that a family can have open. Unused entries
/// cost address space only.
pub const ENTRIES: u32 = 1 << 18;
/// The number of a table's links: the most arenas that a family can have at a time.
pub const LINKS: u16 = 4096;

/// A family's table, mapped.
#[derive(Clone)]
pub struct Table {
    memory: Lasting,
    /// A duplicate of the table's descriptor, to be sent to the family.
    pub file: Arc<OwnedFd>,
}

impl Table {
    pub fn new() -> std::io::Result<Self> {
        let bytes = table::bytes(ENTRIES as usize, LINKS.into());
        let memory = Lasting::new("slipway-sockets", bytes)?;
        let header = [table::MAGIC, table::VERSION, ENTRIES.into(), LINKS.into()];
        for (word, value) in memory.words().iter().zip(header) {
            word.store(value, Ordering::Relaxed);
        }
        let file = memory.file().ok_or(std::io::ErrorKind::Unsupported)?.try_clone_to_owned()?;
        Ok(Self { memory, file: Arc::new(file) })
    }

    /// Returns the words of an entry.
    pub fn entry(&self, number: u32) -> &[AtomicU64] {
        let first = (table::ENTRIES + number as usize * ENTRY) / 8;
        &self.memory.words()[first..first + entry::WORDS]
    }

    pub fn word(&self, number: u32, word: usize) -> u64 {
        self.entry(number)[word].load(Ordering::Relaxed)
    }

    /// Begins an entry: clears its words, then stores its place, which becomes visible last.
    pub fn grant(&self, number: u32, place: table::Place) {
        self.clear(number);
        self.entry(number)[entry::PLACE].store(place.encode(), Ordering::Release);
    }

    /// Clears all words of an entry, which ends it.
    pub fn clear(&self, number: u32) {
        self.entry(number).iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Returns the whole table's memory.
    pub fn memory(&self) -> &Lasting {
        &self.memory
    }

    /// Returns the private indices of an entry's two halves: the sending one, and the receiving
    /// one.
    pub fn halves(&self, number: u32) -> (Own<'_>, Own<'_>) {
        let words = self.entry(number);
        let own = |own: usize, seen: usize| Own { own: &words[own], seen: &words[seen] };
        (own(entry::TX_TAIL, entry::TX_SEEN), own(entry::RX_HEAD, entry::RX_SEEN))
    }

    /// Returns the bits of a link's regions.
    pub fn bits(&self, link: u16) -> &[AtomicU64] {
        let first = (table::links(ENTRIES as usize) + usize::from(link) * LINK) / 8;
        &self.memory.words()[first..first + Regions::WORDS]
    }

    /// Marks all regions of a link as free.
    pub fn clear_bits(&self, link: u16) {
        for word in self.bits(link) {
            // Words that are 0 are not written, so that pages that were never written stay so.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }
}
