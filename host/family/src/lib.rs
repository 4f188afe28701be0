//! A family's signals, from the side of whoever carries its streams: links to other engines, or a guest's socket
//! function.
//!
//! A program whose stream ends at the engine says by a signal in its family's table
//! (`slipway_sgiov_spec::table`) that the stream stirred, and raises the family's bell when the table says that
//! nobody is looking. What a signal means, and which stream an entry is, is the carrier's affair.
//!
//! No dependency of its own beyond those of the tree.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipway_ram::Lasting;
use slipway_ring::cross::{Signals, Spoiled};
use slipway_sgiov_spec::table;

/// What a family tells the engine by: its table, and the bell that it raises when the engine sleeps.
pub struct Family {
    table: Lasting,
    signals: Signals,
    bell: Arc<OwnedFd>,
}

impl Family {
    /// Over the `table`, which has so many entries and links. None: it is too short.
    pub fn new(table: &Lasting, entries: usize, links: usize, bell: Arc<OwnedFd>) -> Option<Self> {
        let (_, rest) = table.split(table::signals(entries, links))?;
        let signals = Signals::new(rest, table::SIGNALS)?;
        (table.len() > table::ENTRIES).then(|| Self { table: table.clone(), signals, bell })
    }

    /// Says whether the bell is to be raised after a signal. Who is about to sleep passes a full barrier
    /// (`slipway_ring::cross::heavy`) and looks once more after it.
    pub fn set_asleep(&self, asleep: bool) {
        self.table.words()[table::ASLEEP / 8].store(asleep.into(), Ordering::Relaxed);
    }

    /// The next signal: the number of an entry, as the family says.
    ///
    /// # Errors
    /// [`Spoiled`]: the family's counter cannot be. It has no more signals.
    pub fn take(&mut self) -> Result<Option<u64>, Spoiled> {
        self.signals.take()
    }

    /// Whether a signal found no room since this was asked last: any entry may have stirred.
    pub fn overflowed(&self) -> bool {
        let word = &self.table.words()[table::OVERFLOW / 8];
        // Acquire: what was done before the signal is seen.
        word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Acquire) != 0
    }

    /// What is readable after the bell was raised.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Lowers the bell. False: its program sees to it that it never is lower.
    pub fn lower_bell(&self) -> bool {
        slipway_eventfd::drain(self.bell())
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_table_that_is_too_short_is_none_and_signals_come_in_turn() {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let bytes = table::bytes(16, 2);
        assert!(Family::new(&Lasting::heap(bytes - 4096), 16, 2, bell.clone()).is_none());
        let memory = Lasting::heap(bytes);
        let mut family = Family::new(&memory, 16, 2, bell).unwrap();
        let (_, signals) = memory.split(table::signals(16, 2)).unwrap();
        let mut program = Signals::new(signals.clone(), table::SIGNALS).unwrap();
        for entry in [3, 5] {
            program.raise(entry).unwrap().unwrap();
        }
        assert_eq!(family.take(), Ok(Some(3)));
        assert_eq!(family.take(), Ok(Some(5)));
        assert_eq!(family.take(), Ok(None));
        family.set_asleep(true);
        assert_eq!(memory.words()[table::ASLEEP / 8].load(Ordering::Relaxed), 1);
        memory.words()[table::OVERFLOW / 8].store(1, Ordering::Relaxed);
        assert!(family.overflowed() && !family.overflowed());
        signals.words()[0].store(u64::MAX, Ordering::Relaxed);
        assert_eq!(family.take(), Err(Spoiled));
    }
}
